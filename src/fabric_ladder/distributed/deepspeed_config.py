"""A DeepSpeed configuration: read, filled from the settings where it says "auto", refused where it contradicts them.

transformers' `HfTrainerDeepSpeedConfig` fills the same keys, but from the Trainer's arguments and a finished model; it
passes over misspelt keys and most of what is refused here, and has `from_pretrained` shard what is loaded next.
"""

import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.models.configs import MODELS, load_config
from fabric_ladder.models.optimizer import build_optimizer
from fabric_ladder.places import CONFIGS
from fabric_ladder.settings import Settings

# What `deepspeed.runtime.config.DeepSpeedConfig` and `deepspeed.initialize` of 0.19.8 ask for at the top level, but for
# what they ask for only to say that it was removed. A test has that version tell which keys these are.
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
OWN_AUTO = "data_types.keep_in_fp32_modules"  # the one key for which "auto" is a value of DeepSpeed itself
KERNELS = ("adam_w_mode", "torch_adam", "fused", "foreach", "fp32_optimizer_states")  # say by which one Adam computes
DEFAULT = None  # DeepSpeed's own value, which a key gets that is left out
# "auto" for these is what accelerate's plugin fills without being told, or what DeepSpeed takes as its default
DEFAULTS = (
    *("steps_per_print", "zero_optimization.overlap_comm", "zero_optimization.allgather_bucket_size"),
    *("zero_optimization.sub_group_size", "zero_optimization.stage3_max_live_parameters"),
    *("zero_optimization.stage3_max_reuse_distance", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
    *("zero_optimization.offload_optimizer.device", "zero_optimization.offload_optimizer.nvme_path"),
    *("zero_optimization.offload_param.device", "zero_optimization.offload_param.nvme_path"),
)
# factor and power of the model's hidden size: transformers/integrations/deepspeed.py; any number will do in their place
BY_HIDDEN_SIZE = {
    "zero_optimization.reduce_bucket_size": (1, 2),
    "zero_optimization.stage3_prefetch_bucket_size": (0.9, 2),
    "zero_optimization.stage3_param_persistence_threshold": (10, 1),
}
# What this project's loop and models leave no room for: the value that does no harm, and why
FIXED = {
    "managed_gradient_accumulation": (True, "the loop, which itself says where an effective batch ends"),
    "gradient_allreduce_op": ("mean", "the loop, whose loss weights are made for the mean over the GPUs"),
    "zero_optimization.cpu_offload": (False, 'DeepSpeed 0.19, where it is "offload_optimizer": {"device": "cpu"}'),
    "zero_optimization.cpu_offload_param": (False, 'DeepSpeed 0.19, where it is "offload_param": {"device": "cpu"}'),
    "torch_autocast.enabled": (False, "Fabric, whose mixed precision under DeepSpeed is bf16 or fp16"),
    "data_efficiency.enabled": (False, "the loop, which chooses the samples itself"),
    "autotuning.enabled": (False, "the loop, which cannot be tuned from outside"),
    "hybrid_engine.enabled": (False, "the loop, which only trains"),
    "expert_parallel.enabled": (False, "the loop, which shares out samples alone"),
    "tensor_parallel.autotp_size": (0, "the loop, which shares out samples alone"),
    "sequence_parallel_size": (1, "the loop, which shares out samples alone"),
} | {
    f"activation_checkpointing.{key}": (False, "the models, which use PyTorch's by --activation_checkpointing true")
    for key in ("partition_activations", "cpu_checkpointing", "contiguous_memory_optimization")
}


class Rule(NamedTuple):
    """What a key must say if it says anything.

    Attributes:
        value: What replaces "auto" and what anything else must equal; a function makes it only where it is needed.
        other: What another value would contradict; empty if any value will do.
        fix: What to do then, beside leaving the key out; `{}` stands for the configuration's value.
    """

    value: object = DEFAULT
    other: str = ""
    fix: str = ""


def read_deepspeed_config(settings: Settings) -> tuple[dict, list[str]]:
    """Return the DeepSpeed configuration that `settings.deepspeed` names, completed from the other settings.

    What it says "auto" for is filled as Hugging Face's Trainer does (transformers/integrations/deepspeed.py). Optimizer
    and schedule are checked and left out, since this project makes them. DeepSpeed's own accumulation is 1: it scales
    by a fixed number of steps and flushes no shorter last batch (DeepSpeed#7439). `gradient_clipping` is always said,
    since DeepSpeed 0.19 clips to 1 where it is not. Its throughput timer, which no line shows, is off unless asked for.

    Args:
        settings: Checked; `devices` is a number.

    Returns:
        The configuration, and what the user should read: a line that says what was filled.

    Raises:
        UserError: No such file, no JSON object, an unknown key, or one that contradicts a setting.
    """
    name, config = _read(settings.deepspeed)
    if unknown := next((key for key in config if key not in KEYS), None):
        near = difflib.get_close_matches(unknown, KEYS, n=1)
        fix = f"did you mean {near[0]}?" if near else "leave it out"
        raise UserError(f"{name}: DeepSpeed knows no {unknown}; {fix}")
    if "bfloat16" in config:  # DeepSpeed's old name of it
        config.setdefault("bf16", config.pop("bfloat16"))
    _check_support(name, config, settings)
    filled = _fill(name, config, _rules(config, settings))
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
    # else it would wait for the GPU at every forward pass, to time what is not printed
    config.setdefault("timers", {"throughput": {"enabled": False}})
    return config, [f"DeepSpeed {name}: filled {', '.join(filled)}"] if filled else []


def offloads(config: dict) -> dict[str, dict]:
    """Return what is offloaded, `optimizer` and `param`, with its section of the configuration."""
    sections = {name: _find(config, f"zero_optimization.offload_{name}") for name in ("optimizer", "param")}
    return {name: each for name, each in sections.items() if each and _find(each, "device") in ("cpu", "nvme")}


def parameter_sizes(settings: Settings) -> list[int]:
    """Return the number of elements of each parameter of the model, without making it."""
    with torch.device("meta"):
        model = MODELS[settings.task].from_config(load_config(settings.model))
    return [parameter.numel() for parameter in model.parameters()]


def _read(name: str | None) -> tuple[str, dict]:
    """Return the configuration, and its name for messages."""
    path = CONFIGS / "deepspeed" / f"{name}.json"
    if not path.is_file():
        path = Path(name or "")
    if not path.is_file():
        ours = ", ".join(sorted(path.stem for path in (CONFIGS / "deepspeed").glob("*.json")))
        raise UserError(f"--deepspeed {name}: there is no such file; those that come along: {ours}")
    config = read_outside(path)
    if not isinstance(config, dict):
        raise UserError(f"--deepspeed {name}: it must hold one JSON object, {{...}}")
    return path.name, config


def _check_support(name: str, config: dict, settings: Settings) -> None:
    """Refuse stages that are none, and settings that ZeRO has no form of."""
    stage, offloaded = _find(config, "zero_optimization.stage"), offloads(config)
    if stage not in (1, 2, 3):
        raise UserError(f"{name}: zero_optimization.stage must be 1, 2 or 3 (src/9_ddp.py shards nothing)")
    if "param" in offloaded and stage != 3:
        raise UserError(f"{name}: zero_optimization.offload_param needs stage 3, the only one that shards the weights")
    if settings.precision not in ("32-true", "16-mixed", "bf16-mixed"):
        raise UserError(
            f"--precision {settings.precision}: ZeRO computes on 16-bit weights and steps on 32-bit copies of them, "
            "which is --precision bf16-mixed or 16-mixed; or use 32-true"
        )
    if settings.optimizer == "adafactor":
        raise UserError("--optimizer adafactor: ZeRO cuts up the matrices that it factorises; use --optimizer adam")
    if settings.optimizer == "adam-4bit":
        raise UserError(
            "--optimizer adam-4bit: ZeRO steps on shares of all weights end to end, and its blocks are those of each "
            "weight; use --optimizer adam"
        )
    if settings.optimizer == "adam-8bit" and "optimizer" in offloaded:
        raise UserError(f"--optimizer adam-8bit steps on a GPU, and {name} offloads it: use --optimizer adam")
    if settings.optimizer == "sgd" and any(section["device"] == "nvme" for section in offloaded.values()):
        raise UserError(f"--optimizer sgd: what {name} swaps to the disk is Adam's state; use --optimizer adam")


def _rules(config: dict, settings: Settings) -> dict[str, Rule]:
    """Return what the settings say of each key, by its path."""
    share, warmup, max_norm = _share(settings), settings.warmup_steps, settings.max_grad_norm
    micro = min(settings.micro_batch_size or share, share)
    batch, rate, rise, precision, schedule, cut = (
        f"--{name} {getattr(settings, name)}"
        for name in ("batch_size", "learning_rate", "warmup_steps", "precision", "schedule", "micro_batch_tokens")
    )
    if not settings.micro_batch_tokens:
        cut = f"--micro_batch_size {micro}"
    cuts = f"{batch} on {settings.ranks} GPUs with {cut}"
    ours = {theirs: ours for ours, theirs in SCHEDULES.items()}.get(str(_find(config, "scheduler.type")))
    rules = {path: Rule() for path in DEFAULTS} | {path: Rule(*value_and_why) for path, value_and_why in FIXED.items()}
    rules |= {
        "train_batch_size": Rule(settings.batch_size, batch, "give --batch_size {}"),
        "train_micro_batch_size_per_gpu": Rule(micro, cut, "give --micro_batch_size {}"),
        "gradient_accumulation_steps": Rule(math.ceil(share / micro), cuts, "change one of these"),
        "gradient_clipping": Rule(
            max_norm or 0.0, f"--max_grad_norm {max_norm or 'null'}", "give --max_grad_norm {} (null for 0)"
        ),
        "scheduler.type": Rule(SCHEDULES[settings.schedule], schedule, f"give --schedule {ours}" if ours else ""),
        "scheduler.params.warmup_max_lr": Rule(settings.learning_rate, rate, "give --learning_rate {}"),
        "scheduler.params.warmup_num_steps": Rule(warmup, rise, "give --warmup_steps {}"),
        "scheduler.params.total_num_steps": Rule("all", "the schedule, which ends with the run"),
        # of DeepSpeed's own size, large embeddings do not fit it
        "zero_optimization.offload_param.buffer_size": Rule(
            lambda: math.ceil(max(parameter_sizes(settings)) / settings.ranks)
        ),
    }
    for section, mixed in (("fp16", "16-mixed"), ("bf16", "bf16-mixed")):
        on = settings.precision == mixed
        rules[f"{section}.enabled"] = Rule(on, precision, f"give --precision {'32-true' if on else mixed}")
    for key in ("warmup_min_lr", "warmup_min_ratio", "cos_min_ratio"):
        rules[f"scheduler.params.{key}"] = Rule(0, "the schedule, which starts and ends at 0")
    if warmup:
        rules["scheduler.params.warmup_type"] = Rule("linear", f"{rise}, in which the learning rate rises linearly")
    for path, (factor, power) in BY_HIDDEN_SIZE.items():
        rules[path] = Rule(lambda path=path, f=factor, p=power: int(f * _hidden_size(settings, path) ** p))
    return rules | (_optimizer_rules(config, settings) if "optimizer" in config else {})


def _optimizer_rules(config: dict, settings: Settings) -> dict[str, Rule]:
    """Compare with the optimizer that `build_optimizer` makes; DeepSpeed's Adam is AdamW, the same without decay."""
    ours, asked = f"--optimizer {settings.optimizer}", str(_find(config, "optimizer.type"))
    theirs = asked if asked.lower() in ("adam", "adamw") else "Adam"
    fix = f"give --optimizer {asked.lower()}" if asked.lower() in ("adam", "adamw", "sgd") else ""
    rules = {"optimizer.type": Rule("SGD" if settings.optimizer == "sgd" else theirs, ours, fix)}
    values = build_optimizer(settings, nn.Linear(1, 1)).defaults | {"bias_correction": True}
    if values.get("weight_decay"):
        values["adam_w_mode"] = True
    fixes = {"lr": "give --learning_rate {}", "weight_decay": "give --optimizer adam for 0, adamw for 0.01"}
    params = _find(config, "optimizer.params")
    for key in params if isinstance(params, dict) else ():
        if key in values or key not in KERNELS:
            other = f"--learning_rate {settings.learning_rate}" if key == "lr" else ours
            rules[f"optimizer.params.{key}"] = Rule(values.get(key), other, fixes.get(key, ""))
    return rules


def _fill(name: str, config: dict, rules: dict[str, Rule]) -> list[str]:
    """Fill what says "auto", check everything else, and return what was filled.

    Raises:
        UserError: A key contradicts its rule, has none and says "auto", or what should be a section is none.
    """
    filled, sections = [], {path.rpartition(".")[0] for path in rules} | {"optimizer.params"}
    for path, section, key in [*_walk(config)]:
        given, rule = section[key], rules.get(path)
        if path in sections and not isinstance(given, dict | None):
            raise UserError(f"{name}: {path} must be an object, {{...}}")
        if given == "auto" and path != OWN_AUTO:
            if rule is None:
                raise UserError(f'{name}: no setting says what {path} "auto" is: write a value there, or leave it out')
            section[key] = rule.value() if callable(rule.value) else rule.value
            filled.append(f"{path} {json.dumps(section[key])}")
            if rule.value is DEFAULT:
                del section[key]
                filled[-1] = f"{path} as DeepSpeed does"
        elif rule and rule.other and given != (list(rule.value) if isinstance(rule.value, tuple) else rule.value):
            fix = f"{rule.fix}, or leave it out" if rule.fix else "leave it out"
            fix = fix.format(f"{given!s:.60}")
            raise UserError(f"{name}: {path} {json.dumps(given):.60} contradicts {rule.other}: {fix}")
    return filled


def _walk(config: dict, above: str = "") -> Iterator[tuple[str, dict, str]]:
    """Yield the path of each key, the section that it is in, and its name there."""
    for key, value in config.items():
        yield above + key, config, key
        if isinstance(value, dict):
            yield from _walk(value, f"{above}{key}.")


def _find(config: dict, path: str) -> object:
    """Return what a configuration says at a path, or None."""
    for key in path.split("."):
        config = config.get(key) if isinstance(config, dict) else None
    return config


def _share(settings: Settings) -> int:
    """Return the samples of an effective batch on each GPU."""
    return math.ceil(settings.batch_size / settings.ranks)


def _hidden_size(settings: Settings, path: str) -> int:
    config = load_config(settings.model).get_text_config()
    if size := getattr(config, "hidden_size", None) or max(getattr(config, "hidden_sizes", None) or [0]):
        return size
    raise UserError(f'{settings.model} has no hidden size that {path} "auto" could be made of: write a number there')
