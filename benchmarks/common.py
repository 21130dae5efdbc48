"""What the benchmarks share: the texts, child processes that measure one side, and the written results."""

import json
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from time import strftime

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # so that no installation is needed

import datasets as hf  # noqa: E402
import torch  # noqa: E402

import local_dataset_utilities as data  # noqa: E402
from fabric_ladder.hardware import describe_hardware, describe_versions  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
BLOG = ROOT / "benchmarks" / "blog_recipe.py"
BASE = ["--config", str(ROOT / "configs" / "imdb_bloom_560m.yaml")]  # without it, a machine without a GPU does less


class ChildError(RuntimeError):
    """A measured process failed; the message is the last line that it wrote to stderr."""


def imdb_archive() -> Path | None:
    """Return the archive of IMDb, or None where there is none: a benchmark downloads nothing."""
    path = Path(data.DataSettings().data_dir) / data.IMDB_ARCHIVE
    return path if path.is_file() else None


def save_texts(settings: data.DataSettings, folder: Path) -> None:
    """Save the splits that the rungs draw for these settings as texts, for the blog's recipe to tokenise.

    A child that reads them from here has not held all 50,000 reviews, so its memory is its recipe's own.
    """
    with tempfile.TemporaryDirectory() as scratch:
        splits, _ = data._read_splits(settings, data._find_source(settings), Path(scratch))
        with data._quiet():
            hf.DatasetDict(data._cut(splits, settings)).save_to_disk(folder)


def run_rung(script: str, options: list[str], threads: int | None = None) -> dict:
    """Run an unchanged script of the ladder in a process of its own, and return its figures.

    Evaluation is timed on the validation split: it is what the elapsed time has beyond the training.
    """
    with tempfile.TemporaryDirectory(prefix="fabric-ladder-runs-") as runs:
        _run_child([str(ROOT / "src" / f"{script}.py"), *options, "--runs_dir", runs], threads)
        record = json.loads((Path(runs) / script / "1" / "run.json").read_text(encoding="utf-8"))
    results, settings = record["results"], record["settings"]
    validating = results["elapsed_seconds"] - results["training_seconds"]
    return {
        "samples_per_second": results["samples_per_second"],
        "evaluation_samples_per_second": settings["validation_samples"] / validating,
        "peak_memory_bytes": results["peak_memory_bytes"],
        "training_seconds": results["training_seconds"],
        "evaluation_seconds": validating,
        "compile_seconds": results.get("compile_seconds", 0.0),
        "tokens": round(results["tokens_per_second"] * results["training_seconds"]),
        "tokens_per_second": results["tokens_per_second"],
        "padding": results["padding"],
        "test_accuracy": results["test_accuracy"],
        "parameters": results["parameters"],
        "threads": record["hardware"]["threads"],
    }


def run_blog(texts: Path, padding: str, options: list[str], threads: int | None = None) -> dict:
    """Run the blog's recipe on saved texts in a process of its own, and return the same figures."""
    with tempfile.TemporaryDirectory(prefix="blog-recipe-") as folder:
        out = Path(folder) / "figures.json"
        extra = ["--texts", str(texts), "--padding", padding, "--out", str(out)]
        _run_child([str(BLOG), *extra, *options], threads)
        return json.loads(out.read_text(encoding="utf-8"))


def _run_child(command: list[str], threads: int | None) -> None:
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])])
    env["TOKENIZERS_PARALLELISM"] = "false"
    if threads:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    done = subprocess.run([sys.executable, *command], env=env, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ChildError(f"{Path(command[0]).name} ended with status {done.returncode}: {lines[-1]}")


def environment(device: torch.device) -> dict:
    """Return what a result depends on beside the code: command, date, versions and hardware."""
    script = Path(sys.argv[0]).resolve()
    name = str(script.relative_to(ROOT)) if script.is_relative_to(ROOT) else str(script)
    return {
        "command": shlex.join(["python", name, *sys.argv[1:]]),
        "date": strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": _commit(),
        "versions": describe_versions("torchmetrics"),
        "hardware": describe_hardware(device),
    }


def _commit() -> str | None:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def write_result(path: Path, part: str, record: dict) -> None:
    """Put a part's record into a results file; the other parts of the file stay as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    records[part] = record
    temporary = path.with_name(f".{path.name}")
    temporary.write_text(json.dumps(records, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def print_table(header: list[str], rows: list[list]) -> None:
    """Print rows under a header, the first column to the left, the others to the right."""
    cells = [header, *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for row in cells:
        padded = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        print("  ".join([row[0].ljust(widths[0]), *padded]).rstrip())
    print(flush=True)


def _cell(value) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)
