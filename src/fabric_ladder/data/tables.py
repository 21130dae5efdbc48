"""Splits of texts and their labels, read from tables or made up; what is wrong with them is refused."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import datasets as hf
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets.table import table_cast

from fabric_ladder.data.cache import write_batches
from fabric_ladder.data.hub import load_hub
from fabric_ladder.data.sources import FILE_FORMATS, REVIEWS, Source
from fabric_ladder.data.splits import SPLITS
from fabric_ladder.data.synthetic import synthetic_reviews
from fabric_ladder.errors import UserError, first_line
from fabric_ladder.settings import DataSettings

SYNTHETIC_SIZES = (4000, 500, 1000)
SHARES = {"validation": 0.1, "test": 0.2}  # what is split off where there is no such split


def read_splits(settings: DataSettings, source: Source, scratch: Path) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Return the splits that the source has, with the columns `text` and `label`, and the names of the classes."""
    if source.key[0] in REVIEWS:
        return read_reviews(settings, source, scratch), ["negative", "positive"]
    splits = {}
    if source.files is None:
        name = settings.dataset
        for split, table in load_hub(name, scratch).items():
            splits[split] = _text_and_label(table, f"{name} ({split})", settings)
    else:
        for split, paths in source.files.items():
            parts = [_text_and_label(read_table(path, scratch), str(path), settings) for path in paths]
            if len({str(part.features["label"]) for part in parts}) > 1:
                raise UserError(f"the {split} files hold labels of unlike kinds: make all integers or all strings")
            splits[split] = hf.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
    return number_labels(splits, "texts")


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


def read_table(path: Path, scratch: Path) -> hf.Dataset:
    """Read a table into an Arrow file in `scratch`, which is mapped from there however large it is."""
    file_format = FILE_FORMATS.get(path.suffix.lower())
    if file_format is None:
        raise UserError(f"{path}: files of this kind are not read, only {', '.join(FILE_FORMATS)}")
    with reading(path, file_format):
        if file_format == "parquet":
            return _read_parquet(path, scratch)
        with open(path, encoding="utf-8") as lines:  # `datasets` would guess another encoding, or die of it
            for _ in lines:
                pass
        options = {"keep_default_na": False} if file_format == "csv" else {}  # the text "None" is a text
        return hf.load_dataset(
            file_format, data_files=str(path), split="train", cache_dir=str(scratch / "files"), **options
        )


def _read_parquet(path: Path, scratch: Path) -> hf.Dataset:
    """Copy 1,000 rows at a time; `datasets` would have all of a row group in memory, and often a file is one."""
    with pq.ParquetFile(path, memory_map=True) as file:  # else all of a column of a row group is read at once
        if file.metadata.num_rows == 0:
            raise UserError(f"{path} holds no rows")
        schema = hf.Features.from_arrow_schema(file.schema_arrow).arrow_schema
        batches = (table_cast(pa.table(batch), schema) for batch in file.iter_batches(1000))
        return write_batches(scratch / f"{uuid4().hex}.arrow", schema, batches)


@contextmanager
def reading(path: Path, file_format: str) -> Iterator[None]:
    """Say in one line why a file cannot be read."""
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty")
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 (byte {error.object[error.start]:#x}): convert it, say by iconv"
        ) from error
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path} ({first_line(error)})") from error
    except Exception as error:  # parsers raise errors of many kinds, and `datasets` wraps them
        raise UserError(f"{path} cannot be read as {file_format} ({first_line(error.__cause__ or error)})") from error


def _text_and_label(table: hf.Dataset, name: str, settings: DataSettings) -> hf.Dataset:
    """Check the two columns that are used and name them `text` and `label`."""
    if settings.text_column == settings.label_column:
        raise UserError(f"--text_column and --label_column name the same column, {settings.text_column!r}")
    for column in (settings.text_column, settings.label_column):
        check_column(table, column, name, "--text_column or --label_column")
    table = table.select_columns([settings.text_column, settings.label_column])
    table = table.rename_columns({settings.text_column: "text", settings.label_column: "label"})
    text = table.data.column("text")
    if not str(text.type).endswith("string"):
        raise UserError(f"{name}: column {settings.text_column!r} holds {text.type}, not text")
    empty = [pc.fill_null(pc.equal(pc.utf8_trim_whitespace(chunk), ""), True) for chunk in text.iterchunks()]
    _refuse_rows(pa.chunked_array(empty, pa.bool_()), f"{name}: empty text")
    check_labels(table, name, settings)
    return table


def check_column(table: hf.Dataset, column: str, name: str, options: str) -> None:
    """Refuse a table, called `name`, that lacks a column which the `options` choose."""
    if column not in table.column_names:
        raise UserError(f"{name} has no column {column!r}, only {', '.join(table.column_names)}: set {options}")


def check_labels(table: hf.Dataset, name: str, settings: DataSettings) -> None:
    """Refuse a column `label` that holds no labels, or not in every row."""
    label = table.data.column("label")
    if not (pa.types.is_integer(label.type) or pa.types.is_boolean(label.type) or str(label.type).endswith("string")):
        raise UserError(f"{name}: column {settings.label_column!r} holds {label.type}, not integers or strings")
    empty = pc.is_null(label)
    if str(label.type).endswith("string"):
        empty = pc.or_(empty, pc.fill_null(pc.equal(label, ""), False))
    elif isinstance(table.features["label"], hf.ClassLabel):
        empty = pc.or_(empty, pc.less(label, 0))
    _refuse_rows(empty, f"{name}: no label")


def _refuse_rows(bad: pa.ChunkedArray, problem: str) -> None:
    rows = np.flatnonzero(bad.to_numpy())
    if len(rows):
        numbers = ", ".join(str(row + 1) for row in rows[:5]) + (", …" if len(rows) > 5 else "")
        raise UserError(f"{problem} in {len(rows):,} of {len(bad):,} rows (row {numbers}): fill or remove them")


def number_labels(splits: dict[str, hf.Dataset], samples: str) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Replace the labels of `samples` (texts or images) by 0, 1, … in the order of their values.

    Numbers are ordered by size, strings by letters. The names of the labels are returned, too.
    """
    feature = splits["train"].features["label"]
    if isinstance(feature, hf.ClassLabel):
        return {split: table.cast_column("label", hf.Value("int64")) for split, table in splits.items()}, feature.names
    values = sorted(pc.unique(splits["train"].data.column("label")).to_pylist())
    if len(values) < 2:
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
    order = np.random.default_rng(settings.split_seed).permutation(len(train))
    for split, share in SHARES.items():
        if split not in splits:
            size = max(1, round(share * len(train)))
            splits[split], order = train.select(order[:size]), order[size:]
    if len(order) == 0:
        raise UserError(f"{len(train)} {samples} are too few to be split into train, validation and test")
    if len(order) < len(train):
        splits["train"] = train.select(order)
    for split in SPLITS:
        wanted = getattr(settings, f"{split}_samples")
        if wanted and wanted < len(splits[split]):
            splits[split] = splits[split].shuffle(settings.split_seed).select(range(wanted))
    if "label" in splits["train"].column_names:
        labels = (set(batch["label"]) for batch in splits["train"].select_columns("label").iter(1000))
        first = next(labels)
        if len(first) == 1 and all(more == first for more in labels):
            raise UserError(f"the training {samples} that are left have a single label: raise --train_samples")
    return splits


def note_bad_samples(bad: list[tuple[str, str]], total: int, problem: str, settings: DataSettings) -> list[str]:
    """Return the notice, if any, that bad samples (names with reasons) are left out, or refuse them."""
    if not bad:
        return []
    examples = "; ".join(f"{name}: {reason}" for name, reason in bad[:3]) + ("; …" if len(bad) > 3 else "")
    found = f"{len(bad):,} of {total:,} {problem} ({examples})"
    if settings.bad_samples == "refuse":
        raise UserError(f"{found}: fix or remove them, or leave them out with --bad_samples skip")
    return [f"{found} and are left out"]
