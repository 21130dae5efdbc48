"""Settings from the defaults in code, the script, a YAML file and the command line, in that order."""

import math
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fabric_ladder.checks import check, check_start, check_values
from fabric_ladder.distributed.deepspeed_config import settings_in_file
from fabric_ladder.distributed.launch import check_launcher, options_of_fabric_run, prepare_launch, resolve_devices
from fabric_ladder.environment import compute_capability, fit_precision, keep_freed_memory, prepare_cuda
from fabric_ladder.errors import Checked, notebook_shell
from fabric_ladder.foreign import DEPENDENT, as_words, read_dependent
from fabric_ladder.models.configs import count_positions
from fabric_ladder.models.probe import padding_notice
from fabric_ladder.options import (
    as_yaml,
    check_bounds,
    check_needs,
    check_ranks,
    check_replaced,
    combine,
    find_config,
    own_rate,
    print_help,
    read_command_line,
    read_config,
    without_options,
)
from fabric_ladder.places import CONFIGS
from fabric_ladder.runs.process import prepare_process
from fabric_ladder.settings import FACTS, Settings, show
from fabric_ladder.techniques import TECHNIQUES, cuda_defaults, full_pass, trains_adapters, used
from fabric_ladder.techniques.advice import explain_errors

CPU_TOKENS = 1024  # per micro-batch: no other number was faster, see docs/journal.md
CPU_FULL_PASS = 256  # tokens. A pass costs 20 to 60 tokens more than its tokens: see docs/techniques/options.md
FEW_SHAPES = 64  # tokens, with a graph for each shape
BUCKET = 16  # tokens. Other lengths may use slower kernels; multiples of 64 would be mostly padding.
SCRIPT_NAME = re.compile(r'^"""(\w+) ·', re.MULTILINE)  # at the start of each rung's docstring


def parse_settings(args: list[str] | None = None, **defaults) -> Settings:
    """Read, resolve and check the settings of the running script.

    Args:
        args: Words to read instead of the command line. In a notebook the kernel's own arguments are never read.
        **defaults: The script's own defaults, which a YAML file or the command line may override; and `strategy`, how
            the script distributes its work: `single`, `ddp`, `fsdp` or `deepspeed`.

    Returns:
        Checked settings. `auto` and defaults that depend on other settings are resolved, see `resolve`.

    Raises:
        UserError: An unknown setting, a wrong type, or values that cannot work together or on this machine.
        Checked: `--check_only` is given, and the run could start.
    """
    explain_errors()
    in_script = args is None and not notebook_shell()
    if args is None:
        args = [*sys.argv[1:], *options_of_fabric_run()] if in_script else []
    words, read_as, named = read_command_line(*args)
    if "help" in named:
        print_help(defaults, _script_doc(), _script_name(), named["help"] == "all")
        raise SystemExit(0)
    settings, given, from_file = _read_settings(named, defaults)
    if in_script:  # commands that the run prints have its own names
        meant = {
            name: show(getattr(settings, name)) for each in DEPENDENT if each in named for name in DEPENDENT[each].means
        }
        if meant or words != args:
            own = (word for each in meant.items() for word in as_words(*each))
            sys.argv[1:] = [*without_options(words, {*DEPENDENT, *meant}), *own]
    if read_as:
        settings = _with_notice(settings, f"Read {', '.join(read_as)}")
    check_values(settings)
    if "print_config" in given:
        print(as_yaml(_with_cuda_defaults(settings, {*given, *from_file, *defaults})), end="")
        raise SystemExit(0)
    check_launcher(settings)
    prepare_cuda(settings.accelerator, settings.deterministic)
    settings = resolve(settings, given, defaults, from_file)
    if settings.accelerator == "cpu":
        keep_freed_memory()
    check(settings)
    settings = _with_notice(settings, padding_notice(settings))
    for technique in used(settings):
        settings = _with_notice(settings, technique.notice(settings))
    if settings.strategy != "single" and settings.ranks == 1:
        settings = _with_notice(settings, "Running on one device. Use --devices N or torchrun for several.")
    explain_errors(settings)
    if "check_only" in named:
        for line in (*settings.notices, *check_start(settings)):
            print(line)
        raise Checked(settings)
    prepare_process(settings)
    prepare_launch(settings)
    return settings


def _read_settings(given: dict[str, object], script: Mapping[str, object]) -> tuple[Settings, dict, dict]:
    """Return the settings from all sources, those of the command line and those of the YAML file.

    Args:
        given: Values on the command line, `config` included.
        script: The script's own defaults.
    """
    quickstart = not {*given, *script} & {"config"} and not torch.cuda.is_available()  # a plan is for a GPU
    path = CONFIGS / "quickstart.yaml" if quickstart else None
    if "config" in given:
        path = find_config(given["config"])
    from_file = read_config(path) if path else {}
    pretrained = quickstart and not given.get("from_scratch") and not given.get("model", ".json").endswith(".json")
    if pretrained:  # the quickstart's other values suit random weights
        from_file = {name: from_file[name] for name in ("dataset", "log_every")}
    name = (dict(script) | from_file | given).get("deepspeed") if "deepspeed" in script else None
    deepspeed = settings_in_file(name) if name else {}
    for source in (deepspeed, from_file):  # options that mean something together, such as the beta of each moment
        beside = [DEPENDENT[name].means for name in DEPENDENT if name in given]
        for name in [name for name in DEPENDENT if name in source and DEPENDENT[name].means in beside]:
            given = {name: source.pop(name)} | given
    values = combine(script, from_file, deepspeed | given)
    settings = Settings(**values | {"name": _script_name(), "config": str(path) if path else None})
    settings, given = _with_dependent(settings, given, given)
    settings, from_file = _with_dependent(settings, from_file, given)
    settings, deepspeed = _with_dependent(settings, deepspeed, given)
    given = deepspeed | given
    if quickstart:
        from_file.pop("max_length", None)  # the user has not chosen it: a model may have fewer positions
        what = "this is the quickstart (configs/quickstart.yaml), a small model with random weights"
        what = f"this trains {settings.model} with the values for a GPU" if pretrained else what
        data = settings.dataset if "dataset" in given else "synthetic reviews"
        config = "imdb_minilm" if pretrained else "imdb_bloom_560m"
        notice = f"No --config and no CUDA GPU: {what}, on {data}. For real work: --config configs/{config}.yaml; "
        settings = _with_notice(settings, f"{notice}settings: --help")
    settings = _with_learning_rate(_with_weights(settings, given, from_file), given, from_file)
    return settings, given, from_file


def _with_dependent(settings: Settings, named: dict, given: Mapping[str, object]) -> tuple[Settings, dict]:
    """Take the settings that options of other libraries mean, unless the command line has their own.

    Args:
        settings: Of all sources, without these options.
        named: The values of one source, and of these options in it.
        given: Values on the command line.

    Returns:
        The settings, and `named` with what the options mean.
    """
    options = {name: named[name] for name in DEPENDENT if name in named}
    if not options:
        return settings, named
    check_ranks()
    ranks = math.prod(resolve_devices(replace(settings, accelerator=_accelerator(settings))))

    meant, lines = read_dependent(options, vars(settings), named, ranks)
    check_bounds(meant)
    check_needs(vars(settings) | meant, meant)
    if named is given:
        check_replaced(vars(settings) | meant, {name for name in named | meant if name in FACTS})
    else:
        meant = {name: value for name, value in meant.items() if name not in given}
    return _with_notice(replace(settings, **meant), f"Read {', '.join(lines)}"), named | meant


def resolve(
    settings: Settings,
    given: Collection[str] = (),
    script: Mapping[str, object] = {},
    from_file: Collection[str] = (),
) -> Settings:
    """Replace every `auto`, and every default that depends on other settings, by a value.

    Only `micro_batch_tokens` may stay `auto`. Its value needs the model, and the training state keeps it.

    Args:
        settings: As they were read.
        given: Names of settings on the command line. A precision among them is not replaced.
        script: The script's own defaults.
        from_file: Names of settings in the YAML file.
    """
    accelerator = _accelerator(settings)
    settings = replace(_with_cuda_defaults(settings, {*given, *script, *from_file}), accelerator=accelerator)
    on_gpu = accelerator == "cuda"
    multiple = settings.pad_to_multiple_of
    size, tokens = _micro_batch(settings, given, script, accelerator)
    capability = compute_capability() if on_gpu else None
    replaceable = trains_adapters(settings) and "precision" not in given
    precision, meaning = fit_precision(settings.precision, capability, replaceable, settings.shards_weights)
    if meaning:
        emulates = f"{torch.cuda.get_device_name()} only emulates bfloat16 (compute capability below 8.0)"
        settings = _with_notice(settings, f"{emulates}: {meaning}")
    if multiple is None:
        # MPS keeps memory for every length that it has seen
        rounded = accelerator == "mps" or settings.replays or any(each.rounds_lengths for each in used(settings))
        bucket = FEW_SHAPES if settings.replays and settings.max_length % FEW_SHAPES == 0 else BUCKET
        multiple = bucket if rounded and settings.max_length % bucket == 0 else 1
    if "max_length" not in {*given, *script, *from_file} and (limit := count_positions(settings)) < settings.max_length:
        settings = replace(settings, max_length=limit)
        settings = _with_notice(settings, f"--max_length {limit}: {settings.model} has no more positions")
    settings = replace(
        settings,
        precision=precision,
        matmul_precision=settings.matmul_precision or ("high" if on_gpu else "highest"),
        micro_batch_size=size,
        micro_batch_tokens=tokens,
        eval_batch_tokens=settings.eval_batch_tokens or (None if on_gpu else CPU_TOKENS),
        pad_to_multiple_of=min(multiple, settings.max_length),
        full_pass=CPU_FULL_PASS if accelerator == "cpu" else full_pass(settings, capability),
    )
    devices, num_nodes = resolve_devices(settings)
    return replace(settings, devices=devices, num_nodes=num_nodes)


def _accelerator(settings: Settings) -> str:
    if settings.accelerator != "auto":
        return settings.accelerator
    return "cuda" if torch.cuda.is_available() else "cpu"


def _with_cuda_defaults(settings: Settings, chosen: Collection[str]) -> Settings:
    """Turn on what makes the techniques in use fast on a CUDA GPU, except for names in `chosen`."""
    if _accelerator(settings) != "cuda":
        return settings
    missing = {technique.setting for technique in TECHNIQUES if not technique.is_installed()}
    for name, reason in cuda_defaults(settings, {*chosen, *missing}, compute_capability()).items():
        settings = _with_notice(replace(settings, **{name: True}), f"--{name} true, since {reason}")
    return settings


def _micro_batch(
    settings: Settings, given: Collection[str], script: Mapping[str, object], accelerator: str
) -> tuple[int | None, int | str | None]:
    """Return `micro_batch_size` and `micro_batch_tokens`; one of them is None."""
    size, tokens = settings.micro_batch_size, settings.micro_batch_tokens
    if tokens == "auto" and "micro_batch_tokens" not in given:
        if size and ("micro_batch_size" in given or size != script.get("micro_batch_size")):  # the user's own
            return size, None
        if accelerator == "cpu":
            return None, CPU_TOKENS
        if accelerator == "mps":
            return 1, None
    return (None, tokens) if tokens else (size or settings.batch_size, None)


def _with_learning_rate(settings: Settings, given: Collection[str], from_file: dict) -> Settings:
    """Take the learning rate that a technique needs, unless the command line, or a file with the technique, has one.

    Args:
        settings: With the learning rate of Adam for all weights.
        given: Names of settings on the command line.
        from_file: Settings in the YAML file; a notice names its learning rate if that is replaced.
    """
    rate, before = own_rate(vars(settings)), settings.learning_rate
    in_file = "learning_rate" in from_file
    if rate in (None, before) or "learning_rate" in given or (in_file and own_rate(from_file)):
        return settings
    if in_file:
        line = f"Learning rate {rate:g} in place of {before:g}, which {Path(settings.config).name} has for Adam on all "
        settings = _with_notice(settings, f"{line}weights; --learning_rate changes it")
    return replace(settings, learning_rate=rate)


def _with_weights(settings: Settings, given: Collection[str], from_file: dict) -> Settings:
    """Use pretrained weights for a model on the command line if only the YAML file has `from_scratch`."""
    random = settings.from_scratch and "from_scratch" in from_file and "from_scratch" not in given
    if not random or "model" not in given or settings.model.endswith(".json"):
        return settings
    notice = (
        f"--model {settings.model}: its pretrained weights, not the random ones of {Path(settings.config).name} "
        "(--from_scratch true)"
    )
    return _with_notice(replace(settings, from_scratch=False), notice)


def _with_notice(settings: Settings, notice: str | None) -> Settings:
    return replace(settings, notices=(*settings.notices, notice)) if notice else settings


def _script_name() -> str:
    if file := getattr(sys.modules["__main__"], "__file__", None):
        return Path(file).stem
    found = re.search(SCRIPT_NAME, _script_doc())
    return found.group(1) if found else "notebook"


def _script_doc() -> str:
    """Return the script's docstring; in a notebook, the newest cell that holds one."""
    main = sys.modules["__main__"]  # not imported once: a script may run others by `runpy`
    if not notebook_shell():
        return main.__doc__ or ""
    cells = (cell for cell in reversed(main.In) if not cell.startswith("%%"))  # such cells only write a script
    return next((cell for cell in cells if re.search(SCRIPT_NAME, cell)), "")
