"""What settings must be to make a run: values that cannot work are refused in one line, before any work."""

from pathlib import Path

import torch

from fabric_ladder.errors import UserError
from fabric_ladder.launch import resolve_devices
from fabric_ladder.loggers import check_logger
from fabric_ladder.lora import check_lora
from fabric_ladder.models import check_model
from fabric_ladder.optimizers import check_optimizer
from fabric_ladder.packing import check_packing

BELONGS_TO = {  # settings that only some scripts use, which name them in their own defaults
    "offload": "src/11_fsdp_cpu_offload.py",
    "deepspeed": "src/12_deepspeed_zero.py",
}


def check(settings, script: dict) -> None:
    """Refuse what cannot work or is not there, and resolve `accelerator`, `devices` and `precision`.

    Args:
        settings: All settings of the run.
        script: The defaults that the script names itself.

    Raises:
        UserError: In one line, what is wrong and what to do.
    """
    _check_values(settings)
    _check_devices(settings, script)
    check_logger(settings)
    check_optimizer(settings)
    check_lora(settings, script)
    check_model(settings)
    check_packing(settings)


def mixed_precision() -> str:
    """Return what `mixed` stands for on this machine: `bf16-mixed`, or `16-mixed` where bfloat16 is emulated."""
    return "bf16-mixed" if _has_bfloat16() else "16-mixed"


def _has_bfloat16() -> bool:
    """Ask for the compute capability: `torch.cuda.is_bf16_supported()` also says yes to an emulation."""
    return not torch.cuda.is_available() or torch.cuda.get_device_capability() >= (8, 0)


def _check_values(settings) -> None:
    """Refuse values that cannot work, and resolve `accelerator`."""
    at_least_1 = ("epochs", "batch_size", "micro_batch_size", "eval_batch_tokens", "log_every")
    at_least_1 += ("max_length", "threads", "pad_to_multiple_of", "train_samples", "validation_samples", "test_samples")
    at_least_1 += (
        "lora_rank",
        "lora_alpha",
        "loss_chunk",
        "image_size",
        "resize_to",
        "num_nodes",
        "keep",
        *(name for name in ("devices", "micro_batch_tokens") if getattr(settings, name) != "auto"),
    )
    at_least_0 = ("num_workers", "seed", "split_seed", "warmup_steps", "save_every", "nan_limit")
    for name, least in [*((name, 1) for name in at_least_1), *((name, 0) for name in at_least_0)]:
        if (value := getattr(settings, name)) is not None and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    for name in ("learning_rate", "sgd_learning_rate", "lora_learning_rate", "max_grad_norm", "max_time"):
        if (value := getattr(settings, name)) is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} {value}: must be a positive number")
    if not 0 <= settings.lora_dropout < 1:
        raise UserError(f"--lora_dropout {settings.lora_dropout}: must be at least 0 and below 1")
    if settings.micro_batch_tokens:
        settings.micro_batch_size = None
    elif settings.micro_batch_size is None:
        settings.micro_batch_size = settings.batch_size
    elif settings.micro_batch_size > settings.batch_size:
        raise UserError(
            f"--micro_batch_size {settings.micro_batch_size} is above --batch_size {settings.batch_size}: it is a "
            "part of the effective batch; lower it, or raise --batch_size too"
        )
    if settings.accelerator == "auto":
        settings.accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    if settings.eval_batch_tokens is None:
        settings.eval_batch_tokens = 4096 if settings.accelerator == "cuda" else 1024
    index = "latest" if settings.deepspeed else ".metadata"
    if settings.load and not (Path(settings.load) / index).is_file():
        raise UserError(
            f"--load {settings.load} is no sharded checkpoint; a consolidated model is given as --model {settings.load}"
        )
    if settings.resume not in ("no", "auto") and not Path(settings.resume).is_dir():
        raise UserError(
            f"--resume {settings.resume}: there is no such folder; --resume auto finds the newest checkpoint"
        )
    if settings.image_size and settings.resize_to and settings.resize_to < settings.image_size:
        raise UserError(f"--resize_to {settings.resize_to} is below --image_size {settings.image_size}: nothing to cut")


def _check_devices(settings, script: dict) -> None:
    """Refuse what this machine or this script (by its own defaults) cannot do, and resolve `precision`."""
    if settings.accelerator == "cuda" and not torch.cuda.is_available():
        raise UserError("--accelerator cuda: PyTorch finds no CUDA GPU here; use --accelerator cpu")
    for name, rung in BELONGS_TO.items():
        if name not in script and (value := getattr(settings, name)):
            raise UserError(f"--{name} {value}: {settings.name} has no use for it; run {rung}")
    resolve_devices(settings, several="devices" in script)
    if settings.micro_batch_tokens == "auto" and ("offload" in script or settings.deepspeed):
        raise UserError(
            "--micro_batch_tokens auto: where weights are sharded, the ranks talk within the forward pass, and one "
            "that runs out of memory there leaves the others waiting; give a number"
        )
    if settings.on_nan == "skip" and settings.deepspeed:
        raise UserError("--on_nan skip: DeepSpeed cannot take a gradient back; in fp16 it skips overflows by itself")
    if settings.matmul_precision is None:
        settings.matmul_precision = "high" if settings.accelerator == "cuda" else "highest"
    if settings.precision == "mixed":
        settings.precision = "bf16-mixed" if settings.accelerator == "cpu" else mixed_precision()
    if settings.precision == "16-true" and settings.optimizer in ("adam", "adamw") and not settings.lora:
        raise UserError(
            f"--precision 16-true: the epsilon of --optimizer {settings.optimizer} is 0 in float16, and every step "
            "would divide by it; use --precision bf16-true, or --optimizer sgd"
        )
    if settings.accelerator == "cpu" and settings.precision == "16-mixed":
        raise UserError("--precision 16-mixed needs a CUDA GPU; use --precision bf16-mixed")
    if settings.accelerator == "cuda" and settings.precision.startswith("bf16") and not _has_bfloat16():
        raise UserError(
            f"--precision {settings.precision}: {torch.cuda.get_device_name()} has no bfloat16 (compute capability "
            "below 8.0); use --precision 16-mixed (src/4_mixed_precision.py takes it by itself)"
        )
    if "offload" in script and settings.optimizer in ("adafactor", "adam-8bit"):
        raise UserError(
            f"--optimizer {settings.optimizer} cannot step on FSDP2's shards; use sgd, the leanest, adam or adamw"
        )
    if "offload" in script and settings.precision in ("16-mixed", "64-true"):
        raise UserError(
            f"--precision {settings.precision}: FSDP2 under Fabric cannot do it; use bf16-mixed, bf16-true or 32-true"
        )
