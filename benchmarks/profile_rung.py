"""Where the time of a rung's training goes: the device's ten longest kinds of work, by torch.profiler.

    python benchmarks/profile_rung.py --out FILE --script 5_low_precision [settings of the rung]

The script runs unchanged; what is recorded is its `train`: some steps, on a GPU the trial of the longest batch before
them, and a validation, which should be short. On a CPU the kinds of work are PyTorch's operators.
"""

import argparse
import json
import runpy
import sys
from pathlib import Path
from time import perf_counter

import common  # first of all: it makes the project importable without an installation
import torch
from torch.profiler import ProfilerActivity, profile

import fabric_ladder

TOP = 10
WORDS = {  # part of a kernel's name: what it does; the first that fits
    "triton_red": "sum or mean, compiled",
    "triton_per": "sum or mean, compiled",
    "triton": "element by element, compiled",
    "gammabeta": "layer norm",
    "lpnorm": "check of gradients",
    "flash": "fused attention",
    "fmha": "fused attention",
    "scaled_dot_product": "fused attention",
    "softmax": "softmax",
    "adam": "optimizer step",
    "multi_tensor": "optimizer step",
    "layer_norm": "layer norm",
    "layernorm": "layer norm",
    "gemm": "matrix product",
    "nvjet": "matrix product",
    "cutlass": "matrix product",
    "mm": "matrix product",
    "memcpy": "copy",
    "copy": "copy or conversion",
    "memset": "zeros",
    "fill": "zeros",
    "embedding": "embedding",
    "index": "embedding",
    "reduce": "sum or mean",
    "elementwise": "element by element",
    "gelu": "element by element",
    "aten::add": "element by element",
    "aten::mul": "element by element",
    "aten::tanh": "element by element",
    "cat": "joining of tensors",
}


def in_words(name: str) -> str:
    """Return what a kernel of this name does."""
    return next((words for part, words in WORDS.items() if part in name.lower()), "other")


def top(profiler: profile, wall: float) -> dict:
    """Return the kinds of work that took the most time, and how much of the wall clock's seconds all took together."""
    events = profiler.key_averages()
    kernels = [event for event in events if event.device_type.name == "CUDA" and not event.is_user_annotation]
    rows = [(event.self_device_time_total, event) for event in kernels]
    rows = rows or [(event.self_cpu_time_total, event) for event in events]
    total = sum(time for time, _ in rows)
    rows.sort(key=lambda row: -row[0])
    found = [
        {"words": in_words(event.key), "share": time / total, "ms": time / 1e3, "calls": event.count, "name": event.key}
        for time, event in rows[:TOP]
    ]
    return {"wall_seconds": wall, "busy_seconds": total / 1e6, "top": found}


def main() -> None:
    """Run the script under the profiler and write what it found."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--script", required=True)
    parser.add_argument("--out", type=Path, required=True)
    own, options = parser.parse_known_args()
    script, train = common.ROOT / "src" / f"{own.script}.py", fabric_ladder.train
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]

    def profiled(*args) -> None:
        start = perf_counter()
        with profile(activities=activities) as profiler:
            train(*args)
        own.out.write_text(json.dumps(top(profiler, perf_counter() - start)), encoding="utf-8")

    fabric_ladder.train = profiled
    sys.argv = [str(script), *options]
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main()
