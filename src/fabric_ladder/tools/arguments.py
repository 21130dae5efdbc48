"""Command lines of the scripts. They are parsed before torch is imported, so that `--help` answers in a second."""

import argparse
import difflib
import os
import re
import sys
from pathlib import Path
from typing import NoReturn

from fabric_ladder.errors import UserError
from fabric_ladder.foreign import to_own_words
from fabric_ladder.options import read_words
from fabric_ladder.rungs import choose_rungs
from fabric_ladder.settings import FACTS, SURROUNDINGS

PRECISIONS = ("32-true", "bf16-true", "16-true")  # weights of a loaded model


class Arguments(argparse.ArgumentParser):
    """Parser of a script's options; an error is one line and exit status 2.

    Args:
        doc: Docstring of the script; its first paragraph is the description.
        options: Options of `argparse.ArgumentParser`.
    """

    def __init__(self, doc: str, **options):
        super().__init__(description=doc.split("\n\n")[0], allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        """Print the error and end the script."""
        unknown = re.match(r"unrecognized arguments:.*? (--\w+)", message)
        near = unknown and difflib.get_close_matches(unknown[1], self._option_string_actions, n=1)
        remedy = f"did you mean {near[0]}?" if near else "see --help"
        self.exit(2, f"error: {message.removeprefix('argument ')} ({remedy})\n")

    def parse_with_settings(self) -> tuple[argparse.Namespace, list[str]]:
        """Return the script's own options, and all other options, which are settings of the rungs by their names."""
        arguments, settings = self.parse_known_args()
        own = [option.removeprefix("--") for option in self._option_string_actions]
        for option in settings:
            name = option.removeprefix("--").split("=")[0]
            if option.startswith("--") and name not in FACTS and (near := difflib.get_close_matches(name, own, n=1)):
                self.error(f"there is no option --{name}; did you mean --{near[0]}?")
        try:
            settings, read_as = to_own_words(settings)
            if "print_config" in read_words(settings):
                self.error("--print_config prints the settings of one rung: give it to the rung's script")
        except UserError as error:
            self.error(str(error))
        if read_as:
            print(f"Read {', '.join(read_as)}", file=sys.stderr)
        return arguments, settings


def at_least_1(text: str) -> int:
    """Return a positive integer, for argparse."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return int(text)


def rungs(text: str) -> list[Path]:
    """Return the rungs of numbers or names separated by commas, for argparse."""
    names = [name for name in text.split(",") if name.strip()]
    if not names:
        raise argparse.ArgumentTypeError("name at least one rung")
    try:
        return choose_rungs(names)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def searched(text: str) -> tuple[str, list[str]]:
    """Return the setting and the values of a search, as in `learning_rate=1e-5,5e-5`, for argparse."""
    name, _, listed = text.partition("=")
    values = [value.strip() for value in listed.split(",") if value.strip()]
    try:
        found = [read_words(to_own_words([f"--{name}", value])[0]) for value in values]
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    name = next(iter(found[0]), name) if found else name
    if name == "seed":
        raise argparse.ArgumentTypeError("seed is not searched: --seeds N runs each value with N seeds")
    if name not in FACTS or FACTS[name].role == SURROUNDINGS:
        raise argparse.ArgumentTypeError(f"--{name} changes no result: search a setting that does")
    if any(one in found[:place] for place, one in enumerate(found)):
        raise argparse.ArgumentTypeError(f"{text}: write each value once")
    if len(values) < 2:
        raise argparse.ArgumentTypeError(f"{text}: write a setting and its values, as in learning_rate=1e-5,5e-5")
    return name, values


def new_path(text: str) -> Path:
    """Return the path of a file or folder that does not exist yet and can be written, for argparse."""
    path = Path(text)
    if path.exists():
        raise argparse.ArgumentTypeError(f"{text} exists; choose another name or remove it")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    if not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text}: the folder {path.parent} is not writable")
    return path


def write_new(path: Path, text: str) -> None:
    """Write a new file.

    Raises:
        UserError: The file cannot be written, or exists by now.
    """
    try:
        with open(path, "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror})") from error
