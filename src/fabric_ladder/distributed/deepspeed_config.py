"""Read a DeepSpeed configuration, fill its "auto" values from the settings, and refuse contradictions.

The "auto" values are filled as in transformers (transformers/integrations/deepspeed.py), but before a model exists.
"""

import json
import math
from collections.abc import Iterator
from pathlib import Path

from fabric_ladder.errors import UserError, read_outside, refused
from fabric_ladder.foreign import as_words
from fabric_ladder.models.configs import load_config
from fabric_ladder.models.optimizer import weight_decay
from fabric_ladder.options import find_path, read_words
from fabric_ladder.places import CONFIGS
from fabric_ladder.settings import Settings, show

SCHEDULES = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
ADAM = ("Adam", "AdamW")  # to DeepSpeed both are AdamW unless `adam_w_mode` is false
OTHER_OPTIMIZERS = {
    "OneBitAdam": "it compresses gradients between machines, which ZeRO's own optimizer replaces here; use AdamW",
    "Lamb": "it is made for batches of thousands, and needs whole weights; use AdamW",
}
# Numbers of a file that hold for the settings which the command line does not name
TAKEN = {
    "train_batch_size": "batch_size",
    "train_micro_batch_size_per_gpu": "micro_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "gradient_clipping": "max_grad_norm",
    "optimizer.params.lr": "learning_rate",
    "optimizer.params.eps": "eps",
    "optimizer.params.weight_decay": "weight_decay",
    "scheduler.params.warmup_max_lr": "learning_rate",
    "scheduler.params.warmup_num_steps": "warmup_steps",
}
# Sizes for "auto", from the model's hidden size
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
        UserError: The file does not exist, is not JSON, or has a number that a setting cannot have.
    """
    file = _find(name)
    config = read_outside(file)
    found = {}
    if not isinstance(config, dict):
        return found
    for path, section, key in _walk(config):
        value = section[key]
        if path in TAKEN and isinstance(value, int | float) and not isinstance(value, bool):
            whole = isinstance(value, float) and value.is_integer()
            found[TAKEN[path]] = str(int(value) if whole else value)
        elif path == "optimizer.params.betas" and isinstance(value, list):
            found["betas"] = ",".join(map(str, value))
        elif path == "optimizer.type" and value in (*ADAM, "SGD"):
            found["optimizer"] = "adam" if value in ADAM else "sgd"
        elif path == "scheduler.type" and value in SCHEDULES.values():
            found["schedule"] = next(name for name, theirs in SCHEDULES.items() if theirs == value)
        elif path in ("fp16.enabled", "bf16.enabled") and value is True:
            found["precision"] = f"{path[:-8].removeprefix('fp')}-mixed"
    if found.get("max_grad_norm") == "0":
        found["max_grad_norm"] = "null"
    if "batch_size" in found:  # `read_deepspeed_config` checks that the three agree
        found.pop("gradient_accumulation_steps", None)
    try:
        return read_words([word for each in found.items() for word in as_words(*each)])
    except UserError as error:
        raise UserError(f"{file.name}: {error}") from None


def read_deepspeed_config(settings: Settings) -> tuple[dict, list[str]]:
    """Return the DeepSpeed configuration that `settings.deepspeed` names, completed from the other settings.

    The sections for optimizer and schedule are checked and removed, since this project builds both. DeepSpeed's own
    accumulation is 1: it divides by a fixed number of steps and drops a shorter last batch (DeepSpeed#7439).
    `gradient_clipping` is always set, since DeepSpeed 0.19 clips to 1 by default.

    Args:
        settings: Checked; `devices` is a number.

    Returns:
        The configuration, and notices for the user: the filled values, and what is moved, left out or done otherwise.

    Raises:
        UserError: The file does not exist or is not a JSON object, or a key contradicts a setting.
    """
    path = _find(settings.deepspeed)
    config = read_outside(path)
    with refused(f"--deepspeed {settings.deepspeed} is not a configuration of DeepSpeed"):
        _check_support(path.name, config, settings)
        notices = _rearrange(config, settings)
        if filled := _fill(path.name, config, settings):
            notices.insert(0, f"filled {', '.join(filled)}")
        _complete(config, settings)
    return config, [f"DeepSpeed {path.name}: {notice}" for notice in notices]


def _find(name: str | None) -> Path:
    path = CONFIGS / "deepspeed" / f"{name}.json"
    path = path if path.is_file() else Path(find_path(name or ""))
    if not path.is_file():
        shipped = ", ".join(sorted(path.stem for path in (CONFIGS / "deepspeed").glob("*.json")))
        raise UserError(f"--deepspeed {name or 'null'}: the file does not exist; give a path, or one of {shipped}")
    return path


def offloads(config: dict) -> dict[str, dict]:
    """Return the sections of `optimizer` and `param` that offload to CPU memory or to an NVMe disk."""
    sections = {name: config["zero_optimization"].get(f"offload_{name}") for name in ("optimizer", "param")}
    return {name: section for name, section in sections.items() if section and section.get("device") in ("cpu", "nvme")}


def _rearrange(config: dict, settings: Settings) -> list[str]:
    """Move and remove keys that have no effect where they are; return a line for each."""
    notices = []
    if config.pop("activation_checkpointing", None) is not None:
        notices.append(
            "activation_checkpointing has no effect on models of transformers and is left out; use "
            "--activation_checkpointing true"
        )
    if aio := config["zero_optimization"].pop("aio", None):
        config.setdefault("aio", aio)
        notices.append("aio is moved out of zero_optimization, where DeepSpeed does not read it")
    optimizer, scheduler = (_section(_section(config, name), "params") for name in ("optimizer", "scheduler"))
    if settings.warmup_steps and scheduler and scheduler.get("warmup_type", "log") != "linear":
        notices.append("the warm-up is linear, in place of DeepSpeed's logarithmic one (warmup_type log)")
    read = {"lr", "betas", "eps", "weight_decay", "momentum", "torch_adam", "adam_w_mode", "warmup_type"}
    read |= {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps"}
    for section, params in (("optimizer", optimizer), ("scheduler", scheduler)):
        if unread := [f"{section}.params.{key}" for key in params if key not in read]:
            notices.append(f"{', '.join(unread)} left out: the run has its own {section}")
    return notices


def _check_support(name: str, config: dict, settings: Settings) -> None:
    """Refuse unknown stages, and settings that do not work with ZeRO."""
    zero = config.get("zero_optimization")
    if not isinstance(zero, dict) or zero.get("stage") not in (1, 2, 3):
        raise UserError(f"{name}: zero_optimization.stage must be 1, 2 or 3 (src/9_ddp.py shards nothing)")
    for key in ("reduce_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance"):
        size = zero.get(key, "auto")
        if size != "auto" and not isinstance(size, int | float):
            raise UserError(f"{name}: zero_optimization.{key} {json.dumps(size):.60} must be a number")
    for key in ("offload_optimizer", "offload_param"):
        device = (zero.get(key) or {}).get("device", "none")
        if device not in ("none", "cpu", "nvme"):
            raise UserError(
                f"{name}: zero_optimization.{key}.device {json.dumps(device):.60} must be none, cpu or nvme"
            )
    kind = _section(config, "optimizer").get("type")
    if kind in OTHER_OPTIMIZERS:
        raise UserError(f"{name}: optimizer.type {kind}: {OTHER_OPTIMIZERS[kind]}")
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


def _fill(name: str, config: dict, settings: Settings) -> list[str]:
    """Fill the "auto" values in place, check the other values, and return descriptions of the filled values.

    A key that no setting determines is removed if it is "auto", so that DeepSpeed takes its default.

    Raises:
        UserError: A key contradicts a setting, or a section is not an object.
    """
    filled = []
    expected = _expected(settings)
    sections = {path.rpartition(".")[0] for path in expected}
    for path, section, key in list(_walk(config)):
        given = section[key]
        values, option = expected.get(path, ((), ""))
        if path in sections and not isinstance(given, dict | None):
            raise UserError(f"{name}: {path} must be an object, {{...}}")
        if isinstance(given, list) and '"auto"' in json.dumps(given) and not path.startswith("data_types"):
            raise UserError(
                f"{name}: {path} {json.dumps(given):.60} holds auto in a list: give a value, or leave it out"
            )
        if given == "auto" and path in SIZES:
            section[key] = SIZES[path](_hidden_size(settings))
        elif given == "auto" and values:
            section[key] = values[0]
        elif given == "auto":
            del section[key]
        elif values and given not in values:
            raise UserError(
                f"{name}: {path} {json.dumps(given):.60} contradicts {option}: change it there or here, or leave it out"
            )
        if given == "auto":
            filled.append(f"{path} {json.dumps(section.get(key, 'default'))}")
    return filled


def _expected(settings: Settings) -> dict[str, tuple[tuple, str]]:
    """Return for each path the values that agree with a setting, and this setting; "auto" becomes the first value."""
    share = _share(settings)
    micro = min(settings.micro_batch_size or share, share)
    cut = f"--micro_batch_size {micro}"
    if settings.micro_batch_tokens:
        cut = f"--micro_batch_tokens {settings.micro_batch_tokens}"
    batch = f"--batch_size {settings.batch_size}"
    precision = f"--precision {settings.precision}"
    optimizer = f"--optimizer {settings.optimizer}"
    rate = ((settings.learning_rate,), f"--learning_rate {settings.learning_rate}")
    clip = settings.max_grad_norm or 0.0
    sgd = settings.optimizer == "sgd"
    options = {"weight_decay": (weight_decay(settings), f"--weight_decay {show(weight_decay(settings))}")}
    if sgd:
        options["momentum"] = 0, optimizer
    else:
        betas = [float(beta) for beta in settings.betas.split(",")]
        options |= {"betas": (betas, f"--betas {settings.betas}"), "eps": (settings.eps, f"--eps {settings.eps:g}")}
        options["adam_w_mode"] = True, f"{optimizer}, whose decay is AdamW's"
    return {
        "train_batch_size": ((settings.batch_size,), batch),
        "train_micro_batch_size_per_gpu": ((micro,), cut),
        "gradient_accumulation_steps": ((math.ceil(share / micro),), f"{batch} on {settings.ranks} GPUs with {cut}"),
        "gradient_clipping": ((clip,), f"--max_grad_norm {clip or 'null'}"),
        "fp16.enabled": ((settings.precision == "16-mixed",), precision),
        "bf16.enabled": ((settings.precision == "bf16-mixed",), precision),
        "optimizer.type": (("SGD",) if sgd else ADAM, optimizer),
        "optimizer.params.lr": rate,
        "scheduler.type": ((SCHEDULES[settings.schedule],), f"--schedule {settings.schedule}"),
        "scheduler.params.warmup_min_lr": ((0,), f"--schedule {settings.schedule}"),
        "scheduler.params.warmup_max_lr": rate,
        "scheduler.params.warmup_num_steps": ((settings.warmup_steps,), f"--warmup_steps {settings.warmup_steps}"),
    } | {f"optimizer.params.{key}": ((value,), option) for key, (value, option) in options.items()}


def _complete(config: dict, settings: Settings) -> None:
    """Remove the sections that this project replaces, and set the values on which the train loop relies."""
    for section in ("optimizer", "scheduler", "train_batch_size"):
        config.pop(section, None)
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


def _walk(config: dict, above: str = "") -> Iterator[tuple[str, dict, str]]:
    """Yield for each key its path, its section and its name in the section."""
    for key, value in config.items():
        yield above + key, config, key
        if isinstance(value, dict):
            yield from _walk(value, f"{above}{key}.")


def _section(config: dict, name: str) -> dict:
    """Return a section; an empty one if it is missing or, which `_fill` refuses, not an object."""
    section = config.get(name)
    return section if isinstance(section, dict) else {}


def _share(settings: Settings) -> int:
    """Return the samples of an effective batch on each GPU."""
    return math.ceil(settings.batch_size / settings.ranks)


def _hidden_size(settings: Settings) -> int:
    config = load_config(settings.model).get_text_config()
    return getattr(config, "hidden_size", None) or max(config.hidden_sizes)
