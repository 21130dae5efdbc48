"""The ladder and the blog's recipe on one GPU: BLOOM-560m, random weights, 2,000 reviews of IMDb, up to 1,024 tokens.

    python benchmarks/gpu_ladder.py [--reviews 2000] [--only NAME …] [--peak_tflops HALF TF32]
    python benchmarks/gpu_ladder.py --rehearse      the same commands on the CPU, with a tiny model and 32 reviews

Every entry is a process of its own. Random weights cost what pretrained ones cost, so nothing need be downloaded; the
accuracies say nothing. An entry that fails, say for lack of memory, is recorded with its error, and the rest go on; the
exit status is then 1.

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
from functools import partial
from pathlib import Path
from typing import NamedTuple

import common  # first of all: it makes the project importable without an installation
import numpy as np
import torch
from common import BASE, ROOT, rung_command

from fabric_ladder import parse_settings
from fabric_ladder.environment import describe_hardware, mixed_precision
from fabric_ladder.planning.gpus import match_gpu
from local_dataset_utilities import load_datasets

OUT = common.RESULTS / "gpu_ladder.json"
RUNGS = ("1_batch_size_1", "2_grad_accum", "3_torch_compile", "4_mixed_precision", "5_low_precision")
COLUMNS = ("samples_per_second", "late_samples_per_second", "tokens_per_second", "evaluation_samples_per_second")
COLUMNS += ("epoch_seconds", "peak_memory_GB", "mfu", "late_mfu")
EPOCH = 35_000  # reviews


class Job(NamedTuple):
    """What all entries share."""

    options: list[str]  # settings
    config: dict  # the model's
    lengths: np.ndarray  # tokens of each training sample, without padding
    texts: Path  # the same reviews, for the blog's recipe
    peaks: dict[str, float] | None  # FLOP/s of 16-bit and of 32-bit products
    conditions: dict
    gpu: str | None
    rehearsal: bool

    def records(self, out: Path) -> dict[str, dict]:
        """Return the entries of a results file that can be compared: measured on the same GPU, as many reviews."""
        return {
            name: other
            for name, other in common.read_results(out).items()
            if "figures" in other
            and other["conditions"] == self.conditions
            and other["hardware"].get("gpu") == self.gpu
        }


def entries(job: Job, _: list[str]) -> dict[str, list[str]]:
    """Return what to run, by name: each rung, rung 5 by tokens, and the blog in the precisions of rungs 2, 4 and 5."""
    commands = {name: rung_command(job.options, name) for name in RUNGS}
    for tokens in ("4096", "16384"):
        command = rung_command(job.options, "5_low_precision", "--micro_batch_tokens", tokens)
        commands[f"5_low_precision-{tokens}_tokens"] = command
    return commands | blog_entries(job)


def blog_entries(job: Job) -> dict[str, list[str]]:
    """Return the blog's recipe in the precisions of rungs 2, 4 and 5."""
    return {
        f"blog-{precision}": common.blog_command(
            job.texts, [*job.options, "--batch_size", "16", "--precision", precision]
        )
        for precision in ("32-true", mixed_precision(), "bf16-true")
    }


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
    """Return the peaks of 16-bit and of 32-bit products in FLOP/s; None for a GPU that the planner does not know."""
    found = match_gpu(gpu)
    peaks = given or (found and (found.half, found.single))
    return peaks and {"16": peaks[0] * 1e12, "32": peaks[1] * 1e12}


def extrapolate(figures: dict, config: dict, lengths: np.ndarray, peak: float | None) -> None:
    """Add an epoch's seconds and the model FLOPs utilisation to the figures of a training.

    Raises:
        RuntimeError: It trained other texts.
    """
    if figures["tokens"] != lengths.sum():
        raise RuntimeError(f"{figures['tokens']} tokens were trained instead of {lengths.sum()}")
    late = figures.setdefault("late_samples_per_second", figures["samples_per_second"])  # the blog's rate is one
    flops = training_flops(figures["parameters"], config, lengths)
    begun = figures.get("seconds_to_last_step", figures["training_seconds"])
    figures["epoch_seconds"] = begun + (EPOCH - len(lengths)) / late
    figures["peak_memory_GB"] = figures["peak_memory_bytes"] / 1e9
    figures["model_tflops_per_second"] = flops / figures["training_seconds"] / 1e12
    figures["mfu"] = flops / figures["training_seconds"] / peak if peak else None
    figures["late_mfu"] = flops / len(lengths) * late / peak if peak else None


def measure(name: str, command: list[str], job: Job, _: Path) -> dict:
    """Run an entry and return its record."""
    figures = common.run_command(command)
    if "training_seconds" in figures:
        peak = job.peaks and job.peaks["32" if precision_of(name) == "32-true" else "16"]
        extrapolate(figures, job.config, job.lengths, peak)
    return {"conditions": job.conditions, "command of the entry": common.shown(command), "figures": figures}


def prepare(args: argparse.Namespace, folder: Path) -> Job:
    """Say what all entries share, and write the texts for the blog's recipe.

    Raises:
        CannotMeasureError: There is no GPU, or no IMDb.
    """
    if not args.rehearse and not torch.cuda.is_available():
        raise common.CannotMeasureError("PyTorch finds no GPU here (--rehearse runs the same commands on the CPU)")
    common.imdb_archive()
    device = torch.device("cpu" if args.rehearse else "cuda")
    reviews = args.reviews or (32 if args.rehearse else 2000)
    model = ROOT / "configs" / "models" / ("bloom-quickstart.json" if args.rehearse else "bloom-560m.json")
    options = [*BASE, "--accelerator", device.type, "--from_scratch", "true", "--model", str(model)]
    options += ["--train_samples", str(reviews), "--validation_samples", str(-(-reviews // 10))]
    options += ["--test_samples", str(-(-reviews // 4)), "--max_length", "128" if args.rehearse else "1024"]
    options += ["--log_every", str(reviews // 2)]
    settings = parse_settings(options)
    lengths = np.asarray(load_datasets(settings).splits["train"]["length"][:])
    common.save_texts(settings, folder / "texts")
    gpu = describe_hardware(device).get("gpu")
    peaks = peak_flops(gpu or "", args.peak_tflops)
    conditions = {"reviews": reviews, "model": model.name, "peak_flops": peaks, "rehearsal": args.rehearse}
    config = json.loads(model.read_text(encoding="utf-8"))
    return Job(options, config, lengths, folder / "texts", peaks, conditions, gpu, args.rehearse)


def run(
    description: str,
    out: Path,
    entries: Callable[[Job, list[str]], dict[str, list[str]]],
    parts: tuple[str, ...] = (),
    further: Callable[[Job, list[str], Path], dict[str, Callable[[Path], dict]]] = lambda *_: {},
    targets: list[tuple[str, str, float]] | None = None,
) -> int:
    """Run the chosen entries, print all that can be compared, and return the exit status.

    Args:
        description: What the script is for.
        out: The results file; a rehearsal leaves none.
        entries: Returns the names and commands of the entries, of the chosen parts.
        parts: What can be chosen.
        further: Returns what is measured after the entries, from their results file.
        targets: What is judged of the part `verdict`; a rehearsal is not judged.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if parts:
        parser.add_argument("--part", nargs="+", choices=parts)
    parser.add_argument("--only", nargs="+", metavar="NAME", help="entries to run, such as blog-bf16-true")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU: shows that the commands work")
    parser.add_argument("--reviews", type=int, help="training reviews (default: 2000; rehearsed: 32)")
    parser.add_argument(
        "--peak_tflops", nargs=2, type=float, metavar=("HALF", "TF32"), help="of a GPU not in the table"
    )
    parser.add_argument("--out", type=Path, help=f"results file; default: {out.name}, rehearsed: none")
    args = parser.parse_args()
    if (args.reviews or 16) % 16:
        parser.error("--reviews must be a multiple of 16, the effective batch")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            job = prepare(args, Path(scratch))
        except common.CannotMeasureError as reason:
            print(f"not measured: {reason}")
            return 0
        out = args.out or (Path(scratch) / out.name if args.rehearse else out)
        chosen = (args.part if parts else None) or list(parts)
        commands = entries(job, chosen)
        if unknown := set(args.only or ()) - set(commands):
            parser.error(f"no entry {', '.join(sorted(unknown))}; there are {', '.join(commands)}")
        measures = {name: partial(measure, name, commands[name], job) for name in args.only or commands}
        judged = {} if args.rehearse else {"verdict": targets or []}
        status = common.run_parts(measures | further(job, chosen, out), out, judged, "cpu" if args.rehearse else "cuda")
        figures = {name: record["figures"] for name, record in job.records(out).items()}
    trained = {name: run for name, run in figures.items() if "training_seconds" in run}
    common.print_table(["entry", *COLUMNS], [[name, *map(run.get, COLUMNS)] for name, run in trained.items()])
    if args.rehearse:
        print("a rehearsal: not measured on a GPU")
    return status


if __name__ == "__main__":
    sys.exit(run(__doc__, OUT, entries))
