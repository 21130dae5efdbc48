"""Read rows of tables from files and the Hub, check them one by one, and report the bad ones."""

import gzip
import itertools
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TextIO

import datasets as hf
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from fabric_ladder.data.cache import write_rows
from fabric_ladder.data.hub import load_hub
from fabric_ladder.data.sources import FILE_FORMATS, SEPARATORS, Source, file_format
from fabric_ladder.errors import UserError, first_line
from fabric_ladder.settings import DataSettings

NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")
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


def read_tables(
    settings: DataSettings, source: Source, scratch: Path, notices: list[str], wanted: tuple[str, ...] = ()
) -> dict[str, dict[str, Table]]:
    """Return the tables of each split by their names; `notices` gets a line about each split that is left out.

    Args:
        settings: `dataset` and `column_names` are used.
        source: The files, or a name on the Hub.
        scratch: Folder for downloads.
        notices: Lines that the user should read.
        wanted: The columns to read; all if empty.
    """
    if source.files is not None:
        names = settings.column_names and [name.strip() for name in settings.column_names.split(",")]
        return {
            split: {str(path): read_file(path, names, wanted) for path in paths}
            for split, paths in source.files.items()
        }
    tables = {}
    for split, table in load_hub(settings, source.key[-1], scratch, notices).items():
        chosen = table.select_columns(list(wanted)) if {*wanted} <= {*table.column_names} and wanted else table
        tables[split] = {f"{settings.dataset} ({split})": Table(table_rows(chosen), table.features)}
    return tables


def read_file(path: Path, names: list[str] | None = None, wanted: tuple[str, ...] = ()) -> Table:
    """Return a file as a table.

    Args:
        path: The file.
        names: Column names for a CSV or TSV file without a header.
        wanted: See `read_tables`.
    """
    kind = file_format(path)
    if kind is None:
        raise UserError(f"{path}: files of this kind cannot be read, only {', '.join(FILE_FORMATS)}")
    if names and kind not in SEPARATORS:
        raise UserError(f"--column_names is for CSV and TSV files without a header, not for {path}")
    if kind != "parquet":
        return Table(_text_rows(path, kind, names))
    with reading(path, kind):
        schema = pq.read_schema(path, memory_map=True)
        if wanted:  # `datasets` does not support the types of all other columns
            schema = pa.schema([schema.field(name) for name in wanted if name in schema.names], schema.metadata)
        return Table(_parquet_rows(path, wanted), hf.Features.from_arrow_schema(schema))


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
    # spreadsheets write semicolons where the comma is for decimals; a line with an open quote is only part of a record
    if separator not in line and line.count('"') % 2 == 0:
        separator = max(f"{separator};\t|", key=line.count)
    file.seek(0)
    options = {"sep": separator, "dtype": str, "keep_default_na": False}  # the text "None" is a text
    first = pd.read_csv(file, header=None, nrows=1, **options).iloc[0].tolist()
    if names and len(names) != len(first):
        raise UserError(f"--column_names gives {len(names)} names, but {file.name} has {len(first)} columns")
    if not names:
        twins = [name for name, count in Counter(first).items() if name and count > 1]
        if twins:
            hint = header_hint(first, str(file.name)) or ": rename all except one"
            raise ValueError(f"several columns are named {twins[0][:40]!r}{hint}")
    file.seek(0)
    for chunk in pd.read_csv(file, header=None if names else 0, names=names, chunksize=1000, **options):
        if not isinstance(chunk.index, pd.RangeIndex):
            raise ValueError("its rows have more fields than its header: quote texts that hold commas")
        frame = chunk.astype(object).where(chunk.notna(), None)
        for index, row in zip(frame.index, frame.to_dict("records"), strict=True):
            yield f"row {index + 1}", SWALLOWED if separator == "\t" and _has_swallowed(row) else row


def _has_swallowed(row: dict[str, str | None]) -> bool:
    """Return whether a text of a tab-separated row begins with a lone quote, so that it has swallowed other rows.

    Such a text ends at the next lone quote, and holds the tabs and line ends between the two.
    """
    return any(value and "\t" in value and "\n" in value and value.count('"') % 2 for value in row.values())


def _json_rows(file: TextIO) -> Rows:
    """Yield the objects of a JSON list, or one object per line."""
    first = next((line for line in file if line.strip()), "").lstrip()[:1]
    file.seek(0)
    if first == "[":
        for number, row in enumerate(json.load(file), 1):
            yield f"row {number}", row if isinstance(row, dict) else ValueError("not a JSON object")
        return
    for number, line in enumerate(map(str.strip, file), 1):
        if line:
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                row = ValueError(f"not JSON ({error.msg}, column {error.colno})")
            except (ValueError, RecursionError) as error:
                row = ValueError(f"not JSON ({first_line(error)})")
            yield f"line {number}", row if isinstance(row, (dict, ValueError)) else ValueError("not a JSON object")


def list_columns(columns: list[str]) -> str:
    """Return the names of at most 12 columns."""
    return ", ".join(f"{column:.40}" for column in columns[:12]) + (", …" if len(columns) > 12 else "")


def header_hint(columns: list[str], name: str, rows: Iterable[dict] = ()) -> str:
    """Return advice about a CSV file whose column names look like data, or an empty text.

    Column names look like data if they are numbers or sentences, or if one occurs again in its column, as labels do.

    Args:
        columns: Names of the columns.
        name: Name of the file.
        rows: Some rows of the file.
    """
    if file_format(Path(name)) not in SEPARATORS:
        return ""
    likely = any(NUMBER.fullmatch(column) or len(column) > 60 or len(column.split()) > 5 for column in columns)
    if not likely and not any(value == column for row in rows for column, value in row.items()):
        return ""
    return ": the first row looks like data; name the columns from the left, e.g. --column_names label,title,text"


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Turn an error about the content of a file into a one-line UserError."""
    try:
        if path.stat().st_size == 0:
            raise UserError(f"{path} is empty")
        yield
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 (byte {error.object[error.start]:#x}): convert it, e.g. with iconv"
        ) from error
    except UserError:
        raise
    except OSError as error:
        raise UserError(f"cannot read {path} ({first_line(error)})") from error
    except Exception as error:  # parsers raise errors of many kinds
        raise UserError(f"{path} cannot be read as {kind} ({first_line(error)})") from error


def find_columns(table: Table, name: str) -> tuple[list[str], Rows, str]:
    """Return the columns of a table, called `name`, by its first rows; all its rows; and the `header_hint`."""
    first = list(itertools.islice(table.rows, 1000))
    read = [row for _, row in first if isinstance(row, dict)]
    found = dict.fromkeys(column for row in read for column in row)
    if not found:
        if not first:
            below = " below the header" if {".csv", ".tsv"} & {*Path(name).suffixes} else ""
            raise UserError(f"{name} holds no rows{below}: there is nothing to learn")
        reasons = "; ".join(f"{location}: {row}" for location, row in first[:3])
        raise UserError(f"{name} holds no rows that can be read ({reasons}): give a table, or JSON objects")
    return list(found), itertools.chain(first, table.rows), header_hint(list(found), name, read)


def write_checked(
    rows: Rows,
    name: str,
    check: Callable[[str, dict], dict],
    schema: pa.Schema,
    target: Path,
    settings: DataSettings,
    notices: list[str],
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

    Raises:
        UserError: There are bad rows, and `bad_samples` is `refuse`; or all rows are bad.
    """
    bad = []
    total = 0

    def good() -> Iterator[dict]:
        nonlocal total
        for location, row in rows:
            total += 1
            try:
                if isinstance(row, ValueError):
                    raise row
                yield check(location, row)
            except ValueError as error:
                bad.append((location, str(error)))

    table = write_rows(target, schema, good())
    notices += note_bad_samples(bad, total, f"rows of {name} cannot be used", settings)
    return table


def read_text(row: dict, column: str, location: str = "", may_be_empty: bool = False) -> str:
    """Return the text in a column of a row, or raise ValueError with the reason."""
    text = "" if row.get(column) is None else row[column]
    if not isinstance(text, str):
        raise ValueError(f"{column}{location} is {shown(text)}, not text")
    if not (may_be_empty or text.strip()):
        raise ValueError(f"no {column}{location}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{column}{location} holds half a character (a lone surrogate)") from None
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
