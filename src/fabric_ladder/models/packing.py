"""Packing: short documents share a row without seeing each other, and without a mask of tokens x tokens.

A packed batch says by `position_ids`, which count from 0 in each document, where documents begin. A softmax row does
not change when a constant is added to it, so what keeps them apart can be a dot product with 8 more dimensions of
queries and keys: the number of the document in 7 binary digits, written as 1 and -1, and a constant that takes 7 away.
Between tokens of one document these add up to exactly 0, between others to -2 for each digit that differs; scaled up,
that leaves the others no weight. So attention is a plain `scaled_dot_product_attention`, causal or not, which takes a
flash kernel on every device that has one. All numbers are whole and small, exact in every floating-point format, and
they stand first, so that they have cancelled out before anything else is added. (A CPU's kernels add in another order
where a few tokens are left over, and round in 32-bit to 1e-4 there: so rows are a multiple of 16 tokens long, where
`max_length` is.)

The seams are transformers' registries of masks and of attention functions, in which `sdpa` does this for packed batches
alone, the model's `forward`, and for a classifier hooks around its base model, by which its own head gets one token of
each document. BLOOM, whose attention is its own, takes the same dimensions (`bloom.py`).
"""

import inspect
import math
from functools import partial

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_outputs import ModelOutput

from fabric_ladder.models.masks import PACKED_DIM, declare_rows

MULTIPLE = 8  # what the width of a head becomes a multiple of, as kernels want it


def unit_of(scale: float) -> float:
    """Return the power of two near what the scale of scores divides by."""
    return 2.0 ** math.ceil(-math.log2(scale))


def support_packing(model: nn.Module, longest: int) -> None:
    """Let a model of transformers take packed batches; before anything is wrapped around it.

    Its forward pass then takes `position_ids` (rows, length), which count from 0 in each document, in place of an
    attention mask; a classifier's also `spans` (documents, 2), the flat positions of each document's first token and
    after its last one, and `labels` (documents,). Without `position_ids` the model computes what it did.

    Args:
        model: A language model, or a classifier of texts.
        longest: The most tokens that a row will have.
    """
    base = model.base_model
    named = "position_ids" in inspect.signature(base.forward).parameters
    shift = _first_position(base) if named else None
    pooling = _Pooling(model) if model.get_output_embeddings() is None else None
    model.forward = partial(_forward, model.forward, pooling, shift, longest)


def _forward(
    inner, pooling: "_Pooling | None", shift: int | None, longest: int, position_ids: Tensor | None = None,
    spans: Tensor | None = None, **inputs,
) -> ModelOutput:  # fmt: skip
    """Run the model's own forward pass, `inner`; `shift` is the first position's number, None where it takes none."""
    if position_ids is None:
        return inner(**inputs)
    positions = {} if shift is None else {"position_ids": position_ids + shift}
    inputs = {name: value for name, value in inputs.items() if value is not None}  # PEFT names all that there may be
    with declare_rows(position_ids, longest):
        if spans is None:
            return inner(**inputs, **positions)
        return pooling.run(inner, {"input_ids": inputs.pop("input_ids"), **positions}, spans, inputs)


def _first_position(base: nn.Module) -> int:
    """Return the number of the first position: RoBERTa and its kin count on from their padding token's."""
    tables = (module for name, module in base.named_modules() if name.endswith("position_embeddings"))
    padding = next((table.padding_idx for table in tables if getattr(table, "padding_idx", None) is not None), -1)
    return padding + 1


class _Pooling:
    """Gives a classifier's own head what it is made for: rows of one token, the one that a document is judged by.

    That is the last token of a causal model, the first one of others, or the mean of all, where the config says so.
    """

    def __init__(self, model: nn.Module):
        base = model.base_model
        both_ways = any(getattr(module, "is_causal", None) is False for module in base.modules())
        mean = getattr(model.config, "classifier_pooling", None) == "mean"
        self.kind = "mean" if mean else "first" if both_ways else "last"
        self._packed = self._spans = None
        base.register_forward_pre_hook(self._enter, with_kwargs=True)
        base.register_forward_hook(self._leave)
        if isinstance(pooler := getattr(base, "pooler", None), nn.Module):  # BERT's, a part of the base model
            pooler.register_forward_pre_hook(self._enter_pooler)

    def run(self, inner, packed: dict[str, Tensor], spans: Tensor, inputs: dict[str, Tensor]) -> ModelOutput:
        """Run a forward pass whose base model gets the packed batch, and whose head the documents."""
        self._packed, self._spans = packed, spans
        try:
            return inner(input_ids=packed["input_ids"].flatten()[spans[:, :1]], **inputs)
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
        within = ((tokens >= start[number]) & (tokens < end[number])).to(hidden.dtype)  # not a row's padding
        sums = hidden.new_zeros(len(end), hidden.shape[-1]).index_add(0, number, hidden * within[:, None])
        return (sums / (end - start)[:, None])[:, None]


def widened(
    query: Tensor, key: Tensor, value: Tensor, of_query: Tensor, of_key: Tensor, scale: float
) -> tuple[tuple[Tensor, Tensor, Tensor], float]:
    """Return query, key and value with new dimensions in front, a multiple of 8 wide, and the scale for the kernel.

    In 32-bit and above that is a power of two, which costs no digits, and the query takes over the rest; 16-bit kernels
    apply any scale in 32-bit.

    Args:
        query: (rows, heads, length, width).
        key: Like `query`, perhaps of fewer heads.
        value: Like `key`, perhaps narrower.
        of_query: (rows, heads or 1, length, new): what stands before the query.
        of_key: The same of the key.
        scale: What scores are multiplied by.
    """
    new, width = of_query.shape[-1], query.shape[-1]
    left = -(new + width) % MULTIPLE
    if query.element_size() > 2 and scale != 1 / unit_of(scale):
        query, scale = query * (scale * unit_of(scale)), 1 / unit_of(scale)

    def join(part: Tensor, before: Tensor | None = None) -> Tensor:
        zeros = part.new_zeros(()).expand(*part.shape[:-1], new + width + left)
        if before is None:
            return torch.cat([part, zeros[..., part.shape[-1] :]], -1)
        return torch.cat([before.to(part.dtype).expand(*part.shape[:-1], new), part, zeros[..., :left]], -1)

    return (join(query, of_query), join(key, of_key), join(value)), scale


def _attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
    scaling: float | None = None, **options,
) -> tuple[Tensor, None]:  # fmt: skip
    """Do as transformers' `sdpa_attention_forward`, whose arguments these are; packed rows bring digits for a mask."""
    if attention_mask is None or attention_mask.dim() != PACKED_DIM:
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    of_query, of_key = attention_mask
    wide, kernel_scale = widened(query, key, value, of_query, of_key * unit_of(scale), scale)
    attended, _ = sdpa_attention_forward(module, *wide, None, scaling=kernel_scale, **options)
    return attended[..., : value.shape[-1]], None


AttentionInterface.register("sdpa", _attend)
