"""What the benchmarks share: the texts, child processes that measure one side, and the written results."""

import csv
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
PEERS = ROOT / "benchmarks" / "peers.py"
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

    Evaluation is timed on the validation split, between the last printed loss and the line of the epoch. The rate of
    the last printed loss is `late_samples_per_second`; `seconds_to_last_step` has all that came before it, such as
    compilation.
    """
    with tempfile.TemporaryDirectory(prefix="fabric-ladder-runs-") as runs:
        _run_child([str(ROOT / "src" / f"{script}.py"), *options, "--runs_dir", runs], threads)
        folder = Path(runs) / script / "1"
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
    results, settings = record["results"], record["settings"]
    last, epoch = ([row for row in rows if row[name]][-1] for name in ("loss", "validation_loss"))
    validating = float(epoch["seconds"]) - float(last["seconds"])
    return {
        "samples_per_second": results["samples_per_second"],
        "late_samples_per_second": float(last["samples_per_second"]),
        "seconds_to_last_step": float(last["seconds"]),
        "evaluation_samples_per_second": settings["validation_samples"] / validating,
        "evaluation_tokens_per_second": results["evaluation_tokens_per_second"],
        "peak_memory_bytes": results["peak_memory_bytes"],
        "peak_host_memory_bytes": results["peak_host_memory_bytes"],
        "training_seconds": results["training_seconds"],
        "evaluation_seconds": validating,
        "compile_seconds": results.get("compile_seconds", 0.0),
        "tokens": round(results["tokens_per_second"] * results["training_seconds"]),
        "tokens_per_second": results["tokens_per_second"],
        "padding": results["padding"],
        "test_accuracy": results["test_accuracy"],
        "test_loss": results["test_loss"],
        "parameters": results["parameters"],
        "updates": int(rows[-1]["step"]),
        "threads": record["hardware"]["threads"],
    }


def run_blog(texts: Path, padding: str, options: list[str], threads: int | None = None) -> dict:
    """Run the blog's recipe on saved texts in a process of its own, and return the same figures."""
    return run_script(blog_command(texts, padding, options), threads)


def blog_command(texts: Path, padding: str, options: list[str]) -> list[str]:
    """Return the blog's recipe with its arguments, for `run_script`."""
    return [str(BLOG), "--texts", str(texts), "--padding", padding, *options]


def peer_command(side: str, options: list[str], *switches: str) -> list[str]:
    """Return a side of peers.py with its arguments, for `run_script`."""
    return [str(PEERS), "--side", side, "--switches", *switches, *options]


def run_script(command: list[str], threads: int | None = None) -> dict:
    """Run a script that writes its figures to `--out`, in a process of its own, and return them."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        out = Path(folder) / "figures.json"
        _run_child([*command, "--out", str(out)], threads)
        return json.loads(out.read_text(encoding="utf-8"))


def shown(command: list[str]) -> str:
    """Return a child's command line as it is kept: paths of this machine's folders shortened."""
    return shlex.join(["python", *command]).replace(f"{ROOT}/", "").replace(sys.prefix, "VENV")


def checksum(model: torch.nn.Module) -> float:
    """Return a number that weights share only when they are the same: the sum of their absolute values."""
    return sum(float(weights.detach().abs().sum(dtype=torch.float64)) for weights in model.parameters())


def child_environment(threads: int | None) -> dict[str, str]:
    """Return the environment of a measured process."""
    env = dict(os.environ)
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [env.get("PYTHONPATH")])])
    env["TOKENIZERS_PARALLELISM"] = "false"
    if threads:
        env |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    return env


def _run_child(command: list[str], threads: int | None) -> None:
    env = child_environment(threads)
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
        "versions": describe_versions("accelerate", "torchmetrics"),
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
