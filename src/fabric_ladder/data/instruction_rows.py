"""Rows of instructions and chats: read from files, the Hub or reviews, and checked one by one."""

import itertools
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import datasets as hf
import pandas as pd
import pyarrow as pa

from fabric_ladder.data.cache import map_batches, write_rows
from fabric_ladder.data.hub import load_hub
from fabric_ladder.data.sources import FILE_FORMATS, REVIEWS, Source
from fabric_ladder.data.tables import note_bad_samples, read_reviews, read_table, reading
from fabric_ladder.errors import UserError, first_line
from fabric_ladder.settings import DataSettings

COLUMNS = (("instruction", "output"), ("input", "target"), ("messages",))  # any of these makes a table usable
ROLES = ("system", "user", "assistant")
REVIEW_QUESTION = "Is this film review positive or negative?"
INSTRUCTIONS = pa.schema(dict.fromkeys(("instruction", "input", "output"), pa.string()))
MESSAGES = pa.list_(pa.struct(dict.fromkeys(("role", "content"), pa.string())))
CHATS = pa.schema({"messages": MESSAGES, "location": pa.string()})
Rows = Iterator[tuple[str, dict | ValueError]]  # where a row is in its file, and the row, or why it is none


def read_instructions(settings: DataSettings, source: Source, scratch: Path) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Return the splits that the source has, and notices of rows that are left out.

    The columns are `instruction`, `input` and `output`, or `messages` and `location` (file and row, for the notices).
    """
    if source.key[0] in REVIEWS:
        reviews = read_reviews(settings, source, scratch)
        return {split: map_batches(table, _ask, f"asked-{split}", scratch) for split, table in reviews.items()}, []
    if source.files is None:
        name = settings.dataset
        tables = {split: {f"{name} ({split})": _table_rows(table)} for split, table in load_hub(name, scratch).items()}
    else:
        tables = {
            split: {str(path): file_rows(path, scratch) for path in paths} for split, paths in source.files.items()
        }
    splits, notices, named = {}, [], {}
    for split, rows_of in tables.items():
        parts = []
        for name, rows in rows_of.items():
            parts.append(_read_rows(rows, name, scratch / f"{split}-{len(parts)}.arrow", settings, notices))
            named.setdefault(tuple(parts[-1].column_names), name)
        splits[split] = hf.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
        if len(named) > 1:
            raise UserError(f"{' and '.join(named.values())} are of two forms: give messages or instructions alone")
    return splits, notices


def _ask(reviews: dict[str, list]) -> dict[str, list]:
    """Make instructions of labelled reviews."""
    answers = ["positive" if label else "negative" for label in reviews["label"]]
    return {"instruction": [REVIEW_QUESTION] * len(answers), "input": reviews["text"], "output": answers}


def _read_rows(rows: Rows, name: str, target: Path, settings: DataSettings, notices: list[str]) -> hf.Dataset:
    """Check the rows of what is called `name` and write them to `target`; `notices` gets what is left out."""
    first = list(itertools.islice(rows, 1000))
    columns = _find_columns(first, name)
    bad, total = [], 0

    def good() -> Iterator[dict]:
        nonlocal total
        for location, row in itertools.chain(first, rows):
            total += 1
            try:
                if isinstance(row, ValueError):
                    raise row
                if columns == ("messages",):
                    checked = {"messages": _check_chat(row), "location": f"{name}, {location}"}
                else:
                    checked = _check_pair(row, *columns)
            except ValueError as error:
                bad.append((location, str(error)))
            else:
                yield checked

    table = write_rows(target, CHATS if columns == ("messages",) else INSTRUCTIONS, good())
    notices += note_bad_samples(bad, total, f"rows of {name} cannot be used", settings)
    if len(bad) == total:
        raise UserError(f"no row is left: {notices[-1]}")
    return table


def _find_columns(first: list[tuple[str, dict | ValueError]], name: str) -> tuple[str, ...]:
    """Return the columns of instructions or chats that the first rows have."""
    found = dict.fromkeys(column for _, row in first if isinstance(row, dict) for column in row)
    for columns in COLUMNS:
        if found.keys() >= set(columns):
            return columns
    reasons = "; ".join(f"{location}: {row}" for location, row in first[:3]) or "none"
    problem = f"has the columns {', '.join(found)}" if found else f"holds no rows that can be read ({reasons})"
    raise UserError(
        f"{name} {problem}: instructions are read as instruction, output and perhaps input, as input and target, or as "
        "messages"
    )


def _check_pair(row: dict, question: str, answer: str) -> dict[str, str]:
    texts = {"instruction": _text(row, question), "input": "", "output": _text(row, answer)}
    if question != "input":
        texts["input"] = _text(row, "input", may_be_empty=True)
    return texts


def _check_chat(row: dict) -> list[dict[str, str]]:
    messages = row.get("messages")
    if not isinstance(messages, list) or not messages:
        raise ValueError(f"messages is {messages!r:.40}, not a list of messages" if messages else "no messages")
    chat = []
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise ValueError(f"message {number} is {message!r:.40}, not role and content")
        role = message.get("role")
        if role not in ROLES:
            raise ValueError(f"message {number} has the role {role!r:.40}, not {', '.join(ROLES)}")
        content = _text(message, "content", f" in message {number}", may_be_empty=role == "system")
        chat.append({"role": role, "content": content})
    roles = [message["role"] for message in chat]
    if "assistant" not in roles:
        raise ValueError("no message of the assistant")
    if roles[0] == "assistant":
        raise ValueError("the first message is the assistant's")
    return chat


def _text(row: dict, name: str, location: str = "", may_be_empty: bool = False) -> str:
    text = "" if row.get(name) is None else row[name]
    if not isinstance(text, str):
        raise ValueError(f"{name}{location} is {text!r:.40}, not text")
    if not (may_be_empty or text.strip()):
        raise ValueError(f"no {name}{location}")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError(f"{name}{location} holds half a character (a lone surrogate)") from None
    return text


def file_rows(path: Path, scratch: Path) -> Rows:
    """Go through a file's rows; CSV values are all texts, and a bad JSON line is an error's value."""
    file_format = FILE_FORMATS.get(path.suffix.lower())
    if file_format == "json":
        with reading(path, file_format), open(path, encoding="utf-8-sig") as file:
            first = next((line for line in file if line.strip()), "").lstrip()[:1]
            file.seek(0)
            yield from _json_list(file) if first == "[" else _json_lines(file)
    elif file_format == "csv":
        with reading(path, file_format):
            for chunk in pd.read_csv(path, dtype=str, keep_default_na=False, encoding="utf-8", chunksize=1000):
                if not isinstance(chunk.index, pd.RangeIndex):
                    raise ValueError("its rows have more fields than its header: quote texts that hold commas")
                frame = chunk.astype(object).where(chunk.notna(), None)
                for index, row in zip(frame.index, frame.to_dict("records"), strict=True):
                    yield f"row {index + 1}", row
    else:
        yield from _table_rows(read_table(path, scratch))


def _table_rows(table: hf.Dataset) -> Rows:
    batches = table.with_format("arrow").iter(1000)
    for number, row in enumerate(itertools.chain.from_iterable(batch.to_pylist() for batch in batches), 1):
        yield f"row {number}", row


def _json_list(file: Iterable[str]) -> Rows:
    for number, row in enumerate(json.load(file), 1):
        yield f"row {number}", row if isinstance(row, dict) else ValueError("no JSON object")


def _json_lines(file: Iterable[str]) -> Rows:
    for number, line in enumerate(map(str.strip, file), 1):
        if line:
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                row = ValueError(f"no JSON ({error.msg}, column {error.colno})")
            except (ValueError, RecursionError) as error:
                row = ValueError(f"no JSON ({first_line(error)})")
            yield f"line {number}", row if isinstance(row, (dict, ValueError)) else ValueError("no JSON object")
