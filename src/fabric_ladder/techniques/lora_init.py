"""How adapters start (`init_lora_weights` of PEFT).

`default` (Kaiming), `gaussian` and `orthogonal` leave the model as it is, and the product of both matrices is 0.

PiSSA (Meng et al., 2024, arXiv:2404.02948) starts from the largest singular values of each weight, and OLoRA
(Büyükakyüz, 2024, arXiv:2406.01775) from its QR decomposition. Both subtract the adapter from the frozen weight. So the
adapter fits only the changed weights, which are saved as `base` next to it. A resumed run changes them again.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings

CHANGES_BASE = ("olora", "pissa", "pissa_niter_16")
UNCHANGED = "use gaussian or default"


@contextmanager
def same_draws() -> Iterator[None]:
    """Draw the same random numbers each time in this block, and leave PyTorch's generators as they were.

    `pissa_niter_16` draws vectors for its decomposition. Every seed and every resumed run must change the frozen
    weights equally.
    """
    with torch.random.fork_rng([torch.cuda.current_device()] if torch.cuda.is_available() else []):
        torch.manual_seed(0)
        yield


def changed_base(model: nn.Module) -> str | None:
    """Return the start of the adapters that has changed the frozen weights of a PEFT model, or None."""
    return getattr(model, "changed_base", None)


def check_init(settings: Settings, layers: list[nn.Module]) -> None:
    """Refuse a start that does not fit the rank, the quantization or the layers that get adapters.

    Raises:
        UserError: The reason and the remedy, in one line.
    """
    start = settings.lora_init
    if start in (*CHANGES_BASE, "orthogonal") and settings.quantization != "no":
        raise UserError(f"--lora_init {start}: not on weights of 4 bits; {UNCHANGED}, or --quantization no")
    if start == "orthogonal" and settings.lora_rank % 2:
        raise UserError(f"--lora_init orthogonal needs an even --lora_rank, not {settings.lora_rank}")
    if start not in CHANGES_BASE:
        return
    if start == "olora" and any(isinstance(layer, Conv1D) for layer in layers):
        raise UserError(f"--lora_init olora: PEFT cannot do it for the layers of {settings.model}; use pissa")
    most = min(min(layer.weight.shape) for layer in layers)
    if settings.lora_rank > most:
        raise UserError(f"--lora_init {start}: --lora_rank {settings.lora_rank} is above {most}, a side of a weight")
