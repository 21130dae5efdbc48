"""The command line and the YAML file as they are given: which names there are, what was meant, and what is refused."""

import dataclasses
import difflib
import os
import re
import typing
from pathlib import Path

import jsonargparse
import torch
import yaml

from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.places import CONFIGS
from fabric_ladder.settings import INTERNAL, Settings

COMMANDS = ("help", "config", "print_config")  # on the command line alone
FIELDS = {item.name: item.type for item in dataclasses.fields(Settings) if item.name not in INTERNAL}
NAMES = [*FIELDS]
SWITCHES = [name for name, kind in FIELDS.items() if bool in (kind, *typing.get_args(kind))]
PATHS = ("dataset", "validation_file", "test_file", "model", "tokenizer")
YAML_BYTES = 2**20
# What others call a setting (transformers' TrainingArguments, accelerate, Lightning's Trainer, litgpt, torchtune, PEFT,
# timm), and what it is here; `{}` stands for the value that was given.
PEERS = {
    "accelerator {}": "device",
    "accelerator cpu": "cpu no_cuda use_cpu",
    "activation_checkpointing true": "gradient_checkpointing grad_checkpointing enable_activation_checkpointing",
    "batch_size {}": "bs train_batch_size global_batch_size",
    "batch_size, the effective batch of one optimizer step, beside --micro_batch_size": (
        "accumulate_grad_batches grad_accum grad_accum_steps gradient_accumulation gradient_accumulation_steps"
    ),
    "compile true": "torch_compile",
    "dataset {}": "data data_path dataset_name train_file",
    "devices {}": "gpu gpus n_gpu ngpu nproc_per_node num_gpus num_processes world_size",
    "epochs {}": "max_epochs n_epochs num_epochs num_train_epochs",
    "float8 true": "enable_fp8_training fp8 use_fp8",
    "label_column {}": "label_name label_field target_column",
    "learning_rate {}": "lr max_lr",
    "log_every {}, in samples": "log_interval logging_steps log_every_n_steps",
    "logger {}": "report_to",
    "lora true": "use_lora use_peft peft",
    "lora_rank {}": "lora_r rank",
    "lora_targets {}": "lora_target_modules target_modules",
    "matmul_precision high": "tf32 allow_tf32",
    "max_grad_norm {}": "clip_grad clip_grad_norm grad_clip gradient_clip gradient_clip_val gradient_clipping max_norm",
    "max_length {}": "block_size cutoff_len max_seq_len max_seq_length model_max_length seq_len seq_length",
    "micro_batch_size {}": "micro_batch per_device_batch_size per_device_train_batch_size",
    "model {}": "base_model checkpoint_dir model_id model_name model_name_or_path pretrained_model_name_or_path",
    "num_workers {}": "dataloader_num_workers workers",
    "optimizer adamw, which has weight decay 0.01": "weight_decay wd",
    "optimizer {}": "opt optim",
    "precision 16-mixed": "fp16 amp float16 half use_fp16",
    "precision bf16-mixed": "bf16 bfloat16 use_bf16",
    "quantization nf4": "load_in_4bit load_in_8bit quantize use_4bit",
    "resume {}": "resume_from_checkpoint",
    "runs_dir {}": "log_dir logging_dir out_dir output output_dir",
    "save_every {}, in optimizer steps": "checkpoint_every save_interval save_steps",
    "schedule {}": "lr_scheduler lr_scheduler_type scheduler",
    "train_samples {}": "limit_train_samples max_samples max_train_samples num_samples",
    "validation_file {}": "eval_file val_file valid_file",
    "validation_samples {}": "max_eval_samples max_val_samples",
    "warmup_steps {}": "num_warmup_steps warmup",
}
PEERS = {theirs: ours for ours, names in PEERS.items() for theirs in names.split()}


def choose_config(config: str | None) -> tuple[bool, Path | None]:
    """Return whether the user chose a config, and its path; the quickstart's on a machine without a CUDA GPU."""
    if config is None:
        return False, None if torch.cuda.is_available() else CONFIGS / "quickstart.yaml"
    places = (Path(os.path.expanduser(config)), CONFIGS / config, CONFIGS.parent / config)
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        ours = ", ".join(sorted(path.name for path in CONFIGS.glob("*.yaml")))
        raise UserError(f"there is no config file {config or '(an empty name)'}; those that come along: {ours}")
    return True, path


def read_config(path: Path) -> dict[str, object]:
    """Read a YAML file of settings; a relative path in it is taken from the file's own folder where that holds it."""
    values = read_outside(path, yaml.safe_load, "YAML", most=YAML_BYTES) or {}
    if not isinstance(values, dict):
        raise UserError(f"{path} must hold lines such as 'batch_size: 16'")
    for name, value in values.items():
        if isinstance(value, list) and not any(isinstance(each, dict | list | set | tuple) for each in value):
            value = values[name] = ",".join(map(str, value))
        if isinstance(value, dict | list | set | tuple):  # which aliases can make endless once it is written out
            raise UserError(f"{path}: {name!r:.60} must be one value, or a list of such")
        if isinstance(value, int) and abs(value) >= 2**63:
            raise UserError(f"{path}: {name!r:.60} is a number of {value.bit_length()} bits: give a smaller one")
    beside = {key: path.parent / str(values[key]) for key in PATHS if values.get(key)}
    return values | {key: str(place) for key, place in beside.items() if place.exists()}


def parse_options(parser: jsonargparse.ArgumentParser, args: list[str], where: str = "") -> dict:
    """Check names and types.

    Args:
        parser: Of all settings.
        args: Options with their values; a switch needs none: `--lora` is `--lora true`.
        where: Starts the message of an error.

    Raises:
        UserError: There is no such setting, or its value is of another type.
    """
    args = _with_switches(args)
    for place, arg in enumerate(args):
        name, _, value = arg[2:].partition("=")
        if arg.startswith("--") and name not in (*(() if where else COMMANDS), *NAMES):
            following = args[place + 1 : place + 2]
            raise UserError(where + _meant(name, value or "".join(each for each in following if each[:2] != "--")))
    try:
        return parser.parse_args(args).as_dict()
    except jsonargparse.ArgumentError as error:
        text = " ".join(str(error).split())
        kind = r"(?:<class '(\w+)'>|typing.Literal\[(.*?)\])"
        if found := re.match(rf'Parser key "(\w+)":.*? Expected an? {kind}.*(?:Got|Given) value: ?(.*)', text):
            name, plain, choices, value = found.groups()
            text = f"--{name} {value:.80}: expected {plain or f'one of {choices}'}"
        raise UserError(f"{where}{text} (see --help)") from error


def _with_switches(args: list[str]) -> list[str]:
    """Give switches that have no value the value `true`."""
    names, following = {f"--{name}" for name in SWITCHES}, [*args[1:], "--"]
    return [
        f"{arg}=true" if arg in names and after.startswith("--") else arg
        for arg, after in zip(args, following, strict=False)
    ]


def _meant(name: str, value: str) -> str:
    """Say that there is no such setting, and which one was meant."""
    start = f"there is no setting {name[:60]!r}"
    ours = PEERS.get(name.replace("-", "_").lower())
    if ours == "resume {}":
        value = {"": "auto", "true": "auto", "false": "no"}.get(value.lower(), value)
    if ours == "accelerator {}":
        value = {"gpu": "cuda"}.get(value.split(":")[0], value.split(":")[0])
    if ours:
        return f"{start}; here it is --{ours.replace('{}', value).replace(' ,', ',').rstrip()}"
    near = difflib.get_close_matches(name, NAMES, n=1)
    return f"{start}; " + (f"did you mean {near[0]!r}?" if near else "see --help for all settings")
