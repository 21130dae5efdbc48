"""Which kernels compute attention on a CUDA GPU, chosen in one place for the whole process.

`scaled_dot_product_attention` takes the first of its kernels that can. On compute capability 9 and 10, with a cuDNN
above 9.15, it tries cuDNN's before flash attention; elsewhere cuDNN's comes last, after the one that takes everything
(PyTorch 2.13, `sdp_utils.cpp: check_prefer_cudnn_attention`). On Hopper cuDNN's is 1.7 to 2.3 times as fast as flash
attention, on Ampere, Ada and RTX Blackwell no faster (transformers#48163). But

- it builds a plan for each shape, 0.05 to 1 second (torchtune#1652, FunASR#3704), and texts, cut by their lengths, have
  another one in nearly every micro-batch;
- with a mask, its gradient is NaN at lengths such as 64, 192 and 704 (pytorch#196678, in PyTorch 2.11 to 2.13).

So it is left to rows of one length without a mask: those of images, and packed ones of fixed shape. The order stays
PyTorch's own, which knows the versions of cuDNN that can be trusted.
"""

import torch

from fabric_ladder.environment import emulates

TRUSTED = 91500  # cuDNN versions above it (9.15.0) PyTorch tries first
GAINING = (9, 10)  # compute capabilities, without their minor number


def attention_kernels(
    precision: str,
    capability: tuple[int, int],
    cudnn: int | None = None,
    fixed: bool = False,
    deterministic: bool = False,
) -> tuple[str, ...]:
    """Return the kernels of attention in the order in which PyTorch is to try them; the last one takes everything.

    Args:
        precision: As in the settings.
        capability: Compute capability of the GPU.
        cudnn: Version of cuDNN, 91500 for 9.15.0.
        fixed: Whether all rows have one length, and no mask.
        deterministic: Whether only deterministic algorithms are allowed, of which cuDNN has none.
    """
    half, kernels = "16" in precision, ["math"]
    if precision != "64-true" and not emulates(precision, capability):
        kernels.insert(0, "memory-efficient")
    if half and capability >= (8, 0):
        kernels.insert(0, "flash")
    if half and capability[0] in GAINING and (cudnn or 0) > TRUSTED and fixed and not deterministic:
        kernels.insert(0, "cuDNN")
    return tuple(kernels)


def use_kernels(kernels: tuple[str, ...]) -> None:
    """Have this process compute attention by these kernels, which `attention_kernels` returned."""
    torch.backends.cuda.enable_cudnn_sdp("cuDNN" in kernels)
