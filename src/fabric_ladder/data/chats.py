"""Write chats with a tokenizer's chat template, and find the characters that the assistant writes."""

import contextlib
import re
from collections.abc import Callable, Collection
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from fabric_ladder.errors import first_line

MARK = "\ue000answer\ue001"  # private characters in place of an answer
NO_SYSTEM = "put the system message into the first message of the user"
REASONING = ("reasoning_content", "thinking", "reasoning")  # a template reads one of these keys of a message


class WrittenChat(NamedTuple):
    """A chat as text.

    Attributes:
        text: The whole chat. If the template does not end the last answer, its end token follows.
        answers: The first character of each trained answer, and the character after its end token.
        masked: The same for the answers with `train` False.
        end: The token that ends the last answer, or None if a message follows without such a token.
        complete: Whether all words of the assistant are in `text`. Some templates leave out `<think>…</think>`.
        unused: Keys of messages that the template does not write, with the role.
    """

    text: str
    answers: list[tuple[int, int]]
    masked: list[tuple[int, int]]
    end: str | None
    complete: bool
    unused: set[str]


def end_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern of a special or added token; such a token after the words of an answer ends it."""
    tokens = {tokenizer.eos_token, *(token.content for token in tokenizer.added_tokens_decoder.values())}
    longest_first = sorted(filter(str.strip, tokens), key=len, reverse=True)
    return re.compile(rf"\s*({'|'.join(map(re.escape, longest_first))})")


def for_template(messages: list[dict], tokenizer: PreTrainedTokenizerBase) -> list[dict]:
    """Return messages as the template reads them: without `train`, and with reasoning under all its keys."""
    knows_developers = "developer" in str(tokenizer.chat_template)
    chat = []
    for message in messages:
        message = {key: value for key, value in message.items() if key != "train"}
        if message["role"] == "developer" and not knows_developers:
            message["role"] = "system"
        found = [message[key] for key in REASONING if key in message]
        chat.append(message | dict.fromkeys(REASONING, found[0]) if len(found) == 1 else message)
    return chat


def write_chat(
    messages: list[dict],
    tokenizer: PreTrainedTokenizerBase,
    end: re.Pattern[str],
    given: int = 0,
    tools: list | None = None,
) -> WrittenChat:
    """Write a chat with the tokenizer's template, and find its answers.

    A template may write an answer in another way when messages follow it. So the answers are found in the whole chat,
    which is written again for each answer, with a mark in its place. The text around the mark is the text around the
    answer. The answer starts where the generation prompt ends. It stops after its end token. This is `<|user|>` for
    GLM, where the next role ends an answer.

    Args:
        messages: With `role`, `content` and other keys for the template; `train` False masks an answer.
        tokenizer: With a chat template and an end-of-text token.
        end: See `end_pattern`.
        given: The number of the first messages whose answers are not trained.
        tools: Descriptions of tools for the template.

    Raises:
        ValueError: The template leaves out a message, a tool or a call, or other messages change with an answer.
        Exception: Any error of the template.
    """
    masked = {number for number, message in enumerate(messages, 1) if message.get("train") is False}
    messages = for_template(messages, tokenizer)
    write = partial(tokenizer.apply_chat_template, tools=tools or None, tokenize=False)
    text = write(messages)
    _check_written(messages, write)
    unused = _unused_keys(messages, write, text)
    if tools and _same(text, messages, partial(write, tools=None)):
        raise ValueError("the template does not write tools: choose another --tokenizer or remove them")
    spans, last_end, complete = {}, None, True
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant" or number <= given:
            continue
        start, stop, found = _find_answer(messages, number, write, text, end)
        said = [message["content"], *(message[key] for key in REASONING if key in message)]
        written = "".join(text[start:stop].split())
        complete = complete and all("".join(str(words).split()) in written for words in said)
        if found:
            last_end = found
        elif number == len(messages):
            reply = {"role": "tool" if "tool_calls" in message else "user", "content": "."}
            _, following = _around_mark(write([*_marked(messages, number), reply]), number)
            match = end.match(following)
            text = text[:stop] + match[0] if match else text + tokenizer.eos_token
            stop = len(text)
            last_end = match[1] if match else tokenizer.eos_token
        spans[number] = (start, stop)
    answers = [span for number, span in spans.items() if number not in masked]
    return WrittenChat(text, answers, [spans[number] for number in masked & {*spans}], last_end, complete, unused)


def _marked(messages: list[dict], number: int, without: Collection[str] = ("tool_calls",)) -> list[dict]:
    """Return the messages with a mark for the content of one, which loses the keys `without`."""
    message = {key: value for key, value in messages[number - 1].items() if key not in without}
    return [*messages[: number - 1], message | {"content": MARK}, *messages[number:]]


def _find_answer(
    messages: list[dict], number: int, write: Callable[..., str], text: str, end: re.Pattern[str]
) -> tuple[int, int, str | None]:
    """Return the first character of an answer, the one after its end token, and this token if there is one."""
    prompt = None
    with contextlib.suppress(Exception):  # many templates cannot write a prompt without messages
        prompt = write(messages[: number - 1], add_generation_prompt=True)
    try:
        before, after = _around_mark(write(_marked(messages, number)), number)
        if prompt is not None and before.startswith(prompt):
            start = len(prompt)
        else:
            other, _ = _around_mark(write(_marked(messages, number, {*messages[number - 1]} - {"role"})), number)
            ends = zip(f"{before}\0", f"{other}\1", strict=False)  # which differ
            start = next(place for place, (one, two) in enumerate(ends) if one != two)
        stop = len(text) - len(after)
        if start > stop or not (text.startswith(before[:start]) and text.endswith(after)):
            raise ValueError(f"the template changes other messages with message {number}")
        found = end.match(after)
        return start, stop + (found.end() if found else 0), found and found[1]
    except Exception:  # of templates that write calls of tools in another way than words
        whole = write(messages[:number]).rstrip()
        found = [*end.finditer(whole)][-1:]
        if not ("tool_calls" in messages[number - 1] and prompt is not None and found):
            raise
        if not (text.startswith(whole) and whole.startswith(prompt) and found[0].end() == len(whole)):
            raise
        return len(prompt), len(whole), found[0][1]


def _same(text: str, messages: list[dict], write: Callable[..., str]) -> bool:
    """Return whether the template writes `text` for these messages, too; an error counts as a difference."""
    with contextlib.suppress(Exception):
        return write(messages) == text
    return False


def _unused_keys(messages: list[dict], write: Callable[..., str], text: str) -> set[str]:
    """Return the keys, with the role, whose removal does not change the text; refuse such calls of tools."""
    unused = set()
    for number, message in enumerate(messages):
        said = ("role", "content", *(REASONING if message["role"] == "assistant" else ()))
        for key in [key for key in message if key not in said]:
            others = [{name: value for name, value in message.items() if name != key}]
            calls = message[key] if key == "tool_calls" else []
            if len(calls) > 1:  # some templates write only the first one
                others = [message | {key: calls[:call] + calls[call + 1 :]} for call in range(len(calls))]
            if any(_same(text, [*messages[:number], other, *messages[number + 1 :]], write) for other in others):
                if key == "tool_calls":
                    raise ValueError(f"message {number + 1} has tool_calls that the template does not write")
                unused.add(f"{key} ({message['role']})")
    return unused


def _check_written(messages: list[dict], write: Callable[..., str]) -> None:
    """Refuse a template that leaves out a message of the system, the user or a tool."""
    marks = {
        number: f"{MARK}{number}{MARK}" for number, message in enumerate(messages, 1) if message["role"] != "assistant"
    }
    marked = [
        message | {"content": message["content"] + marks.get(number, "")} for number, message in enumerate(messages, 1)
    ]
    text = write(marked)
    for number, mark in marks.items():
        if mark not in text:
            raise ValueError(f"the template leaves out message {number}, from the {messages[number - 1]['role']}")


def _around_mark(text: str, number: int) -> tuple[str, str]:
    before, *after = text.split(MARK)
    if len(after) != 1:
        raise ValueError(f"the template does not write message {number} exactly once")
    return before, after[0]


def explain(error: Exception, messages: list[dict], tokenizer: PreTrainedTokenizerBase, end: re.Pattern[str]) -> str:
    """Return the reason for which `write_chat` refused a chat, with the remedy if the template has no system."""
    others = [message for message in messages if message["role"] != "system"]
    if len(others) < len(messages):
        with contextlib.suppress(Exception):  # a template is a program and can raise anything
            write_chat(others, tokenizer, end)
            return f"{first_line(error)}; {NO_SYSTEM}"
    return first_line(error)
