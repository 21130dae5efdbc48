"""Seconds of a training step, predicted from the work that it gives to a GPU and to the CPU.

A pass takes the longer of two times. The CPU needs time to launch each kernel. The GPU needs time for matrix
multiplications, attention, the bytes of all other kernels, and the start of each kernel.

Except `PYTHON_CALL`, no constant here was measured with this project. Each has its source; "a guess" marks the others.
"""

from typing import NamedTuple

from fabric_ladder.planning.gpus import Gpu

BANDWIDTH = {  # bytes/s of the memory: NVIDIA's data sheets of H100 (SXM) and T4, white paper of Ada (RTX 4090)
    "H100": 3.35e12,
    "RTX 4090": 1.008e12,
    "T4": 0.32e12,
}
REACHED_BANDWIDTH = 0.85  # share of it that elementwise kernels reach: a guess
# The best shapes reach 80 % of the peak in bfloat16 on an H100 and 71 % in float8 (Bekman, ML Engineering, Maximum
# Achievable Matmul FLOPS). The matrices here are smaller, so both get less: a guess.
REACHED_PRODUCTS = 0.7
REACHED_PRODUCTS_8 = 0.6
REACHED_ATTENTION = 0.35  # FlashAttention-2 on an H100 (Shah et al., 2024, FlashAttention-3, abstract)
KERNEL_START = 2e-6  # seconds of the GPU between two kernels: a guess
EAGER_CALL = 8e-6  # CPU seconds of an eager kernel: add of 512 x 512 on an A100 (flagos-ai/Torch-FL#27)
COMPILED_CALL = 7e-6  # CPU seconds of a kernel in compiled code (meta-pytorch/tritonbench#1017: 6.8 to 9.1)
GRAPH_CALL = 40e-6  # CPU seconds of a call of compiled code: guards and autograd (pytorch#122029, tritonbench#1017)
# More CPU seconds of an operation that a Python dispatch mode passes on, as selective checkpointing does. Measured on
# a CPU with torch 2.13: 24.7 against 8.4 microseconds for a product of 4 x 4 numbers.
PYTHON_CALL = 16e-6
WAIT = 20e-6  # seconds until the GPU is busy again after the CPU waited for it: a guess


class Work(NamedTuple):
    """The work of a pass or of an optimizer step.

    Attributes:
        kernels: Kernels that the GPU runs.
        compiled: The kernels among them that compiled code launches.
        graphs: Calls of compiled code.
        python_calls: Operations that a Python dispatch mode or a tensor subclass passes on.
        waits: Times that the CPU waits for the GPU.
        moved: Bytes that elementwise kernels, reductions and copies read and write.
        product_bytes: Bytes that matrix multiplications read and write.
        flops_8: FLOPs of matrix multiplications of 8-bit numbers.
        flops_16: The same of 16-bit numbers.
        flops_32: The same of 32-bit numbers.
        attention_flops: FLOPs of fused attention kernels.
    """

    kernels: float = 0.0
    compiled: float = 0.0
    graphs: float = 0.0
    python_calls: float = 0.0
    waits: float = 0.0
    moved: float = 0.0
    product_bytes: float = 0.0
    flops_8: float = 0.0
    flops_16: float = 0.0
    flops_32: float = 0.0
    attention_flops: float = 0.0

    @property
    def flops(self) -> float:
        """FLOPs of all matrix multiplications and of attention."""
        return self.flops_8 + self.flops_16 + self.flops_32 + self.attention_flops


def host_seconds(work: Work) -> float:
    """Return the time that the CPU needs to launch the kernels."""
    eager = work.kernels - work.compiled
    launches = eager * EAGER_CALL + work.compiled * COMPILED_CALL
    return launches + work.graphs * GRAPH_CALL + work.python_calls * PYTHON_CALL


def device_seconds(work: Work, gpu: Gpu) -> dict[str, float]:
    """Return the times that a GPU needs for matrix multiplications, attention, other kernels, and all their starts.

    32-bit matrix multiplications use TF32 if the GPU supports it.
    """
    bandwidth = BANDWIDTH[gpu.name] * REACHED_BANDWIDTH
    half, single = 1e12 * gpu.half, 1e12 * gpu.single
    products = (work.flops_16 / half + work.flops_32 / single) / REACHED_PRODUCTS
    products += work.flops_8 / (2 * half * REACHED_PRODUCTS_8)
    return {
        "products": max(products, work.product_bytes / bandwidth),
        "attention": work.attention_flops / (half * REACHED_ATTENTION),
        "elementwise": work.moved / bandwidth,
        "starts": work.kernels * KERNEL_START,
    }


def seconds(work: Work, gpu: Gpu) -> float:
    """Return the predicted time of a pass or of an optimizer step."""
    return max(host_seconds(work), sum(device_seconds(work, gpu).values())) + work.waits * WAIT
