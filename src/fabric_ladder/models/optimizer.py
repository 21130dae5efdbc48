"""The optimizer and the schedule of its learning rate."""

import importlib.util
import math

import torch
from torch import nn
from torch.optim import Optimizer

from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings


def check_optimizer(settings: Settings) -> None:
    """Refuse an optimizer that cannot run here.

    Raises:
        UserError: `adam-8bit` without a CUDA GPU or without bitsandbytes.
    """
    if settings.optimizer != "adam-8bit":
        return
    if settings.accelerator != "cuda":
        raise UserError("--optimizer adam-8bit needs a CUDA GPU; use --optimizer adafactor, which is as lean")
    if importlib.util.find_spec("bitsandbytes") is None:
        raise UserError("--optimizer adam-8bit needs bitsandbytes: pip install bitsandbytes==0.50.2")


def build_optimizer(settings: Settings, model: nn.Module) -> Optimizer:
    """Return the optimizer of the parameters that are trained.

    State beside each parameter, in the parameter's dtype: Adam and AdamW two values, SGD none, Adafactor one row and
    one column for each matrix (Shazeer and Stern, 2018), 8-bit Adam two bytes (Dettmers et al., 2022).
    The model comes set up: sharding and half precision replace or convert its parameters. Adam and AdamW take one
    kernel for the whole step, which makes no temporary tensors, where `may_fuse` allows it; SGD's is an addition.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if settings.optimizer == "adam-8bit":
        import bitsandbytes

        return bitsandbytes.optim.Adam8bit(parameters, lr=settings.learning_rate)
    fused = {"fused": may_fuse(settings) or None}  # None leaves it to PyTorch
    optimizer, options = {
        "adam": (torch.optim.Adam, fused),
        "adamw": (torch.optim.AdamW, fused | {"weight_decay": 0.01}),
        "sgd": (torch.optim.SGD, {}),
        "adafactor": (torch.optim.Adafactor, {}),
    }[settings.optimizer]
    return optimizer(parameters, lr=settings.learning_rate, **options)


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
