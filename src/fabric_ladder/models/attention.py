"""The project's own entry in transformers' registries of attention functions and masks.

`build_model` gives a model this entry by its config, where transformers would use `sdpa`. The entry computes the same
with kernels that need no mask wherever possible (`masks.py`). For packed rows it extends queries and keys by a few
dimensions, which replace the mask (`packing.py`), or calls a kernel that takes documents (`varlen.py`). transformers'
own entries stay as they are.
"""

import inspect
import math
import re

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from fabric_ladder.models.kernels import MULTIPLE, takes_groups
from fabric_ladder.models.masks import ENDS_DIM, PACKED_DIM, make_mask

ATTENTION = "fabric_ladder_sdpa"
OWN = re.compile(r'_attn_implementation (in \("eager", "sdpa"\)|== "sdpa"):')  # in the source of a model


def use_own_attention(model: nn.Module) -> None:
    """Have a model of transformers compute its attention by this module's entry, in place.

    Models stay as they are where they use another entry than `sdpa`, choose their attention without the registry, or
    attend to chosen keys (DeepSeek V3.2) only if the entry's name is one of transformers' own.
    """
    if model.config._attn_implementation == "sdpa" and model._can_set_attn_implementation():
        inner = [type(module) for module in model.modules() if isinstance(module, PreTrainedModel)]
        if not any(OWN.search(inspect.getsource(module)) for module in {*map(inspect.getmodule, inner)}):
            model.config._attn_implementation = ATTENTION


def power_of_two(scale: float) -> float:
    """Return the power of two near 1 / scale, where scores are multiplied by `scale`."""
    return 2.0 ** math.ceil(-math.log2(scale))


def add_dimensions(
    query: Tensor, key: Tensor, value: Tensor, query_part: Tensor, key_part: Tensor, scale: float
) -> tuple[tuple[Tensor, Tensor, Tensor], float]:
    """Return query, key and value with new dimensions, and the scale for the kernel.

    The width becomes a multiple of 8. In 32-bit and above the returned scale is a power of two, which is exact, and the
    query is multiplied by the rest. 16-bit kernels apply any scale in 32-bit.

    Args:
        query: (rows, heads, length, width), or with the length before the heads; then the new dimensions too.
        key: Like `query`, perhaps with fewer heads.
        value: Like `key`. Its new dimensions are at the end and hold no results.
        query_part: (rows, heads or 1, length, new), placed before the query.
        key_part: The same for the key.
        scale: Factor of the scores.
    """
    if left := -(query_part.shape[-1] + query.shape[-1]) % MULTIPLE:
        query_part, key_part = functional.pad(query_part, (0, left)), functional.pad(key_part, (0, left))
    if query.element_size() > 2 and scale != 1 / power_of_two(scale):
        query, scale = query * (scale * power_of_two(scale)), 1 / power_of_two(scale)
    query_part = query_part.to(query.dtype).expand(*query.shape[:-1], -1)
    key_part = key_part.to(key.dtype).expand(*key.shape[:-1], -1)
    query, key = torch.cat([query_part, query], -1), torch.cat([key_part, key], -1)
    value = torch.cat([value, key_part], -1)  # any finite numbers: zeros would have to be made
    return (query, key, value), scale


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options,
) -> tuple[Tensor, None]:
    """Like transformers' `sdpa_attention_forward`; packed rows bring new dimensions or ends in place of a mask."""
    if attention_mask is None:
        return _attend_without_mask(module, query, key, value, scaling=scaling, **options)
    if attention_mask.dim() not in (PACKED_DIM, ENDS_DIM):
        return sdpa_attention_forward(module, query, key, value, attention_mask, scaling=scaling, **options)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if attention_mask.dim() == ENDS_DIM:
        from fabric_ladder.models.varlen import attend_documents  # takes 0.3 s

        causal = options.get("is_causal")
        causal = getattr(module, "is_causal", True) if causal is None else causal
        heads = (each.transpose(1, 2) for each in (query, key, value))
        return attend_documents(*heads, attention_mask, causal, scale), None
    query_part, key_part = attention_mask
    extended, kernel_scale = add_dimensions(query, key, value, query_part, key_part * power_of_two(scale), scale)
    attended, _ = _attend_without_mask(module, *extended, scaling=kernel_scale, **options)
    return attended[..., : value.shape[-1]], None


def _attend_without_mask(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, **options):
    """Compute attention with as many heads of keys as the kernel needs.

    Without a mask, transformers leaves groups of heads to PyTorch. If no kernel takes them, PyTorch computes a matrix
    of tokens x tokens. Heads that differ or are wider than 256 are repeated by transformers.
    """
    if key.shape[-1] == value.shape[-1] <= 256 and not takes_groups(query):
        groups = query.shape[1] // key.shape[1]
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    return sdpa_attention_forward(module, query, key, value, None, **options)


AttentionInterface.register(ATTENTION, _attend)
AttentionMaskInterface.register(ATTENTION, make_mask)
