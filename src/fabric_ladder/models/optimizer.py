"""The optimizer and the schedule of its learning rate."""

import importlib.util
import math

import torch
from torch import nn
from torch.optim import Optimizer

from fabric_ladder.errors import UserError
from fabric_ladder.models.adam_4bit import Adam4bit
from fabric_ladder.models.kahan import Kahan
from fabric_ladder.models.weight_steps import WeightSteps, forget_hooks
from fabric_ladder.settings import Settings


def check_optimizer(settings: Settings, sharded: bool) -> None:
    """Refuse an optimizer that cannot run here, and ways of stepping that it does not go with.

    Args:
        settings: Resolved.
        sharded: By FSDP2.

    Raises:
        UserError: In one line, why and what to do.
    """
    if settings.optimizer == "adam-8bit":
        if settings.accelerator == "mps":
            raise UserError("--optimizer adam-8bit: bitsandbytes has none for mps; use --optimizer adafactor")
        if importlib.util.find_spec("bitsandbytes") is None:
            raise UserError("--optimizer adam-8bit needs bitsandbytes: pip install bitsandbytes==0.50.2")
    for name, reason in {
        "kahan_summation": _against_kahan(settings, sharded),
        "step_in_backward": _against_single_steps(settings, sharded) or _against_steps_in_backward(settings),
        "optimizer_offload": _against_single_steps(settings, sharded),
    }.items():
        if getattr(settings, name) and reason:
            raise UserError(f"--{name} true: {reason}")


def _against_kahan(settings: Settings, sharded: bool) -> str | None:
    if sharded:
        return "not on FSDP2's shards; use --precision bf16-mixed, whose weights lose nothing"
    if settings.precision not in ("bf16-true", "16-true"):
        return f"under --precision {settings.precision} the weights lose nothing; leave it out, or use bf16-true"
    if settings.lora:
        return "adapters are trained in 32-bit, which loses nothing; leave it out"
    if settings.deepspeed:
        return "DeepSpeed keeps 32-bit copies of the weights, which lose nothing; leave it out"
    if settings.optimizer == "adafactor":
        return "Adafactor measures its steps by the weights, which it would not see; use --optimizer adam or sgd"
    return None


def _against_single_steps(settings: Settings, sharded: bool) -> str | None:
    if settings.deepspeed:
        return "DeepSpeed steps in its own way; use --deepspeed zero2_offload without it"
    if sharded:
        parks = "src/11_fsdp_cpu_offload.py parks them in the host's memory"
        return f"not on FSDP2's shards; {'leave it out' if settings.offload else parks}"
    if settings.optimizer_offload and settings.accelerator == "mps":
        return "Apple silicon's GPU uses the host's memory; leave it out"
    if settings.ranks > 1:
        return "only on one device, since several average their gradients first; use --devices 1"
    if settings.precision == "16-mixed":
        return "not under 16-mixed, whose loss scale is checked over all gradients; use bf16-mixed or 32-true"
    return None


def _against_steps_in_backward(settings: Settings) -> str | None:
    if settings.max_grad_norm:
        return "--max_grad_norm needs all gradients at once, of which each is gone when the next comes; leave one out"
    if settings.on_nan == "skip":
        return "--on_nan skip looks at all gradients before the step; leave one out"
    size = settings.micro_batch_size or settings.batch_size
    if settings.batch_size > 1 and (settings.micro_batch_tokens or settings.pack_rows or size < settings.batch_size):
        return (
            "the effective batch must be one micro-batch, or gradients would have to be kept and added up; leave out "
            "--micro_batch_size, --micro_batch_tokens and --pack_rows, or lower --batch_size"
        )
    return None


def build_optimizer(settings: Settings, model: nn.Module) -> Optimizer:
    """Return the optimizer of the parameters that are trained.

    State beside each parameter, in the parameter's dtype: Adam and AdamW two values, SGD none, Adafactor one row and
    one column for each matrix (Shazeer and Stern, 2018), 8-bit Adam two bytes (Dettmers et al., 2022), 4-bit Adam one
    (Li et al., 2023); with `kahan_summation` one value more.
    The model comes set up: sharding and half precision replace or convert its parameters. Adam and AdamW take one
    kernel for the whole step, which makes no temporary tensors, where `may_fuse` allows it; SGD's is an addition.
    """
    kind, options = _optimizer_class(settings)
    if settings.kahan_summation:
        kind = type(f"Kahan{kind.__name__}", (Kahan, kind), {})
    by_weight = settings.step_in_backward or settings.optimizer_offload
    if by_weight:
        kind = type(kind.__name__, (WeightSteps, kind), {})
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    forget_hooks(parameters)
    optimizer = kind(parameters, lr=settings.learning_rate, **options)
    if by_weight:
        needs_all = settings.max_grad_norm or settings.on_nan == "skip"  # gradients, before the first step
        optimizer.plan_steps(settings.optimizer_offload, settings.step_in_backward, in_backward=not needs_all)
    return optimizer


def _optimizer_class(settings: Settings) -> tuple[type[Optimizer], dict]:
    """Return the class of the optimizer, and its options."""
    if settings.optimizer == "adam-8bit":
        import bitsandbytes

        return bitsandbytes.optim.Adam8bit, {}
    fused = {"fused": may_fuse(settings) or None}  # None leaves it to PyTorch
    return {
        "adam": (torch.optim.Adam, fused),
        "adamw": (torch.optim.AdamW, fused | {"weight_decay": 0.01}),
        "sgd": (torch.optim.SGD, {}),
        "adafactor": (torch.optim.Adafactor, {}),
        "adam-4bit": (Adam4bit, {}),
    }[settings.optimizer]


def state_dtypes(settings: Settings) -> list[torch.dtype | None]:
    """Return the dtype of each tensor of a parameter's size that the optimizer keeps of it; None: the parameter's.

    Both moments of 4-bit Adam are as large as one such tensor of bytes. Scales of blocks are left out.
    """
    moments = {"adam": [None] * 2, "adamw": [None] * 2, "adam-8bit": [torch.uint8] * 2, "adam-4bit": [torch.uint8]}
    return moments.get(settings.optimizer, []) + [None] * settings.kahan_summation


def may_fuse(settings: Settings) -> bool:
    """Return whether the step of Adam or AdamW may be one kernel, on a GPU or a CPU, sharded or not.

    Not under `16-mixed` with clipping: the kernel would take the gradients scaled as they are and divide by the scale
    itself, while clipping needs them unscaled, and PyTorch refuses that. DeepSpeed unscales and clips by itself before.
    """
    return bool(settings.deepspeed) or not (settings.precision == "16-mixed" and settings.max_grad_norm)


def set_learning_rate(settings: Settings, optimizer: Optimizer, done: int, steps: int) -> None:
    """Set the learning rate of the next optimizer step.

    The rate depends on nothing but the number of steps, so a schedule has no state to be saved. The warm-up rises in
    equal steps and reaches the full rate after `warmup_steps`; then the rate stays, falls linearly, or falls along half
    a cosine (Loshchilov and Hutter, 2017, without restarts), and is 0 after the last step.

    Args:
        settings: `learning_rate`, `schedule` and `warmup_steps`.
        optimizer: All its parameter groups get the same rate.
        done: Optimizer steps done so far.
        steps: Optimizer steps of the whole run.
    """
    warmup = settings.warmup_steps
    falling = (done - warmup) / (steps - warmup)
    factors = {"constant": 1.0, "linear": 1 - falling, "cosine": (1 + math.cos(math.pi * falling)) / 2}
    factor = (done + 1) / (warmup + 1) if done < warmup else factors[settings.schedule]
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * factor
