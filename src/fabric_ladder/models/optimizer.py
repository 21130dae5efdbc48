"""PyTorch's optimizers, the state that they keep, and the schedule of the learning rate."""

import math

import torch
from torch.optim import Optimizer

from fabric_ladder.settings import Settings


def optimizer_class(settings: Settings) -> tuple[type[Optimizer], dict]:
    """Return PyTorch's class for the optimizer, and its options; low-bit optimizers start from Adam's.

    Adam and AdamW run the whole step in one kernel without temporary tensors, where `may_fuse` allows it.
    """
    fused = {"fused": may_fuse(settings) or None}  # None leaves the choice to PyTorch
    return {
        "adam": (torch.optim.Adam, fused),
        "adamw": (torch.optim.AdamW, fused | {"weight_decay": 0.01}),
        "sgd": (torch.optim.SGD, {}),
        "adafactor": (torch.optim.Adafactor, {}),
    }.get(settings.optimizer, (torch.optim.Adam, {}))


def state_dtypes(settings: Settings) -> list[torch.dtype | None]:
    """Return the dtypes of the state tensors of a parameter's size; None: the parameter's own dtype.

    The two moments of 4-bit Adam together count as one tensor of bytes. Scales of blocks are left out.
    """
    moments = {"adam": [None] * 2, "adamw": [None] * 2, "adam-8bit": [torch.uint8] * 2, "adam-4bit": [torch.uint8]}
    return moments.get(settings.optimizer, []) + [None] * settings.kahan_summation


def may_fuse(settings: Settings) -> bool:
    """Return whether the step of Adam or AdamW may be one kernel, on a GPU or a CPU, sharded or not.

    PyTorch refuses the kernel under `16-mixed` with clipping: clipping needs unscaled gradients, and the kernel
    unscales them itself. DeepSpeed unscales and clips before its step.
    """
    return bool(settings.deepspeed) or not (settings.precision == "16-mixed" and settings.max_grad_norm)


def set_learning_rate(settings: Settings, optimizer: Optimizer, done: int, steps: int) -> None:
    """Set the learning rate of the next optimizer step.

    The rate depends only on the number of steps, so a schedule has no state to save. During the warm-up the rate rises
    in equal steps and reaches its full value after `warmup_steps`. Then it stays, falls linearly, or falls along half a
    cosine (Loshchilov and Hutter, 2017, without restarts). It is 0 after the last step.

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
