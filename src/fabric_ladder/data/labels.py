"""Read, check and number labels: one for each row of a table, or a list for each row."""

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import chain

import datasets as hf
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_ladder.data.rows import shown
from fabric_ladder.errors import UserError

WHOLE = re.compile(r"(0|-?[1-9][0-9]{0,17})(\.0*)?")  # pandas makes a column of integers with gaps float
NUMBER = re.compile(r"[-+]?([0-9]{1,18}\.?[0-9]*|\.[0-9]+)([eE][-+]?[0-9]+)?")
CODE = re.compile(r"[-+]?0[0-9].*|[-+]?[0-9]+")  # a number that is not a decimal
DATE = re.compile(r"(\d{4}([-/.])\d\d?\2\d\d?|\d\d?([-/.])\d\d?\3\d{4}|\d\d?/\d\d?/\d\d)([T ].*)?", re.ASCII)
PRINTED = re.compile(r"""[\[{(].*['",].*[\]})]|[\[{][0-9.\s]*[\]}]|b(['"]).*\1|(frozen)?set\(.*\)""", re.DOTALL)
MISSING = re.compile(r"(?i:-?nan|nat|null|#?n/?a|<na>)|None")
PRINTED_LIST = re.compile(r"\[.*\]", re.DOTALL)
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
    examples = "; ".join(
        " and ".join(f"{_quoted(label)} ({counts[label]:,})" for label in group) for group in alike[:MOST]
    )
    what = "are one class" if all(map(WHOLE.fullmatch, counts)) else "look alike and are different classes"
    more = "; …" if len(alike) > MOST else ""
    return [f"{sum(map(len, alike))} labels {what}: {examples}{more}: write those that mean the same in one way"]


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
    examples = ", ".join(map(_quoted, [*labels][:MOST])) + (", …" if len(labels) > MOST else "")
    return f"{sum(labels.values()):,} of {total:,} labels ({examples})"


def _quoted(label: str) -> str:
    """Return a label in quotes, with escapes for characters that are invisible or look like others."""
    mixed = re.search("[A-Za-z]", label) and label.casefold().translate(LATIN) != label.casefold()
    return ascii(label[:40]) if mixed or unicodedata.normalize("NFKC", label) != label else f"{label[:40]!r}"


def class_numbers(value: object, column: str, classes: int, ignored: int | None = None) -> list[int]:
    """Return a row's numbers of classes, where the table has names for them, or raise ValueError.

    The number `ignored` is a class of none.
    """
    if value is None:
        raise ValueError(f"no {column}")
    if wrong := [number for number in value if number != ignored and (number is None or not 0 <= number < classes)]:
        raise ValueError(f"{column} has {shown(wrong[0])}, which is not a class")
    return value


def refuse_printed_list(text: str, column: str, printed: re.Pattern[str] = PRINTED_LIST) -> None:
    """Raise ValueError for a text such as `['a', 'b']`, which pandas writes for a list in a CSV file."""
    if printed.fullmatch(text.strip()):
        raise ValueError(f"{column} is {shown(text)}, a printed list: write JSON Lines or Parquet, or the items alone")


def label_texts(labels: list, column: str) -> list[str]:
    """Return a row's labels as texts, or raise ValueError."""
    texts = [str(label).strip() for label in labels if isinstance(label, str | int)]
    if len(texts) < len(labels) or "" in texts:
        raise ValueError(f"{column} is {shown(labels)}, not a list of labels")
    return texts


def find_classes(
    train: hf.Dataset, column: str, several: str, ignored: str = ""
) -> tuple[dict[object, int], list[str], list[str]]:
    """Return the numbers of the classes by their values in the column `label`, their names, and notices.

    Whole numbers are sorted by size, other labels by alphabet. The names of a table stay in their order. See
    `check_labels` for the other arguments. The text `ignored` is no class.
    """
    feature = train.features["label"].feature
    if isinstance(feature, hf.ClassLabel):
        return {number: number for number in range(feature.num_classes)}, feature.names, []
    values = count_texts([pc.list_flatten(train.data.column("label"))])
    values.pop(ignored, None)
    if not values:
        raise UserError("no training text has a label: there is nothing to learn")
    notices = check_labels(values, column, several)
    whole = all(map(WHOLE.fullmatch, values))
    keys = {value: int(value.split(".")[0]) if whole else value for value in values}
    order = {key: number for number, key in enumerate(sorted({*keys.values()}))}
    return {value: order[key] for value, key in keys.items()}, list(map(str, order)), notices


def number_lists(table: hf.Dataset, values: dict[object, int], split: str) -> tuple[pa.ListArray, np.ndarray]:
    """Return the lists in the column `label`, and the numbers of all their labels one after another.

    Raises:
        UserError: A label is not among `values`.
    """
    lists = pa.concat_arrays(table.data.column("label").chunks)
    found = pc.list_flatten(lists)
    places = pc.index_in(found, pa.array(values, found.type))
    if places.null_count:
        unknown = [value for value in pc.unique(found).to_pylist() if value not in values]
        raise UserError(f"the {split} texts have labels that the training texts lack: {unknown[:5]}")
    return lists, np.array(list(values.values()))[places.to_numpy()]
