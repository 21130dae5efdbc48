"""Check labels by their texts: refuse values that are not classes, and name labels that look wrong."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

import pyarrow as pa
import pyarrow.compute as pc

from fabric_ladder.errors import UserError

WHOLE = re.compile(r"(0|-?[1-9][0-9]{0,17})(\.0*)?")  # pandas makes a column of integers with gaps float
NUMBER = re.compile(r"[-+]?([0-9]{1,18}\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
CODE = re.compile(r"[-+]?0[0-9].*|[-+]?[0-9]+")  # a number that is not a decimal
DATE = re.compile(r"(\d{4}([-/.])\d\d?\2\d\d?|\d\d?([-/.])\d\d?\3\d{4}|\d\d?/\d\d?/\d\d)([T ].*)?", re.ASCII)
PRINTED = re.compile(r"""[\[{(].*['",].*[\]})]|[\[{][0-9.\s]*[\]}]|b(['"]).*\1|(frozen)?set\(.*\)""", re.DOTALL)
MISSING = re.compile(r"(?i:-?nan|nat|null|#?n/?a|<na>)|None")
SEPARATORS = ";|/,"
LATIN = str.maketrans("авеіјкмнорстухѕοαρτυκ", "abeijkmhopctyxsoaptuk")  # Cyrillic and Greek that looks like it
MOST = 3  # examples in a line
SEVERAL = "--problem_type multi_label_classification trains several labels per text, separated by | or commas"


def count_texts(columns: Iterable[pa.Array | pa.ChunkedArray]) -> Counter[str]:
    """Return the number of each text in columns."""
    counts = Counter()
    for column in columns:
        texts, numbers = pc.value_counts(column).flatten()
        counts.update(dict(zip(texts.to_pylist(), numbers.to_pylist(), strict=True)))
    return counts


def check_labels(counts: Mapping[str, int], column: str, several: str = SEVERAL) -> list[str]:
    """Return notices about labels that look wrong.

    Args:
        counts: The number of each label.
        column: The column of the labels, for messages.
        several: The remedy for labels such as `a;b` next to `a` and `b`; empty: they are not looked for.

    Raises:
        UserError: The labels are decimal numbers, dates, or printed Python values.
    """
    total, named = sum(counts.values()), [label for label in counts if not MISSING.fullmatch(label)]
    if any(not CODE.fullmatch(label) and not WHOLE.fullmatch(label) for label in named) and all(
        NUMBER.fullmatch(label) and not re.match("[-+]?0[0-9]", label) for label in named
    ):
        raise UserError(
            f"column {column!r} holds decimal numbers, not integers or strings: set --label_column, or --problem_type "
            "regression to predict them"
        )
    if named and all(map(DATE.fullmatch, named)):
        raise UserError(
            f"column {column!r} holds dates such as {named[0]!r}, not classes: set --label_column, or write classes as "
            "words"
        )
    if printed := [label for label in named if PRINTED.fullmatch(label)]:
        found = _found({label: counts[label] for label in printed}, total)
        raise UserError(
            f"{found} in column {column!r} are printed values: write the label alone, or lists in JSON Lines or "
            "Parquet for --problem_type multi_label_classification"
        )
    notices = _name_look_alikes(counts)
    if missing := {label: count for label, count in counts.items() if label not in named}:
        notices.append(f"{_found(missing, total)} are kept as classes: if they mean no label, remove these rows")
    if several and (joined := _find_joined(counts)):
        notices.append(f"{_found(joined, total)} join other labels, and are classes of their own: {several}")
    return notices


def _name_look_alikes(counts: Mapping[str, int]) -> list[str]:
    groups = {}
    for label in counts:
        groups.setdefault(_fold(label), []).append(label)
    alike = [group for group in groups.values() if len(group) > 1]
    if not alike:
        return []
    shown = "; ".join(" and ".join(f"{_shown(label)} ({counts[label]:,})" for label in group) for group in alike[:MOST])
    what = "are one class" if all(map(WHOLE.fullmatch, counts)) else "look alike and are different classes"
    more = "; …" if len(alike) > MOST else ""
    return [f"{sum(map(len, alike))} labels {what}: {shown}{more}: write those that mean the same in one way"]


def _fold(label: str) -> str:
    """Return a label without case, invisible characters, quotes around it, leading zeros, scripts and other forms."""
    text = unicodedata.normalize("NFKC", unicodedata.normalize("NFKC", label).casefold()).translate(LATIN)
    text = "".join(each for each in text if unicodedata.category(each) != "Cf" and not "\ufe00" <= each <= "\ufe0f")
    text = " ".join(text.split()).strip("'\"`‘’“”«» ")
    number = re.fullmatch(r"(-|\+?)0*([0-9]+)(\.0*)?", text)
    return number[1].strip("+") + number[2] if number else text


def _find_joined(counts: Mapping[str, int]) -> dict[str, int]:
    """Return the labels whose parts are all labels too, or parts of other labels, with their numbers."""
    for separator in SEPARATORS:
        parts = {label: [part.strip() for part in label.split(separator)] for label in counts}
        known = Counter(chain.from_iterable(map(set, parts.values())))
        joined = {
            label: counts[label]
            for label, own in parts.items()
            if len(own) > 1 and all(part and known[part] > 1 for part in own)
        }
        if joined:
            return joined
    return {}


def _found(labels: Mapping[str, int], total: int) -> str:
    examples = ", ".join(map(_shown, [*labels][:MOST])) + (", …" if len(labels) > MOST else "")
    return f"{sum(labels.values()):,} of {total:,} labels ({examples})"


def _shown(label: str) -> str:
    """Return a label in quotes, with escapes for characters that are invisible or look like others."""
    mixed = re.search("[A-Za-z]", label) and label.casefold().translate(LATIN) != label.casefold()
    return ascii(label[:40]) if mixed or unicodedata.normalize("NFKC", label) != label else f"{label[:40]!r}"
