"""Rows of instructions and chats, from tables or reviews, checked one by one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets as hf
import pyarrow as pa

from fabric_ladder.data.cache import map_batches
from fabric_ladder.data.rows import find_columns, list_columns, read_tables, read_text, write_checked
from fabric_ladder.data.sources import REVIEWS, Source
from fabric_ladder.data.tables import read_reviews
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

COLUMNS = (("instruction", "output"), ("input", "target"), ("messages",))  # any of these makes a table usable
ROLES = ("system", "user", "assistant")
REVIEW_QUESTION = "Is this film review positive or negative?"
INSTRUCTIONS = pa.schema(dict.fromkeys(("instruction", "input", "output"), pa.string()))
MESSAGES = pa.list_(pa.struct(dict.fromkeys(("role", "content"), pa.string())))
CHATS = pa.schema({"messages": MESSAGES, "location": pa.string()})


def read_instructions(settings: DataSettings, source: Source, scratch: Path) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Return the splits that the source has, and notices of rows that are left out.

    The columns are `instruction`, `input` and `output`, or `messages` and `location` (file and row, for the notices).
    """
    if source.key[0] in REVIEWS:
        reviews = read_reviews(settings, source, scratch)
        return {split: map_batches(table, _ask, f"asked-{split}", scratch) for split, table in reviews.items()}, []
    splits, notices, named = {}, [], {}
    for split, tables in read_tables(settings, source, scratch, notices).items():
        parts = []
        for name, table in tables.items():
            columns, rows, hint = find_columns(table, name)
            check, schema = _form_of(columns, name, hint)
            target = scratch / f"{split}-{len(parts)}.arrow"
            parts.append(write_checked(rows, name, check, schema, target, settings, notices))
            named.setdefault(tuple(schema.names), name)
        splits[split] = hf.concatenate_datasets(parts) if len(parts) > 1 else parts[0]
        if len(named) > 1:
            raise UserError(f"{' and '.join(named.values())} are of two forms: give messages or instructions alone")
    return splits, notices


def _ask(reviews: dict[str, list]) -> dict[str, list]:
    """Make instructions of labelled reviews."""
    answers = ["positive" if label else "negative" for label in reviews["label"]]
    return {"instruction": [REVIEW_QUESTION] * len(answers), "input": reviews["text"], "output": answers}


def _form_of(columns: list[str], name: str, hint: str) -> tuple[Callable[[str, dict], dict], pa.Schema]:
    """Return how rows with these columns are checked, and what is written of them; `hint` is of `find_columns`."""
    form = next((form for form in COLUMNS if {*columns} >= {*form}), None)
    if form is None:
        raise UserError(
            f"{name} has the columns {list_columns(columns)}{hint}: instructions are read as "
            "instruction, output and perhaps input, as input and target, or as messages"
        )
    if form == ("messages",):
        return lambda location, row: {"messages": _check_chat(row), "location": f"{name}, {location}"}, CHATS
    return partial(_check_pair, question=form[0], answer=form[1]), INSTRUCTIONS


def _check_pair(_: str, row: dict, question: str, answer: str) -> dict[str, str]:
    texts = {"instruction": read_text(row, question), "input": "", "output": read_text(row, answer)}
    if question != "input":
        texts["input"] = read_text(row, "input", may_be_empty=True)
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
        content = read_text(message, "content", f" in message {number}", may_be_empty=role == "system")
        chat.append({"role": role, "content": content})
    roles = [message["role"] for message in chat]
    if "assistant" not in roles:
        raise ValueError("no message of the assistant")
    if roles[0] == "assistant":
        raise ValueError("the first message is the assistant's")
    return chat
