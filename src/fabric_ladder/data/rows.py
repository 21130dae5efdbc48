"""Rows of tables, from files of every kind and the Hub, and what is wrong with them."""

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
Rows = Iterator[tuple[str, dict | ValueError]]  # where a row is in its file, and the row, or why it is none


class Table(NamedTuple):
    """A file, or a split of a data set on the Hub.

    Attributes:
        rows: Its rows, which are read as they are taken.
        features: Types of the columns by their names, of Parquet and the Hub.
    """

    rows: Rows
    features: dict = {}  # noqa: RUF012


def read_tables(
    settings: DataSettings, source: Source, scratch: Path, notices: list[str], wanted: tuple[str, ...] = ()
) -> dict[str, dict[str, Table]]:
    """Return the tables of each split by their names; `notices` gets what is left out.

    `wanted` are the columns that will be used; others are not read where that saves anything.
    """
    if source.files is not None:
        names = settings.column_names and [name.strip() for name in settings.column_names.split(",")]
        return {
            split: {str(path): read_file(path, names, wanted) for path in paths}
            for split, paths in source.files.items()
        }
    tables = {}
    for split, table in load_hub(settings, scratch, notices).items():
        chosen = table.select_columns(list(wanted)) if {*wanted} <= {*table.column_names} and wanted else table
        tables[split] = {f"{settings.dataset} ({split})": Table(table_rows(chosen), table.features)}
    return tables


def read_file(path: Path, names: list[str] | None = None, wanted: tuple[str, ...] = ()) -> Table:
    """Return a file as a table.

    Args:
        path: The file.
        names: Of the columns of a CSV or TSV file that has no header.
        wanted: See `read_tables`.
    """
    kind = file_format(path)
    if kind is None:
        raise UserError(f"{path}: files of this kind are not read, only {', '.join(FILE_FORMATS)}")
    if names and kind not in SEPARATORS:
        raise UserError(f"--column_names names the columns of CSV and TSV files without a header, not those of {path}")
    if kind != "parquet":
        return Table(_text_rows(path, kind, names))
    with reading(path, kind):
        schema = pq.read_schema(path, memory_map=True)
        _refuse_twins(schema.names)
        if wanted:  # others may be of types that datasets does not have
            schema = pa.schema([schema.field(name) for name in wanted if name in schema.names], schema.metadata)
        return Table(_parquet_rows(path, wanted), hf.Features.from_arrow_schema(schema))


def table_rows(table: hf.Dataset) -> Rows:
    """Go through the rows of a data set."""
    return _batch_rows(table.with_format("arrow").iter(1000))


def _batch_rows(batches: Iterable[pa.Table | pa.RecordBatch]) -> Rows:
    for number, row in enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), 1):
        yield f"row {number}", row


def _parquet_rows(path: Path, wanted: tuple[str, ...]) -> Rows:
    """Read 1,000 rows at a time; without `memory_map`, all of a column of a row group is read at once."""
    with reading(path, "parquet"), pq.ParquetFile(path, memory_map=True) as file:
        columns = list(wanted) if wanted and {*wanted} <= {*file.schema_arrow.names} else None
        yield from _batch_rows(file.iter_batches(1000, columns=columns))


def _text_rows(path: Path, kind: str, names: list[str] | None) -> Rows:
    """Read CSV, whose values are all texts, or JSON, where a bad line is an error's value."""
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with reading(path, kind), opened(path, "rt", encoding="utf-8-sig", newline="") as file:
        yield from _csv_rows(file, SEPARATORS[kind], names) if kind in SEPARATORS else _json_rows(file)


def _csv_rows(file: TextIO, separator: str, names: list[str] | None) -> Rows:
    line = next((line for line in file if line.strip()), "")
    # as spreadsheets write CSV where the comma is for decimals; a line with an open quote is no whole record
    if separator not in line and line.count('"') % 2 == 0:
        separator = max(f"{separator};\t|", key=line.count)
    file.seek(0)
    options = {"sep": separator, "dtype": str, "keep_default_na": False}  # the text "None" is a text
    first = pd.read_csv(file, header=None, nrows=1, **options).iloc[0].tolist()
    if names and len(names) != len(first):
        raise UserError(f"--column_names gives {len(names)} names, but {file.name} has {len(first)} columns")
    if not names:
        _refuse_twins(first, header_hint(first, str(file.name)))
    file.seek(0)
    for chunk in pd.read_csv(file, header=None if names else 0, names=names, chunksize=1000, **options):
        if not isinstance(chunk.index, pd.RangeIndex):
            raise ValueError("its rows have more fields than its header: quote texts that hold commas")
        frame = chunk.astype(object).where(chunk.notna(), None)
        for index, row in zip(frame.index, frame.to_dict("records"), strict=True):
            yield f"row {index + 1}", SWALLOWED if separator == "\t" and _has_swallowed(row) else row


def _has_swallowed(row: dict[str, str | None]) -> bool:
    """Tell whether a quote in a tab-separated row was read as the start of a text, which then holds rows below it.

    The quote that has ended such a text leaves another one open.
    """
    return any(value and "\t" in value and "\n" in value and value.count('"') % 2 for value in row.values())


def _json_rows(file: TextIO) -> Rows:
    """Go through a JSON list of objects, or objects of a line each."""
    first = next((line for line in file if line.strip()), "").lstrip()[:1]
    file.seek(0)
    if first == "[":
        for number, row in enumerate(json.load(file, object_pairs_hook=_without_twins), 1):
            yield f"row {number}", row if isinstance(row, dict) else ValueError("no JSON object")
        return
    for number, line in enumerate(map(str.strip, file), 1):
        if line:
            try:
                row = json.loads(line, object_pairs_hook=_without_twins)
            except json.JSONDecodeError as error:
                row = ValueError(f"no JSON ({error.msg}, column {error.colno})")
            except (ValueError, RecursionError) as error:
                row = ValueError(f"no JSON ({first_line(error)})")
            yield f"line {number}", row if isinstance(row, (dict, ValueError)) else ValueError("no JSON object")


def _without_twins(pairs: list[tuple[str, object]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        _refuse_twins([name for name, _ in pairs])
    return row


def _refuse_twins(names: list[str], hint: str = "") -> None:
    for name, count in Counter(names).items():
        if count > 1 and name:
            raise ValueError(f"{count} columns are named {name[:40]!r}{hint or ': rename all but one'}")


def list_columns(columns: list[str]) -> str:
    """Return the columns in few words."""
    return ", ".join(f"{column:.40}" for column in columns[:12]) + (", …" if len(columns) > 12 else "")


def header_hint(columns: list[str], name: str, rows: Iterable[dict] = ()) -> str:
    """Return what to do about a CSV file whose column names look like data; an empty text for any other file.

    So they do where they are numbers or sentences, or where one stands in its column once more, as labels do.

    Args:
        columns: Names of the columns.
        name: Of the file.
        rows: Some of those below.
    """
    if file_format(Path(name)) not in SEPARATORS:
        return ""
    likely = any(NUMBER.fullmatch(column) or len(column) > 60 or len(column.split()) > 5 for column in columns)
    if not likely and not any(value == column for row in rows for column, value in row.items()):
        return ""
    return ": the first row looks like data; name the columns, from the left, say --column_names label,title,text"


@contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
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
    except Exception as error:  # parsers raise errors of many kinds
        raise UserError(f"{path} cannot be read as {kind} ({first_line(error)})") from error


def find_columns(table: Table, name: str) -> tuple[list[str], Rows, str]:
    """Return the columns that the first rows of what is called `name` have, all rows, and `header_hint`."""
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
    rows: Rows, name: str, check: Callable[[str, dict], dict], schema: pa.Schema, target: Path, settings: DataSettings,
    notices: list[str],
) -> hf.Dataset:  # fmt: skip
    """Write the rows of what is called `name` to the file `target`, and map it; `notices` gets what is left out.

    `check` gets where a row is, and the row, and returns what to write, or raises ValueError.
    """
    bad, total = [], 0

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
    """Return the text in a column of a row, or raise ValueError."""
    text = "" if row.get(column) is None else row[column]
    if not isinstance(text, str):
        raise ValueError(f"{column}{location} is {text!r:.40}, not text")
    if not (may_be_empty or text.strip()):
        raise ValueError(f"no {column}{location}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{column}{location} holds half a character (a lone surrogate)") from None
    return text


def note_bad_samples(bad: list[tuple[str, str]], total: int, problem: str, settings: DataSettings) -> list[str]:
    """Return the notice, if any, that bad samples (names with reasons) are left out, or refuse them."""
    if not bad:
        return []
    examples = "; ".join(f"{name}: {reason}" for name, reason in bad[:3]) + ("; …" if len(bad) > 3 else "")
    found = f"{len(bad):,} of {total:,} {problem} ({examples})"
    if len(bad) == total:
        raise UserError(f"nothing is left: {found}")
    if settings.bad_samples == "refuse":
        raise UserError(f"{found}: fix or remove them, or leave them out with --bad_samples skip")
    return [f"{found} and are left out"]
