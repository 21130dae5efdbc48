"""Attention of packed documents by PyTorch's `varlen_attn`, which computes no score between documents.

All rows are one sequence, and the flash kernel gets the places where its documents end (`masks.py: document_ends`). On
a CPU, which has no such kernel, this module gives the operation another one: a loop over the documents.
"""

import inspect
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.varlen import _varlen_attn, _varlen_attn_backward, varlen_attn
from torch.nn.functional import pad

from fabric_ladder.models.kernels import MULTIPLE, computing_dtype

TAKES_GROUPS = "enable_gqa" in inspect.signature(varlen_attn).parameters  # not in PyTorch 2.11
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def attend_documents(query: Tensor, key: Tensor, value: Tensor, ends: Tensor, causal: bool, scale: float) -> Tensor:
    """Return the attention of packed rows, (rows, length, heads, width), like `query`; `ends` is `document_ends`."""
    rows, length, heads, width = query.shape
    dtype = computing_dtype(query.device.type, query.dtype)
    query, key, value = (each.to(dtype).flatten(0, 1) for each in (query, key, value))
    if left := -width % MULTIPLE:
        query, key, value = (pad(each, (0, left)) for each in (query, key, value))
    if not TAKES_GROUPS:
        key, value = _repeated(key, heads), _repeated(value, heads)
    options = {"enable_gqa": True} if key.shape[1] != heads else {}
    window = (-1, 0 if causal else -1)
    attended = varlen_attn(query, key, value, ends, ends, length, length, scale=scale, window_size=window, **options)
    return attended.unflatten(0, (rows, length))[..., :width]


@_varlen_attn.register_kernel("cpu")
def _attend_on_cpu(query, key, value, ends, _, longest, __, causal=False, scale=None, *others):
    heads = query.shape[1]
    attended, sums = _loop(_forward, ends, causal, scale, query, _repeated(key, heads), _repeated(value, heads))
    return attended.contiguous(), sums.t().contiguous(), torch.zeros(2, dtype=torch.uint64)


@_varlen_attn_backward.register_kernel("cpu")
def _gradients_on_cpu(grad, query, key, value, attended, sums, ends, _, longest, __, causal, seed, scale=None, *others):
    heads, groups = query.shape[1], key.shape[1]
    tensors = grad, query, _repeated(key, heads), _repeated(value, heads), attended, sums.t()
    of_query, *found = _loop(_backward, ends, causal, scale, *tensors)
    return of_query.contiguous(), *(each.unflatten(1, (groups, -1)).sum(2) for each in found)


def _loop(kernel, ends: Tensor, causal: bool, scale: float | None, *tensors: Tensor) -> list[Tensor]:
    """Call a kernel on each document of tensors (tokens, heads, …), and return its results, joined."""
    parts = [
        kernel(*(each[None, start:end].transpose(1, 2) for each in tensors), 0.0, causal, scale=scale)
        for start, end in pairwise(ends.tolist())
        if start < end
    ]
    return [torch.cat(each, 2)[0].transpose(0, 1) for each in zip(*parts, strict=True)]


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    groups = heads // tensor.shape[1]
    return tensor if groups == 1 else tensor.repeat_interleave(groups, 1)
