"""Settings from defaults in code, the script's own, a YAML file and the command line, in that order."""

import argparse
import dataclasses
import functools
import os
import re
import sys
from collections.abc import Collection, Mapping
from itertools import pairwise
from pathlib import Path

import jsonargparse
import torch
import yaml

from fabric_ladder.advice import show_errors
from fabric_ladder.checks import check, check_start, check_values
from fabric_ladder.distributed.launch import check_launcher, options_of_fabric_run, prepare_launch, resolve_devices
from fabric_ladder.environment import compute_capability, fit_precision, keep_freed_memory, notebook_shell, prepare_cuda
from fabric_ladder.errors import Checked, UserError
from fabric_ladder.options import NAMES, PATHS, choose_config, parse_options, read_config
from fabric_ladder.places import CONFIGS
from fabric_ladder.settings import GROUPS, INTERNAL, Settings

CPU_TOKENS = 1024  # at once: as fast as any cut that was tried, see docs/journal.md
BUCKET = 16  # tokens; kernels for lengths that may be no multiple of this are slower, and a step of 64 mostly padding
FOLDERS = (*PATHS, "data_dir", "cache_dir", "runs_dir", "load", "resume", "deepspeed")
SCRIPT_NAME = re.compile(r'^"""(\w+) ·', re.MULTILINE)  # at the start of each rung's docstring
EXAMPLES = """\
examples:
  python src/{name}.py --config configs/imdb_minilm.yaml --batch_size 32
  python src/{name}.py --model FOLDER --dataset texts.csv --text_column body
  python src/{name}.py --print_config > own.yaml    and then    python src/{name}.py --config own.yaml
"""


def parse_settings(args: list[str] | None = None, config: str | None = None, **defaults) -> Settings:
    """Read, resolve and check the settings of the running script.

    Args:
        args: What to read instead of the command line; a notebook's own arguments are never read.
        config: YAML file to read when the command line names none.
        **defaults: The script's own defaults, which a YAML file or the command line may override.

    Returns:
        Checked settings in which `auto` and defaults that depend on others are resolved, see `resolve`.

    Raises:
        UserError: An unknown setting, a wrong type, or values that do not go together or ask for what is not there.
        Checked: `check_only` is set, and the run could start.
    """
    show_errors()
    if args is None:
        args = [] if notebook_shell() else [*sys.argv[1:], *options_of_fabric_run()]
    settings, given, print_config = _read(settings_parser(defaults), args, config)
    check_values(settings)
    if print_config:
        print(_as_yaml(settings), end="")
        raise SystemExit(0)
    several = "devices" in defaults
    check_launcher(settings, several)
    prepare_cuda(settings.accelerator, settings.deterministic)
    settings = resolve(settings, given, defaults)
    if settings.accelerator == "cpu":
        keep_freed_memory()
    check(settings, defaults)
    if several and settings.ranks == 1:
        notice = "One device: nothing to share it out to; --devices N or torchrun gives this run more"
        settings = _with_notice(settings, notice)
    show_errors(settings)
    if settings.check_only:
        check_start(settings)
        raise Checked(settings)
    prepare_launch(several)
    return settings


def _read(parser: jsonargparse.ArgumentParser, args: list[str], config: str | None) -> tuple[Settings, set[str], bool]:
    """Return the settings as they are given, the names of those on the command line, and whether to print them."""
    chosen, path = choose_config(parse_options(parser, args).get("config", config))
    from_file = read_config(path) if path else {}
    file_args = [f"--{name}={'null' if value is None else value}" for name, value in from_file.items()]
    parse_options(parser, file_args, f"{path}: ")
    values = _with_homes(parse_options(parser, [*file_args, *args]))
    values = _with_carried(values) | {"config": str(path) if path else None}
    print_config = values.pop("print_config", False)
    settings = Settings(**values, name=_script_name())
    given = {arg.removeprefix("--").split("=")[0] for arg in args if arg.startswith("--")}
    if path and not chosen:
        settings = _with_notice(
            settings,
            f"No --config and no CUDA GPU: {_describe_quickstart(path, given)}. For real work: --config "
            "configs/imdb_bloom_560m.yaml; all settings: --help",
        )
    settings = _with_weights(_with_learning_rate(settings, given, from_file), given, from_file)
    if settings.from_scratch and settings.optimizer == "sgd":
        notice = "SGD hardly learns from random weights: accuracy near chance is no fault; --model has pretrained ones"
        settings = _with_notice(settings, notice)
    return settings, given, print_config


class _Help(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Leaves the script's docstring as it is written, marks the script's own defaults, and says nothing twice."""

    def __init__(self, *args, own: set[str], **options):
        super().__init__(*args, **options)
        self._own = own

    def _get_help_string(self, action: argparse.Action) -> str:
        text = super()._get_help_string(action)
        if str(action.metavar).startswith("{"):  # which lists all values
            text = text.replace("type: %(type)s, ", "")
        if action.dest in self._own:
            return text.replace("default: %(", "set by this script: %(")
        return text if action.default is not None else text.replace(", default: %(default)s", "")


def settings_parser(defaults: dict) -> jsonargparse.ArgumentParser:
    """Return the parser of all settings, in groups, with the script's own defaults."""
    parser = jsonargparse.ArgumentParser(
        prog=_script_name(), usage="python src/%(prog)s.py [--config FILE] [--SETTING VALUE …]", print_config=None,
        description=_script_doc(), epilog=EXAMPLES.format(name=_script_name()), exit_on_error=False,
        formatter_class=functools.partial(_Help, own=set(defaults)),
    )  # fmt: skip
    absent = {"default": argparse.SUPPRESS}
    parser.add_argument("--config", metavar="FILE", help="YAML file; the command line overrides it.", **absent)
    parser.add_argument("--print_config", action="store_true", help="Print this run's YAML file, and exit.", **absent)
    for title, names in settings_groups().items():
        group = parser.add_argument_group(title)
        group.add_class_arguments(Settings, as_group=False, skip={*INTERNAL, *NAMES} - {*names})
    parser.set_defaults(defaults)
    return parser


def settings_groups() -> dict[str, list[str]]:
    """Return the names of all settings, by their group."""
    starts = [NAMES.index(first) for first in GROUPS.values()]
    return {title: NAMES[start:end] for title, (start, end) in zip(GROUPS, pairwise([*starts, None]), strict=True)}


def _as_yaml(settings: Settings) -> str:
    """Return what `--config` reads as these settings, those of the script itself included."""
    if name := _own_rate(settings):  # which one that was given by hand has taken the place of
        settings = dataclasses.replace(settings, **{name: settings.learning_rate})
    lines = [f"# python src/{settings.name}.py --config THIS_FILE\n"]
    for title, names in settings_groups().items():
        values = {name: getattr(settings, name) for name in names}
        lines += [f"\n# {title}\n", yaml.safe_dump(values, sort_keys=False, allow_unicode=True)]
    return "".join(lines)


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
    multiple, (size, tokens) = settings.pad_to_multiple_of, _micro_batch(settings, given, script, accelerator)
    capability = compute_capability() if on_gpu else None
    replaceable = settings.lora and "precision" not in given
    precision, meaning = fit_precision(settings.precision, capability, replaceable, "offload" in script)
    if meaning:
        emulates = f"{torch.cuda.get_device_name()} only emulates bfloat16 (compute capability below 8.0)"
        settings = _with_notice(settings, f"{emulates}: {meaning}")
    if settings.float8 and accelerator == "cpu":
        notice = "--float8 on a CPU: factors are rounded to 8 bits and multiplied in 32, which takes longer, not less"
        settings = _with_notice(settings, notice)
    if multiple is None:
        # MPS keeps memory for every length that it has seen
        bucketed = settings.compile or settings.packing or accelerator == "mps"
        multiple = BUCKET if bucketed and settings.max_length % BUCKET == 0 else 1
    settings = dataclasses.replace(
        settings,
        accelerator=accelerator,
        precision=precision,
        matmul_precision=settings.matmul_precision or ("high" if on_gpu else "highest"),
        micro_batch_size=size,
        micro_batch_tokens=tokens,
        eval_batch_tokens=settings.eval_batch_tokens or (None if on_gpu else CPU_TOKENS),
        pad_to_multiple_of=min(multiple, settings.max_length),
    )
    devices, num_nodes = resolve_devices(settings)
    return dataclasses.replace(settings, devices=devices, num_nodes=num_nodes)


def _micro_batch(
    settings: Settings, given: Collection[str], script: Mapping[str, object], accelerator: str
) -> tuple[int | None, int | str | None]:
    """Return `micro_batch_size` and `micro_batch_tokens`, of which one is None."""
    size, tokens = settings.micro_batch_size, settings.micro_batch_tokens
    if settings.pack_rows:
        for name in ("micro_batch_size", "micro_batch_tokens"):
            if name in given:
                raise UserError(f"--pack_rows {settings.pack_rows} takes the place of --{name}: leave one of them out")
        return settings.pack_rows, None
    if tokens == "auto" and "micro_batch_tokens" not in given:
        if size and size != script.get("micro_batch_size"):  # the user's own
            return size, None
        if accelerator == "cpu":
            return None, CPU_TOKENS
        if accelerator == "mps":
            return 1, None
    return (None, tokens) if tokens else (size or settings.batch_size, None)


def _with_learning_rate(settings: Settings, given: set[str], from_file: dict) -> Settings:
    """Take the rate of `sgd` or of adapters, whose steps are of another size, unless the command line gives one.

    Args:
        settings: With the learning rate of Adam for all weights.
        given: Names of settings on the command line.
        from_file: Settings in the YAML file, whose learning rate is not replaced in silence.
    """
    name, before = _own_rate(settings), settings.learning_rate
    if name is None or "learning_rate" in given:
        return settings
    rate = getattr(settings, name)
    if "learning_rate" in from_file and name not in from_file and rate != before:
        settings = _with_notice(
            settings,
            f"Learning rate {rate:g} (--{name}) in place of {before:g}, which {Path(settings.config).name} has for "
            "Adam on all weights; --learning_rate sets another",
        )
    return dataclasses.replace(settings, learning_rate=rate)


def _own_rate(settings: Settings) -> str | None:
    """Name the setting of the learning rate that the steps of this optimizer, or of adapters, need."""
    return "sgd_learning_rate" if settings.optimizer == "sgd" else "lora_learning_rate" if settings.lora else None


def _with_weights(settings: Settings, given: set[str], from_file: dict) -> Settings:
    """Take a model of the command line as pretrained, where only the file asks for random weights."""
    random = settings.from_scratch and "from_scratch" in from_file and "from_scratch" not in given
    if not random or "model" not in given or settings.model.endswith(".json"):
        return settings
    file = f"{Path(settings.config).name} has random ones (--from_scratch true)"
    notice = f"--model {settings.model}: its pretrained weights, where {file}; all else is as there"
    return _with_notice(dataclasses.replace(settings, from_scratch=False), notice)


def _with_notice(settings: Settings, notice: str) -> Settings:
    return dataclasses.replace(settings, notices=(*settings.notices, notice))


def _describe_quickstart(config: Path, given: set[str]) -> str:
    """Say what the quickstart's config supplies to a run whose command line gives these settings."""
    supplied = {"model": "a small model", "dataset": "synthetic reviews"}
    supplied = [text for name, text in supplied.items() if name not in given]
    if not supplied:
        return f"what you do not set is the quickstart's ({config.name})"
    return f"this is the quickstart ({config.name}), {' on '.join(supplied)}"


def _with_homes(values: dict) -> dict:
    """Write the user's home for `~`, which no shell does in a YAML file or after `--runs_dir=`."""
    starts = {name: value for name in FOLDERS if isinstance(value := values[name], str) and value.startswith("~")}
    return values | {name: os.path.expanduser(value) for name, value in starts.items()}


def _with_carried(values: dict) -> dict:
    """Take files such as configs/models/vit-small.json, where this folder has none, from those that come along."""
    names = [name for name in (*PATHS, "deepspeed") if str(values[name]).startswith("configs/")]
    paths = {name: CONFIGS.parent / values[name] for name in names if not Path(values[name]).exists()}
    return values | {name: str(path) for name, path in paths.items() if path.exists()}


def _script_name() -> str:
    if file := getattr(sys.modules["__main__"], "__file__", None):
        return Path(file).stem
    found = re.search(SCRIPT_NAME, _script_doc())
    return found.group(1) if found else "notebook"


def _script_doc() -> str:
    """The script's docstring; in a notebook, the newest cell that holds one."""
    main = sys.modules["__main__"]  # not imported once: a script may run others by `runpy`
    if not notebook_shell():
        return main.__doc__ or ""
    cells = (cell for cell in reversed(main.In) if not cell.startswith("%%"))  # those only write a script
    return next((cell for cell in cells if re.search(SCRIPT_NAME, cell)), "")
