"""Put the figures of harvests into the README and docs/, between `<!-- gpu:NAME -->` and `<!-- /gpu -->`.

    python benchmarks/gpu_figures.py [FILE …]        default: all of benchmarks/results/gpu/

No figure of a GPU is typed by hand. Where nothing has been measured, the block `status` says so, and the others are
empty. A rehearsal, and what failed, fills nothing.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import common  # first of all: it makes the project importable without an installation
import pages
from harvest_entries import fastest, rungs_of
from pages import PAGES, table

from fabric_ladder.advice import show_errors
from fabric_ladder.errors import UserError

GPU = common.RESULTS / "gpu"
BLOCK = pages.block("gpu")
SPEEDS = {  # column: figure, how it is written
    "samples/s": ("samples_per_second", "{:,.1f}"), "at the end": ("late_samples_per_second", "{:,.1f}"),
    "tokens/s": ("tokens_per_second", "{:,.0f}"), "MFU at the end": ("late_mfu", "{:.1%}"),
    "compiling, s": ("compile_seconds", "{:.0f}"), "an epoch, s": ("epoch_seconds", "{:,.0f}"),
    "peak, GB": ("peak_memory_bytes", "{:.2f} GB"),
}  # fmt: skip
Figures = dict[str, dict]  # by entry, of one harvest


def shown(value: float | None, form: str) -> str:
    """Return a figure as it is written; bytes as GB."""
    if value is None:
        return ""
    return form.removesuffix(" GB").format(value / 1e9 if form.endswith(" GB") else value)


def speeds(figures: Figures) -> list[str]:
    """Return all that trains the same reviews, and what the ladder's entry of the same precision is worth beside it."""
    runs = {name: run for name, run in figures.items() if "epoch_seconds" in run}
    ours = {name: runs[name] for name in rungs_of(figures)}
    rows = []
    for name, run in runs.items():
        same = [each["epoch_seconds"] for each in ours.values() if each["precision"] == run["precision"]]
        ratio = f"{run['epoch_seconds'] / min(same):.1f} x" if same and not name[0].isdigit() else ""
        rows.append([name, run["precision"], *(shown(run.get(key), form) for key, form in SPEEDS.values()), ratio])
    return table(["BLOOM-560m", "precision", *SPEEDS, "an epoch / the ladder's"], rows)


def memory(figures: Figures) -> list[str]:
    """Return the predicted and the measured peaks."""
    rows = []
    for name, run in figures.items():
        if name.startswith("memory: ") and "predicted_peak_bytes" in run:
            predicted, measured = run["predicted_peak_bytes"], run["peak_memory_bytes"]
            sizes = [shown(each, "{:.2f} GB") for each in (predicted, measured)]
            rows.append([name.removeprefix("memory: "), *sizes, f"{measured / predicted - 1:+.1%}"])
    return table(["GB", "predicted", "measured", "difference"], rows)


def checks(figures: Figures) -> list[str]:
    """Return what passed, with the largest difference of losses."""
    lines = [
        f"- {name}: {'passed' if run['passed'] else '**did not pass**'}"
        for name, run in figures.items()
        if "passed" in run
    ]
    rows = []
    for name, rung in figures.get("losses", {}).get("rungs", {}).items():
        first, largest = (shown(rung.get(key), "{:.1e}") for key in ("first", "largest difference"))
        rows.append([name, rung.get("precision", ""), first, largest or rung["not run"]])
    header = ["losses against the CPU's", "precision", "first step", "largest difference of 50 steps"]
    return [*lines, *([""] if rows else []), *table(header, rows)]


def attention(figures: Figures) -> list[str]:
    """Return the kernels that are taken, and the milliseconds of all."""
    lines = []
    for name in ("attention kernels", "attention of wide heads"):
        if run := figures.get(name):
            sides = [*dict.fromkeys(side for row in run["rows"] for side in row)][3:]  # after dtype, width and taken
            rows = []
            for row in run["rows"]:
                times = (shown(row.get(side) and row[side] * 1e3, "{:.2f}") for side in sides)
                rows.append([f"{row['dtype']}, {row['width']}", row["taken"], *times])
            plan = f"{max(run['plan_seconds']):.2f} s" if run["plan_seconds"] else "no cuDNN"
            lines += [
                f"{run['heads']} heads, {run['tokens']} tokens, {run.get('rows_of_inputs', 2)} rows; "
                f"order: {', '.join(run['order'])}; "
                f"cuDNN's plan of a new length: {plan}",
                "", *table(["dtype, width; ms", "taken", *sides], rows), "",
            ]  # fmt: skip
    return lines[:-1]


def adapters(figures: Figures) -> list[str]:
    """Return the speeds of adapters on large models, and the largest micro-batches."""
    rows, most = [], []
    for name, run in figures.items():
        for entry in [entry for part in run.values() if isinstance(part, dict) for entry in part.get("entries", [])]:
            start = [name, f"{entry['loss_chunk']:,}"]
            if "largest_micro_batch" in entry:
                most.append([*start, shown(entry["card_bytes"], "{:.0f} GB"), str(entry["largest_micro_batch"])])
            else:
                speed, peak = f"{entry['tokens_per_second']:,.0f}", shown(entry["peak_memory_bytes"], "{:.2f} GB")
                rows.append([*start, str(entry["micro_batch_size"]), speed, peak])
    lines = table(["512 tokens", "loss chunk", "micro-batch", "tokens/s", "peak, GB"], rows)
    fits = table(["512 tokens", "loss chunk", "GB", "largest micro-batch"], most)
    return [*lines, *([""] if fits else []), *fits]


def vocabulary(figures: Figures) -> list[str]:
    """Return the loss over a vocabulary and the gradient of its embedding, by way of computing them."""
    rows = []
    for entry in ("loss over the vocabulary", "embedding gradients"):
        for part, run in figures.get(entry, {}).items():
            for name, side in run["figures"].items():
                which = f"{entry}, {part.partition(', ')[2]}: {name}"
                rows.append([which, f"{side['seconds'] * 1e3:.1f}", shown(side["peak_bytes"], "{:.2f} GB")])
    return table(["", "ms", "peak, GB"], rows)


def profile(figures: Figures) -> list[str]:
    """Return the longest kinds of work of the fastest rung."""
    top = figures.get("profile of the fastest", {}).get("top", [])
    rows = [[row["words"], f"{row['share']:.1%}", f"{row['ms']:.0f}", str(row["calls"])] for row in top]
    return table(["work", "share", "ms", "calls"], rows)


def machine(figures: Figures) -> list[str]:
    """Return the planner's overhead and the speed of an all-reduce."""
    lines = []
    for which, each in figures.get("calibration", {}).items():
        context, workspace = (shown(each[name], "{:.2f} GB") for name in ("context", "workspace"))
        lines.append(
            f"- {which}: CUDA context {context} GB, cuBLAS workspace {workspace} GB, fragmentation "
            f"{each['fragmentation']:.1%}"
        )
    for each in (run := figures.get("all-reduce", {})).get("all_reduce", []):
        size, speed = each["bytes"] / 1e6, each["bus_bytes_per_second"] / 1e9
        lines.append(f"- all-reduce of {size:,.0f} MB over {run['ranks']} GPUs: {speed:.1f} GB/s")
    return lines


def summary(figures: Figures) -> list[str]:
    """Return the fastest rung in a line."""
    if (name := fastest(figures)) is None:
        return []
    run = figures[name]
    mfu = f", MFU {run['late_mfu']:.0%}" if "late_mfu" in run else ""
    peak = shown(run["peak_memory_bytes"], "{:.2f} GB")
    return [f"Fastest: {name}, {run['tokens_per_second']:,.0f} tokens/s{mfu}, {peak} GB."]


BLOCKS: dict[str, Callable[[Figures], list[str]]] = {
    each.__name__: each for each in (speeds, memory, checks, attention, adapters, vocabulary, profile, machine, summary)
}


def title(harvest: dict) -> str:
    """Return where the figures of a harvest are from."""
    about, facts = harvest["machine"], harvest["machine"]["conditions"]
    count = f"{about['gpus']} x " if about["gpus"] > 1 else ""
    versions = ", ".join(f"{name} {about['versions'][name]}" for name in ("torch", "transformers"))
    return (
        f"**{count}{about['hardware']['gpu']}**, {about['date'][:10]}, {versions}, "
        f"commit {about['commit'] or about['code']}, {facts['reviews']:,} reviews ({facts['dataset']})"
    )


def status(harvests: list[dict]) -> list[str]:
    """Return what was measured where, and what was left out; or that nothing was."""
    if not harvests:
        return ["Not measured on a GPU yet."]
    lines = []
    for harvest in harvests:
        missing = [name for name, record in harvest["entries"].items() if "failed" in record]
        missing = dict.fromkeys(missing, "failed") | harvest["left_out"]
        rest = "; ".join(f"{name} ({reason})" for name, reason in missing.items())
        lines.append(f"- {title(harvest)}" + (f". Not in it: {rest}" if rest else ""))
    return lines


def fill(text: str, harvests: list[dict]) -> str:
    """Return a page with its blocks filled."""

    def lines(name: str) -> list[str]:
        if name == "status":
            return status(harvests)
        found = []
        for harvest in harvests:
            records = {entry: record["figures"] for entry, record in harvest["entries"].items() if "figures" in record}
            if made := BLOCKS[name](records):
                found += [*([""] if found else []), title(harvest), "", *made]
        return found

    return pages.fill(text, "gpu", lines)


def read(paths: list[Path]) -> list[dict]:
    """Return the harvests of these files.

    Raises:
        UserError: One is none, or a rehearsal.
    """
    found = []
    for path in paths:
        try:
            harvest = json.loads(path.read_text(encoding="utf-8"))
            rehearsal = harvest["machine"]["rehearsal"]
        except (OSError, ValueError, LookupError, TypeError) as error:
            raise UserError(f"{path} is no file of a harvest ({error})") from error
        if rehearsal:
            raise UserError(f"{path} is a rehearsal on a CPU: its figures say nothing of a GPU")
        found.append(harvest)
    return found


def main() -> None:
    """Fill all pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", metavar="FILE")
    show_errors()
    harvests = read(parser.parse_args().files or sorted(GPU.glob("*.json")))
    for page in PAGES:
        pages.rewrite(page, lambda text: fill(text, harvests))


if __name__ == "__main__":
    main()
