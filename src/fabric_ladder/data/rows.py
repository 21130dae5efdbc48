"""Read rows of tables from files and the Hub, check them one by one, and report the bad ones."""

import gzip
import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TextIO

import datasets as hf
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fabric_ladder.data.cache import write_rows
from fabric_ladder.data.hub import has_labels, load_hub, stream_hub
from fabric_ladder.data.progress import Progress
from fabric_ladder.data.sources import SEPARATORS, Source, check_complete, read_format
from fabric_ladder.errors import UserError, refused
from fabric_ladder.settings import DataSettings

SWALLOWED = ValueError('an open quote has taken in the rows below: write such a text as "a text with ""quotes"""')
Rows = Iterator[tuple[str, dict | ValueError]]  # the location of a row in its file, and the row or its error


class Table(NamedTuple):
    """A file, or a split of a data set on the Hub.

    Attributes:
        rows: Its rows, read lazily.
        features: Types of the columns by their names, for Parquet and the Hub.
    """

    rows: Rows
    features: dict = {}  # noqa: RUF012


def read_parts(
    settings: DataSettings,
    source: Source,
    scratch: Path,
    notices: list[str],
    check_for: Callable[[str, dict, dict], tuple[Callable[[str, dict], dict], pa.Schema]],
    wanted: tuple[str, ...] = (),
    labels: tuple[str, ...] = (),
) -> dict[str, list[hf.Dataset]]:
    """Return the checked tables of each split: one per file, or one of a data set on the Hub.

    Args:
        settings: `dataset`, `column_names` and `bad_samples` are used.
        source: The files, or a name on the Hub.
        scratch: Folder for downloads and the checked tables.
        notices: Gets lines about splits and rows that are left out.
        check_for: Returns the check for rows and the schema of its result, given the name, the columns (with the
            first value of each) and the features of a table; see `write_checked`.
        wanted: The columns to read; all if empty.
        labels: The columns of the labels. A validation or test table without them, as competitions have it, is left
            out, unless an option or a stream needs it.
    """
    needed = settings.validation_file or settings.test_file or settings.stream_buffer
    parts = {}
    tables = _tables(settings, source, scratch, notices, wanted)
    if settings.stream_buffer:  # the training tables last: a refusal of a small table then costs no long pass
        tables = sorted(tables, key=lambda table: table[0] == "train")
    for split, name, table in tables:
        columns, rows = _find_columns(table, name)
        if labels and split != "train" and not needed and not {*labels} & {*columns}:
            notices.append(f"{name} has no column {labels[0]!r} and is left out")
            continue
        check, schema = check_for(name, columns, table.features)
        checked = parts.setdefault(split, [])
        target = scratch / f"{split}-{len(checked)}.arrow"
        keep = source.keep if split == "train" else iter
        checked.append(write_checked(rows, name, check, schema, target, settings, notices, keep))
    return parts


def _tables(
    settings: DataSettings, source: Source, scratch: Path, notices: list[str], wanted: tuple[str, ...]
) -> Iterator[tuple[str, str, Table]]:
    """Yield the split, the name and the content of each table."""
    for split, paths in (source.files or {}).items():
        for path in paths:
            yield split, str(path), read_file(path, settings.column_names, wanted)
    if source.key[0] == "files":
        return
    if settings.stream_buffer:
        loaded = stream_hub(settings, source.key[-1])
        own = [split for split in loaded if split not in source.files]
        with refused(f"cannot read {settings.dataset} from the Hub"):
            own = [split for split in own if split == "train" or has_labels(loaded[split], settings.label_column)]
        check_complete(settings, {*own, *source.files}, loaded)
        yield from ((split, *_hub_table(settings, loaded, split)) for split in own)
        return
    for split, table in load_hub(settings, source.key[-1], scratch, notices).items():
        chosen = table.select_columns(list(wanted)) if {*wanted} <= {*table.column_names} and wanted else table
        yield split, f"{settings.dataset} ({split})", Table(table_rows(chosen), table.features)


def read_file(path: Path, column_names: str | None = None, wanted: tuple[str, ...] = ()) -> Table:
    """Return a file as a table.

    Args:
        path: The file.
        column_names: As in the settings.
        wanted: See `read_parts`.
    """
    names = column_names and [name.strip() for name in column_names.split(",")]
    kind = read_format(path)
    if names and kind not in SEPARATORS:
        raise UserError(f"--column_names is for CSV and TSV files without a header, not for {path}")
    if kind != "parquet":
        return Table(_text_rows(path, kind, names))
    with reading(path, kind):
        schema = pq.read_schema(path, memory_map=True)
        if wanted:  # `datasets` does not support the types of all other columns
            schema = pa.schema([schema.field(name) for name in wanted if name in schema.names], schema.metadata)
        return Table(_parquet_rows(path, wanted), _known_features(schema))


def _known_features(schema: pa.Schema) -> hf.Features:
    """Return the features of a schema, except of columns whose type `datasets` does not support, e.g. maps."""
    known = []
    for field in schema:
        with suppress(ValueError):
            hf.Features.from_arrow_schema(pa.schema([field]))
            known.append(field)
    return hf.Features.from_arrow_schema(pa.schema(known, schema.metadata))


def read_training_rows(
    settings: DataSettings, source: Source, number: int, check_for: Callable, wanted: tuple[str, ...] = ()
) -> Iterator[dict]:
    """Yield the checked rows of a training table, and leave out the bad ones.

    Args:
        settings: See `read_parts`.
        source: See `read_parts`.
        number: The table's number among the training tables.
        check_for: See `read_parts`.
        wanted: See `read_parts`.
    """
    if "train" in source.files:
        path = source.files["train"][number]
        name, table = str(path), read_file(path, settings.column_names, wanted)
    else:
        name, table = _hub_table(settings, stream_hub(settings, source.key[-1]), "train")
    columns, rows = _find_columns(table, name)
    check, _ = check_for(name, columns, table.features)
    yield from _good_rows(rows, check, [])


def _hub_table(settings: DataSettings, loaded: dict[str, hf.IterableDataset], split: str) -> tuple[str, Table]:
    """Return the name and the content of a split that is downloaded while it is read."""
    name = f"{settings.dataset} ({split})"

    def rows() -> Rows:
        with refused(f"cannot read {name} from the Hub"):
            for number, row in enumerate(loaded[split], 1):
                yield f"row {number}", row

    return name, Table(rows(), loaded[split].features or {})


def table_rows(table: hf.Dataset) -> Rows:
    """Yield the rows of a data set."""
    return _batch_rows(table.with_format("arrow").iter(1000))


def _batch_rows(batches: Iterable[pa.Table | pa.RecordBatch]) -> Rows:
    for number, row in enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), 1):
        yield f"row {number}", row


def _parquet_rows(path: Path, wanted: tuple[str, ...]) -> Rows:
    """Read 1,000 rows at a time; without `memory_map`, a whole column of a row group would be read."""
    with reading(path, "parquet"), pq.ParquetFile(path, memory_map=True) as file:
        columns = list(wanted) if wanted and {*wanted} <= {*file.schema_arrow.names} else None
        yield from _batch_rows(file.iter_batches(1000, columns=columns))


def _text_rows(path: Path, kind: str, names: list[str] | None) -> Rows:
    """Read CSV, whose values are all texts, or JSON, where a bad line gives a ValueError."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with reading(path, kind), opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        yield from _csv_rows(file, SEPARATORS[kind], names) if kind in SEPARATORS else _json_rows(file)


def _csv_rows(file: TextIO, separator: str, names: list[str] | None) -> Rows:
    line = next((line for line in file if line.strip()), "")
    if separator not in line:  # spreadsheets write semicolons where the comma is for decimals
        separator = max(f"{separator};\t|", key=line.count)
    file.seek(0)
    options = {"sep": separator, "dtype": str, "keep_default_na": False}  # the text "None" is a text
    for chunk in _chunks(file, header=None if names else 0, names=names, chunksize=1000, **options):
        if not isinstance(chunk.index, pd.RangeIndex):
            raise ValueError("its rows have more fields than column names: quote texts that hold commas")
        if names and chunk.index[0] == 0 and [*chunk.iloc[0]] == names:
            raise ValueError("its first row holds the names of its columns: leave out --column_names")
        frame = chunk.astype(object).where(chunk.notna(), None)
        for index, row in zip(frame.index, frame.to_dict("records"), strict=True):
            yield f"row {index + 1}", SWALLOWED if separator == "\t" and _has_swallowed(row) else row


def _chunks(file: TextIO, **options) -> Iterator[pd.DataFrame]:
    """Yield the parts of a CSV file; raise ValueError with the line, and a remedy for a row with too many fields."""
    try:
        yield from pd.read_csv(file, **options)
    except pd.errors.ParserError as error:
        reason = str(error).removeprefix("Error tokenizing data. C error: ").strip()
        remedy = ": quote texts that hold commas, and write decimals with a point" * reason.startswith("Expected")
        raise ValueError(f"{reason}{remedy}") from error


def _has_swallowed(row: dict[str, str | None]) -> bool:
    """Return whether a text of a tab-separated row begins with a lone quote, so that it contains other rows.

    Such a text ends at the next lone quote. It contains the tabs and line ends between the two.
    """
    return any(value and "\t" in value and "\n" in value and value.count('"') % 2 for value in row.values())


def _json_rows(file: TextIO) -> Rows:
    """Yield the objects of a JSON list, or one object per line."""
    first = next((line for line in file if line.strip()), "").lstrip()[:1]
    file.seek(0)
    if first == "[":
        rows = ((f"row {number}", row) for number, row in enumerate(json.load(file), 1))
    else:
        rows = ((f"line {number}", _parse(line)) for number, line in enumerate(file, 1) if line.strip())
    for location, row in rows:
        yield location, row if isinstance(row, dict | ValueError) else ValueError("not a JSON object")


def _parse(line: str) -> object:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        return ValueError(f"not JSON ({error.msg}, column {error.colno})")


def list_columns(columns: Collection[str]) -> str:
    """Return the names of at most 12 columns."""
    return ", ".join(f"{column:.40}" for column in [*columns][:12]) + (", …" if len(columns) > 12 else "")


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn an error about the content of a file into a one-line UserError."""
    with refused(f"{path} cannot be read as {kind}"):
        try:
            yield
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            raise UserError(f"{path} is not UTF-8 (byte {byte:#x}): convert it, e.g. with iconv") from error


def _find_columns(table: Table, name: str) -> tuple[dict[str, object], Rows]:
    """Return the columns of a table, called `name`, by its first 1,000 rows; and all its rows.

    Each column comes with its first value other than None.
    """
    first = list(itertools.islice(table.rows, 1000))
    columns = {}
    for _, row in first:
        if isinstance(row, dict):
            columns |= {column: value for column, value in row.items() if columns.get(column) is None}
    if not columns:
        reasons = "; ".join(f"{location}: {row}" for location, row in first[:3]) or "it is empty, or has only a header"
        raise UserError(f"{name} holds no rows that can be read ({reasons}): give a table, or JSON objects")
    return columns, itertools.chain(first, table.rows)


def write_checked(
    rows: Rows,
    name: str,
    check: Callable[[str, dict], dict],
    schema: pa.Schema,
    target: Path,
    settings: DataSettings,
    notices: list[str],
    keep: Callable[[Iterator[dict]], Iterator[dict]] = iter,
) -> hf.Dataset:
    """Write the good rows of a table to an Arrow file, and map it.

    Args:
        rows: All rows.
        name: The table's name in messages.
        check: Returns the row to write, given the location and the row; raises ValueError for a bad row.
        schema: Types of the written columns.
        target: The Arrow file.
        settings: `bad_samples` is used.
        notices: Gets a line about rows that are left out.
        keep: Returns the good rows to write.

    Raises:
        UserError: There are bad rows, and `bad_samples` is `refuse`; or all rows are bad.
    """
    bad = []
    with Progress(f"Reading {name}") as progress:
        table = write_rows(target, schema, keep(_good_rows(progress.count(rows), check, bad)))
    notices += note_bad_samples(bad, progress.done, f"rows of {name} cannot be used", settings)
    return table


def _good_rows(rows: Rows, check: Callable[[str, dict], dict], bad: list[tuple[str, str]]) -> Iterator[dict]:
    """Yield the checked rows; `bad` gets the locations of all others, with the reasons."""
    for location, row in rows:
        try:
            if isinstance(row, ValueError):
                raise row
            yield check(location, row)
        except ValueError as error:
            bad.append((location, str(error)))


def read_text(row: dict, column: str, location: str = "", may_be_empty: bool = False) -> str:
    """Return the text in a column of a row, or raise ValueError with the reason."""
    text = "" if row.get(column) is None else row[column]
    if not isinstance(text, str):
        raise ValueError(f"{column}{location} is {shown(text)}, not text")
    if not (may_be_empty or text.strip()):
        raise ValueError(f"no {column}{location}")
    text.encode()  # refuses half of a surrogate pair, which JSON can hold
    return text


def shown(value: object) -> str:
    """Return the beginning of a value as JSON, for messages."""
    return json.dumps(value, ensure_ascii=False, default=str)[:40]


def note_bad_samples(bad: list[tuple[str, str]], total: int, problem: str, settings: DataSettings) -> list[str]:
    """Return a notice about bad samples (names with reasons) that are left out, or refuse them."""
    if not bad:
        return []
    examples = "; ".join(f"{name}: {reason}" for name, reason in bad[:3]) + ("; …" if len(bad) > 3 else "")
    found = f"{len(bad):,} of {total:,} {problem} ({examples})"
    if len(bad) == total:
        raise UserError(f"nothing is left: {found}")
    if settings.bad_samples == "refuse":
        raise UserError(f"{found}: fix or remove them, or leave them out with --bad_samples skip")
    return [f"{found} and are left out"]
