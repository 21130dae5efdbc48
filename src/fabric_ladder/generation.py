"""Answers of a trained language model: from a prompt to its tokens, as in training, to the answer's text."""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase, TextStreamer

from fabric_ladder.attention import fuse_attention
from fabric_ladder.checkpoint import end_tokens
from fabric_ladder.errors import UserError
from fabric_ladder.export import base_name, find_result, four_bits, load_result, quiet
from fabric_ladder.models import load_config
from local_dataset_utilities import load_tokenizer, prompt_text, prompt_tokens, reachable

RAW, CHAT = "raw", "chat"  # what a template's name can be, beside its text: none, and the tokenizer's chat template


class Question(NamedTuple):
    """A prompt: what to do, and what to do it with."""

    instruction: str
    input: str = ""


class Generator:
    """A language model that continues prompts.

    Args:
        model: On its device, in eval mode.
        tokenizer: The model's.
        template: How an instruction becomes a prompt: a template for `prompt_text`, `alpaca`, `chat` or `raw`.
        max_new_tokens: Longest answer.
        sampling: `temperature`, `top_k` and `top_p`; empty to take the likeliest token always.
    """

    def __init__(
        self, model: nn.Module, tokenizer: PreTrainedTokenizerBase, template: str, max_new_tokens: int, sampling: dict
    ):
        self.model, self.tokenizer, self.template = model, tokenizer, template
        self.how = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=bool(sampling),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=end_tokens(tokenizer, model.generation_config.eos_token_id),
            use_cache=True,
            **({"top_k": 0} | sampling if sampling else {}),  # a config's own default would cut off all but 50
        )

    def tokens(self, question: Question) -> list[int]:
        """Return the tokens of a prompt as training had them.

        Raises:
            UserError: There are none, or too many for the model, or there is no place for the input.
        """
        if self.template == CHAT:
            content = "\n\n".join(part for part in question if part)
            ids = self.chat_tokens([{"role": "user", "content": content}])
        elif self.template == RAW:
            if question.input:
                raise UserError("an input needs a template to stand in: give --prompt_template, say alpaca")
            ids = prompt_tokens(self.tokenizer, [question.instruction])[0]
        else:
            ids = prompt_tokens(self.tokenizer, [prompt_text(*question, self.template)])[0]
        return self._checked(ids)

    def chat_tokens(self, messages: list[dict[str, str]]) -> list[int]:
        """Return the tokens of a chat, written by the tokenizer's template up to where the next answer starts."""
        text = self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._checked(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def answer(self, prompts: list[list[int]], stream: bool = False) -> list[list[int]]:
        """Return the tokens that follow each prompt, up to the end or with it; `stream` prints those of the only one.

        Shorter prompts are padded on the left, and what is padded is masked.
        """
        width = max(map(len, prompts))
        ids = torch.full((len(prompts), width), self.tokenizer.pad_token_id)
        mask = torch.zeros_like(ids)
        for row, prompt in enumerate(prompts):
            ids[row, width - len(prompt) :], mask[row, width - len(prompt) :] = torch.tensor(prompt), 1
        device = next(self.model.parameters()).device
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
        with torch.inference_mode():
            found = self.model.generate(
                input_ids=ids.to(device), attention_mask=mask.to(device), generation_config=self.how, streamer=streamer
            )
        ends = set(self.how.eos_token_id or ())
        answers = []
        for row in found[:, width:].tolist():
            length = next((place for place, token in enumerate(row, start=1) if token in ends), len(row))
            answers.append(row[:length])
        return answers

    def text(self, tokens: list[int]) -> str:
        """Return an answer's text."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def chat(self, lines: Iterator[str]) -> None:
        """Answer line after line, each after all that was said before; an empty one ends it.

        Without a chat template the prompts and answers of training stand one after another, each answer with its end.
        """
        messages, history = [], []
        for line in lines:
            if not (line := line.strip()):
                return
            if self.template == CHAT:
                messages.append({"role": "user", "content": line})
                prompt = self.chat_tokens(messages)
            else:
                prompt = self.tokens(Question(line))
                if history:
                    first = len(prompt) - len(self._bare(line))
                    prompt = self._checked([*history, *prompt[first:]])
            (reply,) = self.answer([prompt], stream=True)
            messages.append({"role": "assistant", "content": self.text(reply)})
            ends = self.how.eos_token_id or []
            unfinished = bool(ends) and (not reply or reply[-1] not in ends)
            history = [*prompt, *reply, *([self.tokenizer.eos_token_id or ends[0]] if unfinished else [])]

    def _bare(self, line: str) -> list[int]:
        """A later turn's tokens, without what the tokenizer puts first."""
        text = line if self.template == RAW else prompt_text(line, "", self.template)
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise UserError("the prompt is empty: there is nothing to go on from")
        positions, new = getattr(self.model.config, "max_position_embeddings", None), self.how.max_new_tokens
        if positions and len(ids) + new > positions:
            raise UserError(
                f"{len(ids)} tokens of prompt and --max_new_tokens {new} are beyond the model's {positions} positions: "
                "lower it, or shorten the prompt"
            )
        return ids


def load_language_model(
    name: str, dtype: torch.dtype, quantization: str | None
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Return a language model in eval mode on the CPU, and its tokenizer.

    Args:
        name: The folder of a run or of what it has saved, of a model or of an adapter; or a name on the Hub.
        dtype: Precision of the weights.
        quantization: `nf4` or `no`; default: as the adapter's base was while training, else `no`.

    Raises:
        UserError: A classifier, or nothing that was saved there.
        DatasetError: Weights or tokenizer cannot be read.
    """
    if Path(name).is_dir():
        result = find_result(name)
        described = (result.folder / "config.json").is_file()
        place = str(result.folder) if described else base_name(result)  # an adapter that others have trained
        _check_language(load_config(place), name)
        model = load_result(result, dtype=dtype, quantization=quantization)
        fuse_attention(model)
        own = any((result.folder / file).is_file() for file in ("tokenizer.json", "tokenizer_config.json"))
        return model, load_tokenizer(str(result.folder) if own or not result.adapter else base_name(result))
    quiet()
    config = load_config(name)
    _check_language(config, name)
    tokenizer = load_tokenizer(name)
    bits = four_bits(config, dtype) if quantization == "nf4" else {}
    with reachable(name, "weights") as options:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, **bits, **options)
    fuse_attention(model)
    return model.eval(), tokenizer


def choose_template(tokenizer: PreTrainedTokenizerBase, wanted: str | None, chat: bool) -> str:
    """Return how prompts are written: as is wanted, as in training, by the tokenizer's chat template, or as they are.

    Args:
        tokenizer: Keeps the template of the training.
        wanted: What the user asks for, if anything.
        chat: Whether a chat is held, for which the tokenizer's own template comes first.
    """
    template = wanted or (CHAT if chat and tokenizer.chat_template else tokenizer.init_kwargs.get("prompt_template"))
    if template == CHAT and not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template: give --prompt_template, or --raw")
    if template not in (None, RAW, CHAT):
        prompt_text("", "", template)  # refuses one that lacks the instruction
    return template or (CHAT if tokenizer.chat_template else RAW)


def read_questions(path: Path) -> list[tuple[dict, Question]]:
    """Return the prompts of a file, each with the row that it was in.

    A text file has one on each line that is not empty. JSON (a list) and JSON Lines have objects with `instruction` and
    perhaps `input`, or with `prompt`, which means the same as `instruction`.

    Raises:
        UserError: No such file, or not such a one, or no prompt in it.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read --prompts {path} ({_brief(error)})") from error
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    try:
        if path.suffix == ".json":
            rows = list(enumerate(json.loads(text), start=1))
        elif path.suffix == ".jsonl":
            rows = [(number, json.loads(line)) for number, line in lines]
        else:
            rows = [(number, {"prompt": line}) for number, line in lines]
    except (ValueError, TypeError) as error:
        raise UserError(f"--prompts {path} cannot be read as JSON ({_brief(error)})") from error
    questions = []
    for number, row in rows:
        asked = row.get("instruction") or row.get("prompt") if isinstance(row, dict) else None
        given = (row.get("input") or "") if isinstance(row, dict) else ""
        if not isinstance(asked, str) or not asked.strip() or not isinstance(given, str):
            raise UserError(f"--prompts {path}, {number}: expected texts named instruction (and input) or prompt")
        questions.append((row, Question(asked, given)))
    if not questions:
        raise UserError(f"--prompts {path} holds no prompt")
    return questions


@contextmanager
def new_file(output: Path) -> Iterator[IO[str]]:
    """Give a file to write, which becomes `output` when all is written.

    Raises:
        UserError: `output` is there, or cannot be written.
    """
    unfinished = output.parent / f".{output.name}.unfinished-{os.getpid()}"
    if output.exists():
        raise UserError(f"{output} is there already and is left as it is: choose another --output")
    try:
        file = open(unfinished, "w", encoding="utf-8")  # noqa: SIM115
    except OSError as error:
        raise UserError(f"cannot write --output {output} ({error.strerror}): choose another") from error
    try:
        with file:
            yield file
        unfinished.rename(output)
    finally:
        unfinished.unlink(missing_ok=True)


def answer_all(generator: Generator, questions: list[Question], batch_size: int) -> list[str]:
    """Return the answers, in the order of the questions; prompts of alike lengths share a batch."""
    prompts = [generator.tokens(question) for question in questions]
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))  # the largest batch comes first
    answers = {}
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        for index, tokens in zip(chosen, generator.answer([prompts[index] for index in chosen]), strict=True):
            answers[index] = generator.text(tokens)
    return [answers[index] for index in range(len(prompts))]


def _check_language(config: PretrainedConfig, name: str) -> None:
    kinds = AutoModelForCausalLM._model_mapping
    made = (config.architectures or ["nothing that is known"])[0]
    writes = type(config) in kinds and (not config.architectures or made == kinds[type(config)].__name__)
    if not writes:
        what = "classifies" if made.endswith("Classification") else "is no language model"
        raise UserError(
            f"{name} {what} ({made}) and writes no text: give a model that was trained by --task instruction-tuning"
        )


def _brief(error: BaseException) -> str:
    return " ".join(str(error).split())[:160]
