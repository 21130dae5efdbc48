"""PyTorch's optimizers, and the schedule of the learning rate."""

import math

import torch
from torch import Tensor
from torch.optim import Optimizer

from fabric_ladder.settings import Settings, weight_decay

STATELESS = ("sgd", "sinkgd")  # optimizers that keep no state


def optimizer_class(settings: Settings, may_fuse: bool) -> tuple[type[Optimizer], dict]:
    """Return PyTorch's class for an optimizer, and its options; low-bit optimizers start from Adam's.

    Adam with weight decay is AdamW (Loshchilov and Hutter, 2019, Decoupled Weight Decay Regularization).

    Args:
        settings: `optimizer`, `betas`, `eps` and `weight_decay`.
        may_fuse: Whether the step of Adam or AdamW may be one kernel without temporary tensors.
    """
    name = settings.optimizer
    if name in ("sgd", "sinkgd", "adafactor"):
        return {"adafactor": torch.optim.Adafactor}.get(name, torch.optim.SGD), {}
    options = {"betas": tuple(map(float, settings.betas.split(","))), "eps": settings.eps}
    if name in ("adam", "adamw"):
        options["fused"] = may_fuse or None  # None leaves the choice to PyTorch
    return torch.optim.AdamW if weight_decay(settings) else torch.optim.Adam, options


@torch.no_grad()
def decay_weights(group: dict) -> None:
    """Decay the weights of a group that have a gradient, for optimizers without a decay of their own."""
    decayed = [parameter for parameter in group["params"] if parameter.grad is not None]
    if group["weight_decay"] and decayed:
        torch._foreach_mul_(decayed, 1 - group["lr"] * group["weight_decay"])


def all_finite(gradients: list[Tensor]) -> Tensor:
    """Return whether all numbers of gradients of one type, each with at least one, are finite: a boolean on the device.

    The test takes the largest magnitudes, which cannot overflow as a sum of squares can.
    """
    if gradients[0].device.type == "cpu":  # PyTorch's norm is a scalar loop there, five times as slow
        largest = [bound for gradient in gradients for bound in gradient.aminmax()]
    else:
        largest = torch._foreach_norm(gradients, torch.inf)
    return torch.stack(largest).isfinite().all()


def set_learning_rate(settings: Settings, optimizer: Optimizer, done: int, steps: int) -> None:
    """Set the learning rate of the next optimizer step.

    The rate depends only on the number of steps, so a schedule has no state to save. During the warm-up the rate rises
    in equal steps and reaches its full value after `warmup_steps`. Then it stays, falls linearly, or falls along half a
    cosine (Loshchilov and Hutter, 2017, without restarts). It is 0 after the last step.

    Args:
        settings: `learning_rate`, `schedule` and `warmup_steps`.
        optimizer: All its parameter groups get this rate.
        done: Optimizer steps done so far.
        steps: Optimizer steps of the whole run.
    """
    warmup = settings.warmup_steps
    falling = (done - warmup) / (steps - warmup)
    factors = {"constant": 1.0, "linear": 1 - falling, "cosine": (1 + math.cos(math.pi * falling)) / 2}
    factor = (done + 1) / (warmup + 1) if done < warmup else factors[settings.schedule]
    for group in optimizer.param_groups:
        group["lr"] = settings.learning_rate * factor
