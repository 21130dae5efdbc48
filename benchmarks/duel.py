"""Sides that take turns in one run, and what is made of their figures: medians, ratios, targets met or missed."""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import common  # first of all: it makes the project importable without an installation
import torch

import local_dataset_utilities as data

MEASURES = ("samples_per_second", "evaluation_samples_per_second", "peak_memory_bytes")


class CannotMeasureError(Exception):
    """A part cannot be measured here; the message says why."""


def alternate(repeats: int, **sides: Callable[[], dict]) -> dict[str, list[dict]]:
    """Let the sides take turns, `repeats` times each."""
    figures = {name: [] for name in sides}
    for number in range(1, repeats + 1):
        for name, measure in sides.items():
            figures[name].append(measure())
            print(f"  {number}/{repeats} {name}: {json.dumps(figures[name][-1])}", file=sys.stderr, flush=True)
    return figures


def medians(figures: dict[str, list[dict]]) -> dict[str, dict]:
    """Return each side's median of every figure."""
    return {
        side: {name: statistics.median(run[name] for run in runs) for name in runs[0]} for side, runs in figures.items()
    }


def judge(record: dict, targets: list[tuple[str, str, float]]) -> None:
    """Add the targets and whether they are met."""
    record["targets"] = [
        {
            "ratio": name,
            kind: bound,
            "met": record["ratios"][name] * (sign := 1 if kind == "min" else -1) >= bound * sign,
        }
        for name, kind, bound in targets
    ]
    record["passed"] = all(target["met"] for target in record["targets"])


def report(record: dict, part: str) -> None:
    """Print the medians, the ratios and every target."""
    sides = record["medians"]
    names = [name for name in (*MEASURES, "seconds") if name in next(iter(sides.values()))]
    common.print_table([part, *names], [[side, *(figures[name] for name in names)] for side, figures in sides.items()])
    for name, value in (record.get("growth", {}) | record["ratios"]).items():
        print(f"  {name}: {value if not isinstance(value, float) else f'{value:,.3f}'}")
    for target in record["targets"]:
        kind = "min" if "min" in target else "max"
        word = "met" if target["met"] else "MISSED"
        print(f"  target {word}: {target['ratio']} {'>=' if kind == 'min' else '<='} {target[kind]}")
    print(flush=True)


def need_imdb() -> None:
    """Ask for the archive of IMDb.

    Raises:
        CannotMeasureError: It is not there; nothing is downloaded.
    """
    if common.imdb_archive() is None:
        raise CannotMeasureError(f"no {data.IMDB_ARCHIVE} in FABRIC_LADDER_DATA ({data.DataSettings().data_dir})")


def run_parts(measures: dict[str, Callable[[], dict]], targets: dict[str, list], out: Path) -> int:
    """Measure each part, judge, print and keep it, and return the exit status: 1 when a target is missed.

    Args:
        measures: For each part, what measures it; it raises `CannotMeasureError` for a part to be skipped.
        targets: For each part that has any, the targets for `judge`.
        out: The results file; the parts that are not measured stay in it.
    """
    passed = True
    for part, measure in measures.items():
        try:
            record = measure()
        except CannotMeasureError as reason:
            print(f"skipped {part}: {reason}")
            continue
        judge(record, targets.get(part, []))
        common.write_result(out, part, common.environment(torch.device("cpu")) | record)
        report(record, part)
        passed = passed and record["passed"]
    return int(not passed)
