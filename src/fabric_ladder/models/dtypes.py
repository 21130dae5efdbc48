"""The types of a model's tensors: the 16-bit type of a precision, and tensors that keep their type."""

from functools import partial

import torch
from torch import Tensor, nn

from fabric_ladder.settings import Settings

FREQUENCIES = "inv_freq"  # the end of the names of buffers with rotary frequencies, which 16 bits would detune


def half_precision(settings: Settings) -> torch.dtype | None:
    """Return the 16-bit type that the precision computes in; None for `32-true` and `64-true`."""
    return {"16": torch.float16, "bf16": torch.bfloat16}.get(settings.precision.split("-")[0])


def keep_dtype(module: nn.Module, only_buffers: bool = False) -> None:
    """Keep the type of a module's tensors when a larger module is converted to 16 bits, e.g. by Fabric.

    Args:
        module: Changed in place.
        only_buffers: Keep only the buffers of rotary frequencies, and convert all other tensors.
    """
    module._apply = partial(_apply_but_dtype, module, only_buffers)


def _apply_but_dtype(module: nn.Module, only_buffers: bool, function, recurse: bool = True) -> nn.Module:
    kept = [buffer for name, buffer in module._buffers.items() if name.endswith(FREQUENCIES)]

    def move(tensor: Tensor) -> Tensor:
        moved = function(tensor)
        if moved.dtype == tensor.dtype or (only_buffers and not any(tensor is buffer for buffer in kept)):
            return moved
        return torch.empty_like(tensor, device=moved.device) if tensor.is_meta else tensor.to(moved.device)

    return type(module)._apply(module, move, recurse)
