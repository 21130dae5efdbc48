"""Attention masks made without host-device synchronization.

Whether a mask hides anything decides between kernels, and transformers reads that from the device, which stalls it in
each forward pass. The loader knows it beforehand. The seam is transformers' `AttentionMaskInterface`, whose entry for
`scaled_dot_product_attention` is replaced by one that reads nothing within `declare_padding`, and is transformers' own
everywhere else. So is the function that numbers packed samples, for which there is no such interface.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import AttentionMaskInterface, masking_utils
from transformers.masking_utils import find_packed_sequence_indices, sdpa_mask

_padded: bool | None = None  # None: not declared


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


def _make_mask(**options) -> Tensor | None:
    """Do as `sdpa_mask`, whose options these are; None where the kernel needs no mask, but for its own causal one."""
    if _padded is None:
        return sdpa_mask(**options)
    window, length, offset = options.get("local_size"), options["kv_length"], options.get("q_offset", 0)
    if window is None or length < window:
        from_start = isinstance(offset, int) and offset == 0 and options["q_length"] == length
        if from_start and options.get("allow_is_causal_skip", True):
            return None
        hides = _padded and options.get("attention_mask") is not None
        if options.get("allow_is_bidirectional_skip", False) and not hides:
            return None
    return sdpa_mask(**(options | {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}))


def _number_samples(position_ids: Tensor) -> Tensor | None:
    """Do as `find_packed_sequence_indices`, without asking the device whether any row holds more than one sample."""
    if _padded is None:
        return find_packed_sequence_indices(position_ids)
    return (position_ids.diff(prepend=position_ids[:, :1] - 1) != 1).cumsum(-1)


AttentionMaskInterface.register("sdpa", _make_mask)
masking_utils.find_packed_sequence_indices = _number_samples
