"""Splits of texts and their labels, read from tables or made up; what is wrong with them is refused."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets as hf
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_ladder.data.cache import write_batches
from fabric_ladder.data.rows import (
    NUMBER,
    find_columns,
    list_columns,
    read_tables,
    read_text,
    write_checked,
)
from fabric_ladder.data.sources import REVIEWS, Source
from fabric_ladder.data.splits import SPLITS
from fabric_ladder.data.synthetic import synthetic_reviews
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

SYNTHETIC_SIZES = (4000, 500, 1000)
SHARES = {"validation": 0.1, "test": 0.2}  # what is split off where there is no such split
WHOLE = re.compile(r"\s*[-+]?\d+\s*")


def read_splits(
    settings: DataSettings, source: Source, scratch: Path
) -> tuple[dict[str, hf.Dataset], list[str], list[str]]:
    """Return the splits that the source has, with the columns `text` and `label`, the classes' names, and notices.

    Where there are several text columns, a text is what they hold, each on a line of its own.
    """
    if source.key[0] in REVIEWS:
        return read_reviews(settings, source, scratch), ["negative", "positive"], []
    wanted = (*map(str.strip, settings.text_column.split(",")), settings.label_column)
    if settings.label_column in wanted[:-1]:
        raise UserError(f"--text_column and --label_column name the same column, {settings.label_column!r}")
    parts, notices = {}, []
    for split, tables in read_tables(settings, source, scratch, notices, wanted).items():
        parts[split] = []
        for name, table in tables.items():
            columns, rows, hint = find_columns(table, name)
            for column in wanted:
                check_column(columns, column, name, hint or ": set --text_column or --label_column")
            feature, label_of = label_reader(settings.label_column, table.features)
            check = partial(_join_texts, columns=wanted[:-1], label_of=label_of)
            schema = hf.Features({"text": hf.Value("string"), "label": feature}).arrow_schema
            target = scratch / f"{split}-{len(parts[split])}.arrow"
            part = write_checked(rows, name, check, schema, target, settings, notices)
            if all(NUMBER.fullmatch(text) for batch in part.iter(1000) for text in batch["text"]):
                raise UserError(f"{name}: column {settings.text_column!r} holds numbers, not text: set --text_column")
            parts[split].append((name, part))
    return *number_labels(join_parts(parts, settings.label_column), "texts"), notices


def _join_texts(_: str, row: dict, columns: tuple[str, ...], label_of: Callable[[dict], int | str]) -> dict:
    parts = [read_text(row, column, may_be_empty=True) for column in columns]
    text = "\n".join(part for part in parts if part.strip())
    if not text:
        raise ValueError(f"no {' and no '.join(columns)}")
    return {"text": text, "label": label_of(row)}


def read_reviews(settings: DataSettings, source: Source, scratch: Path) -> dict[str, hf.Dataset]:
    """Return the splits of the reviews, with the columns `text` and `label` (0 negative, 1 positive)."""
    if source.read_imdb:
        reviews, rows = source.read_imdb(settings.data_dir)
        table = pa.Table.from_pandas(reviews, preserve_index=False).replace_schema_metadata()
        mapped = write_batches(scratch / "imdb.arrow", table.schema, table.to_batches(1000))
        del reviews, table
        pa.default_memory_pool().release_unused()  # 150 MB: from here on they are read from the disk
        return {split: mapped.select(chosen) for split, chosen in zip(SPLITS, rows, strict=True)}
    splits = {}
    for number, (split, size) in enumerate(zip(SPLITS, SYNTHETIC_SIZES, strict=True)):
        count = max(size, getattr(settings, f"{split}_samples") or 0)
        texts, labels = synthetic_reviews(count, 3 * settings.split_seed + number)
        splits[split] = hf.Dataset.from_dict({"text": texts, "label": labels})
    return splits


def check_column(columns: list[str], column: str, name: str, hint: str) -> None:
    """Refuse a table, called `name`, that lacks a column; the `hint` says what to do then."""
    if column not in columns:
        raise UserError(f"{name} has no column {column!r}, only {list_columns(columns)}{hint}")


def label_reader(column: str, features: dict) -> tuple[hf.ClassLabel | hf.Value, Callable[[dict], int | str]]:
    """Return the type of the labels in a table's column, and what takes the label from a row or raises ValueError.

    Integers become texts, as they are in a CSV file, unless the table itself has names for them.
    """
    feature = features.get(column)
    is_class = isinstance(feature, hf.ClassLabel)

    def label_of(row: dict) -> int | str:
        label = row.get(column)
        if label is None or not str(label).strip() or (is_class and label < 0):
            raise ValueError(f"no {column}")
        if isinstance(label, float) and label.is_integer():  # a column of integers in which some were missing
            label = int(label)
        if not isinstance(label, int | str):  # a truth value is an integer to Python
            raise ValueError(f"{column} is {label!r:.40}, not an integer or a string")
        return label if is_class else read_text({column: str(label)}, column)

    return feature if is_class else hf.Value("string"), label_of


def join_parts(parts: dict[str, list[tuple[str, hf.Dataset]]], column: str) -> dict[str, hf.Dataset]:
    """Join the tables of each split, in whose place there are their names and tables.

    Where the labels, which `column` holds, are whole numbers in all splits they become integers, so that they are
    ordered by size; a word in one split makes them texts in all.

    Raises:
        UserError: Labels are decimal numbers, or unlike in files that belong together.
    """
    kinds = {split: {_kind(table, name, column) for name, table in tables} for split, tables in parts.items()}
    for split, found in kinds.items():
        if len(found) > 1:
            raise UserError(f"the {split} files hold labels of unlike kinds: make all integers or all strings")
    found = set().union(*kinds.values())
    if len(found) > 1 and not found <= {"integers", "strings"}:
        raise UserError("the labels have names in one split, and none or others in another: make them alike")
    joined = {
        split: hf.concatenate_datasets([table for _, table in tables]) if len(tables) > 1 else tables[0][1]
        for split, tables in parts.items()
    }
    return {split: _to_integers(table) for split, table in joined.items()} if found == {"integers"} else joined


def _kind(table: hf.Dataset, name: str, column: str) -> str:
    """Return whether labels are `integers`, written as such or as 1.0, or `strings`; of a class label its names."""
    if isinstance(table.features["label"], hf.ClassLabel):
        return str(table.features["label"])
    values = pc.unique(table.data.column("label")).to_pylist()
    if not values or not all(len(value) < 19 and NUMBER.fullmatch(value) for value in values):
        return "strings"
    numbers = [_number(value) for value in values]
    if not all(abs(number) < 2**63 and number == int(number) for number in numbers):
        raise UserError(f"{name}: column {column!r} holds decimal numbers, not integers or strings: set --label_column")
    return "integers"


def _number(label: str) -> int | float:
    return int(label) if WHOLE.fullmatch(label) else float(label)


def _to_integers(table: hf.Dataset) -> hf.Dataset:
    labels = table.data.column("label")
    values = pc.unique(labels)
    numbers = np.array([int(_number(value)) for value in values.to_pylist()])
    return table.remove_columns("label").add_column("label", numbers[pc.index_in(labels, values).to_numpy()])


def number_labels(splits: dict[str, hf.Dataset], samples: str) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Replace the labels of `samples` (texts or images) by 0, 1, … in the order of their values.

    Numbers are ordered by size, strings by letters. The names of the labels are returned, too.
    """
    feature = splits["train"].features["label"]
    if isinstance(feature, hf.ClassLabel):
        return {split: table.cast_column("label", hf.Value("int64")) for split, table in splits.items()}, feature.names
    values = sorted(pc.unique(splits["train"].data.column("label")).to_pylist())
    if len(values) < 2 <= len(splits["train"]):
        raise UserError(f"all training {samples} have the same label, {values[0]!r}: there is nothing to learn")
    known = set(values)
    for split, table in splits.items():
        labels = table.data.column("label")
        if strange := [value for value in pc.unique(labels).to_pylist() if value not in known]:
            raise UserError(f"the {split} {samples} have labels that the training {samples} lack: {strange[:5]}")
        numbers = pc.index_in(labels, pa.array(values, labels.type)).cast(pa.int64()).to_numpy()
        splits[split] = table.remove_columns("label").add_column("label", numbers)
    return splits, [str(value) for value in values]


def complete_splits(splits: dict[str, hf.Dataset], settings: DataSettings) -> dict[str, hf.Dataset]:
    """Split off what the source lacks (10 % validation, 20 % test) and keep as many samples as the settings want."""
    samples = {"image-classification": "images", "instruction-tuning": "samples"}.get(settings.task, "texts")
    train = splits["train"]
    rows = len(train)
    order = np.random.default_rng(settings.split_seed).permutation(len(train))
    for split, share in SHARES.items():
        if split not in splits:
            size = max(1, round(share * len(train)))
            splits[split], order = train.select(order[:size]), order[size:]
    if len(order) == 0:
        raise UserError(f"{len(train)} {samples} are too few to be split into train, validation and test: give more")
    if len(order) < len(train):
        splits["train"] = train.select(order)
    for split in SPLITS:
        wanted = getattr(settings, f"{split}_samples")
        if wanted and wanted < len(splits[split]):
            splits[split] = splits[split].shuffle(settings.split_seed).select(range(wanted))
    train = splits["train"]
    if "label" in train.column_names and len(set(train.select_columns("label")["label"])) < 2:  # without the texts
        fewer = settings.train_samples and settings.train_samples < rows
        hint = "raise --train_samples" if fewer else f"{rows} are too few, give more"
        raise UserError(f"the training {samples} that are left have a single label: {hint}")
    return splits
