"""Lists of labels, one list for each row of a table: read them, find their classes, and number them."""

import re

import datasets as hf
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_ladder.data.label_texts import WHOLE, check_labels, count_texts
from fabric_ladder.data.rows import shown
from fabric_ladder.errors import UserError

PRINTED_LIST = re.compile(r"\[.*\]", re.DOTALL)


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
