"""Read a DeepSpeed configuration, fill its "auto" values from the settings, and refuse contradictions.

The "auto" values are filled as in transformers (transformers/integrations/deepspeed.py), but before a model exists.
"""

import difflib
import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.models.configs import MODELS, load_config
from fabric_ladder.places import CONFIGS
from fabric_ladder.settings import Settings

# The top-level keys that DeepSpeed 0.19.8 reads; it ignores others. A test compares them with the installed version.
KEYS = frozenset(
    """activation_checkpointing aio autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type
    compile csv_monitor data_efficiency data_parallel_size data_types dataloader_drop_last datastates_ckpt
    disable_allgather disable_python_gc dump_state expert_parallel flops_profiler fp16 gradient_accumulation_steps
    gradient_allreduce_op gradient_clipping gradient_predivide_factor hybrid_engine log_level
    managed_gradient_accumulation memory_breakdown optimizer pipeline prescale_gradients scheduler
    seq_parallel_communication_data_type sequence_parallel_size steps_per_print tensor_parallel tensorboard timers
    torch_autocast train_batch_size train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size
    wall_clock_breakdown wandb weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer
    zero_optimization""".split()
)
SCHEDULES = {"constant": "WarmupLR", "linear": "WarmupDecayLR", "cosine": "WarmupCosineLR"}
ADAM = {"betas": [0.9, 0.999], "eps": 1e-8}  # the values of this project's optimizers, which are PyTorch's
SGD = {"momentum": 0}
OWN_AUTO = "data_types.keep_in_fp32_modules"  # DeepSpeed itself accepts "auto" for this key
LOOP = "the train loop"
# The only value that works with this project, and what another value contradicts
FIXED = {
    "managed_gradient_accumulation": (True, LOOP),
    "gradient_allreduce_op": ("mean", LOOP),
    "zero_optimization.cpu_offload": (False, 'DeepSpeed 0.19, which needs "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": (False, 'DeepSpeed 0.19, which needs "offload_param": {"device": "cpu"}'),
    "torch_autocast.enabled": (False, "Fabric's mixed precision"),
    "data_efficiency.enabled": (False, LOOP),
    "tensor_parallel.autotp_size": (0, LOOP),
    "sequence_parallel_size": (1, LOOP),
    "activation_checkpointing.partition_activations": (False, "--activation_checkpointing"),
    "activation_checkpointing.cpu_checkpointing": (False, "--activation_checkpointing"),
    "scheduler.params.warmup_min_lr": (0, "the schedule, which starts at 0"),
    "scheduler.params.total_num_steps": ("all", "the schedule, which ends with the run"),
}


class Rule(NamedTuple):
    """The value of one key that agrees with the settings.

    Attributes:
        value: Replaces "auto". A function is called only if it is needed.
        contradicts: The setting that another value contradicts; empty if every value is allowed.
    """

    value: object | Callable[[], object]
    contradicts: str = ""


def read_deepspeed_config(settings: Settings) -> tuple[dict, list[str]]:
    """Return the DeepSpeed configuration that `settings.deepspeed` names, completed from the other settings.

    The sections for optimizer and schedule are checked and removed, since this project builds both. DeepSpeed's own
    accumulation is 1: it divides by a fixed number of steps and drops a shorter last batch (DeepSpeed#7439).
    `gradient_clipping` is always set, since DeepSpeed 0.19 clips to 1 by default.

    Args:
        settings: Checked; `devices` is a number.

    Returns:
        The configuration, and notices for the user: one line with the filled values.

    Raises:
        UserError: The file does not exist or is not a JSON object, or a key is unknown or contradicts a setting.
    """
    name, config = _read(settings.deepspeed)
    if unknown := next((key for key in config if key not in KEYS), None):
        near = difflib.get_close_matches(unknown, KEYS, n=1)
        fix = f"did you mean {near[0]}?" if near else "leave it out"
        raise UserError(f"{name}: DeepSpeed has no key {unknown}; {fix}")
    if "bfloat16" in config:  # DeepSpeed's old name for the section
        config.setdefault("bf16", config.pop("bfloat16"))
    _check_support(name, config, settings)
    filled = _fill(name, config, _rules(settings))
    for section in ("optimizer", "scheduler", "activation_checkpointing", "train_batch_size"):
        config.pop(section, None)
    config |= {
        "train_micro_batch_size_per_gpu": _share(settings),
        "gradient_accumulation_steps": 1,
        "gradient_clipping": settings.max_grad_norm or 0.0,
        "fp16": (config.get("fp16") or {}) | {"enabled": settings.precision == "16-mixed"},
        "bf16": (config.get("bf16") or {}) | {"enabled": settings.precision == "bf16-mixed"},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    # the timer synchronizes with the GPU in every forward pass
    config.setdefault("timers", {"throughput": {"enabled": False}})
    return config, [f"DeepSpeed {name}: filled {', '.join(filled)}"] if filled else []


def offloads(config: dict) -> dict[str, dict]:
    """Return the sections of `optimizer` and `param` that offload to CPU memory or to an NVMe disk."""
    sections = {name: _find(config, f"zero_optimization.offload_{name}") for name in ("optimizer", "param")}
    return {name: each for name, each in sections.items() if each and _find(each, "device") in ("cpu", "nvme")}


def largest_parameter(settings: Settings) -> int:
    """Return the number of elements of the model's largest parameter, without allocating the model."""
    with torch.device("meta"):
        model = MODELS[settings.task].from_config(load_config(settings.model, settings.model_revision))
    return max(parameter.numel() for parameter in model.parameters())


def _read(name: str | None) -> tuple[str, dict]:
    """Return the name for messages, and the configuration."""
    path = CONFIGS / "deepspeed" / f"{name}.json"
    if not path.is_file():
        path = Path(name or "")
    if not path.is_file():
        shipped = ", ".join(sorted(path.stem for path in (CONFIGS / "deepspeed").glob("*.json")))
        raise UserError(f"--deepspeed {name or 'null'}: there is no such file; give a path, or one of {shipped}")
    config = read_outside(path)
    if not isinstance(config, dict):
        raise UserError(f"--deepspeed {name}: it must hold one JSON object, {{...}}")
    return path.name, config


def _check_support(name: str, config: dict, settings: Settings) -> None:
    """Refuse unknown stages, and settings that do not work with ZeRO."""
    stage = _find(config, "zero_optimization.stage")
    offloaded = offloads(config)
    if stage not in (1, 2, 3):
        raise UserError(f"{name}: zero_optimization.stage must be 1, 2 or 3 (src/9_ddp.py shards nothing)")
    if "param" in offloaded and stage != 3:
        raise UserError(f"{name}: zero_optimization.offload_param needs stage 3, which shards the weights")
    if settings.precision not in ("32-true", "16-mixed", "bf16-mixed"):
        raise UserError(
            f"--precision {settings.precision}: ZeRO computes on 16-bit weights and updates 32-bit copies of them; use "
            "--precision bf16-mixed or 16-mixed, or 32-true"
        )
    if settings.optimizer in ("adafactor", "adam-4bit"):
        raise UserError(
            f"--optimizer {settings.optimizer}: it needs whole weights, and ZeRO steps on shares of all weights in one "
            "flat tensor; use --optimizer adam"
        )
    if settings.optimizer == "adam-8bit" and "optimizer" in offloaded:
        raise UserError(f"--optimizer adam-8bit steps on a GPU, and {name} offloads it: use --optimizer adam")
    if settings.optimizer == "sgd" and any(section["device"] == "nvme" for section in offloaded.values()):
        raise UserError(f"--optimizer sgd: {name} swaps the state of Adam to the disk; use --optimizer adam")


def _rules(settings: Settings) -> dict[str, Rule]:
    """Return the rule of each key, by its path."""
    share = _share(settings)
    micro = min(settings.micro_batch_size or share, share)
    cut = f"--micro_batch_tokens {settings.micro_batch_tokens}"
    if not settings.micro_batch_tokens:
        cut = f"--micro_batch_size {micro}"
    precision = f"--precision {settings.precision}"
    optimizer = f"--optimizer {settings.optimizer}"
    learning_rate = Rule(settings.learning_rate, f"--learning_rate {settings.learning_rate}")
    rules = {path: Rule(value, contradicts) for path, (value, contradicts) in FIXED.items()}
    rules |= {
        "train_batch_size": Rule(settings.batch_size, f"--batch_size {settings.batch_size}"),
        "train_micro_batch_size_per_gpu": Rule(micro, cut),
        "gradient_accumulation_steps": Rule(
            math.ceil(share / micro), f"--batch_size {settings.batch_size} on {settings.ranks} GPUs with {cut}"
        ),
        "gradient_clipping": Rule(settings.max_grad_norm or 0.0, f"--max_grad_norm {settings.max_grad_norm or 'null'}"),
        "fp16.enabled": Rule(settings.precision == "16-mixed", precision),
        "bf16.enabled": Rule(settings.precision == "bf16-mixed", precision),
        "optimizer.type": Rule("SGD" if settings.optimizer == "sgd" else "Adam", optimizer),
        "optimizer.params.lr": learning_rate,
        "scheduler.type": Rule(SCHEDULES[settings.schedule], f"--schedule {settings.schedule}"),
        "scheduler.params.warmup_max_lr": learning_rate,
        "scheduler.params.warmup_num_steps": Rule(settings.warmup_steps, f"--warmup_steps {settings.warmup_steps}"),
        # DeepSpeed's own size is too small for large embeddings
        "zero_optimization.offload_param.buffer_size": Rule(
            lambda: math.ceil(largest_parameter(settings) / settings.ranks)
        ),
        "zero_optimization.reduce_bucket_size": Rule(lambda: _hidden_size(settings) ** 2),
        "zero_optimization.stage3_prefetch_bucket_size": Rule(lambda: int(0.9 * _hidden_size(settings) ** 2)),
        "zero_optimization.stage3_param_persistence_threshold": Rule(lambda: 10 * _hidden_size(settings)),
    }
    for key, value in (SGD if settings.optimizer == "sgd" else ADAM).items():
        rules[f"optimizer.params.{key}"] = Rule(value, optimizer)
    rules["optimizer.params.weight_decay"] = Rule(0.01 if settings.optimizer == "adamw" else 0, optimizer)
    return rules


def _fill(name: str, config: dict, rules: dict[str, Rule]) -> list[str]:
    """Fill the "auto" values in place, check the other values, and return descriptions of the filled values.

    A key that no setting determines is removed if it is "auto", so that DeepSpeed takes its default.

    Raises:
        UserError: A key contradicts a setting, or a section is not an object.
    """
    filled = []
    sections = {path.rpartition(".")[0] for path in rules}
    for path, section, key in list(_walk(config)):
        given = section[key]
        rule = rules.get(path)
        if path in sections and not isinstance(given, dict | None):
            raise UserError(f"{name}: {path} must be an object, {{...}}")
        if given == "auto" and path != OWN_AUTO:
            if rule is None:
                del section[key]
                filled.append(f"{path} by DeepSpeed's default")
                continue
            section[key] = rule.value() if callable(rule.value) else rule.value
            filled.append(f"{path} {json.dumps(section[key])}")
        elif rule and rule.contradicts and not _agrees(path, given, rule.value):
            raise UserError(
                f"{name}: {path} {json.dumps(given):.60} contradicts {rule.contradicts}: change it there or here, or "
                "leave it out"
            )
    return filled


def _agrees(path: str, given: object, value: object) -> bool:
    if path == "optimizer.type" and value == "Adam":  # DeepSpeed's Adam is AdamW: equal without weight decay
        return str(given).lower() in ("adam", "adamw")
    return given == value


def _walk(config: dict, above: str = "") -> Iterator[tuple[str, dict, str]]:
    """Yield for each key its path, its section and its name in the section."""
    for key, value in config.items():
        yield above + key, config, key
        if isinstance(value, dict):
            yield from _walk(value, f"{above}{key}.")


def _find(config: dict, path: str) -> object:
    """Return the value at a path, or None."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _share(settings: Settings) -> int:
    """Return the samples of an effective batch on each GPU."""
    return math.ceil(settings.batch_size / settings.ranks)


def _hidden_size(settings: Settings) -> int:
    config = load_config(settings.model, settings.model_revision).get_text_config()
    if size := getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or [0]):
        return size
    raise UserError(f'{settings.model} has no hidden size for "auto" in {settings.deepspeed}: write a number there')
