"""Which kernel computes attention on this machine, forward and backward, and how fast each that can is.

    python benchmarks/attention_kernels.py --out FILE [--heads 16] [--tokens 1024] [--width 64 72 128 136]

For each width of a head and each dtype: the kernel that PyTorch takes by itself, and the seconds of every kernel, asked
for one by one. Widths that are 8 beyond a power of two are those of BLOOM's fused attention, whose new dimensions stand
beside the head's own (models/bloom.py); they are also padded to the next power of two, and computed by plain products
and a softmax with the bias as a matrix. Then the order of the kernels, and what cuDNN takes to plan for a new length:
the first call of it minus the second.
"""

import argparse
import json
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

import common  # noqa: F401 - first of all: it makes the project importable without an installation
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, scaled_dot_product_attention
from torch.profiler import ProfilerActivity, profile

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = 16 if DEVICE.type == "cuda" else 2  # as many as 16,384 tokens are: of fewer, launches would be timed
KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION, "memory-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cuDNN": SDPBackend.CUDNN_ATTENTION, "math": SDPBackend.MATH,
}  # fmt: skip
NAMES = {int(kernel.value): name for name, kernel in KERNELS.items()}
OPERATORS = {  # part of the name of PyTorch's operator: its kernel
    "flash_attention": "flash", "efficient_attention": "memory-efficient", "cudnn_attention": "cuDNN", "_math": "math",
}  # fmt: skip
Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def causal(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the attention as PyTorch computes it, of tensors (rows, heads, tokens, width)."""
    return scaled_dot_product_attention(query, key, value, is_causal=True)


def padded(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the same, with heads as wide as the next power of two."""
    width = query.shape[-1]
    more = 2 ** (width - 1).bit_length() - width
    return causal(*(pad(part, (0, more)) for part in (query, key, value)))[..., :width]


def eager(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the same by products and a softmax, with a bias of tokens x tokens."""
    tokens = query.shape[-2]
    bias = torch.full((tokens, tokens), torch.finfo(query.dtype).min, dtype=query.dtype, device=query.device).triu(1)
    scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5 + bias
    return scores.softmax(-1, dtype=torch.float32).to(value.dtype) @ value


def inputs(heads: int, tokens: int, width: int, dtype: torch.dtype) -> list[Tensor]:
    """Return query, key and value of `ROWS` rows."""
    return [torch.randn(ROWS, heads, tokens, width, dtype=dtype, device=DEVICE, requires_grad=True) for _ in range(3)]


def passes(attention: Attention, parts: list[Tensor], count: int) -> list[float]:
    """Return the seconds of so many forward and backward passes."""
    seconds = []
    for _ in range(count):
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        start = perf_counter()
        attention(*parts).sum().backward()
        if DEVICE.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return seconds


def measure(attention: Attention, parts: list[Tensor], count: int, kernel: SDPBackend | None = None) -> float | None:
    """Return the median seconds of a pass after the first; None where the kernel does not take such tensors."""
    try:
        with sdpa_kernel(kernel) if kernel else nullcontext():
            return statistics.median(passes(attention, parts, count + 1)[1:])
    except RuntimeError:  # no kernel, or no memory
        return None


def taken(parts: list[Tensor]) -> str:
    """Return the kernel that PyTorch takes."""
    problem = ""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        try:
            passes(causal, parts, 1)
        except RuntimeError as error:  # it takes one that has no kernel for the backward pass
            problem = f" (fails: {str(error).splitlines()[0][:80]})"
    names = [event.key for event in profiler.key_averages() if "scaled_dot_product" in event.key]
    found = {kernel for part, kernel in OPERATORS.items() if any(part in name for name in names)}
    return (" and ".join(sorted(found)) or "none of those known") + problem


def plans(heads: int, width: int, tokens: int, dtype: torch.dtype) -> list[float] | None:
    """Return by how much the first pass of each of three new lengths is slower than the second, where there is cuDNN.

    A fourth length before them takes what is once for all.
    """
    lengths = [tokens - 8 * number for number in range(4)]
    try:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            times = [passes(causal, inputs(heads, length, width, dtype), 2) for length in lengths]
    except RuntimeError:
        return None
    return [first - second for first, second in times[1:]]


def main() -> None:
    """Measure all of it and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--width", type=int, nargs="+", default=[64, 72, 128, 136])
    parser.add_argument("--passes", type=int, default=10)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")  # as the rungs have it on a GPU
    rows = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for width in args.width:
            parts = inputs(args.heads, args.tokens, width, dtype)
            row = {"dtype": str(dtype).removeprefix("torch."), "width": width, "taken": taken(parts)}
            row |= {name: measure(causal, parts, args.passes, kernel) for name, kernel in KERNELS.items()}
            if width & (width - 1):
                row |= {"padded": measure(padded, parts, args.passes), "eager": measure(eager, parts, args.passes)}
            rows.append(row)
    figures = {
        "heads": args.heads,
        "rows_of_inputs": ROWS,
        "tokens": args.tokens,
        "order": [NAMES[number] for number in torch._C._get_sdp_priority_order() if number in NAMES],
        "enabled": {name: getattr(torch.backends.cuda, f"{each}_sdp_enabled")() for name, each in
                    zip(KERNELS, ("flash", "mem_efficient", "cudnn", "math"), strict=True)},
        "plan_seconds": plans(args.heads, args.width[0], args.tokens, torch.bfloat16),
        "rows": rows,
    }  # fmt: skip
    args.out.write_text(json.dumps(figures), encoding="utf-8")


if __name__ == "__main__":
    main()
