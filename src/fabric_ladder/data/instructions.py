"""Turn instructions and chats into prompts and answers, and these into tokens and labels."""

import json
import re
from collections import Counter
from functools import lru_cache
from itertools import chain
from pathlib import Path

import datasets as hf
import numpy as np
from transformers import PreTrainedTokenizerBase

from fabric_ladder.data.cache import map_batches, save_tokens
from fabric_ladder.data.chats import end_pattern, explain, write_chat
from fabric_ladder.data.instruction_rows import INSTRUCTIONS
from fabric_ladder.data.rows import note_bad_samples, shown
from fabric_ladder.data.splits import IGNORED
from fabric_ladder.data.summary import ReadData
from fabric_ladder.data.tokens import END_OF_TEXT, NO_TOKEN, tokenize, train_tokenizer
from fabric_ladder.errors import UserError, refused
from fabric_ladder.settings import DataSettings

INSTRUCTION_CACHE_FORMAT = 4  # raise it whenever the same instructions would give other tokens
ALPACA = (  # with and without an input; the exact prompts of Stanford's Alpaca
    "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
    "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n"
    "### Response:",
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{instruction}\n\n### Response:",
)
CHATML = (  # of trained tokenizers
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COUNTED = {  # notices about the samples that the encoder counts
    "left out": "have a prompt of --max_length {length} tokens or more and are left out",
    "cut": "have their answer cut at --max_length {length} tokens",
    "hidden": "have an input that --prompt_template does not show",
    "shortened": "have words of the assistant, such as <think>…</think>, that the chat template leaves out",
    "pictured": "have <image>, <video> or <audio> in a text, which is trained as a text",
}
PLACEHOLDER = re.compile("<(image|video|audio)>")
TOKENS, NUMBER = hf.List(hf.Value("int32")), hf.Value("int64")
FEATURES = hf.Features({"input_ids": TOKENS, "labels": TOKENS, "length": NUMBER, "items": NUMBER})


def prompt_text(instruction: str, input: str = "", template: str | None = None, system: str = "") -> str:
    """Return the prompt, up to the beginning of the answer.

    Args:
        instruction: The task.
        input: The text for the task; may be empty.
        template: A text with `{instruction}` and optionally `{input}`. A line with only `{input}` is left out if the
            input is empty. None or `alpaca`: Alpaca's two prompts.
        system: A text in front of it; may be empty.

    Raises:
        UserError: The template lacks `{instruction}` or has another field.
    """
    with_input, without = prompt_templates(template)
    start = f"{system}\n\n" if system.strip() else ""
    if not input.strip():
        return start + without.format(instruction=instruction, input="")
    return start + with_input.format(instruction=instruction, input=input)


@lru_cache
def prompt_templates(template: str | None) -> tuple[str, str]:
    """Return the templates with and without an input, for `str.format`; see `prompt_text`."""
    if template in (None, "alpaca"):
        return ALPACA
    template = template.replace("\\n", "\n")  # a command line has no line ends
    with refused("--prompt_template: only {instruction} and {input} are filled in; write each literal brace twice"):
        filled = template.format(instruction="\0", input="")
    if "\0" not in filled:
        raise UserError(f"--prompt_template {template!r} lacks {{instruction}}: add it")
    return template, "\n".join(line for line in template.split("\n") if line.strip() != "{input}")


def hides_input(template: str | None) -> bool:
    """Return whether prompts of this template leave out the input of an instruction."""
    return "{input}" not in prompt_templates(template)[0]


def prompt_tokens(tokenizer: PreTrainedTokenizerBase, prompts: list[str]) -> list[list[int]]:
    """Tokenize prompts with the tokenizer's first special tokens (e.g. BOS), but without its last ones (e.g. EOS)."""
    encoded = tokenize(tokenizer, prompts, return_special_tokens_mask=True)
    rows = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    return [ids[: len(ids) - (mask[::-1].index(0) if 0 in mask else 0)] for ids, mask in rows]


def encode_turns(
    tokenizer: PreTrainedTokenizerBase, turns: list[tuple[str, str]], template: str | None, system: str = ""
) -> list[list[int]]:
    """Return the tokens of earlier turns: a prompt, its answer with the end token, and so on."""
    parts = []
    for question, answer in turns:
        if parts:
            parts.append(plain_tokens(tokenizer, prompt_text(question, "", template)))
        else:
            parts += prompt_tokens(tokenizer, [prompt_text(question, "", template, system)])
        parts.append([*plain_tokens(tokenizer, answer), tokenizer.eos_token_id])
    return parts


def plain_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text without those that start or end a sequence."""
    return tokenize(tokenizer, [text], add_special_tokens=False)["input_ids"][0]


def set_end_token(tokenizer: PreTrainedTokenizerBase, name: str) -> None:
    """Set the end-of-text token of a tokenizer that lacks one, such as BERT's, to its separator."""
    if tokenizer.eos_token is None:
        if tokenizer.sep_token is None:
            raise UserError(
                f"the tokenizer of {name} has no token that ends an answer (eos_token): choose another --tokenizer"
            )
        tokenizer.eos_token = tokenizer.sep_token


def check_template(settings: DataSettings, data: ReadData, tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Refuse messages that a tokenizer has no chat template for; return whether the data are messages."""
    chat = "messages" in data.splits["train"].column_names
    if chat and tokenizer and tokenizer.chat_template is None:
        raise UserError(
            f"{settings.dataset} holds messages, and the tokenizer has no chat template to write them: choose a "
            "--tokenizer that has one, or give instructions with the columns instruction and output"
        )
    return chat


def tokenize_instructions(
    settings: DataSettings, data: ReadData, tokenizer: PreTrainedTokenizerBase | None, vocabulary, scratch: Path
) -> tuple[Path, dict]:
    """Tokenize all splits and save them below `scratch`; return the folder and the facts about it."""
    target = scratch / "tokens"
    splits, notices = data.splits, data.notices
    chat = check_template(settings, data, tokenizer)
    if chat and settings.prompt_template:
        notices.append("--prompt_template is not used: the tokenizer's chat template writes the messages")
    if tokenizer is None:
        read = _contents if chat else lambda rows: _prompts(rows, settings) + rows["output"]
        texts = map_batches(splits["train"], lambda rows: {"text": read(rows)}, "texts", scratch)
        special = {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"} if chat else {"eos_token": END_OF_TEXT}
        tokenizer = train_tokenizer(texts, vocabulary, **special)
        tokenizer.chat_template = CHATML if chat else None
        tokenizer.save_pretrained(target / "tokenizer")
    encoder, total = Encoder(settings, tokenizer), sum(map(len, splits.values()))
    encode = encoder.encode_chats if chat else encoder.encode_instructions
    tokens = {split: map_batches(rows, encode, split, scratch, features=FEATURES) for split, rows in splits.items()}
    notices += encoder.notices(total, chat)
    if chat:
        turns, trained = encoder.counts["turns"], encoder.counts["answers"]
        data.summary[-1] += f" · {trained:,} turns trained, {turns - trained:,} masked"
    if empty := [split for split, rows in tokens.items() if len(rows) == 0]:
        advice = f": raise --max_length {settings.max_length}" if encoder.counts["left out"] else ""
        raise UserError(f"no {empty[0]} sample is left ({'; '.join(notices)}){advice}")
    facts = {"class_names": [], "chat": chat, "answer_ends": sorted(encoder.ends), "notices": notices}
    return save_tokens(target, tokens, facts)


class Encoder:
    """Turns batches of rows into tokens and labels, and counts the samples that are cut or left out."""

    def __init__(self, settings: DataSettings, tokenizer: PreTrainedTokenizerBase):
        self.settings = settings
        self.tokenizer = tokenizer
        self.bad = []
        self.counts = Counter()
        self.ends: set[str] = set()  # tokens that end the last answers of chats
        self.unused: set[str] = set()  # keys of messages that the chat template does not write
        self._end = end_pattern(tokenizer)

    def encode_instructions(self, batch: dict[str, list]) -> dict[str, list]:
        """Tokenize prompts and answers."""
        if hides_input(self.settings.prompt_template):
            self.counts["hidden"] += sum(map(bool, map(str.strip, batch["input"])))
        answers = tokenize(self.tokenizer, batch["output"], add_special_tokens=False)["input_ids"]
        prompts = prompt_tokens(self.tokenizer, _prompts(batch, self.settings))
        template, samples = self.settings.prompt_template, []
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            system, instruction, given, output, location, turns = (batch[name][row] for name in INSTRUCTIONS.names)
            if not (prompt and answer) or any(map(self._lacks_tokens, (instruction, output))):
                self.bad.append((location or shown(instruction), NO_TOKEN))
                continue
            parts = [prompt]
            if turns:
                last = plain_tokens(self.tokenizer, prompt_text(instruction, given, template))
                parts = [*encode_turns(self.tokenizer, turns, template, system), last]
            parts.append([*answer, self.tokenizer.eos_token_id])
            answered = [np.full(len(ids), number % 2, bool) for number, ids in enumerate(parts)]
            self.counts["pictured"] += bool(PLACEHOLDER.search(f"{instruction}{given}"))
            samples.append(([*chain.from_iterable(parts)], np.concatenate(answered), False))
        return self._columns(samples)

    def encode_chats(self, batch: dict[str, list]) -> dict[str, list]:
        """Tokenize chats; a chat that the chat template cannot write is added to `bad`, with the reason."""
        chats, written = [], []
        for row, location in enumerate(batch["location"]):
            messages, tools = (json.loads(batch[name][row]) for name in ("messages", "tools"))
            try:
                if any(self._lacks_tokens(message["content"]) for message in messages):
                    raise ValueError(NO_TOKEN)
                chats.append(write_chat(messages, self.tokenizer, self._end, batch["given"][row], tools))
                written.append(messages)
            except Exception as error:  # a template is a program and can raise anything
                self.bad.append((location, explain(error, messages, self.tokenizer, self._end)))
        if not chats:
            return self._columns([])
        self.counts["turns"] += sum(map(len, written))
        self.counts["answers"] += sum(len(chat.answers) for chat in chats)
        self.counts["shortened"] += sum(not chat.complete for chat in chats)
        self.counts["pictured"] += sum(bool(PLACEHOLDER.search(chat.text)) for chat in chats)
        self.unused.update(*(chat.unused for chat in chats))
        self.ends |= {chat.end for chat in chats if chat.end}
        texts = [chat.text for chat in chats]
        found = tokenize(self.tokenizer, texts, add_special_tokens=False, return_offsets_mapping=True)
        rows = zip(found["input_ids"], found["offset_mapping"], chats, strict=True)
        return self._columns([(ids, _within(at, chat.answers), _within(at, chat.masked)) for ids, at, chat in rows])

    def notices(self, total: int, chat: bool) -> list[str]:
        """Return notices about samples that were cut or left out, or refuse those that cannot be written."""
        problem = "samples cannot be written by the tokenizer" + "'s chat template" * chat
        length = self.settings.max_length
        counted = [
            f"{self.counts[name]:,} of {total:,} samples {text.format(length=length)}"
            for name, text in COUNTED.items()
            if self.counts[name]
        ]
        if self.unused:
            counted.append(f"The chat template does not write these keys of messages: {', '.join(sorted(self.unused))}")
        return note_bad_samples(self.bad, total, problem, self.settings) + counted

    def _lacks_tokens(self, text: str) -> bool:
        """Return whether the tokenizer has no token for a text of other characters than letters and digits."""
        return bool(text) and not any(map(str.isalnum, text)) and not plain_tokens(self.tokenizer, text)

    def _columns(self, samples: list[tuple[list[int], np.ndarray, np.ndarray | bool]]) -> dict[str, list]:
        """Label and cut the tokens of each sample, which come with masks of the answers and of those not trained."""
        columns = {name: [] for name in FEATURES}
        longest = self.settings.max_length
        for tokens, answered, masked in samples:
            ids = np.array(tokens, np.int32)
            trained = (answered | self.settings.train_on_inputs) & ~np.asarray(masked)
            labels = np.where(trained, ids, np.int32(IGNORED))
            labels = labels[:longest]
            items = np.count_nonzero(labels[1:] != IGNORED)
            if items:
                self.counts["cut"] += bool(answered[longest:].any())
                row = {"input_ids": ids[:longest], "labels": labels, "length": len(labels), "items": items}
                for name, value in row.items():
                    columns[name].append(value)
            else:
                self.counts["left out"] += 1
        return columns


def _prompts(batch: dict[str, list], settings: DataSettings) -> list[str]:
    rows = zip(batch["system"], batch["instruction"], batch["input"], strict=True)
    return [prompt_text(*pair, settings.prompt_template, system) for system, *pair in rows]


def _contents(batch: dict[str, list]) -> list[str]:
    return [message["content"] for chat in batch["messages"] for message in json.loads(chat)]


def _within(offsets: list[tuple[int, int]], answers: list[tuple[int, int]]) -> np.ndarray:
    """Return which tokens have a character in an answer, given the first and last + 1 character of each."""
    first, end = np.array(offsets).T
    return np.any([np.zeros(len(first), bool), *((first < stop) & (end > start) for start, stop in answers)], axis=0)
