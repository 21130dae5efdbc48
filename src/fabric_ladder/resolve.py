"""What settings come to: each `auto`, and each default that depends on other settings or on the hardware."""

import dataclasses
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from fabric_ladder.distributed.launch import resolve_devices
from fabric_ladder.environment import compute_capability, fit_precision
from fabric_ladder.settings import Settings

BUCKET = 16  # tokens; kernels for lengths that may be no multiple of this are slower, and a step of 64 mostly padding


def resolve(settings: Settings, given: Collection[str] = (), script: Mapping[str, object] = {}) -> Settings:
    """Return settings in which every `auto`, and every default that depends on other settings, is a value.

    `micro_batch_tokens` alone stays `auto`: what fits is found once the model is there, and kept in the training state.

    Args:
        settings: As they were read.
        given: Names of settings on the command line, whose precision is taken as it is.
        script: The script's own defaults.
    """
    accelerator = settings.accelerator
    if accelerator == "auto":
        accelerator = "cuda" if torch.cuda.is_available() else "cpu"
    on_gpu = accelerator == "cuda"
    multiple, (size, tokens) = settings.pad_to_multiple_of, _micro_batch(settings, given, script, on_gpu)
    capability = compute_capability() if on_gpu else None
    replaceable = settings.lora and "precision" not in given
    precision, meaning = fit_precision(settings.precision, capability, replaceable, "offload" in script)
    if meaning:
        emulates = f"{torch.cuda.get_device_name()} only emulates bfloat16 (compute capability below 8.0)"
        settings = with_notice(settings, f"{emulates}: {meaning}")
    if multiple is None:
        bucketed = settings.compile or accelerator == "mps"  # which keeps memory for every length that it has seen
        multiple = BUCKET if bucketed and settings.max_length % BUCKET == 0 else 1
    settings = dataclasses.replace(
        settings,
        accelerator=accelerator,
        precision=precision,
        matmul_precision=settings.matmul_precision or ("high" if on_gpu else "highest"),
        micro_batch_size=size,
        micro_batch_tokens=tokens,
        eval_batch_tokens=settings.eval_batch_tokens or (None if on_gpu else 1024),
        pad_to_multiple_of=multiple,
    )
    devices, num_nodes = resolve_devices(settings)
    return dataclasses.replace(settings, devices=devices, num_nodes=num_nodes)


def _micro_batch(
    settings: Settings, given: Collection[str], script: Mapping[str, object], on_gpu: bool
) -> tuple[int | None, int | str | None]:
    """Return `micro_batch_size` and `micro_batch_tokens`, of which one is None."""
    size, tokens = settings.micro_batch_size, settings.micro_batch_tokens
    if tokens == "auto" and "micro_batch_tokens" not in given:
        if size and size != script.get("micro_batch_size"):  # the user's own
            return size, None
        if not on_gpu:
            return 1, None
    return (None, tokens) if tokens else (size or settings.batch_size, None)


def with_learning_rate(settings: Settings, given: set[str], from_file: dict) -> Settings:
    """Take the rate of `sgd` or of adapters, whose steps are of another size, unless the command line gives one.

    Args:
        settings: With the learning rate of Adam for all weights.
        given: Names of settings on the command line.
        from_file: Settings in the YAML file, whose learning rate is not replaced in silence.
    """
    name, before = own_rate(settings), settings.learning_rate
    if name is None or "learning_rate" in given:
        return settings
    rate = getattr(settings, name)
    if "learning_rate" in from_file and name not in from_file and rate != before:
        settings = with_notice(
            settings,
            f"Learning rate {rate:g} (--{name}) in place of {before:g}, which {Path(settings.config).name} has for "
            "Adam on all weights; --learning_rate sets another",
        )
    return dataclasses.replace(settings, learning_rate=rate)


def own_rate(settings: Settings) -> str | None:
    """Name the setting of the learning rate that the steps of this optimizer, or of adapters, need."""
    return "sgd_learning_rate" if settings.optimizer == "sgd" else "lora_learning_rate" if settings.lora else None


def with_weights(settings: Settings, given: set[str], from_file: dict) -> Settings:
    """Take a model of the command line as pretrained, where only the file asks for random weights."""
    random = settings.from_scratch and "from_scratch" in from_file and "from_scratch" not in given
    if not random or "model" not in given or settings.model.endswith(".json"):
        return settings
    file = f"{Path(settings.config).name} has random ones (--from_scratch true)"
    notice = f"--model {settings.model}: its pretrained weights, where {file}; all else is as there"
    return with_notice(dataclasses.replace(settings, from_scratch=False), notice)


def with_notice(settings: Settings, notice: str) -> Settings:
    """Return the settings with one more line to print first."""
    return dataclasses.replace(settings, notices=(*settings.notices, notice))
