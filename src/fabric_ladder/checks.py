"""Refuse settings that cannot work, in one line and before any work; nothing is changed."""

from pathlib import Path

import torch

from fabric_ladder.data.class_weights import check_class_weights
from fabric_ladder.data.hub import find_weights, reachable
from fabric_ladder.data.kinds import check_kind
from fabric_ladder.data.load import check_data
from fabric_ladder.data.sampler import check_steps
from fabric_ladder.distributed.deepspeed import EngineState
from fabric_ladder.distributed.launch import check_devices
from fabric_ladder.environment import compute_capability, read_size
from fabric_ladder.errors import UserError
from fabric_ladder.models.configs import check_model
from fabric_ladder.models.layers import check_images
from fabric_ladder.models.probe import check_probed
from fabric_ladder.runs.folder import check_writable
from fabric_ladder.runs.loggers import check_logger
from fabric_ladder.runs.memory_history import check_snapshot
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import TECHNIQUES, check_together, used


def check_values(settings: Settings) -> None:
    """Refuse values that cannot work with any model or data, and missing files.

    Args:
        settings: Settings as they were given: None and `auto` are not resolved yet.

    Raises:
        UserError: A value cannot work.
    """
    size = settings.micro_batch_size
    if settings.micro_batch_tokens in (None, "auto") and size and size > settings.batch_size:
        raise UserError(
            f"--micro_batch_size {size} is above --batch_size {settings.batch_size}: it is a part of the effective "
            "batch; lower it, or raise --batch_size too"
        )
    if settings.gpu_memory_limit:
        read_size(settings.gpu_memory_limit, "--gpu_memory_limit")
    found = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if settings.accelerator in found and not found[settings.accelerator]():
        kind = {"cuda": "CUDA GPU", "mps": "Apple GPU"}[settings.accelerator]
        raise UserError(f"--accelerator {settings.accelerator}: PyTorch finds no {kind} here; use --accelerator cpu")
    checkpoint_file = EngineState.file if settings.owns_optimizer else "optimizer.json"
    if settings.load and not (Path(settings.load) / checkpoint_file).is_file():
        folder = next((path.parent for path in sorted(Path(settings.load).glob("**/config.json"))), "FOLDER")
        raise UserError(
            f"--load {settings.load} is no sharded checkpoint; load a consolidated model by --model {folder}"
        )
    if settings.resume not in ("no", "auto") and not Path(settings.resume).is_dir():
        raise UserError(
            f"--resume {settings.resume}: the folder does not exist; --resume auto finds the newest checkpoint"
        )
    check_kind(settings)
    check_class_weights(settings)
    if settings.best_metric == "accuracy" and settings.problem_type == "regression":
        raise UserError("--best_metric accuracy: a regression has no accuracy; use --best_metric loss")
    if settings.image_size and settings.resize_to and settings.resize_to < settings.image_size:
        raise UserError(f"--resize_to {settings.resize_to} is below --image_size {settings.image_size}: nothing to cut")


def check(settings: Settings) -> None:
    """Refuse settings that this machine or this script cannot run.

    Args:
        settings: Resolved settings; only `micro_batch_tokens` may still be `auto`.

    Raises:
        UserError: A setting cannot work.
    """
    if settings.accelerator == "mps":
        _check_mps(settings)
    check_devices(settings)
    capability = compute_capability() if settings.accelerator == "cuda" else None
    check_precision(settings, capability)
    check_logger(settings)
    check_snapshot(settings)
    if settings.stream_from:
        check_writable(Path(settings.stream_from), f"--stream_from {settings.stream_from}")
    check_model(settings)
    if settings.task == "image-classification":
        check_images(settings)
    check_probed(settings)
    check_together(settings)
    for technique in TECHNIQUES:
        technique.check(settings, capability)


def check_start(settings: Settings) -> list[str]:
    """Refuse what a run would refuse later because of its files; return lines about what it would read.

    Raises:
        UserError: A folder, the data, the tokenizer or the model cannot be used, or does not suit another setting.
    """
    for option, folder in (("--runs_dir", settings.runs_dir), ("FABRIC_LADDER_CACHE", settings.cache_dir)):
        check_writable(Path(folder), f"{option} {folder}")
    lines, samples, names = check_data(settings)
    if samples is not None:
        check_steps(settings, samples)
        check_class_weights(settings, names)
    if Path(settings.model).is_dir() and not settings.from_scratch and not find_weights(settings.model):
        with reachable(settings.model, "weights"):
            raise OSError("it has no file of weights")
    return lines


def _check_mps(settings: Settings) -> None:
    """Refuse settings that PyTorch does not support on the GPU of Apple silicon."""
    refused = ["more than one device: --devices 1"] if settings.ranks > 1 else []
    refused += [technique.refused_on_mps for technique in used(settings) if technique.refused_on_mps]
    if settings.precision == "64-true":
        refused.append("--precision 64-true: use 32-true")
    old = torch.backends.mps.is_available() and not torch.backends.mps.is_macos_or_newer(14, 0)  # a plan needs no Mac
    if settings.precision.startswith("bf16") and old:
        refused.append(f"--precision {settings.precision} before macOS 14: use 16-mixed or 32-true")
    if refused:
        raise UserError(f"--accelerator mps does not go with {refused[0]}, or --accelerator cpu")


def check_precision(settings: Settings, capability: tuple[int, int] | None) -> None:
    """Refuse a precision that a device does not support, or that is slower on it than another one.

    Args:
        settings: Resolved settings.
        capability: Compute capability of the GPU; None: a CPU, or Apple silicon.

    Raises:
        UserError: The precision cannot work.
    """
    for technique in used(settings):
        technique.check_precision(settings, capability)
