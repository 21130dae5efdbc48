"""Read texts and labels from tables or reviews, number the labels, and split the rows."""

from collections.abc import Callable, Collection, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path

import datasets as hf
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fabric_ladder.data.label_kind import LabelKind, join
from fabric_ladder.data.labels import WHOLE, check_labels, count_texts
from fabric_ladder.data.reviews import REVIEWS, read_reviews
from fabric_ladder.data.rows import list_columns, read_parts, read_text, shown
from fabric_ladder.data.splits import SPLITS
from fabric_ladder.data.text_sources import Source
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

SHARES = {"validation": 0.1, "test": 0.2}  # of the rows, for splits that the source lacks
SMALLEST_STRATUM = 10  # rows: 20 % and 10 % of them are at least one row each


def read_splits(
    settings: DataSettings, source: Source, scratch: Path, kind: LabelKind | None = None
) -> tuple[dict[str, hf.Dataset], list[str], list[str]]:
    """Return the splits of the source, the names of the classes, and notices.

    The texts of several columns are joined, one line per column. The splits have the columns `text` and `label`, a
    class; of another kind of labels they have the columns `text` and `labels`, a list of numbers. Texts of tables also
    have a `location`, the file and the row.
    """
    if source.key[0] in REVIEWS:
        if kind:
            raise UserError(
                f"--problem_type {settings.problem_type}: {source.key[0]} has one of two classes per text; give a "
                "--dataset with such labels"
            )
        return read_reviews(settings, scratch), ["negative", "positive"], []
    texts, labels = text_columns(settings, kind)
    if both := [column for column in labels if column in texts]:
        raise UserError(f"--text_column and --label_column name the same column, {both[0]!r}")
    notices = []
    parts = read_parts(
        settings, source, scratch, notices, partial(check_texts, settings, kind), (*texts, *labels), labels
    )
    if kind:
        return kind.number(join(parts, settings.label_column), settings), kind.names, [*notices, *kind.notices]
    splits = join_parts(parts, settings.label_column, notices)
    return *number_labels(splits, "texts"), notices


def text_columns(settings: DataSettings, kind: LabelKind | None = None) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the columns of the texts and of the labels."""
    texts = tuple(map(str.strip, settings.text_column.split(",")))
    return texts, kind.columns(settings) if kind else (settings.label_column,)


def check_texts(
    settings: DataSettings, kind: LabelKind | None, name: str, columns: dict, features: dict
) -> tuple[Callable[[str, dict], dict], pa.Schema]:
    """Return the check for rows of the table `name` with these columns, and the schema of its result."""
    texts, labels = text_columns(settings, kind)
    for column in (*texts, *labels):
        check_column(columns, column, name)
    feature, label_of = kind.reader(settings, features) if kind else label_reader(settings.label_column, features)

    def check(location: str, row: dict) -> dict:
        return {"text": join_texts(row, texts), "label": label_of(row), "location": f"{name}, {location}"}

    text = hf.Value("string")
    return check, hf.Features({"text": text, "label": feature, "location": text}).arrow_schema


def join_texts(row: dict, columns: Sequence[str]) -> str:
    """Return the texts of these columns in one, or raise ValueError if all are empty."""
    parts = [read_text(row, column, may_be_empty=True) for column in columns]
    text = "\n".join(part for part in parts if part.strip())
    if not text:
        raise ValueError(f"no {' and no '.join(columns)}")
    return text


def check_column(columns: Collection[str], column: str, name: str) -> None:
    """Refuse a table, called `name`, without this column."""
    if column in columns:
        return
    remedy = "set --text_column or --label_column, or --column_names for a CSV file without a header"
    if "," in column and {part.strip() for part in column.split(",")} <= {*columns}:
        remedy = "several columns of labels need --problem_type multi_label_classification or regression"
    elif "instruction" in columns or "messages" in columns:
        remedy += ", or --task instruction-tuning"
    raise UserError(f"{name} has no column {column!r}, only {list_columns(columns)}: {remedy}")


def label_reader(column: str, features: dict) -> tuple[hf.ClassLabel | hf.Value, Callable[[dict], int | str]]:
    """Return the type of the labels in a column, and a function that returns a row's label or raises ValueError.

    Numbers become texts, as in a CSV file, unless the table has class names for them.
    """
    feature = features.get(column)
    is_class = isinstance(feature, hf.ClassLabel)

    def label_of(row: dict) -> int | str:
        label = row.get(column)
        if is_class:
            if label is None or label < 0:
                raise ValueError(f"no {column}")
            return label
        if isinstance(label, int | float | Decimal):
            label = str(label) if label == label else None  # NaN differs from itself
        if label is not None and not isinstance(label, str):
            remedy = "set --problem_type multi_label_classification" if isinstance(label, list) else "write it as text"
            raise ValueError(f"{column} is {shown(label)}, not a class: {remedy}, or set --label_column")
        return read_text({column: label}, column).strip()

    return feature if is_class else hf.Value("string"), label_of


def join_parts(parts: dict[str, list[hf.Dataset]], column: str, notices: list[str]) -> dict[str, hf.Dataset]:
    """Join the tables of each split, and add to `notices` what looks wrong with their labels.

    If all labels are whole numbers without leading zeros, they become integers. Otherwise all stay texts.

    Raises:
        UserError: Labels are not classes, see `check_labels`, or the files have different class names.
    """
    splits = join(parts, column)
    if isinstance(splits["train"].features["label"], hf.ClassLabel):
        return splits
    counts = count_texts(table.data.column("label") for table in splits.values())
    notices += check_labels(counts, column)
    if all(map(WHOLE.fullmatch, counts)):
        return {split: _with_numbers(table, lambda value: int(value.split(".")[0])) for split, table in splits.items()}
    return splits


def _with_numbers(table: hf.Dataset, number_of: Callable[[str], int]) -> hf.Dataset:
    labels = table.data.column("label")
    values = pc.unique(labels)
    numbers = np.array(list(map(number_of, values.to_pylist())))
    return table.remove_columns("label").add_column("label", numbers[pc.index_in(labels, values).to_numpy()])


def number_labels(splits: dict[str, hf.Dataset], samples: str) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Replace the labels by 0, 1, … in the order of their values, and return the splits and the labels' names.

    Numbers are sorted by size, strings alphabetically. `samples` (texts or images) is for messages.
    """
    feature = splits["train"].features["label"]
    if isinstance(feature, hf.ClassLabel):
        return {split: table.cast_column("label", hf.Value("int64")) for split, table in splits.items()}, feature.names
    values = pc.unique(splits["train"].data.column("label")).to_pylist()
    whole = all(WHOLE.fullmatch(str(value)) for value in values)  # also names of folders
    values.sort(key=lambda value: (float(value) if whole else 0, value))
    if len(values) < 2 <= len(splits["train"]):
        raise UserError(f"all training {samples} have the same label, {values[0]!r}: there is nothing to learn")
    known = set(values)
    for split, table in splits.items():
        labels = table.data.column("label")
        if unknown := [value for value in pc.unique(labels).to_pylist() if value not in known]:
            raise UserError(f"the {split} {samples} have labels that the training {samples} lack: {unknown[:5]}")
        numbers = pc.index_in(labels, pa.array(values, labels.type)).cast(pa.int64()).to_numpy()
        splits[split] = table.remove_columns("label").add_column("label", numbers)
    return splits, [str(value) for value in values]


def complete_splits(splits: dict[str, hf.Dataset], settings: DataSettings) -> dict[str, hf.Dataset]:
    """Split off missing splits (10 % validation, 20 % test), then draw `train_samples` and so on from each split.

    Labelled data are split by label: each part has the same share of each label; see `_strata`.
    """
    samples = {"image-classification": "images", "instruction-tuning": "samples"}.get(settings.task, "texts")
    total = len(splits["train"])
    sizes = {split: max(1, round(share * total)) for split, share in SHARES.items() if split not in splits}
    if sum(sizes.values()) >= total:
        raise UserError(f"{total} {samples} are too few to be split into train, validation and test: give more")
    if sizes:
        whole = splits["train"]
        rows = _split_rows(whole, sizes, settings.split_seed)
        splits |= {split: whole.select(chosen) for split, chosen in rows.items()}
    splits = {split: splits[split] for split in SPLITS}
    for split, table in splits.items():
        wanted = getattr(settings, f"{split}_samples")
        if wanted and wanted < len(table):
            splits[split] = table.shuffle(settings.split_seed).select(range(wanted))
    train = splits["train"]
    if "label" in train.column_names and len(set(_labels(train))) < 2:
        fewer = settings.train_samples and settings.train_samples < total
        hint = "raise --train_samples" if fewer else f"{total} are too few, give more"
        raise UserError(f"the training {samples} that are left have a single label: {hint}")
    return splits


def _split_rows(table: hf.Dataset, sizes: dict[str, int], seed: int) -> dict[str, np.ndarray]:
    """Return the rows of new splits with these sizes, and the remaining rows for training."""
    rows = {}
    strata = _strata(_labels(table)) if "label" in table.column_names else None
    if strata is None:
        left = np.random.default_rng(seed).permutation(len(table))
        for split, size in sizes.items():
            rows[split] = left[:size]
            left = left[size:]
        return rows | {"train": left}
    features = hf.Features({"row": hf.Value("int64"), "stratum": hf.ClassLabel(num_classes=int(strata.max()) + 1)})
    left = hf.Dataset.from_dict({"row": np.arange(len(table)), "stratum": strata}, features)
    for split, size in sizes.items():
        parts = left.train_test_split(size, stratify_by_column="stratum", seed=seed)
        rows[split] = np.asarray(parts["test"]["row"])
        left = parts["train"]
    rows |= {"train": np.asarray(left["row"])}
    _train_every_class(_labels(table), rows)
    return rows


def _train_every_class(labels: np.ndarray, rows: dict[str, np.ndarray]) -> None:
    """Exchange rows, so that a class with several rows has one in training. The sizes of the splits stay."""
    numbers, counts = np.unique(labels, return_counts=True)
    trained = np.bincount(np.searchsorted(numbers, labels[rows["train"]]), minlength=len(numbers))
    for number in np.flatnonzero((counts > 1) & (trained == 0)):
        largest = trained.argmax()
        if trained[largest] < 2:
            return
        split = next(split for split, chosen in rows.items() if (labels[chosen] == numbers[number]).any())
        ours = np.flatnonzero(labels[rows[split]] == numbers[number])[0]
        other = np.flatnonzero(labels[rows["train"]] == numbers[largest])[0]
        rows[split][ours], rows["train"][other] = rows["train"][other], rows[split][ours]
        trained[[number, largest]] += [1, -1]


def _strata(labels: np.ndarray) -> np.ndarray | None:
    """Return the stratum of each row, or None if all rows are in one.

    A label with at least `SMALLEST_STRATUM` rows is a stratum. All rarer labels together are one stratum, or belong to
    the most frequent label if they have too few rows even together. So every split has rows of every stratum.
    """
    values, numbers, counts = np.unique(labels, return_inverse=True, return_counts=True)
    stratum = np.arange(len(values))
    rare = counts < SMALLEST_STRATUM
    if rare.any():
        stratum[rare] = rare.argmax() if counts[rare].sum() >= SMALLEST_STRATUM else counts.argmax()
    found, strata = np.unique(stratum[numbers], return_inverse=True)
    return strata if len(found) > 1 else None


def _labels(table: hf.Dataset) -> np.ndarray:
    return np.asarray(table.select_columns("label")["label"])  # without this selection, the texts are read too
