"""Refuse a run whose results the disk cannot hold, report failures on all ranks, and let others read the files."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from lightning import Fabric
from torch import nn

from fabric_ladder.errors import UserError, first_line, is_out_of_memory
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import state_dtypes, trains_adapters


def check_disk_space(settings: Settings, model: nn.Module, steps: int, existing: int = 0) -> None:
    """Refuse to train if the disk of `runs_dir` cannot hold the results.

    Args:
        settings: All settings of the run.
        model: Set up by Fabric; its sizes are the sizes before sharding.
        steps: Optimizer steps of the run.
        existing: Checkpoints of this run that are on the disk already.

    Raises:
        UserError: The space is too small for the files of `save` and for the checkpoints.
    """
    trained = 0
    frozen = 0
    state = 0
    dtypes = state_dtypes(settings)
    for parameter in model.parameters():
        # ZeRO-3 leaves an empty tensor in place of a weight and keeps the count here
        numbers = getattr(parameter, "ds_numel", parameter.numel())
        size = numbers * parameter.element_size()
        if parameter.requires_grad:
            trained += size
            state += sum(size if dtype is None else numbers * dtype.itemsize for dtype in dtypes)
        else:
            frozen += size
    adapters = trains_adapters(settings)
    weights = trained if adapters else trained + frozen
    state += weights
    needed = {"no": 0, "consolidated": weights, "sharded": state}[settings.save]
    if settings.save != "no" and adapters and settings.from_scratch:
        needed += trained + frozen  # the base exists nowhere else
    needed += max(0, most_checkpoints(settings, steps) - existing) * state
    runs_dir = Path(settings.runs_dir).absolute()
    free = shutil.disk_usage(next(path for path in (runs_dir, *runs_dir.parents) if path.exists())).free
    if free < needed:
        keep = f" --keep {settings.keep}" if settings.save_every else ""
        best = " --best_weights true" if settings.best_weights else ""
        raise UserError(
            f"--save {settings.save} --save_every {settings.save_every}{keep}{best} needs {_size(needed)} in "
            f"--runs_dir {settings.runs_dir}, and {_size(free)} are free: delete files there, or choose another "
            "--runs_dir"
        )


def most_checkpoints(settings: Settings, steps: int) -> int:
    """Return the most checkpoints that are on the disk together: an old one is removed after the next is complete."""
    if not settings.save_every:
        return 2 if settings.best_weights else 0
    several_validations = settings.epochs > 1 or settings.evaluate_every  # then the best may be older than the others
    written = steps // settings.save_every + settings.epochs + 1  # a stop writes one too
    return min(settings.keep + bool(several_validations) + 1, written)


def _size(count: int) -> str:
    """Return bytes in GB, or in MB below 0.1 GB."""
    return f"{count / 1e9:.2f} GB" if count >= 1e8 else f"{count / 1e6:.2f} MB"


def let_others_read(folder: Path) -> None:
    """Give files the permissions that the user's new files have; safetensors lets only the user read its files."""
    os.umask(mask := os.umask(0))
    for path in filter(Path.is_file, folder.rglob("*")):
        path.chmod(0o666 & ~mask)


def try_on_all(fabric: Fabric, *steps: Callable[[], object]) -> str | None:
    """Run each step on all ranks, until one fails on any of them; return the reason for the failure."""
    for step in steps:
        problem = None
        try:
            step()
        except Exception as error:  # safetensors and tokenizers raise errors of their own classes
            if is_out_of_memory(error) and fabric.world_size > 1:
                raise  # the other ranks may wait for tensors of this rank: the watch ends them
            problem = getattr(error, "strerror", None) or first_line(error, 160)
        flag = torch.tensor(float(problem is not None), device=fabric.device)
        if fabric.all_reduce(flag, reduce_op="max"):
            return problem or "another rank could not write"
    return None
