"""Attention masks made without host-device synchronization.

Whether a mask hides anything decides between kernels, and transformers reads that from the device, which stalls it in
each forward pass. The loader knows it beforehand. The seam is transformers' `AttentionMaskInterface`, whose entry for
`scaled_dot_product_attention` is replaced by one that reads nothing within `declare_padding`, and is transformers' own
everywhere else. Within `declare_rows` it makes, instead of a mask, what keeps packed documents apart (`packing.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, masking_utils
from transformers.masking_utils import find_packed_sequence_indices, sdpa_mask

from fabric_ladder.errors import UserError

DIGITS = 7  # binary ones of a document's number in its row
OF_QUERY, OF_KEY = 64.0, 4.0  # what stands for 1; the key's is multiplied by what the scale of scores divides by, too
PACKED_DIM = 5  # dimensions of what stands for a mask then; a mask has 2 or 4
_padded: bool | None = None  # None: not declared
_rows: tuple[Tensor, int] | None = None  # packed: their positions, and the most tokens that one may have


@contextmanager
def declare_padding(padded: bool) -> Iterator[None]:
    """Declare whether the attention masks of this block's batches hide any token; padding stands on the right.

    Then a causal model needs no mask: it hides the padding, which comes later, from every real token as it is.
    """
    global _padded
    before, _padded = _padded, padded
    try:
        yield
    finally:
        _padded = before


@contextmanager
def declare_rows(positions: Tensor, longest: int) -> Iterator[None]:
    """Declare that the batches of this block are packed, in rows of so many tokens at the most.

    Positions (rows, length) count from 0 in each document.
    """
    global _rows
    before, _rows = _rows, (positions, longest)
    try:
        yield
    finally:
        _rows = before


def document_digits() -> Tensor | None:
    """Return what keeps the documents of the declared rows apart, (2, rows, 1, length, 8); None without such rows.

    For queries and keys: a constant, and the document's number in binary digits, 1 and -1. Their dot product is 0
    within a document, and elsewhere -2 `OF_QUERY` x `OF_KEY` for each digit that differs.
    """
    if _rows is None:
        return None
    number = (_rows[0] == 0).cumsum(-1)[:, None, :, None]
    digits = (number >> torch.arange(DIGITS, device=number.device)) % 2 * 2.0 - 1
    one = torch.ones_like(digits[..., :1])
    of_query, of_key = torch.cat([one * DIGITS, digits], -1), torch.cat([-one, digits], -1)
    return torch.stack([of_query * OF_QUERY, of_key * OF_KEY])


def _make_mask(**options) -> Tensor | None:
    """Do as `sdpa_mask`, whose options these are; None where the kernel needs no mask, but for its own causal one."""
    window, length, offset = options.get("local_size"), options["kv_length"], options.get("q_offset", 0)
    if _rows:
        if window is not None and window < _rows[1]:
            raise UserError(
                f"--packing true: layers of this model see {window} tokens at once, and rows have up to {_rows[1]}; "
                f"leave it out, or use --max_length {window}"
            )
        return document_digits()
    if _padded is None:
        return sdpa_mask(**options)
    if window is None or length < window:
        from_start = isinstance(offset, int) and offset == 0 and options["q_length"] == length
        if from_start and options.get("allow_is_causal_skip", True):
            return None
        hides = _padded and options.get("attention_mask") is not None
        if options.get("allow_is_bidirectional_skip", False) and not hides:
            return None
    return sdpa_mask(**(options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))


def _number_samples(position_ids: Tensor) -> Tensor | None:
    """Do as `find_packed_sequence_indices`, but for declared rows, which need no numbers, nor a look at the device."""
    return None if _rows else find_packed_sequence_indices(position_ids)


AttentionMaskInterface.register("sdpa", _make_mask)
masking_utils.find_packed_sequence_indices = _number_samples
