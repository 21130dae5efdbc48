"""Read rows of tables from files and the Hub, check them one by one, and report the bad ones."""

import csv
import gzip
import itertools
import json
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TextIO

import datasets as hf
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from fabric_ladder.data.cache import progress_bar, write_rows
from fabric_ladder.data.hub import load_hub
from fabric_ladder.data.text_sources import (
    GZIP,
    IN_EXCEL,
    SEPARATORS,
    Source,
    content_problem,
    read_format,
    read_head,
)
from fabric_ladder.errors import UserError, refused
from fabric_ladder.settings import DataSettings

BAD_BYTE = re.compile("[\udc80-\udcff]")  # a byte that is not UTF-8, as `surrogateescape` reads it
BACKSLASHES = 'a quote in a text is written as \\", as MySQL and Spark do: write ""'
NUMBER = re.compile(r"[-+]?\d+([.,]\d+)?")
SENTENCE = re.compile(r"sent(ence)?s?[ _.-]*(#|ids?|idx|no|nr|num|number|index)?", re.IGNORECASE)  # a column
csv.field_size_limit(sys.maxsize)
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
            out, unless an option needs it.
    """
    needed = settings.validation_file or settings.test_file
    parts = {}
    notices += source.notices
    tables = _tables(settings, source, scratch, notices, wanted)
    for split, name, table in sorted(tables, key=lambda table: table[0] != "train"):
        columns, rows = find_columns(table, name)
        if labels and split != "train" and not needed:
            rows, missing = _unless_unlabelled(rows, columns, labels, parts["train"])
            if missing:
                notices.append(f"{name} has {missing} and is left out")
                continue
        check, schema = check_for(name, columns, table.features)
        checked = parts.setdefault(split, [])
        target = scratch / f"{split}-{len(checked)}.arrow"
        checked.append(write_checked(rows, name, check, schema, target, settings, notices))
    return parts


def _unless_unlabelled(
    rows: Rows, columns: dict, labels: tuple[str, ...], trained: list[hf.Dataset]
) -> tuple[Rows, str | None]:
    """Return the rows, and what is missing if no row has a label; -1 is none, as in GLUE, unless training has it."""
    if not {*labels} & {*columns}:
        return rows, f"no column {labels[0]!r}"
    missing = {"", "None", "nan"}
    values = pa.chunked_array([chunk for table in trained for chunk in table.data.column("label").chunks])
    values = pc.list_flatten(values) if pa.types.is_list(values.type) else values
    if not {"-1", "-1.0"} & {*map(str, pc.unique(values).to_pylist())}:
        missing |= {"-1", "-1.0"}
    first = []
    for each in rows:
        first.append(each)
        if isinstance(each[1], dict) and not {str(each[1].get(label)).strip() for label in labels} <= missing:
            return itertools.chain(first, rows), None
    return rows, f"no labels in {labels[0]!r}"


def _tables(
    settings: DataSettings, source: Source, scratch: Path, notices: list[str], wanted: tuple[str, ...]
) -> Iterator[tuple[str, str, Table]]:
    """Yield the split, the name and the content of each table."""
    for split, paths in (source.files or {}).items():
        for path in paths:
            yield split, str(path), read_file(path, settings.column_names, wanted)
    if source.key[0] == "files":
        return
    for split, table in load_hub(settings, source.key[-1], scratch, notices).items():
        chosen = table.select_columns(_needed_columns(table.column_names, wanted))
        yield split, f"{settings.dataset} ({split})", Table(table_rows(chosen), table.features)


def _needed_columns(names: list[str], wanted: tuple[str, ...]) -> list[str]:
    """Return the wanted columns and those that number sentences; all if a wanted one is missing."""
    found = [name for name in names if name in wanted or SENTENCE.fullmatch(name)]
    return found if wanted and {*wanted} <= {*found} else names


def read_file(path: Path, column_names: str | None = None, wanted: tuple[str, ...] = ()) -> Table:
    """Return a file as a table, with the columns that `read_parts` calls wanted."""
    names = column_names and [name.strip() for name in column_names.split(",")]
    kind = read_format(path)
    if names and kind not in SEPARATORS:
        raise UserError(f"--column_names is for CSV and TSV files without a header, not for {path}")
    if problem := content_problem(read_head(path), kind):
        raise UserError(f"{path} is {problem}")
    if kind == "arrow":
        with reading(path, kind):
            table = hf.Dataset.from_file(str(path))
        return Table(table_rows(table), table.features)
    if kind != "parquet":
        return Table(_text_rows(path, kind, names, wanted))
    with reading(path, kind):
        schema = pq.read_schema(path, memory_map=True)
        check_names(schema.names, wanted)
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


def table_rows(table: hf.Dataset) -> Rows:
    """Yield the rows of a data set."""
    return _batch_rows(table.with_format("arrow").iter(1000))


def _batch_rows(batches: Iterable[pa.Table | pa.RecordBatch]) -> Rows:
    for number, row in enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), 1):
        yield f"row {number}", row


def _parquet_rows(path: Path, wanted: tuple[str, ...]) -> Rows:
    """Read 1,000 rows at a time; without `memory_map`, a whole column of a row group would be read."""
    with reading(path, "parquet"), pq.ParquetFile(path, memory_map=True) as file:
        yield from _batch_rows(file.iter_batches(1000, columns=_needed_columns(file.schema_arrow.names, wanted)))


def _text_rows(path: Path, kind: str, names: list[str] | None, wanted: tuple[str, ...]) -> Rows:
    """Read CSV, whose values are all texts, or JSON, where a bad line gives a ValueError."""
    opened = gzip.open if read_head(path).startswith(GZIP) else open
    with (
        reading(path, kind),
        opened(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as file,
    ):
        yield from _csv_rows(file, SEPARATORS[kind], names, wanted) if kind in SEPARATORS else _json_rows(file)


class _Record(NamedTuple):
    """A record of a CSV file: its number without the header, its first line, its text, and its fields or an error."""

    number: int
    line: int
    text: str
    fields: list[str] | ValueError


def _csv_rows(file: TextIO, separator: str, names: list[str] | None, wanted: tuple[str, ...]) -> Rows:
    """Yield the rows of a CSV file; a row with open quotes, too many fields, or the header again gives a ValueError."""
    numbered = ((number, line) for number, line in enumerate(file, 1) if number > 1 or line.strip() != "sep=;")
    first = next(((number, line) for number, line in numbered if line.strip()), (1, ""))
    while not names and first[1].startswith("#") and not {*wanted} & {*re.split(r"\W+", first[1])}:
        first = next(numbered, (1, ""))  # a comment
    line = first[1]
    if separator not in line:  # spreadsheets write semicolons where the comma is for decimals
        separator = max(f"{separator},;\t|", key=line.count)
    options = {"delimiter": separator, "skipinitialspace": f"{separator} " in line and not names}
    records = _records(itertools.chain([first], numbered), 0 if names else -1, options)
    header = names or _header(next(records, None), wanted)
    for part in iter(lambda: list(itertools.islice(records, 1000)), []):
        checked = [_check_record(record, len(header), separator) for record in part]
        single = [fields for fields in checked if isinstance(fields, list) and "\n" not in "".join(fields)]
        known = [{*column} for column in itertools.zip_longest(*single)]
        for record, row in zip(part, checked, strict=True):
            if isinstance(row, list):
                if names and record.number == 0:
                    check_first_row(row, names)
                if [*map(str.strip, row)] == header:
                    row = ValueError("it repeats the header")
                elif any(_has_swallowed(row, column, known, separator) for column in range(len(row))):
                    row = _open_quote(record)
                else:
                    row = {name: cell for name, cell in itertools.zip_longest(header, row) if name}
            yield f"row {record.number + 1}", row


def _records(lines: Iterator[tuple[int, str]], number: int, options: dict) -> Iterator[_Record]:
    """Yield the records of numbered lines; `number` is that of the first record."""
    taken = []

    def take() -> Iterator[str]:
        for line in lines:
            taken.append(line)
            yield line[1]

    reader = csv.reader(take(), strict=True, **options)
    while True:
        try:
            fields = next(reader, None)
        except csv.Error as error:
            fields = ValueError(str(error))
        if not taken:
            return
        text = "".join(line for _, line in taken)
        if text.strip():
            yield _Record(number, taken[0][0], text, fields)
            number += 1
        taken.clear()


def _header(record: _Record | None, wanted: tuple[str, ...]) -> list[str]:
    """Return the names of the columns."""
    if record is None:
        raise ValueError("it is empty")
    if isinstance(record.fields, ValueError):
        raise ValueError(f"its header: {record.fields}")
    if bad := _bad_byte(record.text):
        raise bad
    names = [name.strip().lstrip("\ufeff") for name in record.fields]
    check_names(names, wanted)
    return names


def check_names(names: list[str], wanted: tuple[str, ...]) -> None:
    """Refuse several columns of one name, if they are read."""
    if twice := [name for name in names if name and names.count(name) > 1 and (not wanted or name in wanted)]:
        raise ValueError(f"{names.count(twice[0])} columns are called {twice[0]!r}: rename or remove one")


def check_first_row(row: list[str], names: list[str]) -> None:
    """Refuse `--column_names` for a file with a header: its first row has the names, in any order and case."""
    if sorted(each.strip().casefold() for each in row) == sorted(map(str.casefold, names)):
        raise ValueError("its first row holds the names of its columns: leave out --column_names")


def _check_record(record: _Record, width: int, separator: str) -> list[str] | ValueError:
    """Return the fields of a record, at most `width`, or the reason why they cannot be known."""
    fields = record.fields
    line = record.text.strip("\r\n")
    escaped = '\\"' in line
    if isinstance(fields, ValueError) and "\n" not in line and "\r" not in line:
        literal = line.split(separator)  # quotes within a text such as "Up" is a film
        fields = literal if len(literal) == width and not escaped else fields
    elif f'{separator} "' in line:
        with suppress(csv.Error):
            spaced = next(
                csv.reader(record.text.splitlines(True), delimiter=separator, skipinitialspace=True, strict=True)
            )
            fields = spaced if len(spaced) == width else fields
    if isinstance(fields, list):
        while len(fields) > width and not fields[-1].strip():
            fields = fields[:-1]
        if len(fields) <= width:
            return _bad_byte(line) or fields
    if isinstance(fields, ValueError) or escaped:  # the next rows cannot be found
        raise ValueError(f"row {record.number + 1}: {BACKSLASHES if escaped else _open_quote(record)}")
    found = f"more fields than column names ({len(fields)} instead of {width})"
    return ValueError(f"{found}: quote texts that hold commas, and write decimals with a point")


def _bad_byte(text: str) -> ValueError | None:
    found = None if text.isascii() else BAD_BYTE.search(text)
    return found and ValueError(f"not UTF-8 (byte {ord(found[0]) - 0xDC00:#x}): save it as UTF-8 ({IN_EXCEL})")


def _open_quote(record: _Record) -> ValueError:
    below = len(record.text.splitlines()) - 1
    taken = f" has taken in the {below} lines below" if below else ""
    return ValueError(f'an open quote in line {record.line}{taken}: write such a text as "a text with ""quotes"""')


def _has_swallowed(fields: list[str], column: int, known: list[set[str]], separator: str) -> bool:
    """Return whether a field that begins with a lone quote contains other rows.

    Such a field ends at the next lone quote. Its first line then ends like a row, and its last line begins like a row,
    with as many separators and with values that the other rows have in these columns, such as labels.
    """
    lines = fields[column].splitlines()
    if len(lines) < 2 or lines[0].count(separator) != len(fields) - 1 - column or lines[-1].count(separator) != column:
        return False
    inner = [line.count(separator) == len(fields) - 1 for line in lines[1:-1]]
    if 2 * sum(inner) < len(inner):
        return False
    cells = [*lines[-1].split(separator)[:column], fields[column], *lines[0].split(separator)[1:]]
    return separator == "\t" or any(
        cell.strip() in values or (cell and NUMBER.fullmatch(cell) and all(map(NUMBER.fullmatch, filter(None, values))))
        for number, (cell, values) in enumerate(zip(cells, known, strict=False))
        if number != column and cell.strip()
    )


def _json_rows(file: TextIO) -> Rows:
    """Yield the objects of a JSON list or table, one object per line, or objects over several lines each."""
    first = [line.strip() for line in itertools.islice(filter(str.strip, file), 2)]
    single = len(first) == 1 and isinstance(_parse(first[0]), dict)
    spread = len(first) == 2 and isinstance(_parse(first[0]), ValueError) and not first[1].startswith(("{", "["))
    file.seek(0)
    if single or spread or (first and first[0].startswith("[")):
        rows = ((f"row {number}", row) for number, row in enumerate(_objects(file.read()), 1))
    else:
        rows = ((f"line {number}", _parse(line)) for number, line in enumerate(file, 1) if line.strip())
    for location, row in rows:
        yield location, row if isinstance(row, dict | ValueError) else ValueError("not a JSON object")


def _parse(line: str) -> object:
    try:
        return _bad_byte(line) or json.loads(line.strip().removesuffix(","), object_pairs_hook=_object)
    except json.JSONDecodeError as error:
        return ValueError(f"not JSON ({error.msg}, column {error.colno})")
    except ValueError as error:
        return error


def _object(pairs: list[tuple[str, object]]) -> dict:
    row = dict(pairs)
    if len(row) < len(pairs):
        check_names([name for name, _ in pairs], ())
    return row


def _objects(text: str) -> list:
    """Return the rows of a JSON text: a list, objects one after another, or an object that holds all rows."""
    if bad := _bad_byte(text):
        raise bad
    decode, found = json.JSONDecoder(object_pairs_hook=_object).raw_decode, []
    between = re.compile(r"[\s,]*")
    place = between.match(text).end()
    while place < len(text):
        value, place = decode(text, place)
        found.append(value)
        place = between.match(text, place).end()
    if len(found) != 1:
        return found
    return found[0] if isinstance(found[0], list) else _unwrap(found[0])


def _unwrap(whole: dict) -> list:
    """Return the rows in the only object of a file: a list of rows, a table of pandas, or itself."""
    if {"columns", "data"} <= {*whole}:  # orient="split"
        return [dict(zip(whole["columns"], row, strict=True)) for row in whole["data"]]
    lists = [name for name, value in whole.items() if isinstance(value, list) and len(value) > 1 and _are_rows(value)]
    if len(lists) > 1:
        raise ValueError(f"its lists {', '.join(lists)} hold rows: write each to a file of its own")
    if lists:
        return whole[lists[0]]
    values = [*whole.values()]
    if values and all(isinstance(value, dict) and value and {*value} == {*values[0]} for value in values):
        if all(map(str.isdecimal, values[0])):  # columns
            return [{name: column[number] for name, column in whole.items()} for number in values[0]]
        if all(map(str.isdecimal, whole)):  # orient="index"
            return values
    return [whole]


def _are_rows(values: list) -> bool:
    """Return whether a list holds objects of the same keys that are not messages of a chat."""
    return all(isinstance(value, dict) and {*value} == {*values[0]} - {"role", "from"} for value in values)


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
            raise UserError(f"{path} is not UTF-8 (byte {byte:#x}): save it as UTF-8 ({IN_EXCEL})") from error


def find_columns(table: Table, name: str) -> tuple[dict[str, object], Rows]:
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
) -> hf.Dataset:
    """Write the good rows of the table `name` to an Arrow file, and map it; `notices` gets a line about the others.

    `check` returns the row to write, given the location and the row, and raises ValueError for a bad row.

    Raises:
        UserError: There are bad rows, and `bad_samples` is `refuse`; or all rows are bad.
    """
    bad = []
    table = write_rows(target, schema, _good_rows(progress_bar(f"Reading {name}", rows), check, bad))
    notices += note_bad_samples(bad, len(table) + len(bad), f"rows of {name} cannot be used", settings)
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
