"""Attention masks made without host-device synchronization.

transformers reads the mask's values from the device to find out whether the mask hides a token. This stalls the device
in each forward pass. The loader declares the answer beforehand. Within `declare_padding` the function `make_mask` reads
no values; elsewhere it is transformers' own `sdpa_mask`. Within `declare_rows` it returns dimensions that keep packed
documents apart, or the places where documents end, in place of a mask (`attention.py`, `packing.py`).
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils
from transformers.masking_utils import sdpa_mask

from fabric_ladder.environment import within
from fabric_ladder.errors import UserError
from fabric_ladder.models.kernels import computing_dtype

DIGITS = 7  # binary digits of a document's number in its row
QUERY_UNIT = 64.0  # factor of the query's dimensions
KEY_UNIT = 4.0  # factor of the key's dimensions, which are also divided by the scale of the scores
PACKED_DIM, ENDS_DIM = 5, 1  # tensor dimensions of `document_digits` and `document_ends`; a mask has 2 or 4
_padded: bool | None = None  # None: not declared


class _Rows(NamedTuple):
    """The arguments of `declare_rows`."""

    positions: Tensor
    longest: int
    documents: int | None


_rows: _Rows | None = None  # None: not declared


def declare_padding(padded: bool) -> AbstractContextManager:
    """Declare whether attention masks hide any token in the batches of this block; padding is on the right.

    A causal model then needs no mask: no real token attends to the padding, which comes later.
    """
    return within(globals(), _padded=padded)


@contextmanager
def declare_rows(positions: Tensor, longest: int, documents: int | None = None) -> Iterator[None]:
    """Declare that the batches of this block are packed.

    transformers' own search for packed documents is switched off in this block, since it reads from the device.

    Args:
        positions: (rows, length), which count from 0 in each document.
        longest: The largest number of tokens that a row may have.
        documents: The most documents of all rows, padding included, if attention takes `document_ends`; None: digits.
    """
    search = {"find_packed_sequence_indices": lambda position_ids: None}
    with within(globals(), _rows=_Rows(positions, longest, documents)), within(vars(masking_utils), **search):
        yield


def document_digits() -> Tensor | None:
    """Return new dimensions for queries and keys, (2, rows, 1, length, 8); None if no rows are declared to need them.

    They hold a constant and the document's number in binary digits, 1 and -1. Their dot product is 0 within a document.
    Between documents it is -2 `QUERY_UNIT` x `KEY_UNIT` for each digit that differs.
    """
    if _rows is None or _rows.documents:
        return None
    number = (_rows.positions == 0).cumsum(-1)[:, None, :, None]
    digits = (number >> torch.arange(DIGITS, device=number.device)) % 2 * 2.0 - 1
    one = torch.ones_like(digits[..., :1])
    query_part = torch.cat([one * DIGITS, digits], -1)
    key_part = torch.cat([-one, digits], -1)
    return torch.stack([query_part * QUERY_UNIT, key_part * KEY_UNIT])


def document_ends() -> Tensor | None:
    """Return 0 and where each document ends in the flattened rows, (documents + 1,); None if rows have digits or none.

    The last end is repeated in place of missing documents. So the shape depends on no value, and nothing waits.
    """
    if _rows is None or not _rows.documents:
        return None
    number = (_rows.positions.flatten() == 0).cumsum(0)  # of each token's document, from 1 on
    documents = torch.arange(_rows.documents + 1, device=number.device)
    return torch.searchsorted(number, documents, right=True, out_int32=True)


def make_mask(**options) -> Tensor | None:
    """Like `sdpa_mask`, with the same options; None where the kernel needs no mask except its own causal one."""
    window = options.get("local_size")
    length = options["kv_length"]
    offset = options.get("q_offset", 0)
    if _rows:
        if window is not None and window < _rows.longest:
            raise UserError(
                f"--packing true: layers of this model attend to {window} tokens, and rows have up to {_rows.longest}; "
                f"leave it out, or use --max_length {window}"
            )
        if _rows.documents:
            return document_ends()
        return document_digits().to(computing_dtype(options["device"].type, options["dtype"]))
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
