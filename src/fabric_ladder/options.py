"""Read settings from the command line and from YAML files, and refuse wrong ones.

This module imports neither torch nor lightning, so that `--help` and a mistyped option are answered within a second.
"""

import argparse
import ast
import contextlib
import dataclasses
import difflib
import functools
import math
import os
import re
import sys
import textwrap
import types
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

from fabric_ladder.errors import UserError, once, read_outside
from fabric_ladder.foreign import (
    ALIASES,
    DEPENDENT,
    FALSE,
    INSTEAD,
    OWN_OPTIONS,
    TRUE,
    as_words,
    split_words,
    to_own_words,
)
from fabric_ladder.places import CONFIGS, SRC
from fabric_ladder.settings import FACTS, GROUPS, LARGEST, SURROUNDINGS, Fact, Settings, kinds_of, names, show

NAMES = [*FACTS]
DEFAULTS = {field.name: field for field in dataclasses.fields(Settings)}
EXPECTED = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
# a name that ends so is no name on the Hub
DATA_FILES = tuple(".csv .tsv .json .jsonl .parquet .arrow .txt .xls .xlsx .gz .tar .tgz .zip".split())
OFF = (False, None, "no")  # values that switch a setting off
RANKS = """RANK LOCAL_RANK NODE_RANK WORLD_SIZE LOCAL_WORLD_SIZE SLURM_PROCID SLURM_LOCALID SLURM_NODEID SLURM_NTASKS
SLURM_NNODES LOCAL_SIZE CROSS_RANK CROSS_SIZE""".split()  # of launchers and Lightning
GONE = {  # settings of earlier versions
    "lora_learning_rate sgd_learning_rate": "use --learning_rate",
    "data_dir": "set the environment variable FABRIC_LADDER_DATA",
    "cache_dir": "set the environment variable FABRIC_LADDER_CACHE",
    "max_time": "start the run by `timeout 60m`, which stops it with a checkpoint",
    "model_revision dataset_revision": "download the revision, and give its folder",
    "image_column": "name the column `image`",
    "lora_init init_lora_weights peft_init_lora_weights": "adapters start with B = 0, as PEFT starts them",
    "lora_plus_ratio loraplus_lr_ratio loraplus_ratio lora_plus_lr_ratio": "adapters have --learning_rate",
    "min_learning_rate min_lr lr_end": "--schedule linear and cosine end at 0",
    "pack_rows": "use --micro_batch_size, which counts rows with --packing true",
    "check_only": "give it on the command line: --check_only",
    "rslora": "use --lora_alpha: rsLoRA's is --lora_alpha times the root of --lora_rank",
    "on_nan nan_limit stream_buffer": "leave it out",
    "price_per_hour": "multiply the planned hours by it",
}
EXAMPLES = """\
examples:
  python src/{name}.py --config configs/imdb_minilm.yaml --batch_size 32
  python src/{name}.py --model FOLDER --dataset texts.csv --text_column body
  python src/{name}.py --print_config > own.yaml    and then    python src/{name}.py --config own.yaml
"""


def _metavar(name: str) -> str:
    types_of, words = kinds_of(name)
    plain = {int: "N", float: "X", str: "TEXT", bool: "true|false"}
    return FACTS[name].metavar or "|".join([*(plain[kind] for kind in types_of if kind in plain), *words])


def _describe_default(name: str, script: Mapping[str, object]) -> str:
    if name in script:
        return f"(set by this script: {show(script[name])})"
    default = DEFAULTS[name].default
    return "" if default in (None, dataclasses.MISSING) else f"(default: {show(default)})"


def print_help(script: Mapping[str, object], doc: str, name: str, every: bool) -> None:
    """Print the settings that a beginner needs, or every setting.

    Args:
        script: The script's own defaults, which the help marks.
        doc: The script's docstring.
        name: The script's name.
        every: Describe all settings.
    """
    more = "" if every else f"All {len(NAMES)} settings: python src/{name}.py --help all\n\n"
    parser = argparse.ArgumentParser(
        usage=f"python src/{name}.py [--config FILE] [--SETTING VALUE …]",
        description=doc,
        epilog=more + EXAMPLES.format(name=name),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument("--help", metavar="all", nargs="?", help="Describe the settings, or all of them.")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; the command line overrides it.")
    parser.add_argument("--print_config", action="store_true", help="Print this run's YAML file, and exit.")
    parser.add_argument("--check_only", action="store_true", help="Check whether the run could start here, and exit.")
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for setting in NAMES if every else names(for_beginners=True):
        text = f"{FACTS[setting].help} {_describe_default(setting, script)}".strip().replace("%", "%%")
        nargs = "?" if _is_switch(setting) else None
        groups[FACTS[setting].group].add_argument(f"--{setting}", metavar=_metavar(setting), nargs=nargs, help=text)
    print(parser.format_help(), end="")


def _is_switch(name: str) -> bool:
    return bool in kinds_of(name)[0]


class CommandLine(NamedTuple):
    """A command line in this project's own names, how other names were read, and the values by name."""

    words: list[str]
    read_as: list[str]
    given: dict[str, object]


@functools.cache
def read_command_line(*args: str) -> CommandLine:
    """Read a command line, once for the answer before torch is imported and for the run.

    Raises:
        UserError: As `to_own_words` and `read_words`. The line also says how other names were read.
    """
    read_as = []
    try:
        words, read_as = to_own_words([*args])
        return CommandLine(words, read_as, read_words(words))
    except UserError as error:
        if not read_as:
            raise
        raise UserError(f"{error} (read {', '.join(read_as)})") from error.__cause__


def read_words(words: list[str]) -> dict[str, object]:
    """Return the values of a command line by name, with `config` and the other options that are not settings.

    Args:
        words: Options with their values. A switch needs no value: `--lora` is `--lora true`.

    Raises:
        UserError: An unknown setting, a missing value, or a value of another type.
    """
    given, pairs = {}, [*split_words(words)]
    if unknown := [name for name, _ in pairs if name not in (*NAMES, *OWN_OPTIONS, *DEPENDENT)]:
        raise UserError("; ".join(map(_suggest, dict.fromkeys(unknown))))
    for name, text in pairs:
        if name in INSTEAD and text is not None:
            if text.lower() not in (*TRUE, *FALSE):
                raise UserError(f"--{name} {text:.80}: expected true or false")
            if text.lower() in FALSE:
                continue
        if text is None and name not in (*INSTEAD, "help") and (name in DEPENDENT or not _is_switch(name)):
            words = kinds_of(name)[1] if name in FACTS else ()
            raise UserError(f"--{name} needs a value{': ' * bool(words)}{' or '.join(words)} (see --help)")
        text = "true" if text is None and name in FACTS else text
        read = _read_dependent if name in DEPENDENT else read_value
        given[name] = text if name in OWN_OPTIONS else read(name, text)
    return given


def _read_dependent(name: str, text: str) -> float:
    kind = DEPENDENT[name].kind
    least = FACTS[DEPENDENT[name].means[0]].at_least or 0
    try:
        if least <= (value := kind(text)) <= LARGEST:
            return value
    except ValueError:
        pass
    raise UserError(f"--{name} {text:.80}: expected {EXPECTED[kind]}, at least {least}")


def read_value(name: str, text: str) -> object:
    """Return the value of a setting that a text stands for.

    Raises:
        UserError: The setting has no such value.
    """
    types_of, words = kinds_of(name)
    if text in words:
        return text
    if types.NoneType in types_of and text == "null":
        return None
    if bool in types_of and text.lower() in (*TRUE, *FALSE):
        return text.lower() in TRUE
    for kind in (int, float):
        if kind in types_of:
            try:
                return kind(text)
            except ValueError:
                continue
    if name in FACTS and (count := FACTS[name].numbers):
        with contextlib.suppress(ValueError):
            numbers = [float(number) for number in text.split(",")]
            if len(numbers) == count:
                return ",".join(map(str, numbers))
        raise UserError(f"--{name} {text:.80}: expected {count} numbers, separated by commas")
    if str in types_of:
        return text
    choices = [*(EXPECTED[kind] for kind in types_of if kind in EXPECTED), *words]
    near = "".join(f"; did you mean {word}?" for word in difflib.get_close_matches(text, words, n=1))
    raise UserError(
        f"--{name} {text:.80}: expected {', '.join(choices[:-1])}{' or ' * (len(choices) > 1)}{choices[-1]}{near}"
    )


def check_bounds(values: Mapping[str, object]) -> None:
    """Refuse numbers that no machine or library can use, and empty names.

    Raises:
        UserError: The setting and its value.
    """
    for name, value in values.items():
        fact = FACTS.get(name)
        if fact is None or isinstance(value, bool):
            continue
        numbers = [value] if isinstance(value, int | float) else map(float, value.split(",")) if fact.numbers else ()
        for number in numbers:
            _check_number(f"--{name} {str(value)[:30]}", number, fact)
        if value == "":
            raise UserError(f"--{name} is empty: give a value, or leave it out")
        if isinstance(value, str) and (plain := value.encode(errors="replace").decode()) != value:
            raise UserError(f"--{name} {plain}: holds bytes that are not UTF-8; rename the file, or change the value")


def _check_number(option: str, value: float, fact: Fact) -> None:
    if fact.above is not None and not fact.above < value < math.inf:
        raise UserError(f"{option}: must be a number above {fact.above:g}")
    if fact.at_least is not None and not value >= fact.at_least:
        raise UserError(f"{option}: must be at least {fact.at_least:g}")
    if fact.below is not None and not value < fact.below:
        raise UserError(f"{option}: must be below {fact.below:g}")
    if value == math.inf:
        raise UserError(f"{option}: must be a finite number")
    most = LARGEST if fact.at_most is None else fact.at_most
    if isinstance(value, int) and value > most:
        raise UserError(f"{option}: must be at most {most}")


def is_met(need: str, values: Mapping[str, object]) -> bool:
    """Return whether settings meet a need: a switch is on, or a setting has a value, as in `schedule=linear|cosine`."""
    name, _, value = need.partition("=")
    return not need or (values.get(name) in value.split("|") if value else values.get(name) not in OFF)


def own_rate(values: Mapping[str, object]) -> float | None:
    """Return the learning rate that these settings' technique needs by default; None: that of Adam on all weights."""
    if values.get("optimizer") == "sgd":
        return 1e-2
    if values.get("lora"):
        return 2e-3 if values.get("from_scratch") else 2e-4
    return None


def combine(script: Mapping[str, object], from_file: Mapping[str, object], given: Mapping[str, object]) -> dict:
    """Return all settings by name: the defaults, overridden by the script, the YAML file and the command line.

    Raises:
        UserError: A number that no library can use, an empty name, or a setting that has no effect.
    """
    given = {name: value for name, value in given.items() if name in FACTS}
    values = vars(Settings()) | dict(script) | {k: v for k, v in from_file.items() if k not in DEPENDENT} | given
    for name in names(is_path=True):
        values[name] = values[name] and find_path(values[name])
    check_bounds(values)
    check_needs(values, given, from_file)
    check_replaced(values, given)
    return values


def find_path(path: str) -> str:
    """Return a path with `~` expanded; a file such as configs/models/vit-small.json is found from any folder."""
    path = os.path.expanduser(path)  # no shell expands it in a YAML file and after `--runs_dir=`
    shipped = CONFIGS.parent / path
    return str(shipped) if path.startswith("configs/") and not Path(path).exists() and shipped.exists() else path


def find_data(name: str, data_dir: str) -> Path | None:
    """Return the file or folder of a data set; None for a name on the Hub.

    Raises:
        UserError: The name is neither.
    """
    path = find_file(name, data_dir)
    if path is None and (name.lower().endswith(DATA_FILES) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", name)):
        several = "; put several files into one folder" if "," in name else ""
        raise UserError(f"there is no file or folder {name} here or in {data_dir}{several or nearest(Path(name))}")
    return path


def find_file(name: str, data_dir: str) -> Path | None:
    """Return the file or folder of this name from the current folder or `data_dir`, or None."""
    return next((path for path in (Path(name), Path(data_dir) / name) if path.exists()), None)


def nearest(path: Path) -> str:
    """Return the question for the file or folder that a mistyped path may mean; empty without one."""
    names = {each.name.lower(): each for each in Path(os.path.expanduser(path)).absolute().parent.glob("*")}
    near = difflib.get_close_matches(path.name.lower(), names, n=1)
    return f"; did you mean {path.parent / names[near[0]].name}?" if near else ""


def check_files(values: Mapping[str, object]) -> None:
    """Refuse files of data that do not exist.

    Raises:
        UserError: The setting and the name.
    """
    for split in ("validation", "test"):
        file = values[f"{split}_file"]
        if file and not find_file(file, values["data_dir"]):
            raise UserError(f"there is no {split} file {file} here or in {values['data_dir']}{nearest(Path(file))}")
    find_data(values["dataset"], values["data_dir"])


def check_needs(values: Mapping[str, object], given: Collection[str], from_file: Mapping | None = None) -> None:
    """Refuse settings that have no effect.

    A YAML file may serve several rungs, so it may hold settings that name their technique, as `lora_rank` does, and
    settings such as Adam's betas that have an effect by the file alone, where the script or the command line has SGD.

    Args:
        values: All settings by name.
        given: Names of the settings on the command line.
        from_file: The settings in the YAML file; None: check only `given`.
    """
    alone = vars(Settings()) | dict(from_file or {})
    for name in given if from_file is None else FACTS:
        fact, value = FACTS[name], values[name]
        technique = fact.needs.split("=")[-1]
        of_other_rung = value == DEFAULTS[name].default or name.startswith(f"{technique}_")
        of_other_rung |= name in (from_file or ()) and is_met(fact.needs, alone)
        if is_met(fact.needs, values) or value in OFF or (of_other_rung and name not in given):
            continue
        if fact.needs.startswith("strategy="):
            rung = next(path for path in sorted(SRC.glob("[0-9]*.py")) if name in script_defaults(path.stem))
            raise UserError(f"--{name} has no effect in this script: leave it out, or run src/{rung.name}")
        needed = fact.needs.replace("=", " ")
        if needed in FACTS:
            needed += " true" if _is_switch(needed) else " N"
        remedy = f"leave --{name} out" if name in given or value is not True else f"use --{name} false"
        raise UserError(f"--{name} has no effect without --{needed}: add that, or {remedy}")


def check_replaced(values: Mapping[str, object], given: Collection[str]) -> None:
    """Refuse settings on the command line whose place another one takes, there or in the YAML file."""
    for name in given:
        for other in FACTS[name].replaced_by.split():
            if None not in (values[name], values[other]) and (other in given or values[other] != "auto"):
                remedy = "leave one of them out" if other in given else f"leave it out, or add --{other} null"
                raise UserError(
                    f"--{name} {show(values[name])} has no effect next to --{other} {show(values[other])}: {remedy}"
                )


def drop_unneeded(words: list[str], script: Mapping[str, object]) -> list[str]:
    """Return a command line for several rungs without the options that have no effect on this rung.

    Args:
        words: Options with their values.
        script: The rung's own defaults.
    """
    try:
        given = read_words(words)
        from_file = read_named_config(given)
    except UserError:  # the rung itself refuses them
        return words
    values = vars(Settings()) | dict(script) | from_file | given
    needed = {name: DEPENDENT[name].means[0] if name in DEPENDENT else name for name in given}
    return without_options(
        words, [name for name, own in needed.items() if own in FACTS and not is_met(FACTS[own].needs, values)]
    )


def read_named_config(given: Mapping[str, object]) -> dict[str, object]:
    """Return the settings in the YAML file that a command line names; none if there is no such file.

    Args:
        given: The command line's settings, as `read_words` returns them.

    Raises:
        UserError: The named file does not exist, or is damaged.
    """
    return read_config(find_config(given["config"])) if "config" in given else {}


def without_options(words: list[str], dropped: Collection[str]) -> list[str]:
    """Return a command line without the named options and their values."""
    kept = []
    keeps = True
    for word in words:
        if word.startswith("--"):
            keeps = word.removeprefix("--").split("=")[0] not in dropped
        if keeps:
            kept.append(word)
    return kept


def find_config(config: str) -> Path:
    """Return the path of a YAML file: in the current folder, or among the configs, also as configs/NAME.

    Raises:
        UserError: The file does not exist.
    """
    places = (Path(os.path.expanduser(config)), CONFIGS / config, CONFIGS.parent / config)
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        ours = sorted(path.name for path in CONFIGS.glob("*.yaml"))
        near = difflib.get_close_matches(Path(config).name, ours, n=1)
        hint = nearest(places[0]) or (f"; did you mean configs/{near[0]}?" if near else "")
        raise UserError(
            f"there is no config file {config or '(an empty name)'}{hint or '; these exist: ' + ', '.join(ours)}"
        )
    return path


class _Texts(yaml.SafeLoader):
    """Reads every scalar as a text, so that `no` is not taken for `false`, except for null; refuses a repeated key."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        once([(key.value, value) for key, value in node.value if isinstance(key, yaml.ScalarNode)])
        return super().construct_mapping(node, deep)


_Texts.yaml_implicit_resolvers = {
    start: [
        (tag, pattern) for tag, pattern in resolvers if tag in ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")
    ]
    for start, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_config(path: Path) -> dict[str, object]:
    """Return the settings of a YAML file. A relative path in it is looked for in the file's own folder first.

    Raises:
        UserError: The file is damaged, names an unknown setting, or has a value of another type.
    """
    lines = read_outside(path, functools.partial(yaml.load, Loader=_Texts), "YAML") or {}
    if not isinstance(lines, dict):
        raise UserError(f"{path} must hold lines such as 'batch_size: 16'")
    words = []
    for name, value in lines.items():
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            value = ",".join(value)
        if not isinstance(value, str | None):
            raise UserError(f"{path}: {name!r:.60} must be one value, or a list of values")
        words += as_words(str(name), "null" if value is None else value)
    try:
        own, read_as = to_own_words(words)
        values = read_words(own)
    except UserError as error:
        raise UserError(f"{path}: {error}") from None
    if own_options := [name for name in OWN_OPTIONS if name in values]:
        raise UserError(f"{path}: {_suggest(own_options[0])}")
    values |= {"notices": (f"{path.name}: read {', '.join(read_as)}",)} if read_as else {}
    read = [name for name in names(is_path=True) if values.get(name) and FACTS[name].role != SURROUNDINGS]
    beside = {name: path.parent / values[name] for name in read}
    return values | {name: str(place) for name, place in beside.items() if place.exists()}


def as_yaml(settings: Settings) -> str:
    """Return the YAML file that gives these settings."""
    lines = [f"# python src/{settings.name}.py --config THIS_FILE\n"]
    for group in GROUPS:
        values = {name: getattr(settings, name) for name in names(group=group)}
        lines += [f"\n# {group}\n", yaml.safe_dump(values, sort_keys=False, allow_unicode=True)]
    return "".join(lines)


def _suggest(name: str) -> str:
    """Return the message for an unknown setting, with the nearest ones."""
    near = difflib.get_close_matches(name.replace("-", "_").lower(), [*NAMES, *ALIASES, *DEPENDENT], n=3)
    if remedy := next((remedy for gone, remedy in GONE.items() if name in gone.split()), None):
        return f"there is no setting {name!r} any more: {remedy}"
    if name in ("num_labels", "num_classes"):
        return f"there is no setting {name!r}: the classes are those of the column --label_column"
    options = dict.fromkeys(f"--{ALIASES[each][0] if each in ALIASES else each}" for each in near)
    did_you_mean = f"did you mean {' or '.join(options)}?" if options else "see --help all for all settings"
    return f"there is no setting {name[:60]!r}; {did_you_mean}"


@functools.cache
def script_defaults(rung: str) -> dict[str, object]:
    """Return the keywords that a rung, given by its name, passes to `parse_settings`, read from its source."""
    tree = ast.parse((SRC / f"{rung}.py").read_text(encoding="utf-8"))
    call = next(
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "parse_settings"
    )
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


def answer_early() -> None:
    """Answer `--help`, and refuse mistyped options and ranks of a rung before torch and lightning are imported.

    Raises:
        UserError: In one line. The libraries read the ranks when they are imported.
    """
    main = Path(getattr(sys.modules["__main__"], "__file__", None) or SRC).resolve()
    if main.parent != SRC or not re.fullmatch(r"\d+_.*\.py", main.name):
        return
    script, given = script_defaults(main.stem), read_command_line(*sys.argv[1:]).given
    if "help" in given:
        doc = ast.get_docstring(ast.parse(main.read_text(encoding="utf-8"))) or ""
        print_help(script, textwrap.dedent(doc), main.stem, given["help"] == "all")
        raise SystemExit(0)
    if "deepspeed" not in script:  # whose file may hold what these options need
        check_files(combine(script, read_named_config(given), given))
    check_ranks()
    terminal = next((stream for stream in (sys.stdout, sys.stderr) if stream.isatty()), None)
    if terminal and "print_config" not in given and os.environ.get("LOCAL_RANK", "0") == "0":
        print("Loading PyTorch …", file=terminal, flush=True)  # takes seconds


def check_ranks() -> None:
    """Refuse a launcher's variable that is not a number.

    Raises:
        UserError: The variable and its value.
    """
    for name in RANKS:
        if not re.fullmatch(r"\d+", text := os.environ.get(name, "0"), re.ASCII):
            raise UserError(f"the environment variable {name} is {text!r} and must be a number: unset {name}")
