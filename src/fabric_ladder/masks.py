"""Attention masks made without a question to the device.

Whether a mask hides anything decides between kernels, and transformers reads that from the device, which stalls it in
each forward pass. The loader knows it beforehand. The seam is transformers' `AttentionMaskInterface`, whose entry for
`scaled_dot_product_attention` is replaced by one that asks nothing within `mask_known`, and is transformers' own
everywhere else.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor
from transformers import AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

_hides: bool | None = None  # None: nobody has said


@contextmanager
def mask_known(hides: bool) -> Iterator[None]:
    """Say of the batches within whether their attention mask hides any token; all are padded on the right, if at all.

    Then a causal model needs no mask: it hides the padding, which comes later, from every real token as it is.
    """
    global _hides
    before, _hides = _hides, hides
    try:
        yield
    finally:
        _hides = before


def _mask(
    *, q_length: int, kv_length: int, q_offset: int = 0, local_size: int | None = None,
    allow_is_causal_skip: bool = True, allow_is_bidirectional_skip: bool = False, **how,
) -> Tensor | None:  # fmt: skip
    """Do as `sdpa_mask`, whose arguments these are; None: the kernel needs no mask, but for a causal one of its own."""
    how |= {"q_length": q_length, "kv_length": kv_length, "q_offset": q_offset, "local_size": local_size}
    if _hides is None:
        skips = {"allow_is_causal_skip": allow_is_causal_skip}
        return sdpa_mask(**how, **skips, allow_is_bidirectional_skip=allow_is_bidirectional_skip)
    whole = local_size is None or kv_length < local_size
    if whole and allow_is_causal_skip and isinstance(q_offset, int) and q_offset == 0 and q_length == kv_length:
        return None
    if whole and allow_is_bidirectional_skip and not (_hides and how.get("attention_mask") is not None):
        return None
    return sdpa_mask(**how, allow_is_causal_skip=False)


AttentionMaskInterface.register("sdpa", _mask)
