"""PyTorch's optimizers, and the schedule of the learning rate."""

import math

import torch
from torch.optim import Optimizer

from fabric_ladder.settings import Settings

STATELESS = ("sgd", "sinkgd")  # optimizers that keep no state


def optimizer_class(name: str, may_fuse: bool) -> tuple[type[Optimizer], dict]:
    """Return PyTorch's class for an optimizer, and its options; low-bit optimizers start from Adam's.

    Args:
        name: As in the settings.
        may_fuse: Whether the step of Adam or AdamW may be one kernel without temporary tensors.
    """
    fused = {"fused": may_fuse or None}  # None leaves the choice to PyTorch
    return {
        "adam": (torch.optim.Adam, fused),
        "adamw": (torch.optim.AdamW, fused | {"weight_decay": 0.01}),
        "sgd": (torch.optim.SGD, {}),
        "adafactor": (torch.optim.Adafactor, {}),
    }.get(name, (torch.optim.Adam, {}))


def set_learning_rate(settings: Settings, optimizer: Optimizer, done: int, steps: int) -> None:
    """Set the learning rate of the next optimizer step.

    The rate depends only on the number of steps, so a schedule has no state to save. During the warm-up the rate rises
    in equal steps and reaches its full value after `warmup_steps`. Then it stays, falls linearly, or falls along half a
    cosine (Loshchilov and Hutter, 2017, without restarts). It is 0 after the last step.

    Args:
        settings: `learning_rate`, `schedule` and `warmup_steps`.
        optimizer: Each of its parameter groups gets this rate times its `rate_factor`.
        done: Optimizer steps done so far.
        steps: Optimizer steps of the whole run.
    """
    warmup = settings.warmup_steps
    falling = (done - warmup) / (steps - warmup)
    factors = {"constant": 1.0, "linear": 1 - falling, "cosine": (1 + math.cos(math.pi * falling)) / 2}
    factor = (done + 1) / (warmup + 1) if done < warmup else factors[settings.schedule]
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * factor * group.get("rate_factor", 1.0)
