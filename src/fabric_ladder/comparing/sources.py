"""Find and read runs: in their folders, in folders of runs, and in logs."""

import csv
import math
import os
import re
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fabric_ladder.comparing.logs import LoggedRun, LogParser, Point
from fabric_ladder.errors import UserError, read_outside

FORMAT = 1
FIGURES = {  # key in run.json -> name of the figure, and the factor to its unit
    "elapsed_seconds": ("minutes", 1 / 60),
    "compile_seconds": ("compile_minutes", 1 / 60),
    "compiled_graphs": ("compiled_graphs", 1),
    "samples_per_second": ("samples_per_second", 1),
    "tokens_per_second": ("tokens_per_second", 1),
    "padding": ("padding", 100),
    "peak_memory_bytes": ("memory", 1e-9),
    "predicted_peak_bytes": ("predicted_memory", 1e-9),
    "peak_host_memory_bytes": ("host_memory", 1e-9),
    "test_accuracy": ("test_accuracy", 100),
    "parameters": ("parameters", 1e-6),
    "trainable_parameters": ("trainable_parameters", 1e-6),
}
MOST_FOLDERS = 20_000  # limit of the search, a guard against searching a whole disk
LARGEST = 50_000_000  # bytes of a log, a guard against reading a checkpoint


class Found(NamedTuple):
    """Finished and unfinished runs of the sources, and notices about them."""

    runs: list[LoggedRun]
    notices: list[str]


def read_sources(sources: list[str]) -> Found:
    """Read the runs of all sources, in their order.

    Args:
        sources: Folders of runs, folders above them, logs, or `-` for standard input.

    Raises:
        UserError: A source does not exist, cannot be read or has no log, or no run is finished.
    """
    runs, notices = [], []
    for source in sources:
        path = Path(source)
        if source == "-" or path.is_file():
            found = _read_text(source)
        elif path.is_dir():
            found = _read_folder(path)
        else:
            raise UserError(f"there is no {source}; give runs/<script>/<n>, a folder of runs, a log, or - for stdin")
        runs += found.runs
        notices += found.notices
    if all(run.unfinished for run in runs):
        raise UserError(f"there is no finished run in {', '.join(sources)}: {runs[0].name}: {runs[0].unfinished}")
    if others := list(dict.fromkeys(run.source for run in runs if not run.ours and run.unfinished is None)):
        notices.append(
            f"Other scripts printed {', '.join(others)}. The blog prints the loss of one micro-batch divided by the "
            "number of accumulated micro-batches, and the memory that PyTorch "
            "reserved. This project prints allocated memory."
        )
    return Found(runs, notices)


def _read_folder(folder: Path) -> Found:
    folders = set()
    for number, (path, _, names) in enumerate(os.walk(folder)):  # os.walk skips unreadable folders
        if number == MOST_FOLDERS:
            raise UserError(f"{folder} holds more than {MOST_FOLDERS:,} folders; give the folder of the runs")
        if not {"run.json", "log.txt"}.isdisjoint(names):
            folders.add(Path(path))
    if not folders:
        raise UserError(f"{folder} holds no run: it has no run.json and no log.txt")
    runs, notices = [], []
    for path in sorted(folders, key=_natural):
        if (path / "run.json").is_file():
            runs.append(_read_run(path))
            continue
        try:
            found = _read_text(str(path / "log.txt"))
        except UserError as error:  # a log.txt of another program
            notices.append(f"{error}: left out.")
            continue
        runs += found.runs
        notices += found.notices
    if not runs:
        raise UserError(f"{folder} holds no run: its log.txt is not the log of a training")
    return Found(runs, notices)


def _natural(path: Path) -> list:
    """Return a sort key that puts 2_grad_accum before 10_fsdp."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in re.split(r"(\d+)", str(path)) if part]


def _read_text(source: str) -> Found:
    if source == "-":
        name, data = "standard input", sys.stdin.buffer.read(LARGEST + 1)
    else:
        name = source
        try:
            with open(source, "rb") as file:
                data = file.read(LARGEST + 1)
        except OSError as error:
            raise UserError(f"cannot read {source} ({error.strerror})") from error
    if len(data) > LARGEST:
        raise UserError(f"{name} is larger than {LARGEST // 10**6} MB, so it is not a log")
    stem = Path(source).parent.name if Path(source).name == "log.txt" else Path(source).stem
    parser = LogParser(name, "standard input" if source == "-" else stem or name)
    runs = parser.parse(data.decode("utf-8", errors="replace"))
    if not runs:
        raise UserError(
            f"there is no log in {name}: it has no line like 'Epoch: 0001/0001 | …' or 'Test accuracy 92.70%'"
        )
    notices = []
    if parser.skipped:
        lines = "1 line is" if parser.skipped == 1 else f"{parser.skipped} lines are"
        notices.append(f"{name}: {lines} skipped: damaged or repeated lines with figures.")
    return Found(runs, notices)


def _read_run(folder: Path) -> LoggedRun:
    """Read run.json and metrics.csv; an unreadable record becomes an unfinished run with the reason."""
    run = LoggedRun(str(folder), folder.parent.name or str(folder))
    try:
        record = read_outside(folder / "run.json")
        _fill(run, record)
        if run.unfinished is None:
            _read_points(run, folder / "metrics.csv", record["data"]["train_samples"])
    except (OSError, ValueError, LookupError, TypeError, ArithmeticError, csv.Error) as error:
        run.unfinished = f"its files cannot be read ({type(error).__name__}: {error})"
    return run


def _fill(run: LoggedRun, record: dict) -> None:
    if not all(isinstance(record[part], dict) for part in ("settings", "results")):
        raise TypeError("settings and results must be objects")
    for name, value in record["settings"].items():
        plain = isinstance(value, str | int | float | None) and value not in (math.inf, -math.inf) and value == value
        if not plain or (name == "seed" and not isinstance(value, int)):
            raise TypeError(f"the setting {name} is {value!r:.40}")
    run.name = str(record["settings"]["name"])
    if record["format"] != FORMAT:
        run.unfinished = f"its run.json has format {record['format']}; this version reads {FORMAT}"
        return
    if record["status"] != "finished":
        run.unfinished = f"its status is {record['status']!r}: it is running or was interrupted"
        return
    if record.get("log_lost"):
        run.unfinished = "its log is incomplete, because it could not be written"
        return
    results = record["results"]
    run.settings = record["settings"] | {"ranks": record["ranks"]}
    parts = [record, *record.get("resumed", [])]
    run.versions = _join(parts, "versions")
    run.hardware = _join(parts, "hardware")
    run.data = record["data"]["fingerprint"]
    run.figures = {name: results[key] * factor for key, (name, factor) in FIGURES.items() if key in results}
    last = results["epochs"][-1]
    run.figures |= {name: last[name] * 100 for name in ("train_accuracy", "validation_accuracy")}
    run.test_samples = results.get("test_samples")
    if classes := results.get("classes"):
        np.array(classes["confusion"], dtype=int).reshape(
            2 * [len(classes["names"])]
        )  # raises ValueError unless it is square
        run.classes = classes
        run.figures["macro_f1"] = classes["macro_f1"] * 100
    if "test_tokens" in results:
        run.figures["test_loss"] = results["test_loss"]
        run.figures["test_perplexity"] = _perplexity(results["test_loss"])
        run.figures["validation_perplexity"] = _perplexity(last["validation_loss"])


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _join(parts: list[dict], name: str) -> dict:
    """Return versions or hardware of a resumed run; facts that differ between its parts are listed in order."""
    facts = [dict(part[name]) for part in parts]
    values = {key: [each.get(key) for each in facts] for key in facts[0]}
    return {key: found[0] if found.count(found[0]) == len(found) else ", then ".join(map(str, found))
            for key, found in values.items()}  # fmt: skip


def _read_points(run: LoggedRun, path: Path, epoch_samples: int) -> None:
    """Read the losses and the accuracies of metrics.csv, which has one row per printed point."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            samples, minutes = int(row["samples"]), float(row["seconds"]) / 60
            at = {"epochs": samples / epoch_samples, "samples": samples, "minutes": minutes}
            if row["loss"]:
                run.losses.append(Point(value=float(row["loss"]), **at))
            if accuracy := row.get("validation_accuracy"):
                of_training = float(row["train_accuracy"]) * 100
                run.accuracies.append(Point(value=float(accuracy) * 100, train_accuracy=of_training, **at))
