"""The kernels that compute attention on a CUDA GPU, chosen once for the whole process.

`scaled_dot_product_attention` uses the first kernel that supports its input. On compute capability 9 and 10, with a
cuDNN above 9.15, PyTorch tries cuDNN's kernel before flash attention. On other GPUs cuDNN's kernel comes last, after
the math kernel, which supports everything (PyTorch 2.13, `sdp_utils.cpp: check_prefer_cudnn_attention`). On Hopper
cuDNN's kernel is 1.7 to 2.3 times as fast as flash attention (transformers#48163). It has two problems:

- It builds a plan for each shape, which takes 0.05 to 1 second (torchtune#1652, FunASR#3704). Texts have a new shape in
  nearly every micro-batch.
- With a mask, its gradient is NaN at lengths such as 64, 192 and 704 (pytorch#196678, in PyTorch 2.11 to 2.13).

So it is used only for rows of one length without a mask: images, and packed rows of fixed shape. The order is
PyTorch's own, because PyTorch excludes unreliable versions of cuDNN.

The memory-efficient kernel needs as many heads of keys as of queries (`sdp_utils.cpp: can_use_mem_efficient_attention`;
later versions than 2.13 change this, pytorch#191085).
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from fabric_ladder.environment import emulates, within

TRUSTED = 91500  # PyTorch tries newer versions of cuDNN first
MULTIPLE = 8  # kernels want the width of a head to be a multiple of this
GAINING = (9, 10)  # compute capabilities, without their minor number
_flash = True  # whether this process has a flash kernel for 16 bits; a CPU has one for all types


def attention_kernels(
    precision: str,
    capability: tuple[int, int],
    cudnn: int | None = None,
    fixed: bool = False,
    deterministic: bool = False,
) -> tuple[str, ...]:
    """Return the attention kernels in PyTorch's order; the last one supports everything.

    Args:
        precision: As in the settings.
        capability: Compute capability of the GPU.
        cudnn: Version of cuDNN, 91500 for 9.15.0.
        fixed: Whether all rows have one length and no mask.
        deterministic: Whether only deterministic algorithms are allowed; cuDNN's kernel is not deterministic.
    """
    half = "16" in precision
    kernels = ["math"]
    if precision != "64-true" and not emulates(precision, capability):
        kernels.insert(0, "memory-efficient")
    if half and capability >= (8, 0):
        kernels.insert(0, "flash")
    if half and capability[0] in GAINING and (cudnn or 0) > TRUSTED and fixed and not deterministic:
        kernels.insert(0, "cuDNN")
    return tuple(kernels)


def use_kernels(kernels: tuple[str, ...]) -> None:
    """Compute attention in this process with the kernels that `attention_kernels` returned."""
    global _flash
    torch.backends.cuda.enable_cudnn_sdp("cuDNN" in kernels)
    _flash = "flash" in kernels


def declare_flash(available: bool) -> AbstractContextManager:
    """Declare whether the GPU of a rehearsal has flash kernels."""
    return within(globals(), _flash=available)


def takes_groups(query: Tensor) -> bool:
    """Return whether the kernel for a query also takes fewer heads of keys and values than of queries."""
    return _flash and computing_dtype(query.device.type, query.dtype).itemsize == 2


def computing_dtype(device: str, dtype: torch.dtype) -> torch.dtype:
    """Return autocast's type for a type of device where it is on, else `dtype`."""
    autocast = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if autocast else dtype
