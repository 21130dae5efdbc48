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
PAIRS = (  # columns of the instruction and of the answer; the first that fit count
    ("instruction", "output"),
    ("instruction", "response"),
    ("instruction", "target"),
    ("input", "target"),
    ("prompt", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
    ("question", "response"),
    ("query", "response"),
)
INPUTS = ("input", "context")  # columns of the instruction's input, which may be missing; the first with text counts
SYSTEM_COLUMNS = ("system", "system_prompt")  # a system message next to a chat, or the start of an instruction's prompt
ROLES = ("system", "user", "assistant")
SHAREGPT = {"human": "user", "gpt": "assistant"}  # in `from`, next to the names in ROLES
REVIEW_QUESTION = "Is this film review positive or negative?"
INSTRUCTIONS = pa.schema(dict.fromkeys(("system", "instruction", "input", "output"), pa.string()))
MESSAGES = pa.list_(pa.struct(dict.fromkeys(("role", "content"), pa.string())))
CHATS = pa.schema({"messages": MESSAGES, "given": pa.int64(), "location": pa.string()})


def read_instructions(settings: DataSettings, source: Source, scratch: Path) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Return the splits of the source, and notices about rows that are left out.

    The columns are `system`, `instruction`, `input` and `output`; or `messages`, `given` (the first messages, which are
    not trained) and `location` (file and row, for the notices).
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
    columns = {"system": [""] * len(answers), "instruction": [REVIEW_QUESTION] * len(answers)}
    return columns | {"input": reviews["text"], "output": answers}


def check_for(name: str, columns: dict, _: dict) -> tuple[Callable[[str, dict], dict], pa.Schema]:
    """Return the check for rows of the table `name` with these columns, and the schema of its result."""
    system = next((column for column in SYSTEM_COLUMNS if column in columns), None)
    chat = next(((column,) for column in CHAT_COLUMNS if column in columns), None)
    pair = next((pair for pair in PAIRS if {*pair} <= {*columns}), None)
    if chat is None and pair and all(isinstance(columns[part], list) for part in pair):  # as TRL writes chats
        chat = pair
    if chat:
        return lambda location, row: {**_check_chat(row, chat, system), "location": f"{name}, {location}"}, CHATS
    if pair is None:
        known = "; ".join(f"{question} and {answer}" for question, answer in PAIRS)
        raise UserError(
            f"{name} has the columns {list_columns(columns)}: chats need the column {' or '.join(CHAT_COLUMNS)}, and "
            f"instructions need one of the pairs {known} (--column_names names those of a CSV file without a header)"
        )
    given = [column for column in INPUTS if column in columns and column != pair[0]]
    for column in given:
        if not isinstance(columns[column], str | None):  # such as the paragraphs of HotpotQA
            raise UserError(
                f"{name}: the column {column} is no text, but {shown(columns[column])}: write it as text or remove it"
            )
    return partial(_check_pair, pair=pair, given=given, system=system), INSTRUCTIONS


def _check_pair(_: str, row: dict, pair: tuple[str, str], given: list[str], system: str | None) -> dict[str, str]:
    question, answer = pair
    texts = {"instruction": read_text(row, question), "output": read_text(row, answer)}
    inputs = [read_text(row, column, may_be_empty=True) for column in given]
    texts["input"] = next((text for text in inputs if text.strip()), "")
    texts["system"] = read_text(row, system, may_be_empty=True) if system else ""
    return texts


def _check_chat(row: dict, columns: tuple[str, ...], system: str | None) -> dict[str, list | int]:
    """Return the messages of all columns, and the number of the messages before the last column.

    Args:
        row: A row.
        columns: A chat; or its messages that are not trained, and those that are.
        system: The column of a system message, for chats that do not begin with one.
    """
    parts = [row.get(column) for column in columns]
    for column, messages in zip(columns, parts, strict=True):
        if not isinstance(messages, list):
            raise ValueError(f"{column} is {shown(messages)}, not a list of messages")
    chat = _check_messages([message for part in parts for message in part])
    given = sum(map(len, parts[:-1]))
    first = read_text(row, system, may_be_empty=True) if system else ""
    if first.strip() and chat[0]["role"] != "system":
        chat.insert(0, {"role": "system", "content": first})
        given += len(parts) > 1
    if "assistant" not in [message["role"] for message in chat[max(1, given) :]]:
        raise ValueError("no answer from the assistant")
    return {"messages": chat, "given": given}


def _check_messages(messages: list) -> list[dict[str, str]]:
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
    if not chat:
        raise ValueError("no answer from the assistant")
    if chat[0]["role"] == "assistant":
        raise ValueError("the first message is from the assistant")
    return chat
