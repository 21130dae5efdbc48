"""The loss of a language model: all logits at once against chunks of them, and against fused kernels on a GPU.

    python benchmarks/chunked_loss.py [--tokens 2048] [--width 1024] [--vocabulary 250880] [--chunk 64 256 1024]

One forward and backward pass of head and loss alone, with the head trained and frozen (as with adapters). `whole` is
transformers' own `ForCausalLMLoss`. On a GPU the peak is PyTorch's own figure, and Liger Kernel's and Apple's
cut-cross-entropy are measured too where they are installed; on a CPU it is the bytes of the tensors alive. The inputs'
own bytes are left out of all of them. The sides take turns; the median of the turns is given, and with `--repeats 0` no
time: then fake tensors do on a CPU, and nothing is computed.
"""

import argparse
import importlib.util
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import common  # first of all: it makes the project importable without an installation
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.nn.functional import linear
from transformers.loss.loss_utils import ForCausalLMLoss

from fabric_ladder.models.chunked_loss import chunked_loss
from fabric_ladder.planning.tracker import PeakTracker

OUT = common.RESULTS / "chunked_loss.json"
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # of hidden states, the head's weight, and the next tokens
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def sides(chunks: list[int]) -> dict[str, Loss]:
    """Return what is compared on this machine."""

    def whole(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        return ForCausalLMLoss(linear(hidden, weight), None, weight.shape[0], shift_labels=targets)

    def in_chunks(chunk: int) -> Loss:
        return lambda hidden, weight, targets: chunked_loss(hidden, weight, None, targets, chunk)[0]

    found = {"whole": whole} | {f"chunks of {chunk}": in_chunks(chunk) for chunk in chunks}
    if DEVICE.type == "cuda" and importlib.util.find_spec("liger_kernel"):
        from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

        found["Liger Kernel"] = liger_fused_linear_cross_entropy
    if DEVICE.type == "cuda" and importlib.util.find_spec("cut_cross_entropy"):
        from cut_cross_entropy import linear_cross_entropy

        found["cut-cross-entropy"] = linear_cross_entropy
    return found


def measure(loss: Loss, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[float, int, list[Tensor]]:
    """Return seconds of a forward and backward pass, on a GPU its peak bytes, and loss and gradients."""
    hidden.grad = weight.grad = None
    before = 0
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    start = perf_counter()
    value = loss(hidden, weight, targets)
    value.backward()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    seconds = perf_counter() - start
    peak = torch.cuda.max_memory_allocated() - before if DEVICE.type == "cuda" else 0
    return seconds, peak, [tensor for tensor in (value.detach(), hidden.grad, weight.grad) if tensor is not None]


def fake_peak(loss: Loss, args: argparse.Namespace, dtype: torch.dtype, trained: bool) -> int:
    """Return the bytes of the tensors alive at the peak, on fake tensors; the tests compare them with real ones."""
    with FakeTensorMode() as mode:
        inputs = make_inputs(args, dtype, trained, torch.device("cpu"))
        with PeakTracker(mode) as tracker:
            for tensor in inputs:
                tracker.hold(tensor.detach(), "parameters")
            loss(*inputs).backward()
    return tracker.peak().total - tracker.peak().parameters


def make_inputs(
    args: argparse.Namespace, dtype: torch.dtype, trained: bool, device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states, the head's weight, and the next tokens."""
    torch.manual_seed(0)
    hidden = torch.randn(args.tokens, args.width, dtype=dtype, device=device, requires_grad=True)
    weight = torch.randn(args.vocabulary, args.width, dtype=dtype, device=device).mul_(0.02).requires_grad_(trained)
    return hidden, weight, torch.randint(args.vocabulary, (args.tokens,), device=device)


def compare(args: argparse.Namespace, dtype: torch.dtype, trained: bool) -> dict[str, dict]:
    """Measure all sides in turns, and return the figures of each."""
    losses = sides(args.chunk)
    turns: dict[str, list] = {name: [] for name in losses}
    reference: list[Tensor] = []
    if args.repeats or DEVICE.type == "cuda":
        inputs = make_inputs(args, dtype, trained, DEVICE)
        for turn in range(args.repeats + 1):
            for name, loss in losses.items():
                seconds, peak, results = measure(loss, *inputs)
                turns[name].append((seconds, peak))
                if turn == 0:
                    reference = reference or results
                    error = max(_relative(mine, its) for mine, its in zip(results, reference, strict=True))
                    print(f"{name}: differs from whole by {error:.1e}", file=sys.stderr, flush=True)
    figures = {}
    for name, measured in turns.items():
        peak = max((peak for _, peak in measured), default=0) or fake_peak(losses[name], args, dtype, trained)
        timed = [seconds for seconds, _ in measured[1:]]  # the first one warms up
        figures[name] = {"seconds": statistics.median(timed) if timed else None, "peak_bytes": peak}
    return figures


def _relative(mine: Tensor, its: Tensor) -> float:
    return (torch.linalg.vector_norm(mine.float() - its.float()) / torch.linalg.vector_norm(its.float())).item()


def main() -> None:
    """Compare in the precisions asked for, print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048, help="trained tokens; default: 4 x 512")
    parser.add_argument("--width", type=int, default=1024, help="of the hidden states; default: BLOOM-560m's")
    parser.add_argument("--vocabulary", type=int, default=250_880, help="default: BLOOM's")
    parser.add_argument("--chunk", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--precision", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    shape = {name: getattr(args, name) for name in ("tokens", "width", "vocabulary", "repeats")}
    for precision in args.precision:
        for trained in (True, False):
            figures = compare(args, getattr(torch, precision), trained)
            whole, rows = figures["whole"], []
            for name, side in figures.items():
                peak, seconds = side["peak_bytes"], side["seconds"]
                ratio = seconds and seconds / whole["seconds"]
                rows.append([name, peak / 1e9, peak / whole["peak_bytes"], seconds, ratio])
            part = f"{precision}, head {'trained' if trained else 'frozen'}, width {args.width}"
            common.print_table([part, "peak GB", "of whole", "seconds", "of whole"], rows)
            record = common.environment(DEVICE) | {"shape": shape, "figures": figures}
            common.write_result(args.out, f"{DEVICE.type}, {part}", record)


if __name__ == "__main__":
    main()
