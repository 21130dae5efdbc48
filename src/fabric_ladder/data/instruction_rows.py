"""Read rows of instructions and chats from tables or reviews, and check them one by one."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets as hf
import pyarrow as pa

from fabric_ladder.data.cache import map_batches
from fabric_ladder.data.rows import list_columns, read_parts, read_text, shown
from fabric_ladder.data.sources import REVIEWS, Source
from fabric_ladder.data.tables import read_reviews
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

CHAT_COLUMNS = ("messages", "conversations")  # a table with one of them holds chats, whatever else it has
PAIRS = (  # columns of the instruction, of its input, which may be missing, and of the answer; the first that fit count
    ("instruction", "input", "output"),
    ("instruction", "context", "response"),
    ("input", None, "target"),
    ("prompt", None, "response"),
    ("prompt", None, "completion"),
    ("question", None, "answer"),
    ("query", None, "response"),
)
ROLES = ("system", "user", "assistant")
SHAREGPT = {"human": "user", "gpt": "assistant"}  # in `from`, next to the names in ROLES
REVIEW_QUESTION = "Is this film review positive or negative?"
INSTRUCTIONS = pa.schema(dict.fromkeys(("instruction", "input", "output"), pa.string()))
MESSAGES = pa.list_(pa.struct(dict.fromkeys(("role", "content"), pa.string())))
CHATS = pa.schema({"messages": MESSAGES, "location": pa.string()})


def read_instructions(settings: DataSettings, source: Source, scratch: Path) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Return the splits of the source, and notices about rows that are left out.

    The columns are `instruction`, `input` and `output`, or `messages` and `location` (file and row, for the notices).
    """
    if source.key[0] in REVIEWS:
        reviews = read_reviews(settings, source, scratch)
        return {split: map_batches(table, _ask, f"asked-{split}", scratch) for split, table in reviews.items()}, []
    notices = []
    parts = read_parts(settings, source, scratch, notices, check_for)
    if len({str(table.column_names) for tables in parts.values() for table in tables}) > 1:
        raise UserError(f"{settings.dataset} has files of two forms: use only messages or only instructions")
    return {split: hf.concatenate_datasets(tables) for split, tables in parts.items()}, notices


def _ask(reviews: dict[str, list]) -> dict[str, list]:
    """Turn labelled reviews into instructions."""
    answers = ["positive" if label else "negative" for label in reviews["label"]]
    return {"instruction": [REVIEW_QUESTION] * len(answers), "input": reviews["text"], "output": answers}


def check_for(name: str, columns: list[str], _: dict) -> tuple[Callable[[str, dict], dict], pa.Schema]:
    """Return the check for rows of the table `name` with these columns, and the schema of its result."""
    chat = next((column for column in CHAT_COLUMNS if column in columns), None)
    if chat:
        return lambda location, row: {"messages": _check_chat(row, chat), "location": f"{name}, {location}"}, CHATS
    pair = next((pair for pair in PAIRS if {pair[0], pair[2]} <= {*columns}), None)
    if pair is None:
        known = "; ".join(f"{question} and {answer}" for question, _, answer in PAIRS)
        raise UserError(
            f"{name} has the columns {list_columns(columns)}: chats need the column {' or '.join(CHAT_COLUMNS)}, and "
            f"instructions need one of the pairs {known} (--column_names names those of a CSV file without a header)"
        )
    return partial(_check_pair, pair=pair), INSTRUCTIONS


def _check_pair(_: str, row: dict, pair: tuple[str, str | None, str]) -> dict[str, str]:
    question, given, answer = pair
    texts = {"instruction": read_text(row, question), "input": "", "output": read_text(row, answer)}
    if given:
        texts["input"] = read_text(row, given, may_be_empty=True)
    return texts


def _check_chat(row: dict, column: str) -> list[dict[str, str]]:
    messages = row.get(column)
    if not isinstance(messages, list):
        raise ValueError(f"{column} is {shown(messages)}, not a list of messages")
    chat = []
    for number, message in enumerate(messages, 1):
        given = message if isinstance(message, dict) else {}
        named, text = ("from", "value") if "from" in given else ("role", "content")
        role = given.get(named)
        if named == "from" and isinstance(role, str):
            role = SHAREGPT.get(role, role)
        if role not in ROLES:
            raise ValueError(f"message {number} has the role {shown(role)}, not {', '.join(ROLES)}")
        content = read_text(message, text, f" in message {number}", may_be_empty=role == "system")
        chat.append({"role": role, "content": content})
    roles = [message["role"] for message in chat]
    if "assistant" not in roles[1:]:
        raise ValueError("no answer from the assistant")
    if roles[0] == "assistant":
        raise ValueError("the first message is from the assistant")
    return chat
