"""bfloat16 on a CPU without instructions for it: operations compute in 32 bits and round their result.

Without such instructions PyTorch multiplies bfloat16 matrices in a loop without vectors, and its attention and
convolutions use this loop (PyTorch 2.13, `CPUBlas.cpp: gemm`). It sums in 32 bits and rounds once, as here. So only the
order of a sum differs.

During an operation there are copies of its inputs and its result in 32 bits.
"""

import warnings
from functools import cache, partial

import torch
from torch import Tensor

# how many results are rounded: attention also returns logsumexp, which has 32 bits
OPERATIONS = {
    "mm": 1,
    "addmm": 1,
    "bmm": 1,
    "baddbmm": 1,
    "convolution": 1,
    "convolution_backward": 3,
    "_scaled_dot_product_flash_attention_for_cpu": 1,
    "_scaled_dot_product_flash_attention_for_cpu_backward": 3,
}


@cache
def compute_in_32_bits() -> torch.library.Library:
    """Replace PyTorch's operations on bfloat16 in this process; other types keep theirs.

    Returns:
        What holds the replacements; they end with it.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel is replaced
        for name, rounded in OPERATIONS.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, partial(_compute, kernel, rounded), "CPU", with_keyset=True)
    return library


def _compute(kernel, rounded: int, keys, *inputs, **options):
    """Call an operation's own kernel, with bfloat16 inputs in 32 bits."""
    if not any(_is_bfloat16(each) for each in inputs):
        return kernel.call_boxed(keys, *inputs, **options)
    wide = [_widen(each) for each in inputs]
    results = kernel.call_boxed(keys, *wide, **{name: _widen(each) for name, each in options.items()})
    if isinstance(results, Tensor):
        return results.bfloat16()
    return *(each if each is None else each.bfloat16() for each in results[:rounded]), *results[rounded:]


def _is_bfloat16(value: object) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.bfloat16


def _widen(value: object) -> object:
    return value.float() if _is_bfloat16(value) else value
