"""Write chats with a tokenizer's chat template, and find the characters that the assistant writes."""

import contextlib
import re
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from fabric_ladder.errors import first_line

MARK = "\ue000answer\ue001"  # private characters in place of an answer
NO_SYSTEM = "put the system message into the first message of the user"


class WrittenChat(NamedTuple):
    """A chat as text.

    Attributes:
        text: The whole chat. If the template does not end the last answer, its end token follows.
        answers: The first character of each answer, and the character after its end token.
        end: The token that ends the last answer, or None if a message follows without such a token.
        complete: Whether all words of the assistant are in `text`. Some templates leave out `<think>…</think>`.
    """

    text: str
    answers: list[tuple[int, int]]
    end: str | None
    complete: bool


def end_pattern(tokenizer: PreTrainedTokenizerBase) -> re.Pattern[str]:
    """Return a pattern of a special or added token; such a token after the words of an answer ends it."""
    tokens = {tokenizer.eos_token, *(token.content for token in tokenizer.added_tokens_decoder.values())}
    longest_first = sorted(filter(str.strip, tokens), key=len, reverse=True)
    return re.compile(rf"\s*({'|'.join(map(re.escape, longest_first))})")


def write_chat(
    messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, end: re.Pattern[str], given: int = 0
) -> WrittenChat:
    """Write a chat with the tokenizer's template, and find its answers.

    A template may write an answer in another way when messages follow it. So the answers are found in the whole chat,
    which is written again for each answer, with a mark in its place. The text around the mark is the text around the
    answer. The answer starts where the generation prompt ends. It stops after its end token. This is `<|user|>` for
    GLM, where the next role ends an answer.

    Args:
        messages: With `role` and `content`.
        tokenizer: With a chat template and an end-of-text token.
        end: See `end_pattern`.
        given: The number of the first messages whose answers are not trained.

    Raises:
        ValueError: The template leaves out a message, or other messages change with an answer.
        Exception: Any error of the template.
    """
    write = partial(tokenizer.apply_chat_template, tokenize=False)
    text = write(messages)
    _check_written(messages, write)
    answers, last_end, complete = [], None, True
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant" or number <= given:
            continue
        marked = [*messages[: number - 1], message | {"content": MARK}, *messages[number:]]
        before, after = _around_mark(write(marked), number)
        prompt = write(messages[: number - 1], add_generation_prompt=True)
        start = len(prompt) if before.startswith(prompt) else len(before)
        stop = len(text) - len(after)
        if start > stop or not (text.startswith(before[:start]) and text.endswith(after)):
            raise ValueError(f"the template changes other messages with message {number}")
        complete = complete and "".join(message["content"].split()) in "".join(text[start:stop].split())
        found = end.match(after)
        if found:
            stop += found.end()
            last_end = found[1]
        elif number == len(messages):
            _, following = _around_mark(write([*marked, {"role": "user", "content": "."}]), number)
            found = end.match(following)
            text = text[:stop] + found[0] if found else text + tokenizer.eos_token
            stop = len(text)
            last_end = found[1] if found else tokenizer.eos_token
        answers.append((start, stop))
    return WrittenChat(text, answers, last_end, complete)


def _check_written(messages: list[dict[str, str]], write: Callable[[list[dict[str, str]]], str]) -> None:
    """Refuse a template that leaves out a message of the system or the user."""
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


def explain(
    error: Exception, messages: list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, end: re.Pattern[str]
) -> str:
    """Return the reason for which `write_chat` refused a chat, with the remedy if the template has no system."""
    others = [message for message in messages if message["role"] != "system"]
    if len(others) < len(messages):
        with contextlib.suppress(Exception):  # a template is a program and can raise anything
            write_chat(others, tokenizer, end)
            return f"{first_line(error)}; {NO_SYSTEM}"
    return first_line(error)
