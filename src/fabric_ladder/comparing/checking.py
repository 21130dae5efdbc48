"""Refuse values in a run.json that no run writes. Each error names the place in the file and the value."""

import json
import math
from typing import NamedTuple

from fabric_ladder.errors import UserError
from fabric_ladder.options import DEFAULTS, check_bounds, read_value


class Kind(NamedTuple):
    """A kind of number: its types, its smallest and its largest value, and its name in messages."""

    types: tuple[type, ...]
    least: float
    most: float
    words: str


MOST = 2**60  # of bytes, samples or seconds; NumPy's integers hold it
ONE = 1 + 1e-6  # a mean of shares or a correlation may exceed 1 by a rounding error
COUNT = Kind((int,), 0, MOST, "a whole number of at least 0")
SIZE = Kind((int,), 1, MOST, "a whole number above 0")
NUMBER = Kind((int, float), 0, MOST, "a number of at least 0")
SHARE = Kind((int, float), 0, ONE, "a number from 0 to 1")
CORRELATION = Kind((int, float), -ONE, ONE, "a number from -1 to 1")
LOSS = Kind((int, float), 0, math.inf, "a number of at least 0, or NaN")


def refusal(place: str, value: object, words: str) -> UserError:
    """Return the error about a value in run.json that is not what `words` say."""
    return UserError(f"its run.json has {place} {json.dumps(value):.60}, not {words}")


def number(place: str, value: object, kind: Kind) -> float:
    """Return a number of this kind, or raise UserError."""
    diverged = kind is LOSS and value != value
    if type(value) not in kind.types or not (diverged or kind.least <= value <= kind.most):
        raise refusal(place, value, kind.words)
    return value


def check_texts(value: object, place: str = "") -> None:
    """Refuse half characters, which JSON can hold and no file or terminal can.

    Raises:
        UserError: A key or a text holds one.
    """
    if isinstance(value, str) and value.encode(errors="replace") != value.encode(errors="surrogatepass"):
        raise refusal(place or "a name", value, "a text of whole characters")
    for key, inner in value.items() if isinstance(value, dict) else ():
        check_texts(key)
        check_texts(inner, f"{place}.{key}".lstrip("."))
    for inner in value if isinstance(value, list) else ():
        check_texts(inner, place)


def check_settings(settings: dict) -> None:
    """Refuse settings that no command line gives; settings of later versions may have any value.

    Raises:
        UserError: The setting and its value.
    """
    for name, value in settings.items():
        if name not in DEFAULTS or name == "notices":
            continue
        text = value if isinstance(value, str) else json.dumps(value)
        try:
            check_bounds({name: value})
            fits = read_value(name, text) == value
        except UserError:
            fits = False
        if not fits:
            raise refusal(f"settings.{name}", value, f"a value of --{name}")


def check_facts(place: str, facts: object) -> dict:
    """Return facts by name, such as versions, or refuse anything but texts and numbers.

    Raises:
        UserError: The facts.
    """
    if not isinstance(facts, dict) or not all(isinstance(value, str | int | float | None) for value in facts.values()):
        raise refusal(place, facts, "texts or numbers by name")
    return facts


def check_classes(classes: dict) -> dict:
    """Return the results of single classes, or refuse names and counts that do not fit.

    Raises:
        UserError: The names or the counts.
    """
    names, counts = classes["names"], classes.get("confusion", [])
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise refusal("results.classes.names", names, "texts")
    if len({*names}) != len(names):
        raise refusal("results.classes.names", names, "different names")
    if "confusion" in classes and (not names or [len(row) for row in counts] != [len(names)] * len(names)):
        raise refusal("results.classes.confusion", counts, f"{len(names)} rows of {len(names)} counts")
    for count in (count for row in counts for count in row):
        number("results.classes.confusion", count, COUNT)
    return classes
