"""Generate answers with a trained language model; prompts are tokenised as in training."""

from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig, PreTrainedTokenizerBase, TextStreamer

from fabric_ladder.checkpoints.export import Result, base_name, find_result, load_result
from fabric_ladder.checkpoints.save import end_tokens
from fabric_ladder.data.chats import for_template
from fabric_ladder.data.instruction_rows import (
    CHAT_COLUMNS,
    INPUTS,
    PAIRS,
    SYSTEM_COLUMNS,
    check_messages,
    read_history,
    read_tools,
)
from fabric_ladder.data.instructions import encode_turns, plain_tokens, prompt_text, prompt_tokens
from fabric_ladder.data.rows import read_file, reading
from fabric_ladder.data.text_sources import file_format
from fabric_ladder.data.tokens import load_tokenizer
from fabric_ladder.errors import UserError, refused
from fabric_ladder.models.activations import fuse_gelu
from fabric_ladder.models.configs import load_config, silence_loading
from fabric_ladder.models.probe import answers_alone
from fabric_ladder.techniques.fused_attention import fuse_attention

RAW = "raw"  # no template
CHAT = "chat"  # the tokenizer's chat template


class Question(NamedTuple):
    """An instruction, its input, a system text in front of both, and earlier turns; or a chat and its tools."""

    instruction: str
    input: str = ""
    system: str = ""
    history: list[list[str]] | tuple = ()
    messages: list[dict] | tuple = ()
    tools: list[dict] | tuple = ()


class Generator:
    """A language model that continues prompts.

    Args:
        model: On its device, in eval mode.
        tokenizer: The model's.
        template: Template for `prompt_text`, `alpaca`, `chat` or `raw`.
        max_new_tokens: Longest answer.
        sampling: `temperature`, `top_k` and `top_p`; empty for greedy decoding.
    """

    def __init__(
        self,
        model: nn.Module,
        tokenizer: PreTrainedTokenizerBase,
        template: str,
        max_new_tokens: int,
        sampling: dict,
    ):
        self.model = model
        self.tokenizer = tokenizer
        self.template = template
        self.max_new_tokens = max_new_tokens
        self._ends = end_tokens(tokenizer, model.generation_config.eos_token_id) or []
        self._config = GenerationConfig(
            max_new_tokens=max_new_tokens,
            do_sample=bool(sampling),
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=self._ends or None,
            use_cache=True,
            **({"top_k": 0} | sampling if sampling else {}),  # GenerationConfig's default is 50
        )

    def tokens(self, question: Question) -> list[int]:
        """Return the tokens of a prompt, as in training.

        Raises:
            UserError: The prompt is empty, or too long for the model.
        """
        if question.messages and self.template != CHAT:
            raise UserError("messages need the chat template; leave out --prompt_template and --raw")
        if self.template == CHAT:
            content = "\n\n".join(filter(None, (question.instruction, question.input)))
            said = [*chain.from_iterable(question.history), content]
            turns = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(said)]
            return self.chat_tokens(question.messages or [*_system_message(question.system), *turns], question.tools)
        if question.history and self.template != RAW:
            parts = encode_turns(self.tokenizer, question.history, self.template, question.system)
            last = self._plain_tokens(self._prompt(Question(question.instruction, question.input)))
            return self._checked([*chain.from_iterable(parts), *last])
        return self._checked(prompt_tokens(self.tokenizer, [self._prompt(question)])[0])

    def chat_tokens(self, messages: list[dict], tools: list[dict] | tuple = ()) -> list[int]:
        """Return the tokens of a chat, formatted by the tokenizer's template, with the start of the next answer."""
        with refused("the tokenizer's chat template cannot write this chat"):
            text = self.tokenizer.apply_chat_template(
                for_template(messages, self.tokenizer), tools or None, tokenize=False, add_generation_prompt=True
            )
        return self._checked(self._plain_tokens(text))

    def answer(self, prompts: list[list[int]], stream: bool = False) -> list[list[int]]:
        """Return the tokens that follow each prompt, including the end token; `stream` prints them for a single prompt.

        Shorter prompts are padded on the left. The padding is masked.
        """
        device = next(self.model.parameters()).device
        inputs = self.tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(device)
        streamer = TextStreamer(self.tokenizer, skip_prompt=True, skip_special_tokens=True) if stream else None
        with torch.inference_mode():
            found = self.model.generate(**inputs, generation_config=self._config, streamer=streamer)
        answers = []
        for row in found[:, inputs["input_ids"].shape[1] :].tolist():
            length = next((index for index, token in enumerate(row, start=1) if token in self._ends), len(row))
            answers.append(row[:length])
        return answers

    def text(self, tokens: list[int]) -> str:
        """Return an answer's text."""
        return self.tokenizer.decode(tokens, skip_special_tokens=True)

    def chat(self, lines: Iterator[str], system: str = "") -> None:
        """Answer each line with all earlier lines and answers as context; an empty line ends the chat.

        Without a chat template, the context is a sequence of prompts and answers as in training.
        """
        messages, history = _system_message(system), []
        for line in lines:
            if not (line := line.strip()):
                return
            messages.append({"role": "user", "content": line})
            if self.template == CHAT:
                prompt = self.chat_tokens(messages)
            elif history:  # without the tokens that start a sequence
                prompt = self._checked([*history, *self._plain_tokens(self._prompt(Question(line)))])
            else:
                prompt = self.tokens(Question(line, system=system))
            (reply,) = self.answer([prompt], stream=True)
            messages.append({"role": "assistant", "content": self.text(reply)})
            history = [*prompt, *reply]
            if self._ends and history[-1] not in self._ends:
                history.append(self.tokenizer.eos_token_id or self._ends[0])

    def _prompt(self, question: Question) -> str:
        """Return the text of a prompt."""
        if self.template != RAW:
            return prompt_text(question.instruction, question.input, self.template, question.system)
        if question.input or question.system or question.history:
            kind = "an input" if question.input else "a system text" if question.system else "a history"
            raise UserError(f"{kind} needs a template; give --prompt_template, e.g. alpaca")
        return question.instruction

    def _plain_tokens(self, text: str) -> list[int]:
        return plain_tokens(self.tokenizer, text)

    def _checked(self, ids: list[int]) -> list[int]:
        if not ids:
            raise UserError("the prompt is empty; write an instruction")
        positions = getattr(self.model.config.get_text_config(), "max_position_embeddings", None)
        new = self.max_new_tokens
        if positions and len(ids) + new > positions:
            raise UserError(
                f"{len(ids)} tokens of prompt and --max_new_tokens {new} are beyond the model's {positions} positions; "
                "reduce it, or shorten the prompt"
            )
        return ids


def _system_message(text: str) -> list[dict[str, str]]:
    return [{"role": "system", "content": text}] if text.strip() else []


def load_language_model(
    name: str, dtype: torch.dtype, quantization: str | None
) -> tuple[nn.Module, PreTrainedTokenizerBase]:
    """Return a language model in eval mode on the CPU, and its tokenizer.

    Args:
        name: Folder of a run, a checkpoint, a model or an adapter, or a name on the Hub.
        dtype: Precision of the weights.
        quantization: `nf4` or `no`; default: as the adapter's base in training, else `no`.

    Raises:
        UserError: The model is a classifier, or does not exist, or its files cannot be read.
    """
    silence_loading()
    result = find_result(name) if Path(name).is_dir() else Result(Path(name), "model", adapter=False)
    # an adapter of another project has no config
    _check_language(result.config or load_config(base_name(result)), name)
    model = load_result(result, dtype=dtype, quantization=quantization)
    fuse_attention(model)
    fuse_gelu(model)
    own = not result.adapter or result.has("tokenizer.json", "tokenizer_config.json")
    return model, load_tokenizer(result.folder.as_posix() if own else base_name(result))


def choose_template(tokenizer: PreTrainedTokenizerBase, wanted: str | None, chat: bool) -> str:
    """Return the template for prompts: the wanted one, else that of the training, the chat template, or `raw`.

    Args:
        tokenizer: It stores the template of the training.
        wanted: Template of the user, or None.
        chat: Prefer the chat template to the template of the training.
    """
    template = wanted or (CHAT if chat and tokenizer.chat_template else tokenizer.init_kwargs.get("prompt_template"))
    if template == CHAT and not tokenizer.chat_template:
        raise UserError("the tokenizer has no chat template; give --prompt_template or --raw")
    if template not in (None, RAW, CHAT):
        prompt_text("", "", template)  # raises if the template has no {instruction}
    return template or (CHAT if tokenizer.chat_template else RAW)


def read_questions(path: Path) -> list[tuple[dict, Question]]:
    """Return the rows of a file, each with its question.

    A text file has one prompt per non-empty line. A table (CSV, TSV, JSON, JSON Lines or Parquet) has the columns of a
    training without the answers: `instruction`, `prompt`, `question` and others (`PAIRS`), and optionally an input
    (`INPUTS`), `system` and `history`; or a chat, whose last answer is left out, and its `tools`.

    Raises:
        UserError: The file cannot be read, or has no prompt.
    """
    if file_format(path):
        rows = read_file(path).rows
    else:
        with reading(path, "text"):
            lines = enumerate(path.read_text(encoding="utf-8-sig").splitlines(), start=1)
            rows = [(f"line {number}", {"prompt": line}) for number, line in lines if line.strip()]
    questions = []
    for location, row in rows:
        if isinstance(row, ValueError):
            raise UserError(f"--prompts {path}, {location}: {row}")
        system = next(filter(None, map(row.get, SYSTEM_COLUMNS)), "")
        likely = {pair: (pair[1] in row, pair[0] != "input") for pair in PAIRS if row.get(pair[0])}
        asked, _ = max(likely, key=likely.get, default=PAIRS[0])
        text = next((row[name] for name in INPUTS if row.get(name) and name != asked), "")
        try:
            question = Question(row.get(asked), text, system, read_history(row) or ())
            if chat := next((row[name] for name in CHAT_COLUMNS if isinstance(row.get(name), list)), []):
                messages = check_messages(chat, set())
                while messages and messages[-1]["role"] == "assistant":
                    messages.pop()
                question = Question("", messages=messages, tools=read_tools(row))
        except ValueError as error:
            raise UserError(f"--prompts {path}, {location}: {error}") from error
        if question.messages:
            questions.append((row, question))
            continue
        if not all(isinstance(text, str) for text in question[:3]) or not question.instruction.strip():
            raise UserError(
                f"--prompts {path}, {location}: expected texts named instruction (and input, system) or prompt"
            )
        questions.append((row, question))
    if not questions:
        raise UserError(f"--prompts {path} holds no prompt")
    return questions


def answer_all(generator: Generator, questions: list[Question], batch_size: int) -> Iterator[tuple[int, str]]:
    """Yield the number of each question and its answer; prompts of similar length share a batch.

    Each prompt is alone where padding on the left would change its answer.
    """
    prompts = [generator.tokens(question) for question in questions]
    longest = max(map(len, prompts)) + generator.max_new_tokens
    if batch_size > 1 and answers_alone(generator.model.config, longest):
        batch_size = 1
    order = sorted(
        range(len(prompts)), key=lambda index: -len(prompts[index])
    )  # the largest batch first, so that memory runs out early
    for start in range(0, len(order), batch_size):
        chosen = order[start : start + batch_size]
        for index, tokens in zip(chosen, generator.answer([prompts[index] for index in chosen]), strict=True):
            yield index, generator.text(tokens)


def _check_language(config: PretrainedConfig, name: str) -> None:
    """Refuse a model that transformers cannot use to generate text."""
    classes = AutoModelForCausalLM._model_mapping
    architecture = (config.architectures or ["unknown"])[0]
    if type(config) not in classes or architecture != classes[type(config)].__name__:
        reason = "classifies" if architecture.endswith("Classification") else "is not a language model"
        raise UserError(
            f"{name} {reason} ({architecture}) and writes no text; give a model trained with --task instruction-tuning"
        )
