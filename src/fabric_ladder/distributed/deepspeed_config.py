"""Read a DeepSpeed configuration: take its values as settings, and complete it from the settings.

DeepSpeed's own parser checks all other keys (`check_deepspeed`).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from fabric_ladder.data.hub import load_config
from fabric_ladder.errors import UserError, read_outside, refused
from fabric_ladder.foreign import as_words
from fabric_ladder.options import find_path, read_words
from fabric_ladder.places import CONFIGS
from fabric_ladder.settings import Settings, show, weight_decay

# Values of a file that hold for the settings which the command line does not name
TAKEN = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "fp16.enabled": "precision",
    "bf16.enabled": "precision",
    "optimizer.type": "optimizer",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.betas": "betas",
    "optimizer.params.eps": "eps",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.type": "schedule",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
NAMES = {  # to DeepSpeed Adam is AdamW, too
    "optimizer.type": {"Adam": "adam", "AdamW": "adam", "SGD": "sgd"},
    "scheduler.type": {"WarmupLR": "constant", "WarmupDecayLR": "linear", "WarmupCosineLR": "cosine"},
}
SAME = [("torch_adam", True), ("torch_adam", False), ("adam_w_mode", True), ("momentum", 0), ("warmup_min_lr", 0)]
# Sizes for "auto", from the model's hidden size, as in transformers (transformers/integrations/deepspeed.py)
SIZES = {
    "zero_optimization.reduce_bucket_size": lambda hidden: hidden**2,
    "zero_optimization.stage3_prefetch_bucket_size": lambda hidden: int(0.9 * hidden**2),
    "zero_optimization.stage3_param_persistence_threshold": lambda hidden: 10 * hidden,
}


def settings_in_file(name: str | None) -> dict[str, object]:
    """Return the settings that a DeepSpeed configuration has values for, by name; "auto" is none.

    Args:
        name: As the setting `deepspeed`.

    Raises:
        UserError: The file does not exist, is not JSON, or has a value that a setting cannot have.
    """
    path, config = _read(name)
    found = {setting: value for _, _, setting, value in _taken(path.name, config)}
    if "batch_size" in found:  # `read_deepspeed_config` checks that the three agree
        found.pop("gradient_accumulation_steps", None)
    return found


def read_deepspeed_config(settings: Settings) -> tuple[dict, list[str]]:
    """Return the DeepSpeed configuration that `settings.deepspeed` names, completed from the other settings.

    The sections for optimizer and schedule are removed, since this project builds both. DeepSpeed's own accumulation is
    1: it divides by a fixed number of steps and drops a shorter last batch (DeepSpeed#7439). `gradient_clipping` is
    always set, since DeepSpeed 0.19 clips to 1 by default.

    Args:
        settings: Checked; `devices` is a number.

    Returns:
        The configuration, and notices for the user: what is moved, left out or done otherwise.

    Raises:
        UserError: The file does not exist or is not a JSON object, or a key contradicts a setting.
    """
    path, config = _read(settings.deepspeed)
    _check_sections(path.name, config)
    _check_agreement(path.name, config, settings)
    with refused(f"--deepspeed {settings.deepspeed} is not a configuration of DeepSpeed"):
        notices = _rearrange(config, settings)
        _complete(config, settings)
        _check_support(path.name, config, settings)
    return config, [f"DeepSpeed {path.name}: {notice}" for notice in notices]


def offloads(config: dict) -> dict[str, dict]:
    """Return the sections of `optimizer` and `param` that offload to CPU memory or to an NVMe disk."""
    sections = {name: config["zero_optimization"].get(f"offload_{name}") for name in ("optimizer", "param")}
    return {name: section for name, section in sections.items() if section and section.get("device") in ("cpu", "nvme")}


def _read(name: str | None) -> tuple[Path, dict]:
    path = CONFIGS / "deepspeed" / f"{name}.json"
    path = path if path.is_file() else Path(find_path(name or ""))
    if not path.is_file():
        shipped = ", ".join(sorted(path.stem for path in (CONFIGS / "deepspeed").glob("*.json")))
        raise UserError(f"--deepspeed {name or 'null'}: the file does not exist; give a path, or one of {shipped}")
    config = read_outside(path)
    if not isinstance(config, dict):
        raise UserError(f"--deepspeed {name} is not a configuration of DeepSpeed, which is an object, {{...}}")
    return path, config


def _taken(name: str, config: dict) -> Iterator[tuple[str, object, str, object]]:
    """Yield path and value of each key that is taken as a setting, the setting, and the value as the setting's."""
    for path, section, key in _walk(config):
        value = section[key]
        if path not in TAKEN or value in ("auto", None):
            continue
        if path.endswith(".enabled"):
            if not isinstance(value, bool):
                raise UserError(f"{name}: {path} {json.dumps(value):.60} must be true or false")
            if not value:
                continue
            text = {"fp16.enabled": "16-mixed", "bf16.enabled": "bf16-mixed"}[path]
        elif path in NAMES:
            if value not in NAMES[path]:
                raise UserError(f"{name}: {path} {json.dumps(value):.60} must be {', '.join(NAMES[path])}, or left out")
            text = NAMES[path][value]
        elif isinstance(value, list):
            text = ",".join(map(str, value))
        else:
            text = str(int(value) if isinstance(value, float) and value.is_integer() else value)
        if path == "gradient_clipping" and text == "0":
            text = "null"
        try:
            yield path, value, TAKEN[path], read_words(as_words(TAKEN[path], text))[TAKEN[path]]
        except UserError as error:
            raise UserError(f"{name}: {path}: {error}") from None


def _check_agreement(name: str, config: dict, settings: Settings) -> None:
    """Refuse values of a configuration that differ from the settings."""
    share = _share(settings)
    micro = min(settings.micro_batch_size or share, share)
    own = asdict(settings) | {
        "micro_batch_size": micro,
        "gradient_accumulation_steps": math.ceil(share / micro),
        "weight_decay": weight_decay(settings),
        "optimizer": "sgd" if settings.optimizer == "sgd" else "adam",
    }
    for path, given, setting, value in _taken(name, config):
        if value != own[setting]:
            option = f"--{setting} {show(own[setting])}"
            if setting == "gradient_accumulation_steps":
                option = f"--batch_size {settings.batch_size} on {settings.ranks} GPUs with --micro_batch_size {micro}"
            raise UserError(
                f"{name}: {path} {json.dumps(given):.60} contradicts {option}: change it there or here, or leave it out"
            )


def _rearrange(config: dict, settings: Settings) -> list[str]:
    """Move and remove keys that have no effect where they are; return a line for each."""
    notices = []
    if config.pop("activation_checkpointing", None) is not None:
        notices.append(
            "activation_checkpointing has no effect on models of transformers and is left out; use "
            "--activation_checkpointing true"
        )
    for half, precision in (("fp16", "16-mixed"), ("bf16", "bf16-mixed")):
        if (config.get(half) or {}).get("enabled") is False and settings.precision == precision:
            notices.append(f"{half}.enabled false gives way to --precision {precision}")
    if aio := config["zero_optimization"].pop("aio", None):
        config.setdefault("aio", aio)
        notices.append("aio is moved out of zero_optimization, where DeepSpeed does not read it")
    for name in ("optimizer", "scheduler"):
        params = (config.pop(name, None) or {}).get("params") or {}
        if name == "scheduler" and settings.warmup_steps and params and params.get("warmup_type", "log") != "linear":
            notices.append("the warm-up is linear, in place of DeepSpeed's logarithmic one (warmup_type log)")
        given = [
            f"{name}.params.{key}" for key, value in params.items() if value != "auto" and (key, value) not in SAME
        ]
        if unread := [path for path in given if path not in TAKEN and path != "scheduler.params.warmup_type"]:
            notices.append(f"{', '.join(unread)} left out: the run has its own {name}")
    return notices


def _complete(config: dict, settings: Settings) -> None:
    """Fill or remove the "auto" values, and set the values on which the train loop relies."""
    for path, section, key in list(_walk(config)):
        if section[key] == "auto" and path in SIZES:
            section[key] = SIZES[path](_hidden_size(settings))
        elif section[key] == "auto":  # DeepSpeed then takes its default
            del section[key]
    config.pop("train_batch_size", None)
    config |= {
        "train_micro_batch_size_per_gpu": _share(settings),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm or 0.0,
        "fp16": {**(config.get("fp16") or {}), "enabled": settings.precision == "16-mixed"},
        "bf16": {**(config.get("bf16") or {}), "enabled": settings.precision == "bf16-mixed"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    # the timer synchronizes with the GPU in every forward pass
    config.setdefault("timers", {"throughput": {"enabled": False}})


def _check_sections(name: str, config: dict) -> None:
    """Refuse what a plan would misread; DeepSpeed's own parser, which refuses the rest, needs a CUDA GPU."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
        raise UserError(f"{name}: zero_optimization.stage must be 1, 2 or 3 (src/9_ddp.py shards nothing)")
    for key in ("reduce_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"):
        if not isinstance(size := zero.get(key, 0), int | float) and size != "auto":
            raise UserError(f"{name}: zero_optimization.{key} {json.dumps(size):.60} must be a number")
    for key in ("offload_optimizer", "offload_param"):
        if (device := (zero.get(key) or {}).get("device", "none")) not in ("none", "cpu", "nvme"):
            raise UserError(
                f"{name}: zero_optimization.{key}.device {json.dumps(device):.60} must be none, cpu or nvme"
            )


def _check_support(name: str, config: dict, settings: Settings) -> None:
    """Refuse settings that do not work with ZeRO."""
    if settings.precision not in ("32-true", "16-mixed", "bf16-mixed"):
        raise UserError(
            f"--precision {settings.precision}: ZeRO computes on 16-bit weights and updates 32-bit copies of them; use "
            "--precision bf16-mixed or 16-mixed, or 32-true"
        )
    if settings.optimizer in ("adafactor", "sinkgd", "adam-4bit"):
        raise UserError(
            f"--optimizer {settings.optimizer}: it needs whole weights, and ZeRO steps on shares of all weights in one "
            "flat tensor; use --optimizer adam"
        )
    device = offloads(config).get("optimizer", {}).get("device")
    if (settings.optimizer, device) in (("adam-8bit", "cpu"), ("adam-8bit", "nvme"), ("sgd", "nvme")):
        raise UserError(f"--optimizer {settings.optimizer}: {name} offloads its state, which needs --optimizer adam")


def _walk(config: dict, above: str = "") -> Iterator[tuple[str, dict, str]]:
    """Yield for each key its path, its section and its name in the section."""
    for key, value in config.items():
        yield above + key, config, key
        if isinstance(value, dict):
            yield from _walk(value, f"{above}{key}.")


def _share(settings: Settings) -> int:
    """Return the samples of an effective batch on each GPU."""
    return math.ceil(settings.batch_size / settings.ranks)


def _hidden_size(settings: Settings) -> int:
    config = load_config(settings.model).get_text_config()
    return getattr(config, "hidden_size", None) or max(config.hidden_sizes)
