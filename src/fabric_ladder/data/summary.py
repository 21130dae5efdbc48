"""Describe what was read: a line with rows, columns, classes and splits, and notices about copies and empty classes."""

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import datasets as hf
import numpy as np
import pandas as pd
import pyarrow.compute as pc

from fabric_ladder.data.label_kind import LabelKind
from fabric_ladder.data.rows import shown
from fabric_ladder.data.splits import SPLITS
from fabric_ladder.data.tables import complete_splits
from fabric_ladder.settings import DataSettings

MOST_NAMES = 10
CONTENT = ("text", "words", "messages", "system", "instruction", "input")  # columns of a sample without its answer


class ReadData(NamedTuple):
    """Samples before they are tokenized or decoded.

    Attributes:
        splits: `train`, `validation` and `test`.
        class_names: Names of the classes; empty for instructions.
        summary: Lines about what was read.
        notices: Lines that the user should read.
    """

    splits: dict[str, hf.Dataset]
    class_names: list[str]
    summary: list[str]
    notices: list[str]


def complete(
    settings: DataSettings,
    read: dict[str, hf.Dataset],
    class_names: list[str],
    notices: list[str],
    columns: Sequence[tuple[str, ...]],
    name: str,
    files: Mapping[str, list[Path]] | None = None,
    kind: LabelKind | None = None,
) -> ReadData:
    """Split off missing splits, draw the samples of each split, and describe the result.

    `columns` are those of the texts and those of the labels; `name` is that of the source.
    """
    splits = complete_splits(dict(read), settings)
    counts = {split: count_classes(table, class_names, kind) for split, table in splits.items()}
    unit = "sentences" if settings.task == "token-classification" else "rows"
    if files and sum(map(len, files.values())) > 1:
        names = {split: join_names(path.name for path in files.get(split, ()) if split in read) for split in splits}
        summary = [
            summary_line(f"{split} ({names[split] or 'split off'})", len(table), columns, counts[split], unit)
            for split, table in splits.items()
        ]
    else:
        rows = sum(map(len, read.values()))
        whole = sum((count_classes(table, class_names, kind) for table in read.values()), Counter())
        sizes = ", ".join(f"{split} {len(table):,}" for split, table in splits.items())
        summary = [f"{summary_line(name, rows, columns, whole, unit)} · {sizes}"]
    notices = [*notices, *_name_untrained(counts["train"], settings), *_copied_texts(splits)]
    return ReadData(splits, class_names, summary, notices)


def summary_line(
    name: str, rows: int, columns: Sequence[tuple[str, ...]], counts: Mapping[str, int], unit: str = "rows"
) -> str:
    """Return a line about a table: its name, its size, its columns of texts and labels, and its classes."""
    used = zip(("text", "label"), columns, strict=False)
    used = ", ".join(f"{kind} {', '.join(map(repr, names))}" for kind, names in used)
    ordered = sorted(counts, key=counts.get, reverse=True)
    classes = join_names(f"{label} {counts[label]:,}" for label in ordered)
    return " · ".join(filter(None, [f"{name}: {rows:,} {unit}", used, classes]))


def join_names(names: Iterable[str]) -> str:
    """Return at most ten names in one line, and the number of the others."""
    names = list(names)
    first = ", ".join(" ".join(name.split())[:80] for name in names[:MOST_NAMES])
    return first + (f" and {len(names) - MOST_NAMES:,} more" if len(names) > MOST_NAMES else "")


def count_classes(table: hf.Dataset, names: list[str], kind: LabelKind | None) -> Counter[str]:
    """Return the number of labels of each class; empty for instructions and for numbers."""
    column = "labels" if kind else "label"
    if not names or column not in table.column_names:
        return Counter()
    counts = np.zeros(len(names), int)
    for batch in table.select_columns([column]).with_format("arrow").iter(1000):  # a whole column takes 400 bytes a row
        labels = (pc.list_flatten(batch[column]) if kind else batch[column]).to_numpy()
        if labels.dtype.kind == "f":
            return Counter()
        if kind and not kind.per_token:
            counts += labels.reshape(len(batch), -1).sum(0, dtype=int)
        else:
            counts += np.bincount(labels[labels >= 0], minlength=len(names))
    return Counter(dict(zip(names, counts.tolist(), strict=True)))


def _name_untrained(counts: Counter[str], settings: DataSettings) -> list[str]:
    missing = [name for name, count in counts.items() if not count]
    if not missing:
        return []
    remedy = "raise --train_samples or give more rows" if settings.train_samples else "give more rows"
    return [f"{len(missing):,} of {len(counts):,} classes have no training sample ({join_names(missing)}): {remedy}"]


def _copied_texts(splits: dict[str, hf.Dataset]) -> list[str]:
    columns = [column for column in CONTENT if column in splits["train"].column_names]
    return name_copies({split: _hashed(splits[split], columns) for split in SPLITS}, "texts") if columns else []


def name_copies(splits: Mapping[str, Iterable[tuple[Callable[[int], str], np.ndarray]]], what: str) -> list[str]:
    """Return a line for each split with samples that are also training samples.

    Args:
        splits: Batches of samples: a function that returns the name of one, and their 64-bit hashes.
        what: The samples' name in the line.
    """
    known = np.sort(np.concatenate([hashes for _, hashes in splits["train"]]))
    notices = []
    for split in SPLITS[1:]:
        count, total, first = 0, 0, None
        for name, hashes in splits[split]:
            places = np.flatnonzero(known[np.searchsorted(known, hashes).clip(max=len(known) - 1)] == hashes)
            first = name(int(places[0])) if first is None and len(places) else first
            count += len(places)
            total += len(hashes)
        if count:
            notices.append(
                f"{count:,} of {total:,} {split} {what} are also training {what} (first: {shown(first)}): leave them "
                "out of one of the two"
            )
    return notices


def _hashed(table: hf.Dataset, columns: list[str]) -> Iterator[tuple[Callable[[int], str], np.ndarray]]:
    for batch in table.select_columns(columns).with_format("arrow").iter(1000):
        rows = zip(*(batch[column].to_pylist() for column in columns), strict=True)
        texts = ["\n".join(map(_plain, columns, row)).strip() for row in rows]
        yield texts.__getitem__, pd.util.hash_array(np.array(texts, object), categorize=False)


def _plain(column: str, text: str | list) -> str:
    """Return a column of a sample as one text; of a chat, which is stored as JSON, the contents of its messages."""
    if column == "messages":
        return "\n".join(str(message.get("content")) for message in json.loads(text))
    return str(text)
