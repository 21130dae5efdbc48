"""An embedding's gradient, added to that of the micro-batches before: PyTorch's way against rows alone.

    python benchmarks/embedding_gradients.py [--tokens 1024] [--width 1024] [--rows 250880] [--repeats 10]

One forward and backward pass of the table alone, of BLOOM-560m's size, over random tokens, where a gradient is there
already. glibc keeps freed memory, as in every run. The peak is that of all tensors alive, without table and gradient.
The sides take turns, and the median of the turns is given. On a CPU the committed figures are those of one thread
(`OMP_NUM_THREADS=1`).
"""

import argparse
import statistics
from contextlib import nullcontext
from pathlib import Path
from time import perf_counter

import common  # first of all: it makes the project importable without an installation
import torch
from torch import nn

from fabric_ladder.environment import keep_freed_memory
from fabric_ladder.models.embeddings import add_rows, adding_rows
from fabric_ladder.planning.tracker import PeakTracker

OUT = common.RESULTS / "embedding_gradients.json"
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIDES = {"PyTorch": False, "by rows": True}


def measure(table: nn.Embedding, ids: torch.Tensor, by_rows: bool) -> float:
    """Return the seconds of a forward and backward pass."""
    start = perf_counter()
    with adding_rows(hooked=False) if by_rows else nullcontext():
        table(ids).sum().backward()
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start


def peak_of(table: nn.Embedding, ids: torch.Tensor, by_rows: bool) -> int:
    """Return the bytes of the tensors that live at the peak, without table and gradient."""
    with PeakTracker() as tracker:
        for tensor in (table.weight.detach(), table.weight.grad, ids):
            tracker.hold(tensor, "parameters")
        measure(table, ids, by_rows)
    return tracker.peak().total - tracker.peak().parameters


def compare(args: argparse.Namespace, dtype: torch.dtype) -> dict[str, dict]:
    """Measure both sides in turns."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(args.rows, args.width, dtype=dtype, device=DEVICE))
    add_rows(model)
    (table,) = model
    ids = torch.randint(args.rows, (1, args.tokens), device=DEVICE)
    table.weight.grad = torch.zeros_like(table.weight)
    turns = [{name: measure(table, ids, by_rows) for name, by_rows in SIDES.items()} for _ in range(args.repeats + 1)]
    return {
        name: {"seconds": statistics.median(turn[name] for turn in turns[1:]),  # the first one warms up
               "peak_bytes": peak_of(table, ids, by_rows)}
        for name, by_rows in SIDES.items()
    }  # fmt: skip


def main() -> None:
    """Compare in both precisions, print the tables and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch (default 1024)")
    parser.add_argument("--width", type=int, default=1024, help="default: BLOOM-560m's")
    parser.add_argument("--rows", type=int, default=250_880, help="of the table; default: BLOOM's")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    keep_freed_memory()  # as every run on a CPU does
    shape = {name: getattr(args, name) for name in ("tokens", "width", "rows", "repeats")}
    for precision in ("float32", "bfloat16"):
        figures = compare(args, getattr(torch, precision))
        rows = [[name, side["seconds"] * 1000, side["peak_bytes"] / 1e6] for name, side in figures.items()]
        common.print_table([precision, "milliseconds", "peak MB"], rows)
        record = common.environment(DEVICE) | {"shape": shape, "figures": figures}
        common.write_result(args.out, f"{DEVICE.type}, {precision}", record)


if __name__ == "__main__":
    main()
