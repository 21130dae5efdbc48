"""Attention of packed documents by PyTorch's `varlen_attn`, which computes no score between documents.

All rows are one sequence, and the flash kernel gets the places where its documents end (`masks.py: document_ends`). On
a CPU, which has no such kernel, this module gives the operation another one: a loop over the documents.
"""

import inspect
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward, varlen_attn
from torch.nn.functional import pad

from fabric_ladder.models.attention import MULTIPLE
from fabric_ladder.models.kernels import computing_dtype

TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in PyTorch 2.11
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_documents(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, causal: bool, scale: float) -> Tensor:
    """Return the attention of packed rows, (rows, length, heads, width).

    Args:
        query: (rows, length, heads, width).
        key: Like `query`, perhaps with fewer heads.
        value: Like `key`.
        ends: The result of `document_ends`.
        causal: Whether a token sees no later ones.
        scale: Factor of the scores.
    """
    rows, length, heads, width = query.shape
    dtype = computing_dtype(query.device.type, query.dtype)
    query, key, value = (each.to(dtype).flatten(0, 1) for each in (query, key, value))
    if left := -width % MULTIPLE:
        query, key, value = (pad(each, (0, left)) for each in (query, key, value))
    options = {"scale": scale, "window_size": (-1, 0 if causal else -1)}
    if groups := heads // key.shape[1] if key.shape[1] != heads else 0:
        if TAKES_GROUPS:
            options["enable_gqa"] = True
        else:
            key, value = (each.repeat_interleave(groups, 1) for each in (key, value))
    attended = varlen_attn(query, key, value, ends, ends, length, length, **options)
    return attended.unflatten(0, (rows, length))[..., :width]


@_varlen_attn.register_kernel("cpu")
def _attend_on_cpu(query, key, value, ends, _, longest, __, causal=False, scale=None, *others):
    """Return the results and the logarithms of the sums of exponentials, by documents, and a seed without use."""
    key, value = (each.repeat_interleave(query.shape[1] // each.shape[1], 1) for each in (key, value))
    parts = [_forward(*each, 0.0, causal, scale=scale) for each in _documents(ends, query, key, value)]
    attended, sums = (torch.cat([part[place][0] for part in parts], 1) for place in (0, 1))
    return attended.transpose(0, 1).contiguous(), sums, torch.zeros(2, dtype=torch.uint64)


@_varlen_attn_backward.register_kernel("cpu")
def _attend_backward_on_cpu(
    gradient, query, key, value, attended, sums, ends, _, longest, __, causal, seed, scale=None, *others
):
    """Return the gradients of query, key and value."""
    heads = key.shape[1]
    key, value = (each.repeat_interleave(query.shape[1] // heads, 1) for each in (key, value))
    parts = [
        _backward(*each, 0.0, causal, scale=scale)
        for each in _documents(ends, gradient, query, key, value, attended, sums.t()[..., None])
    ]
    found = [torch.cat([part[place][0] for part in parts], 1).transpose(0, 1) for place in range(3)]
    return found[0].contiguous(), *(each.unflatten(1, (heads, -1)).sum(2) for each in found[1:])


def _documents(ends: Tensor, *tensors: Tensor) -> Iterator[list[Tensor]]:
    """Yield each document of tensors (tokens, heads, width), as (1, heads, tokens, width)."""
    for start, end in pairwise(ends.tolist()):
        if start < end:
            yield [each[None, start:end].transpose(1, 2) for each in tensors]
