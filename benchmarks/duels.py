"""Sides that take turns, and targets that their ratios are to meet."""

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from common import CannotMeasureError, environment, print_table, write_result  # first: it makes the project importable

MEASURES = ("samples_per_second", "evaluation_samples_per_second", "peak_memory_bytes")


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
        side: {
            name: statistics.median(run[name] for run in runs)
            for name, value in runs[0].items()
            if not isinstance(value, str)
        }
        for side, runs in figures.items()
    }


def judge(record: dict, targets: list[tuple[str, str, float]]) -> None:
    """Add the targets whose ratio has been measured, and whether they are met."""
    record["targets"] = [
        {
            "ratio": name,
            limit: bound,
            "met": record["ratios"][name] * (sign := 1 if limit == "min" else -1) >= bound * sign,
        }
        for name, limit, bound in targets
        if name in record["ratios"]
    ]
    record["passed"] = all(target["met"] for target in record["targets"])


def report(record: dict) -> None:
    """Print the ratios and every target of a record that has been judged."""
    for name, value in (record.get("growth", {}) | record["ratios"]).items():
        print(f"  {name}: {value if not isinstance(value, float) else f'{value:,.3f}'}")
    for target in record["targets"]:
        limit, sign = ("min", ">=") if "min" in target else ("max", "<=")
        print(f"  target {'met' if target['met'] else 'MISSED'}: {target['ratio']} {sign} {target[limit]}")
    print(flush=True)


def duel_parser(description: str, parts: Iterable[str], repeats: int, out: Path) -> argparse.ArgumentParser:
    """Return a parser of what all duels on the CPU share: parts, repeats, threads and the results file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=out, help="results file; the parts that are not run stay in it")
    return parser


def run_parts(
    measures: dict[str, Callable[[Path], dict]], out: Path, targets: dict[str, list] | None = None, device: str = "cpu"
) -> int:
    """Measure each part, judge, print and keep it, and return the exit status: 1 when one failed or missed a target.

    Args:
        measures: For each part, what measures it, with an empty folder to work in, and returns its record. It raises
            `CannotMeasureError` for a part to be skipped; one that fails is kept with its error, and the rest go on.
        out: The results file; the parts that are not measured stay in it.
        targets: For each part that has any, the targets for `judge`.
        device: Its type is kept with the results.
    """
    passed = True
    for part, measure in measures.items():
        print(f"{part} …", file=sys.stderr, flush=True)
        try:
            with tempfile.TemporaryDirectory() as folder:
                record = measure(Path(folder))
        except CannotMeasureError as reason:
            print(f"skipped {part}: {reason}")
            continue
        except RuntimeError as error:
            print(f"{part} failed: {error}", flush=True)
            record = {"failed": str(error), "passed": False}
        if sides := record.get("medians"):
            names = [name for name in (*MEASURES, "seconds") if name in next(iter(sides.values()))]
            print_table([part, *names], [[side, *map(figures.get, names)] for side, figures in sides.items()])
        if "ratios" in record:
            judge(record, (targets or {}).get(part, []))
            report(record)
        write_result(out, part, environment(torch.device(device)) | record)
        passed = passed and record.get("passed", True)
    return int(not passed)
