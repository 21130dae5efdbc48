"""The command line and the YAML file: which settings they name, and what they must not hold.

This module needs neither torch nor lightning, so that `--help` and a mistyped option are answered within a second.
"""

import argparse
import ast
import dataclasses
import difflib
import functools
import math
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Literal, NoReturn

import yaml

from fabric_ladder.errors import UserError, print_error, read_outside
from fabric_ladder.places import CONFIGS, SRC
from fabric_ladder.settings import FACTS, GROUPS, LARGEST, Fact, Settings, names, show

NAMES = [*FACTS]
DEFAULTS = {field.name: field for field in dataclasses.fields(Settings)}
ALIASES = {
    alias: f"--{name}{value}" if value.startswith(",") else f"--{name} {value}"
    for name, fact in FACTS.items()
    for value, aliases in fact.aliases.items()
    for alias in aliases.split()
}
YAML_BYTES = 2**20
TRUE = ("true", "yes", "on")
FALSE = ("false", "no", "off")
EXAMPLES = """\
examples:
  python src/{name}.py --config configs/imdb_minilm.yaml --batch_size 32
  python src/{name}.py --model FOLDER --dataset texts.csv --text_column body
  python src/{name}.py --print_config > own.yaml    and then    python src/{name}.py --config own.yaml
"""


class Parser(argparse.ArgumentParser):
    """Turns the words of a command line into texts by name; errors are `UserError`s."""

    def error(self, message: str) -> NoReturn:
        """Raise the error, which argparse would print."""
        raise UserError(f"{message} (see --help)")


def kinds_of(name: str) -> tuple[tuple[type, ...], tuple[str, ...]]:
    """Return the types of a setting's values, and the words that it takes."""
    hint = _hints()[name]
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    words = tuple(word for part in parts if typing.get_origin(part) is Literal for word in typing.get_args(part))
    return tuple(part for part in parts if typing.get_origin(part) is not Literal), words


@functools.cache
def _hints() -> dict[str, object]:
    return typing.get_type_hints(Settings)


def settings_parser(
    script: Mapping[str, object] = types.MappingProxyType({}), shown: Collection[str] = NAMES
) -> Parser:
    """Return the parser of all settings.

    Args:
        script: The script's own defaults, which `--help` marks.
        shown: Names of the settings that `--help` describes.
    """
    parser = Parser(
        usage="python src/%(prog)s.py [--config FILE] [--SETTING VALUE …]",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.add_argument(
        "--help", metavar="all", nargs="?", const="short", help="Describe the settings, or all of them."
    )
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings; the command line overrides it.")
    parser.add_argument(
        "--print_config", action="store_true", default=None, help="Print this run's YAML file, and exit."
    )
    groups = {title: parser.add_argument_group(title) for title in GROUPS}
    for name, fact in FACTS.items():
        switch = {"nargs": "?", "const": "true"} if bool in kinds_of(name)[0] else {}
        text = argparse.SUPPRESS
        if name in shown:
            text = f"{fact.help} {_describe_default(name, script or {})}".strip().replace("%", "%%")
        groups[fact.group].add_argument(f"--{name}", metavar=_metavar(name), help=text, **switch)
    return parser


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
        script: The script's own defaults.
        doc: The script's docstring.
        name: The script's name.
        every: Describe all settings.
    """
    parser = settings_parser(script, NAMES if every else names(for_beginners=True))
    parser.prog = name
    parser.description = doc
    more = "" if every else f"All {len(NAMES)} settings: python src/{name}.py --help all\n\n"
    parser.epilog = more + EXAMPLES.format(name=name)
    print(parser.format_help(), end="")


def read_words(words: list[str]) -> dict[str, object]:
    """Return the values of a command line by name, `config`, `print_config` and `help` included.

    Args:
        words: Options with their values. A switch needs no value: `--lora` is `--lora true`.

    Raises:
        UserError: An unknown setting, or a value of another type.
    """
    parser = settings_parser(shown=())
    for place, word in enumerate(words):
        name, _, value = word[2:].partition("=")
        if word.startswith("--") and name not in (*NAMES, "config", "print_config", "help"):
            following = words[place + 1 : place + 2]
            raise UserError(_suggest(name, value or "".join(each for each in following if each[:2] != "--")))
    found, strays = parser.parse_known_args(words)
    if strays:
        raise UserError(f"{strays[0]!r} belongs to no option: write --NAME VALUE (see --help)")
    given = {name: text for name, text in vars(found).items() if text is not None}
    return {name: read_value(name, text) if name in FACTS else text for name, text in given.items()}


def read_value(name: str, text: str) -> object:
    """Return the value of a setting that a text stands for.

    Raises:
        UserError: The setting has no such value.
    """
    types_of, words = kinds_of(name)
    expected = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
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
    if str in types_of:
        return text
    choices = [*(expected[kind] for kind in types_of if kind in expected), *words]
    raise UserError(
        f"--{name} {text:.80}: expected {', '.join(choices[:-1])}{' or ' * (len(choices) > 1)}{choices[-1]}"
    )


def check_bounds(values: Mapping[str, object]) -> None:
    """Refuse numbers that no machine or library can use, and empty names.

    Args:
        values: Settings by name; any may be None or `auto`.

    Raises:
        UserError: In one line, which value and its bound.
    """
    for name, value in values.items():
        fact = FACTS.get(name)
        if fact is None or isinstance(value, bool):
            continue
        if isinstance(value, int | float):
            _check_number(f"--{name} {str(value)[:30]}", value, fact)
        if value == "":
            raise UserError(f"--{name} is empty: give a value, or leave it out")
        if isinstance(value, str) and (plain := value.encode(errors="replace").decode()) != value:
            raise UserError(f"--{name} {plain}: holds bytes that are not UTF-8; rename the file, or change the value")


def _check_number(option: str, value: float, fact: Fact) -> None:
    if fact.above is not None and not (value > fact.above and math.isfinite(value)):
        raise UserError(f"{option}: must be a number above {fact.above:g}")
    if fact.at_least is not None and not value >= fact.at_least:
        raise UserError(f"{option}: must be at least {fact.at_least:g}")
    if fact.below is not None and not value < fact.below:
        raise UserError(f"{option}: must be below {fact.below:g}")
    most = LARGEST if fact.at_most is None else fact.at_most
    if isinstance(value, int) and value > most:
        raise UserError(f"{option}: must be at most {most}")


def is_met(need: str, values: Mapping[str, object]) -> bool:
    """Return whether settings have what another setting needs: a switch that is on, or a value as `optimizer=sgd`."""
    name, _, value = need.partition("=")
    return values[name] == value if value else values[name] not in (False, None, "no")


def check_needs(given: Collection[str], values: Mapping[str, object]) -> None:
    """Refuse options that have no effect.

    A YAML file may hold values for several scripts, such as `lora_rank`. Only its `true` values are refused.

    Args:
        given: Names of the settings on the command line.
        values: All settings by name.

    Raises:
        UserError: An option needs another setting that is off.
    """
    for name, fact in FACTS.items():
        need = fact.needs
        if need and (name in given or values[name] is True) and not is_met(need, values):
            option = need.replace("=", " ") if "=" in need else f"{need} true"
            raise UserError(f"--{name} has no effect without --{option}: add that, or leave --{name} out")


def drop_unneeded(words: list[str], script: Mapping[str, object]) -> list[str]:
    """Return a command line for several rungs without the options that have no effect on this rung.

    Args:
        words: Options with their values.
        script: The rung's own defaults.
    """
    try:
        given = read_words(words)
        from_file = read_config(find_config(given["config"])) if "config" in given else {}
    except UserError:  # the rung itself refuses them
        return words
    values = vars(Settings()) | dict(script) | from_file | given
    unneeded = {name for name in given if name in FACTS and (need := FACTS[name].needs) and not is_met(need, values)}
    return without_options(words, unneeded)


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
    """Return the path of a YAML file: in the current folder, among the configs, or beside their folder.

    Raises:
        UserError: There is no such file.
    """
    places = (Path(os.path.expanduser(config)), CONFIGS / config, CONFIGS.parent / config)
    path = next((path for path in places if path.is_file()), None)
    if path is None:
        ours = ", ".join(sorted(path.name for path in CONFIGS.glob("*.yaml")))
        raise UserError(f"there is no config file {config or '(an empty name)'}; these exist: {ours}")
    return path


class _Texts(yaml.SafeLoader):
    """Reads every scalar as a text, so that `no` is not taken for `false`, except for null."""


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
    lines = read_outside(path, functools.partial(yaml.load, Loader=_Texts), "YAML", most=YAML_BYTES) or {}
    if not isinstance(lines, dict):
        raise UserError(f"{path} must hold lines such as 'batch_size: 16'")
    values = {}
    for name, value in lines.items():
        if name not in FACTS:
            raise UserError(f"{path}: {_suggest(str(name), '' if value is None else str(value))}")
        if isinstance(value, list) and all(isinstance(each, str) for each in value):
            value = ",".join(value)
        if not isinstance(value, str | None):
            raise UserError(f"{path}: {name!r:.60} must be one value, or a list of values")
        try:
            values[name] = read_value(name, "null" if value is None else value)
        except UserError as error:
            raise UserError(f"{path}: {error}") from None
    beside = {name: path.parent / str(values[name]) for name in names(beside_config=True) if values.get(name)}
    return values | {name: str(place) for name, place in beside.items() if place.exists()}


def as_yaml(settings: Settings) -> str:
    """Return the YAML file that gives these settings."""
    lines = [f"# python src/{settings.name}.py --config THIS_FILE\n"]
    for group in GROUPS:
        values = {name: getattr(settings, name) for name in names(group=group)}
        lines += [f"\n# {group}\n", yaml.safe_dump(values, sort_keys=False, allow_unicode=True)]
    return "".join(lines)


def _suggest(name: str, value: str) -> str:
    """Return the message for an unknown setting, with the nearest ones."""
    start = f"there is no setting {name[:60]!r}"
    ours = ALIASES.get(name.replace("-", "_").lower())
    if ours == "--resume {}":
        value = {"": "auto", "true": "auto", "false": "no"}.get(value.lower(), value)
    if ours == "--accelerator {}":
        value = {"gpu": "cuda"}.get(value.split(":")[0], value.split(":")[0])
    if ours:
        return f"{start}; here it is {ours.replace('{}', value).replace(' ,', ',').rstrip()}"
    near = difflib.get_close_matches(name.replace("-", "_").lower(), [*NAMES, *ALIASES], n=3)
    options = dict.fromkeys(f"--{each}" if each in FACTS else re.match(r"--\w+", ALIASES[each])[0] for each in near)
    if not options:
        return f"{start}; see --help all for all settings"
    return f"{start}; did you mean {' or '.join(options)}?"


def script_defaults(path: Path) -> dict[str, object]:
    """Return the keywords that a rung passes to `parse_settings`, read from its source."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    call = next(
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "parse_settings"
    )
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


def answer_early() -> None:
    """Answer `--help` and refuse mistyped options of a rung before torch and lightning are imported.

    `parse_settings` does the same again, with everything that needs those libraries.
    """
    main = getattr(sys.modules["__main__"], "__file__", None)
    if not main or Path(main).resolve().parent != SRC or not re.match(r"\d+_", Path(main).name):
        return
    script = script_defaults(Path(main))
    try:
        given = read_words(sys.argv[1:])
        if "help" in given:
            doc = ast.get_docstring(ast.parse(Path(main).read_text(encoding="utf-8"))) or ""
            print_help(script, textwrap.dedent(doc), Path(main).stem, given["help"] == "all")
            raise SystemExit(0)
        from_file = read_config(find_config(given["config"])) if "config" in given else {}
        values = vars(Settings()) | script | from_file | given
        check_bounds(values)
        check_needs([name for name in given if name in FACTS], values)
    except UserError as error:
        print_error(error, f"error: {error}")
        raise SystemExit(2) from None
