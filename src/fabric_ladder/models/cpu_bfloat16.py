"""bfloat16 on a CPU where PyTorch has no fast kernels for it: operations compute in 32 bits and round their result.

Without AVX-512 PyTorch multiplies bfloat16 matrices in a loop without vectors, 10 to 500 times slower than 32-bit
ones (pytorch#146508). Attention and convolutions use the same loop. For matrix multiplications it sums in 32 bits and
rounds once, as here, so only the order of a sum differs. Attention and convolutions round more often there.

Each operation copies its inputs and its result in 32 bits, and holds Python's global lock (GIL). Operations on other
types, or on several, stay as they are. `torch.library.get_kernel` documents this way to replace a kernel.
"""

import warnings
from functools import cache, partial

import torch
from torch import Tensor

from fabric_ladder.environment import cpu_has_fast_bfloat16
from fabric_ladder.settings import Settings

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
IN_PLACE = ("mm.out", "addmm.out", "bmm.out", "baddbmm.out", "addmm_", "baddbmm_")  # compiled code uses `.out`


def replaces_bfloat16(settings: Settings) -> bool:
    """Return whether a run computes bfloat16 in 32 bits."""
    return settings.accelerator == "cpu" and settings.precision.startswith("bf16") and not cpu_has_fast_bfloat16()


@cache
def compute_in_32_bits() -> torch.library.Library:
    """Replace PyTorch's operations on bfloat16 in this process until `restore_bfloat16`."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Warning only once for all operators")  # that a kernel is replaced
        for name, rounded in OPERATIONS.items():
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, partial(_compute, kernel, rounded), "CPU", with_keyset=True)
        for name in IN_PLACE:
            kernel = torch.library.get_kernel(f"aten::{name}", "CPU")
            library.impl(name, partial(_compute_in_place, kernel), "CPU", with_keyset=True)
    return library


def restore_bfloat16() -> None:
    """Give PyTorch its own operations back, for peers and comparisons."""
    if compute_in_32_bits.cache_info().currsize:
        compute_in_32_bits()._destroy()
        compute_in_32_bits.cache_clear()


def _compute(kernel, rounded: int, keys, *inputs, **options):
    """Call an operation's own kernel, with bfloat16 inputs in 32 bits."""
    if not _are_bfloat16(inputs[:5]):  # the sixth of attention's backward pass, logsumexp, has 32 bits
        return kernel.call_boxed(keys, *inputs, **options)
    wide, wide_options = _widen(inputs, options)
    results = kernel.call_boxed(keys, *wide, **wide_options)
    if isinstance(results, Tensor):
        return results.bfloat16()
    return *(each if each is None else each.bfloat16() for each in results[:rounded]), *results[rounded:]


def _compute_in_place(kernel, keys, *inputs, **options) -> Tensor:
    """Call the own kernel of an operation that writes into `out` or its first input."""
    target = options.get("out", inputs[0])
    if not _are_bfloat16((target, *inputs)):
        return kernel.call_boxed(keys, *inputs, **options)
    wide, wide_options = _widen(inputs, options)
    kernel.call_boxed(keys, *wide, **wide_options)
    result = wide_options.get("out", wide[0])
    return target.resize_(result.shape).copy_(result)


def _are_bfloat16(values: tuple) -> bool:
    return all(each.dtype == torch.bfloat16 for each in values if isinstance(each, Tensor))


def _widen(inputs: tuple, options: dict[str, object]) -> tuple[list, dict[str, object]]:
    """Return the inputs and options with bfloat16 tensors in 32 bits."""

    def wide(value: object) -> object:
        return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

    return [wide(each) for each in inputs], {name: wide(each) for name, each in options.items()}
