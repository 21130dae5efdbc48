"""Settings from defaults in code, the script's own, a YAML file and the command line, in that order."""

import dataclasses
import os
import re
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from fabric_ladder.advice import show_errors
from fabric_ladder.checks import check, check_start, check_values
from fabric_ladder.distributed.launch import check_launcher, options_of_fabric_run, prepare_launch, resolve_devices
from fabric_ladder.environment import compute_capability, fit_precision, keep_freed_memory, notebook_shell, prepare_cuda
from fabric_ladder.errors import Checked, UserError
from fabric_ladder.options import as_yaml, check_bounds, check_needs, find_config, print_help, read_config, read_words
from fabric_ladder.places import CONFIGS
from fabric_ladder.runs.process import prepare_process
from fabric_ladder.settings import Settings, names
from fabric_ladder.techniques import trains_adapters, used

CPU_TOKENS = 1024  # per micro-batch: as fast as any cut that was tried, see docs/journal.md
BUCKET = 16  # tokens; other lengths may take slower kernels, and a step of 64 would be mostly padding
SCRIPT_NAME = re.compile(r'^"""(\w+) ·', re.MULTILINE)  # at the start of each rung's docstring


def parse_settings(
    args: list[str] | None = None, config: str | None = None, strategy: str = "single", **defaults
) -> Settings:
    """Read, resolve and check the settings of the running script.

    Args:
        args: What to read instead of the command line; a notebook's own arguments are never read.
        config: YAML file to read when the command line names none.
        strategy: How the script spreads its work: `single`, `ddp`, `fsdp` or `deepspeed`.
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
    options = read_words(args)
    if "help" in options:
        print_help(defaults, _script_doc(), _script_name(), options["help"] == "all")
        raise SystemExit(0)
    print_config = options.pop("print_config", False)
    given = {*options} - {"config"}
    settings = _merge(options, given, config, strategy, defaults)
    check_values(settings)
    if print_config:
        print(as_yaml(_with_own_rate(settings)), end="")
        raise SystemExit(0)
    check_launcher(settings)
    prepare_cuda(settings.accelerator, settings.deterministic)
    settings = resolve(settings, given, defaults)
    if settings.accelerator == "cpu":
        keep_freed_memory()
    check(settings)
    if strategy != "single" and settings.ranks == 1:
        notice = "Running on one device. Use --devices N or torchrun for several."
        settings = _with_notice(settings, notice)
    show_errors(settings)
    if settings.check_only:
        check_start(settings)
        raise Checked(settings)
    prepare_process(settings)
    prepare_launch(settings)
    return settings


def _merge(
    options: dict[str, object], given: set[str], config: str | None, strategy: str, script: Mapping[str, object]
) -> Settings:
    """Return the settings from all four sources.

    Args:
        options: Values on the command line, `config` included.
        given: Names of the settings among them.
        config: YAML file to read when the command line names none.
        strategy: See `parse_settings`.
        script: The script's own defaults.
    """
    chosen = options.pop("config", config)
    path = CONFIGS / "quickstart.yaml" if chosen is None else find_config(chosen)
    if chosen is None and torch.cuda.is_available():
        path = None
    from_file = read_config(path) if path else {}
    values = vars(Settings()) | dict(script) | from_file | options
    values = _with_shipped_files(_with_home_folders(values))
    values |= {"name": _script_name(), "strategy": strategy, "config": str(path) if path else None}
    check_bounds(values)
    check_needs(given, values)
    settings = Settings(**values)
    if path and chosen is None:
        settings = _with_notice(
            settings,
            f"No --config and no CUDA GPU: {_describe_quickstart(path, given)}. For real work: --config "
            "configs/imdb_bloom_560m.yaml; settings: --help",
        )
    return _with_weights(_with_learning_rate(settings, given, from_file), given, from_file)


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
    replaceable = trains_adapters(settings) and "precision" not in given
    precision, meaning = fit_precision(settings.precision, capability, replaceable, settings.strategy == "fsdp")
    if meaning:
        emulates = f"{torch.cuda.get_device_name()} only emulates bfloat16 (compute capability below 8.0)"
        settings = _with_notice(settings, f"{emulates}: {meaning}")
    if multiple is None:
        # MPS keeps memory for every length that it has seen
        rounded = accelerator == "mps" or any(technique.rounds_lengths for technique in used(settings))
        multiple = BUCKET if rounded and settings.max_length % BUCKET == 0 else 1
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
    for technique in used(settings):
        if notice := technique.notice(settings):
            settings = _with_notice(settings, notice)
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
    """Take the learning rate that a technique's steps need, unless the command line gives one.

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
            "Adam on all weights; --learning_rate changes it",
        )
    return dataclasses.replace(settings, learning_rate=rate)


def _with_own_rate(settings: Settings) -> Settings:
    """Return settings in which the learning rate of a technique's steps is the rate of the run."""
    name = _own_rate(settings)
    return dataclasses.replace(settings, **{name: settings.learning_rate}) if name else settings


def _own_rate(settings: Settings) -> str | None:
    """Return the setting with the learning rate that a technique's steps need; None: `learning_rate`."""
    return next((technique.learning_rate for technique in used(settings) if technique.learning_rate), None)


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


def _with_home_folders(values: dict) -> dict:
    """Replace `~` by the user's home, as no shell does in a YAML file or after `--runs_dir=`."""
    paths = {name: value for name in names(is_path=True) if str(value := values[name]).startswith("~")}
    return values | {name: os.path.expanduser(value) for name, value in paths.items()}


def _with_shipped_files(values: dict) -> dict:
    """Find files such as configs/models/vit-small.json from any folder."""
    shipped = {
        name: CONFIGS.parent / value for name in names(is_path=True) if str(value := values[name])[:8] == "configs/"
    }
    return values | {
        name: str(path) for name, path in shipped.items() if path.exists() and not Path(values[name]).exists()
    }


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
