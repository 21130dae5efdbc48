"""What settings must be to make a run: what cannot work is refused in one line, before any work; nothing is changed."""

import os
from pathlib import Path

import torch

from fabric_ladder.data.load import check_data
from fabric_ladder.distributed.deepspeed import check_deepspeed
from fabric_ladder.distributed.fsdp import transformer_blocks
from fabric_ladder.distributed.launch import check_devices
from fabric_ladder.environment import compute_capability, emulates
from fabric_ladder.errors import UserError
from fabric_ladder.models.checkpointing import check_checkpointing
from fabric_ladder.models.configs import check_model, load_config
from fabric_ladder.models.float8 import check_float8
from fabric_ladder.models.lora import check_lora, without_values
from fabric_ladder.models.optimizer import check_optimizer
from fabric_ladder.models.packing_check import check_packing
from fabric_ladder.runs.folder import check_writable
from fabric_ladder.runs.loggers import check_logger
from fabric_ladder.settings import INTERNAL, Settings

BELONGS_TO = {  # settings that only some scripts use, which name them in their own defaults
    "offload": "src/11_fsdp_cpu_offload.py",
    "deepspeed": "src/12_deepspeed_zero.py",
}
AT_LEAST = dict.fromkeys(
    "epochs batch_size micro_batch_size micro_batch_tokens eval_batch_tokens log_every max_length threads keep devices "
    "pad_to_multiple_of pack_rows train_samples validation_samples test_samples lora_rank lora_alpha loss_chunk "
    "image_size resize_to num_nodes".split(),
    1,
) | dict.fromkeys("num_workers seed split_seed warmup_steps save_every nan_limit".split(), 0)
AT_MOST = {"image_size": 2**13, "resize_to": 2**13, "lora_rank": 2**13}  # far above any use; memory ends before
AT_MOST |= {"seed": 2**32 - 2**16, "split_seed": 2**32 - 2**16}  # NumPy's bound, less the numbers of the ranks
LARGEST = 2**31 - 1  # of any other whole number: what all libraries take
POSITIVE = ("learning_rate", "sgd_learning_rate", "lora_learning_rate", "max_grad_norm", "max_time")


def check_values(settings: Settings) -> None:
    """Refuse values that cannot work on any machine, and files that are not there.

    Args:
        settings: As they were given: any may still be None or `auto`.

    Raises:
        UserError: In one line, what is wrong and what to do.
    """
    for name, least in AT_LEAST.items():
        value = getattr(settings, name)
        if value not in (None, "auto") and value < least:
            raise UserError(f"--{name} {value}: must be at least {least}")
    _check_upper_bounds(settings)
    for name in POSITIVE:
        if (value := getattr(settings, name)) is not None and not 0 < value < float("inf"):
            raise UserError(f"--{name} {value}: must be a positive number")
    if not 0 <= settings.lora_dropout < 1:
        raise UserError(f"--lora_dropout {settings.lora_dropout}: must be at least 0 and below 1")
    by_size = settings.micro_batch_tokens in (None, "auto")
    for name, value in (("micro_batch_size", by_size and settings.micro_batch_size), ("pack_rows", settings.pack_rows)):
        if value and value > settings.batch_size:
            raise UserError(
                f"--{name} {value} is above --batch_size {settings.batch_size}: it is a part of the effective batch; "
                "lower it, or raise --batch_size too"
            )
    found = {"cuda": torch.cuda.is_available, "mps": torch.backends.mps.is_available}
    if settings.accelerator in found and not found[settings.accelerator]():
        kind = {"cuda": "CUDA GPU", "mps": "Apple GPU"}[settings.accelerator]
        raise UserError(f"--accelerator {settings.accelerator}: PyTorch finds no {kind} here; use --accelerator cpu")
    index = "latest" if settings.deepspeed else "optimizer.json"
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


def _check_upper_bounds(settings: Settings) -> None:
    """Refuse numbers that no machine or library can do with, and names that are empty."""
    cores = os.cpu_count() or 1
    most = AT_MOST | {"threads": max(256, cores), "num_workers": max(256, cores)}
    for name, value in vars(settings).items():
        if isinstance(value, int) and value > most.get(name, LARGEST):
            raise UserError(f"--{name} {str(value)[:30]}: must be at most {most.get(name, LARGEST)}")
        if value == "" and name not in INTERNAL:
            raise UserError(f"--{name} is empty: give a value, or leave it out")
        if isinstance(value, str) and (plain := value.encode(errors="replace").decode()) != value:
            raise UserError(f"--{name} {plain}: holds bytes that are not UTF-8; rename the file, or change the value")


def check(settings: Settings, script: dict) -> None:
    """Refuse what this machine or this script cannot do.

    Args:
        settings: Resolved: no `auto` is left but that of `micro_batch_tokens`.
        script: The defaults that the script names itself.

    Raises:
        UserError: In one line, what is wrong and what to do.
    """
    for name, rung in BELONGS_TO.items():
        if name not in script and (value := getattr(settings, name)):
            raise UserError(f"--{name} {value}: {settings.name} has no use for it; run {rung}")
    if settings.accelerator == "mps":
        _check_mps(settings, script)
    check_devices(settings, several="devices" in script)
    capability, sharded = compute_capability() if settings.accelerator == "cuda" else None, "offload" in script
    check_precision(settings, capability, sharded)
    _check_sharding(settings, script)
    check_logger(settings)
    check_optimizer(settings, sharded)
    check_model(settings)
    if sharded:
        transformer_blocks(without_values(settings, load_config(settings.model)))
    check_checkpointing(settings)
    check_lora(settings, script)
    check_float8(settings, capability)
    check_packing(settings)
    if settings.deepspeed:
        check_deepspeed(settings)


def check_start(settings: Settings) -> None:
    """Refuse what a run would find out after its checks, before it computes: folders, data and tokenizer.

    Args:
        settings: Of a run that is only to be checked.

    Raises:
        UserError: In one line, what is wrong and what to do.
    """
    for option, folder in (("runs_dir", settings.runs_dir), ("cache_dir", settings.cache_dir)):
        try:
            check_writable(Path(folder))
        except OSError as error:
            raise UserError(f"cannot write --{option} {folder} ({error.strerror}): choose another") from error
    check_data(settings)


def _check_mps(settings: Settings, script: dict) -> None:
    """Refuse what PyTorch cannot do on Apple silicon's GPU."""
    bfloat16 = settings.precision.startswith("bf16") and not torch.backends.mps.is_macos_or_newer(14, 0)
    for what, wanted in {
        "more than one device: --devices 1": settings.ranks > 1,
        "FSDP2: use src/7_grad_checkpointing.py": "offload" in script,
        "4-bit weights of bitsandbytes: use src/13_lora.py": settings.quantization != "no",
        "--compile true: leave it out, or use src/2_grad_accum.py": settings.compile,
        "--precision 64-true: use 32-true": settings.precision == "64-true",
        f"--precision {settings.precision} before macOS 14: use 16-mixed or 32-true": bfloat16,
    }.items():
        if wanted:
            raise UserError(f"--accelerator mps does not go with {what}, or --accelerator cpu")


def check_precision(settings: Settings, capability: tuple[int, int] | None, sharded: bool) -> None:
    """Refuse a precision that a device cannot do, or does worse than another.

    Args:
        settings: Resolved.
        capability: Compute capability of the GPU; None: a CPU, or Apple silicon.
        sharded: By FSDP2.

    Raises:
        UserError: In one line, why and which one to use.
    """
    if settings.precision == "16-true" and settings.optimizer in ("adam", "adamw") and not settings.lora:
        raise UserError(
            f"--precision 16-true: the epsilon of --optimizer {settings.optimizer} is 0 in float16, and every step "
            "would divide by it; use --precision bf16-true, or --optimizer sgd"
        )
    if settings.precision == "16-mixed" and capability is None and settings.accelerator != "mps":
        raise UserError("--precision 16-mixed needs a CUDA GPU; use --precision bf16-mixed")
    if sharded and settings.precision in ("16-mixed", "64-true"):
        raise UserError(
            f"--precision {settings.precision}: FSDP2 under Fabric cannot do it; use bf16-mixed, bf16-true or 32-true"
        )
    if settings.precision == "bf16-mixed" and emulates(settings.precision, capability):
        raise UserError(
            f"--precision bf16-mixed: a GPU of compute capability {capability[0]}.{capability[1]}, below 8.0, only "
            f"emulates bfloat16; use --precision {'32-true' if sharded else '16-mixed'}"
        )


def _check_sharding(settings: Settings, script: dict) -> None:
    """Refuse what FSDP2 and DeepSpeed do not go with."""
    sharded = "offload" in script
    if settings.micro_batch_tokens == "auto" and settings.accelerator != "cuda" and (sharded or settings.deepspeed):
        raise UserError(
            "--micro_batch_tokens auto: where weights are sharded, the ranks talk within the forward pass, and one "
            "that runs out of memory in a trial leaves the others waiting; give a number"
        )
    if settings.on_nan == "skip" and settings.deepspeed:
        raise UserError("--on_nan skip: DeepSpeed cannot take a gradient back; in fp16 it skips overflows by itself")
    if sharded and settings.optimizer in ("adafactor", "adam-8bit", "adam-4bit"):
        raise UserError(
            f"--optimizer {settings.optimizer} cannot step on FSDP2's shards; use sgd, the leanest, adam or adamw"
        )
