"""Packing: short documents share a row without seeing each other, and without a mask of tokens x tokens.

The `position_ids` of a packed batch count from 0 in each document, which marks where documents begin. Queries and keys
get 8 more dimensions: the number of the document in 7 binary digits, written as 1 and -1, and a constant. Their dot
product is added to the scores. It is exactly 0 between tokens of one document. Between other tokens it is -2 for each
digit that differs, scaled up until softmax gives them no weight. Attention is then a plain
`scaled_dot_product_attention`, causal or not, with a flash kernel on every device that has one.

All added numbers are small integers, exact in every floating-point format. They come first, so that they cancel before
the kernel adds anything else. (CPU kernels add the last few tokens of a row in another order, with an error of 1e-4 in
32-bit. Rows are therefore a multiple of 16 tokens long where `max_length` is.)

With `--attention varlen` a kernel takes the places where documents end instead (`models/varlen.py`).

This module is the model's part. `data/cutting.py` chooses which documents share a row; `data/loaders.py` joins them.

`support_packing` wraps the model's `forward`. A classifier also gets hooks around its base model, so that its own head
sees one token of each document. The new dimensions enter through the model's attention function: BLOOM's own
(`fused_attention.py`), or that of all other models (`models/attention.py`).
"""

import inspect
from functools import partial

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import ModelOutput

from fabric_ladder.models.configs import load_config
from fabric_ladder.models.masks import DIGITS, declare_rows
from fabric_ladder.models.probe import facts_of, probe
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique

# The architectures (`model_type`) whose packed gradients a test has compared with those of separate documents.
TESTED = frozenset(
    "bert bloom camembert electra distilbert gemma gemma3_text gpt2 gpt_neox granite llama mistral modernbert olmo2 "
    "opt phi phi3 qwen2 qwen3 roberta starcoder2 xlm-roberta".split()
)


def support_packing(model: nn.Module, longest: int, documents: int | None = None) -> None:
    """Let a model of transformers take packed batches; call it before the model is wrapped.

    The forward pass then takes `position_ids` (rows, length), which count from 0 in each document, in place of an
    attention mask. A classifier also takes `spans` (documents, 2), the flat positions of each document's first token
    and after its last token, and `labels` (documents,). Without `position_ids` the model computes the same as before.

    Args:
        model: A language model, or a classifier of texts.
        longest: The largest number of tokens in a row.
        documents: The most documents of a micro-batch in training, if a kernel takes their ends; None: by digits.
    """
    base = model.base_model
    base.warn_if_padding_and_no_attention_mask = lambda *_: None  # it would wait for the device
    named = "position_ids" in inspect.signature(base.forward).parameters
    shift = _first_position(base) if named else None
    pooling = _Pooling(model, longest) if model.get_output_embeddings() is None else None
    model.forward = partial(_forward, model.forward, pooling, shift, longest, documents)


def _forward(
    inner,
    pooling: "_Pooling | None",
    shift: int | None,
    longest: int,
    documents: int | None,
    position_ids: Tensor | None = None,
    spans: Tensor | None = None,
    **inputs,
) -> ModelOutput:
    """Run the model's own forward pass, `inner`; `shift` is the first position's number, or None."""
    if position_ids is None:
        return inner(**inputs)
    positions = {} if shift is None else {"position_ids": position_ids + shift}
    inputs = {name: value for name, value in inputs.items() if value is not None}  # PEFT passes every argument
    with declare_rows(position_ids, longest, documents and _count(len(position_ids), spans, documents)):
        if spans is None:
            return inner(**inputs, **positions)
        return pooling.run(inner, {"input_ids": inputs.pop("input_ids"), **positions}, spans, inputs)


def _count(rows: int, spans: Tensor | None, most: int) -> int:
    """Return a number that the documents of packed rows do not exceed; the padding of each row is one."""
    if spans is not None:
        return len(spans) + rows
    in_rows = rows * (2**DIGITS - 1)
    # for each document a backward pass takes memory for 128 more tokens
    return rows + (min(max(most, rows), in_rows) if torch.is_grad_enabled() else in_rows)


def _first_position(base: nn.Module) -> int:
    """Return the number of the first position; RoBERTa counts from the number of its padding token."""
    tables = (module for name, module in base.named_modules() if name.endswith("position_embeddings"))
    padding = next((table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None), -1)
    return padding + 1


class _Pooling:
    """Gives a classifier's own head rows of one token for each document: the token that the head reads."""

    def __init__(self, model: nn.Module, longest: int):
        base = model.base_model
        self.kind = getattr(probe(model.config, "text-classification", longest), "pooled", None)
        self.padding = model.config.pad_token_id
        self._packed = self._spans = None
        base.register_forward_pre_hook(self._enter, with_kwargs=True)
        base.register_forward_hook(self._leave)
        if isinstance(pooler := getattr(base, "pooler", None), nn.Module):  # BERT's, a part of the base model
            pooler.register_forward_pre_hook(self._enter_pooler)

    def run(self, inner, packed: dict[str, Tensor], spans: Tensor, inputs: dict[str, Tensor]) -> ModelOutput:
        """Run a forward pass: the base model gets the packed batch, the head gets the documents."""
        ids = packed["input_ids"].flatten()
        if self.kind == "last" and self.padding is not None:  # a text may end with the token that also pads
            places = torch.arange(len(ids), device=ids.device)
            last = torch.where(ids == self.padding, -1, places).cummax(0).values[spans[:, 1] - 1]
            spans = torch.stack([spans[:, 0], torch.maximum(last, spans[:, 0]) + 1], dim=1)
        self._packed, self._spans = packed, spans
        try:
            return inner(input_ids=ids[spans[:, :1]], **inputs)
        finally:
            self._packed = self._spans = None

    def _enter(self, _: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
        return None if self._packed is None else ((), kwargs | self._packed)

    def _enter_pooler(self, _: nn.Module, args: tuple) -> tuple:
        return self._pool(args[0]), *args[1:]

    def _leave(self, _: nn.Module, args: tuple, output: ModelOutput) -> ModelOutput:
        if self._packed is not None:
            output.last_hidden_state = self._pool(output.last_hidden_state)
        return output

    def _pool(self, hidden: Tensor) -> Tensor:
        """Return (documents, 1, width) of hidden states (rows, length, width)."""
        if self._packed is None or hidden.dim() != 3:
            return hidden
        hidden, (start, end) = hidden.flatten(0, 1), self._spans.unbind(1)
        if self.kind != "mean":
            return hidden[start if self.kind == "first" else end - 1][:, None]
        tokens = torch.arange(len(hidden), device=hidden.device)
        number = torch.searchsorted(end.contiguous(), tokens, right=True).clamp(max=len(end) - 1)
        within = ((tokens >= start[number]) & (tokens < end[number])).to(hidden.dtype)  # 0 for padding
        sums = hidden.new_zeros(len(end), hidden.shape[-1]).index_add(0, number, hidden * within[:, None])
        return (sums / (end - start)[:, None])[:, None]


class Packing(Technique):
    """Let short documents share a row."""

    rounds_lengths = True

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if settings.task == "image-classification":
            return "images have one size and need no padding; use --packing false"
        if settings.attention == "eager":
            return "eager attention would need a mask of tokens x tokens; use --attention fused"
        config = load_config(settings.model)
        if config.model_type not in TESTED:
            return (
                f"packed texts may see each other in {settings.model} ({config.model_type}), which is not among the "
                f"tested architectures ({', '.join(sorted(TESTED))}); leave it out"
            )
        if config.output_attentions:
            return (
                f"output_attentions in the config of {settings.model} asks for eager attention, in which packed texts "
                "would see each other; leave it out"
            )
        if settings.task == "text-classification" and not getattr(facts_of(settings), "pooled", None):
            return f"it is not known which token the head of {settings.model} reads; leave it out"
        window = _shortest_window(config)
        if window and window < settings.max_length:
            return (
                f"layers of {settings.model} attend to {window} tokens, and rows have up to {settings.max_length}; "
                f"leave it out, or use --max_length {window}"
            )
        return None

    def describe_batch(self, settings: Settings, ranks: int) -> str | None:
        if settings.micro_batch_tokens:
            return f"batch {settings.batch_size} in packed micro-batches of {settings.micro_batch_tokens} tokens"
        devices = f"{ranks} x " if ranks > 1 else ""
        rows = f"{devices}{settings.micro_batch_size} row" + "s" * (settings.micro_batch_size > 1)
        return f"batch {settings.batch_size} packed, {rows} of up to {settings.max_length} tokens at once"

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        support_packing(model, settings.max_length, settings.batch_size if settings.attention == "varlen" else None)
        return model


def _shortest_window(config: PretrainedConfig) -> int | None:
    """Return the tokens that layers with sliding attention attend to; None if no layer has it."""
    types = getattr(config, "layer_types", None)
    if types and "sliding_attention" not in types:
        return None
    return getattr(config, "sliding_window", None)
