"""Read rows of instructions and chats from tables or reviews, and check them one by one."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets as hf
import pyarrow as pa

from fabric_ladder.data.cache import map_batches
from fabric_ladder.data.reviews import REVIEWS, read_reviews
from fabric_ladder.data.rows import list_columns, read_parts, read_text, shown
from fabric_ladder.data.text_sources import Source
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
ROLES = ("system", "user", "assistant", "tool", "developer")
OTHER_ROLES = {"model": "assistant", "function": "tool"}
SHAREGPT = {"human": "user", "gpt": "assistant", "function_call": "assistant", "observation": "tool"}  # in `from`
FLAGS = ("weight", "train", "training", "loss")  # keys of a message; 0 or false masks an answer
FLAG_VALUES = {"0": False, "0.0": False, "false": False, "1": True, "1.0": True, "true": True}
MEDIA = ("image", "images", "video", "videos", "audio", "audios")  # columns, and keys of a message
TOOLS = "tools"  # the column of the tools of a chat
HISTORY = "history"  # the column of an instruction's earlier turns
REVIEW_QUESTION = "Is this film review positive or negative?"
INSTRUCTIONS = pa.schema(
    dict.fromkeys(("system", "instruction", "input", "output", "location"), pa.string())
    | {HISTORY: pa.list_(pa.list_(pa.string()))}
)
CHATS = pa.schema(dict.fromkeys(("messages", TOOLS, "location"), pa.string()) | {"given": pa.int64()})


def read_instructions(settings: DataSettings, source: Source, scratch: Path) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Return the splits of the source, and notices about rows that are left out.

    The columns are `system`, `instruction`, `input`, `output` and `history` (pairs of a question and an answer); or
    `messages` and `tools` (both as JSON) and `given` (the first messages, which are not trained); and `location` (file
    and row, for the notices).
    """
    if source.key[0] in REVIEWS:
        reviews = read_reviews(settings, scratch)
        return {split: map_batches(table, _ask, f"asked-{split}", scratch) for split, table in reviews.items()}, []
    notices, unused = [], set()
    parts = read_parts(settings, source, scratch, notices, partial(check_for, unused=unused))
    if unused:
        notices.append(f"Columns, and keys of messages, that are not used: {', '.join(sorted(unused))}")
    if len({str(table.column_names) for tables in parts.values() for table in tables}) > 1:
        raise UserError(f"{settings.dataset} has files of two forms: use only messages or only instructions")
    return {split: hf.concatenate_datasets(tables) for split, tables in parts.items()}, notices


def _ask(reviews: dict[str, list]) -> dict[str, list]:
    """Turn labelled reviews into instructions."""
    answers = ["positive" if label else "negative" for label in reviews["label"]]
    columns = {name: [""] * len(answers) for name in ("system", "location")}
    columns |= {"instruction": [REVIEW_QUESTION] * len(answers), HISTORY: [None] * len(answers)}
    return columns | {"input": reviews["text"], "output": answers}


def check_for(
    name: str, columns: dict, features: dict, unused: set[str] | None = None
) -> tuple[Callable[[str, dict], dict], pa.Schema]:
    """Return the check for rows of the table `name` with these columns, and the schema of its result.

    The check adds the columns that it does not use, and keys of messages, to `unused`.
    """
    unused = set() if unused is None else unused
    system = next((column for column in SYSTEM_COLUMNS if column in columns), None)
    chat = next(((column,) for column in CHAT_COLUMNS if column in columns), None)
    pair = next((pair for pair in PAIRS if {*pair} <= {*columns}), None)
    if chat is None and pair and all(isinstance(columns[part], list) for part in pair):  # as TRL writes chats
        chat = pair
    if chat:
        maps = isinstance(columns[chat[0]], list) and any(isinstance(each, list) for each in columns[chat[0]])
        check = partial(_check_chat, columns=chat, system=system, merged=bool(features) or maps, unused=unused)
        return partial(_check_columns, check, name, {*chat, system, TOOLS}, unused), CHATS
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
    check = partial(_check_pair, pair=pair, given=given, system=system)
    return partial(_check_columns, check, name, {*pair, *given, system, HISTORY}, unused), INSTRUCTIONS


def _check_columns(
    check: Callable[[dict], dict], name: str, used: set[str], unused: set[str], location: str, row: dict
) -> dict:
    """Return the checked row with its location; refuse images, sounds and films."""
    filled = {column for column, value in row.items() if value not in (None, "", [], {})} - used
    if media := [column for column in MEDIA if column in filled]:
        raise ValueError(f"{media[0]} is {shown(row[media[0]])}: only texts are trained")
    checked = check(row)
    unused |= filled
    return checked | {"location": f"{name}, {location}"}


def _check_pair(row: dict, pair: tuple[str, str], given: list[str], system: str | None) -> dict[str, str | list]:
    question, answer = pair
    texts = {"instruction": read_text(row, question), "output": read_text(row, answer)}
    inputs = [read_text(row, column, may_be_empty=True) for column in given]
    texts["input"] = next((text for text in inputs if text.strip()), "")
    texts["system"] = read_text(row, system, may_be_empty=True) if system else ""
    return texts | {HISTORY: read_history(row)}


def read_history(row: dict) -> list[list[str]]:
    """Return the earlier turns of an instruction, pairs of a question and an answer, or raise ValueError."""
    turns = _parsed(row.get(HISTORY) or [])
    if not isinstance(turns, list) or not all(isinstance(turn, list) and len(turn) == 2 for turn in turns):
        found = shown(row[HISTORY])
        raise ValueError(f"{HISTORY} is {found}, not a list of pairs [question, answer]: rename or remove the column")
    return [[read_text({HISTORY: text}, HISTORY) for text in turn] for turn in turns]


def _parsed(value: object) -> object:
    """Return the content of a text of JSON, and another value unchanged."""
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return value


def _filled(value: object) -> object:
    """Return a value without None, which Parquet writes for the keys of other rows; maps become dictionaries."""
    if isinstance(value, dict):
        return {key: _filled(each) for key, each in value.items() if each is not None}
    if isinstance(value, list):
        is_map = bool(value) and all(isinstance(each, tuple) and len(each) == 2 for each in value)
        return _filled(dict(value)) if is_map else [*map(_filled, value)]
    return value


def _check_chat(
    row: dict, columns: tuple[str, ...], system: str | None, merged: bool, unused: set[str]
) -> dict[str, str | int]:
    """Return the messages of all columns, and the number of the messages before the last column.

    Args:
        row: A row.
        columns: A chat; or its messages that are not trained, and those that are.
        system: The column of a system message, for chats that do not begin with one.
        merged: Whether the row has the keys of all rows, as in Parquet.
        unused: Gets keys of messages that are not used.
    """
    read = _filled if merged else lambda value: value
    parts = [read(row.get(column)) for column in columns]
    for column, messages in zip(columns, parts, strict=True):
        if not isinstance(messages, list):
            raise ValueError(f"{column} is {shown(messages)}, not a list of messages")
    chat = check_messages([message for part in parts for message in part], unused)
    given = sum(map(len, parts[:-1]))
    first = read_text(row, system, may_be_empty=True) if system else ""
    if first.strip() and chat[0]["role"] not in ("system", "developer"):
        chat.insert(0, {"role": "system", "content": first})
        given += len(parts) > 1
    answers = [message for message in chat[given:] if message["role"] == "assistant"]
    if not any(message.get("train", True) for message in answers):
        raise ValueError("no answer from the assistant" + " that is trained" * bool(answers))
    written = {"messages": chat, TOOLS: read_tools(row, read)}
    return {name: _as_json(value) for name, value in written.items()} | {"given": given}


def read_tools(row: dict, read: Callable[[object], object] = lambda value: value) -> list[dict]:
    """Return the tools of a chat, or raise ValueError."""
    found = read(_parsed(row.get(TOOLS) or []))
    tools = [*map(_parsed, found)] if isinstance(found, list) else [found]
    if not all(isinstance(tool, dict) for tool in tools) or isinstance(found, dict):
        raise ValueError(f"{TOOLS} is {shown(found)}, not a list of objects")
    return tools


def _as_json(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    text.encode()  # refuses half of a surrogate pair, which JSON can hold
    return text


def check_messages(messages: list, unused: set[str]) -> list[dict]:
    """Return messages with `role`, `content`, the other keys for the template, and `train` False for masked answers."""
    chat = [_check_message(number, message, unused) for number, message in enumerate(messages, 1)]
    if not chat:
        raise ValueError("no answer from the assistant")
    return chat


def _check_message(number: int, message: object, unused: set[str]) -> dict:
    given = {key: value for key, value in message.items() if value is not None} if isinstance(message, dict) else {}
    place = f" in message {number}"
    named, text = ("from", "value") if "from" in given else ("role", "content")
    speaker = role = given.pop(named, None)
    if isinstance(role, str):
        role = OTHER_ROLES.get(role, role)
        role = SHAREGPT.get(role, role) if named == "from" else role
    if role not in ROLES:
        raise ValueError(f"message {number} has the role {shown(role)}, not {', '.join(ROLES)}")
    if media := [key for key in MEDIA if given.get(key)]:
        raise ValueError(f"{media[0]}{place} is {shown(given[media[0]])}: only texts are trained")
    content = _joined(given.pop(text, None))
    calls = [_parsed(content)] if speaker == "function_call" else given.pop("tool_calls", None) or []
    if not calls and "function_call" in given:
        calls = [given.pop("function_call")]
    if speaker == "function_call":
        content = ""
    may_be_empty = bool(calls) or role in ("system", "developer", "tool")
    checked = {"role": role, "content": read_text({text: content}, text, place, may_be_empty)}
    flags = {flag: _read_flag(given.pop(flag), f"{flag}{place}") for flag in FLAGS if flag in given}
    if role != "assistant":
        unused |= {f"{flag} ({role})" for flag, value in flags.items() if value}
    elif not all(flags.values()):
        checked["train"] = False
    return checked | given | ({"tool_calls": _read_calls(calls, place)} if calls else {})


def _joined(content: object) -> object:
    """Return the text of a list of parts of text, and other contents unchanged."""
    if not isinstance(content, list) or not content:
        return content
    texts = []
    for part in content:
        if isinstance(part, dict):
            part = {key: value for key, value in part.items() if value is not None}
            if str(part.pop("type", "text")) in ("text", "input_text", "output_text") and len(part) == 1:
                part = part.get("text")
        if not isinstance(part, str):
            return content
        texts.append(part)
    return "".join(texts)


def _read_flag(value: object, name: str) -> bool:
    flag = FLAG_VALUES.get(str(value).lower())
    if flag is None:
        raise ValueError(f"{name} is {shown(value)}, not 0, 1, true or false")
    return flag


def _read_calls(calls: object, place: str) -> list[dict]:
    """Return the calls of tools, with their arguments as objects, which templates write as JSON."""
    calls = [*map(_parsed, found)] if isinstance(found := _parsed(calls), list) else []
    if not calls or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"tool_calls{place} is {shown(found)}, not a list of objects")
    read = []
    for call in calls:
        call = call if isinstance(call.get("function"), dict) else {"type": "function", "function": call}
        function = call["function"]
        if not isinstance(function.get("name"), str):
            raise ValueError(f"tool_calls{place} has {shown(call)}, a call without a name")
        arguments = _parsed(function.get("arguments", {}))
        read.append(call | {"function": function | {"arguments": arguments}})
    return read
