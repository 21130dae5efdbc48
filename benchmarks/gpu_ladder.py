"""The ladder and the blog's recipe on one GPU: BLOOM-560m, random weights, 2,000 reviews of IMDb, up to 1,024 tokens.

    python benchmarks/gpu_ladder.py [--reviews 2000] [--only NAME …] [--peak_tflops HALF TF32]
    python benchmarks/gpu_ladder.py --rehearse      the same commands on the CPU, with a tiny model and 32 reviews

Every entry is a process of its own. Random weights cost what pretrained ones cost, so nothing need be downloaded; the
accuracies say nothing. An entry that fails, say for lack of memory, is recorded with its error, and the rest go on.

Model FLOPs utilisation (MFU) follows appendix B of the PaLM paper (Chowdhery et al., 2022, arXiv:2204.02311): a token
costs 6 N + 12 L H Q T floating-point operations, forward and backward, where N counts the parameters, L the layers,
H Q = heads x head size is the hidden size, and T is the sequence's length. Over sequences of the lengths t this adds up
to 6 N sum(t) + 12 L H Q sum(t^2). N leaves out the embedding, which is only looked up: a classifier has no output
embedding. Padding is not counted as work, so it lowers the MFU; the seconds are those of the training, without
validation and without what torch.compile takes, which stands beside them.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import common  # first of all: it makes the project importable without an installation
import numpy as np
import torch

from fabric_ladder import parse_settings
from fabric_ladder.checks import mixed_precision
from local_dataset_utilities import DataSettings, load_datasets

OUT = common.RESULTS / "gpu_ladder.json"
MODELS = common.ROOT / "configs" / "models"
RUNGS = ("1_batch_size_1", "2_grad_accum", "3_torch_compile", "4_mixed_precision", "5_low_precision")
# Dense peaks in TFLOP/s of tensor cores: 16-bit with 32-bit accumulation, and TF32, which the rungs take for 32-bit
# products. From NVIDIA's data sheets; where those give figures "with sparsity", half of them. The longest name that
# fits counts. V100 and T4 have neither bfloat16 nor TF32: float16, and 32-bit outside of tensor cores.
PEAKS = {
    "B200": (2250.0, 1125.0),
    "H200": (989.5, 494.7),
    "GH200": (989.5, 494.7),
    "H100": (989.5, 494.7),
    "H100 PCIe": (756.0, 378.0),
    "H100 NVL": (835.0, 417.5),
    "A100": (312.0, 156.0),
    "A10": (125.0, 62.5),
    "L40S": (362.0, 183.0),
    "L4": (121.0, 60.0),
    "V100": (125.0, 15.7),
    "T4": (65.0, 8.1),
    "RTX 4090": (165.2, 82.6),  # Ada and Ampere architecture white papers
    "RTX 3090": (71.0, 35.6),
}
COLUMNS = ("samples_per_second", "tokens_per_second", "evaluation_samples_per_second", "peak_memory_GB", "mfu")


def entries(options: list[str], texts: Path, padding: str) -> dict[str, Callable[[], dict]]:
    """Return what to run, by name: each rung, rung 5 by tokens, and the blog in the precisions of rungs 2, 4 and 5."""
    runs = {name: lambda name=name: common.run_rung(name, options) for name in RUNGS}
    for tokens in (4096, 16384):
        more = [*options, "--micro_batch_tokens", str(tokens)]
        runs[f"5_low_precision-{tokens}_tokens"] = lambda more=more: common.run_rung("5_low_precision", more)
    for precision in ("32-true", mixed_precision(), "bf16-true"):
        blog = [*options, "--batch_size", "16", "--precision", precision]
        runs[f"blog-{precision}"] = lambda blog=blog: common.run_blog(texts, padding, blog)
    return runs


def precision_of(name: str) -> str:
    """Return the precision that an entry's matrix products have: the one that it names, or its rung's."""
    for precision in ("bf16-mixed", "16-mixed", "bf16-true", "32-true"):
        if precision in name:
            return precision
    return {"4": mixed_precision(), "5": "bf16-true"}.get(name[0], "32-true")


def training_flops(parameters: int, config: dict, lengths: np.ndarray) -> float:
    """Return the FLOPs of one epoch over sequences of these lengths; see the formula above.

    Args:
        parameters: All of the model's, its input embedding among them.
        config: The model's, with `vocab_size`, `hidden_size` and `n_layer`.
        lengths: Tokens of each training sample, without padding.
    """
    lengths = lengths.astype(float)
    others = parameters - config["vocab_size"] * config["hidden_size"]
    return 6 * others * lengths.sum() + 12 * config["n_layer"] * config["hidden_size"] * (lengths**2).sum()


def peak_flops(gpu: str, given: list[float] | None) -> dict[str, float] | None:
    """Return the peaks of 16-bit and of 32-bit products in FLOP/s; None for a GPU that is not in the table."""
    words = set(gpu.replace("-", " ").split())
    names = [name for name in PEAKS if set(name.split()) <= words and not words & {"Laptop", "Ti", "D"}]
    peaks = given or PEAKS.get(max(names, key=len, default=""))
    return peaks and {"16": peaks[0] * 1e12, "32": peaks[1] * 1e12}


def measure(run: Callable[[], dict], name: str, config: dict, lengths: np.ndarray, peaks: dict | None) -> dict:
    """Run an entry and add what its figures say of the device."""
    try:
        figures = run()
    except common.ChildError as error:
        return {"failed": str(error)}
    if figures["tokens"] != lengths.sum():
        raise RuntimeError(f"{name} trained {figures['tokens']} tokens instead of {lengths.sum()}")
    flops = training_flops(figures["parameters"], config, lengths)
    figures["model_tflops_per_second"] = flops / figures["training_seconds"] / 1e12
    figures["peak_memory_GB"] = figures["peak_memory_bytes"] / 1e9
    width = "32" if precision_of(name) == "32-true" else "16"
    figures["mfu"] = flops / figures["training_seconds"] / peaks[width] if peaks else None
    return figures


def job(rehearse: bool, reviews: int) -> tuple[list[str], Path, torch.device]:
    """Return the settings of all entries, the file of the model's config, and the device."""
    model = MODELS / ("bloom-quickstart.json" if rehearse else "bloom-560m.json")
    device = torch.device("cpu" if rehearse else "cuda")
    options = [*common.BASE, "--accelerator", device.type, "--from_scratch", "true", "--model", str(model)]
    options += ["--train_samples", str(reviews), "--validation_samples", str(-(-reviews // 10))]
    options += ["--test_samples", str(-(-reviews // 4)), "--max_length", "128" if rehearse else "1024"]
    return options, model, device


def main() -> int:
    """Run the entries and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU: shows that the command works")
    parser.add_argument("--reviews", type=int, help="training reviews (default: 2000; rehearsed: 32)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="entries to run, such as 2_grad_accum blog-bf16-true")
    parser.add_argument(
        "--peak_tflops", nargs=2, type=float, metavar=("HALF", "TF32"), help="of a GPU not in the table"
    )
    parser.add_argument(
        "--out", type=Path, help=f"results file; default: {OUT.relative_to(common.ROOT)}, rehearsed: none"
    )
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("not measured on a GPU: PyTorch finds none here (--rehearse runs the same commands on the CPU)")
        return 0
    if common.imdb_archive() is None:
        print(f"skipped: the archive of IMDb is not in FABRIC_LADDER_DATA ({DataSettings().data_dir})")
        return 0
    reviews = args.reviews or (32 if args.rehearse else 2000)
    options, model, device = job(args.rehearse, reviews)
    config = json.loads(model.read_text(encoding="utf-8"))
    settings = parse_settings(options)
    lengths = np.asarray(load_datasets(settings).splits["train"]["length"][:])
    environment = common.environment(device)
    peaks = peak_flops(environment["hardware"].get("gpu", ""), args.peak_tflops)
    out = args.out or (None if args.rehearse else OUT)
    rows, failed = [], False
    with tempfile.TemporaryDirectory() as scratch:
        texts = Path(scratch) / "texts"
        common.save_texts(settings, texts)
        runs = entries(options, texts, "max_length")
        if unknown := set(args.only or ()) - set(runs):
            parser.error(f"no entry {', '.join(sorted(unknown))}; there are {', '.join(runs)}")
        for name in args.only or runs:
            print(f"{name} …", file=sys.stderr, flush=True)
            figures = measure(runs[name], name, config, lengths, peaks)
            failed = failed or "failed" in figures
            rows.append([name, *(figures.get(column) for column in COLUMNS)])
            if "failed" in figures:
                print(f"{name} failed: {figures['failed']}", flush=True)
            if out:
                conditions = {"reviews": reviews, "model": model.name, "peak_flops": peaks, "rehearsal": args.rehearse}
                common.write_result(out, name, environment | {"conditions": conditions, "figures": figures})
    common.print_table(["entry", *COLUMNS], rows)
    if args.rehearse:
        print("a rehearsal: not measured on a GPU")
    return int(failed and args.rehearse)


if __name__ == "__main__":
    sys.exit(main())
