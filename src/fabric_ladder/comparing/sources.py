"""Find and read runs: in their folders, in folders of runs, and in logs."""

import csv
import re
import sys
from datetime import datetime
from pathlib import Path

from fabric_ladder.comparing.logs import LoggedRun, LogParser, Point, perplexity
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
    "test_mse": ("test_mse", 1),
    "test_pearson": ("test_pearson", 1),
    "parameters": ("parameters", 1e-6),
    "trainable_parameters": ("trainable_parameters", 1e-6),
}


def read_sources(sources: list[str]) -> list[LoggedRun]:
    """Return the runs of all sources in their order, unfinished ones included, and each folder once.

    Args:
        sources: Folders of runs, folders above them, logs, or `-` for standard input.

    Raises:
        UserError: A source does not exist, cannot be read or has no log, or no run is finished.
    """
    runs, known = [], set()
    for source in sources:
        path = Path(source)
        if path.is_dir():
            folders = [folder for folder in _find_runs(path) if folder.resolve() not in known]
            known |= {folder.resolve() for folder in folders}
            runs += map(_read_run, folders)
        elif source == "-" or path.is_file():
            runs += _read_text(source)
        else:
            raise UserError(f"there is no {source}; give runs/<script>/<n>, a folder of runs, a log, or - for stdin")
    if all(run.unfinished for run in runs):
        raise UserError(f"found no finished run in {', '.join(sources)}: {runs[0].name}: {runs[0].unfinished}")
    return runs


def _find_runs(folder: Path) -> list[Path]:
    folders = {path.parent for path in folder.rglob("run.json")}
    if not folders:
        raise UserError(f"{folder} holds no run: it has no run.json")
    return sorted(folders, key=_natural)


def _natural(path: Path) -> list:
    """Return a sort key that puts 2_grad_accum before 10_fsdp."""
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", str(path))]


def _read_text(source: str) -> list[LoggedRun]:
    if source == "-":
        name, stem, data = "standard input", "standard input", sys.stdin.buffer.read()
    else:
        path = Path(source)
        name, stem = source, path.parent.name if path.name == "log.txt" else path.stem
        try:
            data = path.read_bytes()
        except OSError as error:
            raise UserError(f"cannot read {source} ({error.strerror})") from error
    runs = LogParser(name, stem or name).parse(data.decode("utf-8", errors="replace"))
    if not runs:
        raise UserError(f"found no log in {name}: it has no line like 'Epoch: 0001/0001 | …' or 'Test accuracy 92.70%'")
    return runs


def _read_run(folder: Path) -> LoggedRun:
    """Read run.json and metrics.csv; an unreadable record becomes an unfinished run with the reason."""
    run = LoggedRun(str(folder), folder.parent.name or str(folder))
    try:
        record = read_outside(folder / "run.json")
        run.name = record["settings"]["name"]
        run.unfinished = _why_unfinished(record)
        if run.unfinished is None:
            _fill(run, record)
            _read_points(run, folder / "metrics.csv", record["data"]["train_samples"])
    except UserError as error:
        run.unfinished = str(error)
    except (OSError, ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
        run.unfinished = f"its files cannot be read ({type(error).__name__}: {error})"
    return run


def _why_unfinished(record: dict) -> str | None:
    if record["format"] != FORMAT:
        return f"its run.json has format {record['format']!r:.60}; this version reads {FORMAT}"
    if record["status"] != "finished":
        return f"its status is {record['status']!r:.60}: it is running or was interrupted"
    if record.get("log_lost"):
        return "its log is incomplete, because it could not be written"
    return None


def _fill(run: LoggedRun, record: dict) -> None:
    results = record["results"]
    parts = [record, *record.get("resumed", [])]
    run.settings = record["settings"] | {"ranks": parts[-1]["ranks"]}
    run.versions = _join(parts, "versions")
    run.hardware = _join(parts, "hardware")
    run.data = record["data"]["fingerprint"]
    for kind, part in (("content", "contents"), ("commit", "commits")):
        run.contents |= {f"{kind} of {name}": value for name, value in record.get(part, {}).items() if value}
    run.train_samples = record["data"]["train_samples"]
    run.begun = record.get("begun")
    run.read = record["data"].get("read") or []
    run.figures = {
        name: results[key] * factor for key, (name, factor) in FIGURES.items() if results.get(key) is not None
    }
    last = results["epochs"][-1]
    for name in ("train", "validation"):
        if f"{name}_mse" in last:
            run.figures[f"{name}_mse"] = last[f"{name}_mse"]
        else:
            run.figures[f"{name}_accuracy"] = last[f"{name}_accuracy"] * 100
    best = results.get("best_validation")
    if best and best["used"]:  # the test is of these weights, and the last validation is of others
        figures = {"accuracy": ("validation_accuracy", 100), "loss": ("validation_mse", 1)}
        run.figures = {name: value for name, value in run.figures.items() if name not in dict(figures.values())}
        name, factor = figures[best["metric"]]
        if name == "validation_accuracy" or "test_mse" in run.figures:
            run.figures[name] = best["value"] * factor
    if run.begun and len(parts) == 1:
        start = datetime.fromisoformat(run.begun).timestamp()
        run.times = start, start + results["elapsed_seconds"]
    run.test_samples = results.get("test_samples")
    run.classes = results.get("classes", {})
    scores = {name: ("classes", name) for name in ("micro_f1", "macro_f1")} | {"entity_f1": ("entities", "micro_f1")}
    for name, (part, key) in scores.items():
        if (score := results.get(part, {}).get(key)) is not None:
            run.figures[name] = score * 100
    if "test_tokens" in results:
        run.figures["test_loss"] = results["test_loss"]
        run.figures["test_perplexity"] = perplexity(results["test_loss"])
        by_loss = best and best["used"] and best["metric"] == "loss"
        run.figures["validation_perplexity"] = perplexity(best["value"] if by_loss else last["validation_loss"])


def _join(parts: list[dict], name: str) -> dict:
    """Return versions or hardware of a resumed run; facts that differ between its parts are listed in order."""
    facts = [part[name] for part in parts]
    values = {key: [each.get(key) for each in facts] for key in facts[0]}
    return {key: found[0] if len(set(found)) == 1 else ", then ".join(map(str, found)) for key, found in values.items()}


def _read_points(run: LoggedRun, path: Path, epoch_samples: int) -> None:
    """Read the losses and the accuracies of metrics.csv, which has one row per printed point."""
    if not path.is_file():
        return
    with open(path, encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            samples = int(row["samples"])
            epochs = samples / epoch_samples
            if row["loss"]:
                run.losses.append(Point(epochs, samples, float(row["loss"])))
            if accuracy := row.get("validation_accuracy"):
                of_training = float(train) * 100 if (train := row["train_accuracy"]) else None
                run.accuracies.append(Point(epochs, samples, float(accuracy) * 100, of_training))
