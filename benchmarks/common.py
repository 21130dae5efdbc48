"""What the benchmarks share: texts, child processes that measure one side, tables, written results."""

import csv
import json
import os
import re
import shlex
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from time import strftime

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # so that no installation is needed

import datasets as hf  # noqa: E402
import psutil  # noqa: E402
import torch  # noqa: E402

from fabric_ladder.data.cache import quiet  # noqa: E402
from fabric_ladder.data.sources import find_source  # noqa: E402
from fabric_ladder.data.tables import complete_splits, read_splits  # noqa: E402
from fabric_ladder.environment import describe_hardware, describe_versions, write_whole  # noqa: E402
from fabric_ladder.settings import DataSettings  # noqa: E402
from local_dataset_utilities import IMDB_ARCHIVE, download_dataset, read_split  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
BLOG = ROOT / "benchmarks" / "blog_recipe.py"
PEERS = ROOT / "benchmarks" / "peers.py"
KEPT = (
    "samples_per_second tokens_per_second evaluation_tokens_per_second peak_memory_bytes peak_host_memory_bytes".split()
)
KEPT += "training_seconds padding test_accuracy test_loss parameters".split()  # figures of run.json
SOMETIMES = ("compile_seconds", "predicted_peak_bytes", "peak_reserved_bytes")  # on a GPU, or compiled
BASE = ["--config", str(ROOT / "configs" / "imdb_bloom_560m.yaml")]  # without it, a machine without a GPU does less


CHILDREN: set[subprocess.Popen] = set()  # that run now


class ChildError(RuntimeError):
    """A measured process failed; the message is the last line that it wrote to stderr."""

    def __init__(self, message: str, status: int):
        super().__init__(message)
        self.status, self.figures = status, {}


class CannotMeasureError(Exception):
    """A part cannot be measured here; the message says why."""


def has_imdb() -> bool:
    """Tell whether the archive of IMDb is here."""
    return (Path(DataSettings().data_dir) / IMDB_ARCHIVE).is_file()


def imdb_archive() -> Path:
    """Return the archive of IMDb; a benchmark downloads nothing.

    Raises:
        CannotMeasureError: It is not there.
    """
    path = Path(DataSettings().data_dir) / IMDB_ARCHIVE
    if not has_imdb():
        raise CannotMeasureError(f"no {IMDB_ARCHIVE} in FABRIC_LADDER_DATA ({path.parent})")
    return path


def save_texts(settings: DataSettings, folder: Path) -> None:
    """Save the splits that the rungs draw for these settings as texts, for the blog's recipe to tokenize.

    A child that reads them from here has not held all 50,000 reviews, so its memory is its recipe's own.
    """
    with tempfile.TemporaryDirectory() as scratch:
        source = find_source(settings, download_dataset, read_split)
        splits, *_ = read_splits(settings, source, Path(scratch))
        with quiet():
            hf.DatasetDict(complete_splits(splits, settings)).save_to_disk(folder)


def run_recorded(
    script: str, options: list[str], threads: int | None = None, limit: float | None = None
) -> tuple[dict, list[dict]]:
    """Run an unchanged script of the ladder in a process of its own; return its run.json and its metrics' rows."""
    with tempfile.TemporaryDirectory(prefix="fabric-ladder-runs-") as runs:
        run_child([str(ROOT / "src" / f"{script}.py"), *options, "--runs_dir", runs], threads, limit)
        return read_run(Path(runs) / script / "1")


def read_run(folder: Path) -> tuple[dict, list[dict]]:
    """Return a run's run.json and its metrics' rows."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    with open(folder / "metrics.csv", encoding="utf-8", newline="") as file:
        return record, list(csv.DictReader(file))


def run_rung(script: str, options: list[str], threads: int | None = None, limit: float | None = None) -> dict:
    """Run an unchanged script of the ladder in a process of its own, and return its figures.

    Evaluation is timed on the validation split, between the last printed loss and the line of the epoch. The rate of
    the last printed loss is `late_samples_per_second`; `seconds_to_last_step` has all that came before it, such as
    compilation.
    """
    record, rows = run_recorded(script, options, threads, limit)
    results, settings = record["results"], record["settings"]
    last, epoch = ([row for row in rows if row[name]][-1] for name in ("loss", "validation_loss"))
    validating = float(epoch["seconds"]) - float(last["seconds"])
    figures = {name: results[name] for name in KEPT} | {
        "late_samples_per_second": float(last["samples_per_second"]),
        "seconds_to_last_step": float(last["seconds"]),
        "evaluation_samples_per_second": settings["validation_samples"] / validating,
        "evaluation_seconds": validating,
        "compile_seconds": 0.0,
        "tokens": round(results["tokens_per_second"] * results["training_seconds"]),
        "updates": int(rows[-1]["step"]),
        "threads": record["hardware"]["threads"],
        **precisions(settings),
    }
    return figures | {name: results[name] for name in SOMETIMES if name in results}


def precisions(settings: dict) -> dict[str, str]:
    """Return what the matrix products of these settings are taken in."""
    return {name: settings[name] for name in ("precision", "matmul_precision")}


def leave_memory_alone() -> None:
    """Leave glibc as a peer's users have it: what a rung tells it is part of the rung's speed. Before the settings."""
    os.environ["MALLOC_"] = ""


def blog_command(texts: Path, options: list[str]) -> list[str]:
    """Return the blog's recipe with its arguments, for `run_command`."""
    return [str(BLOG), "--texts", str(texts), "--padding", "max_length", *options]


def peer_command(side: str, options: list[str], *switches: str) -> list[str]:
    """Return a side of peers.py with its arguments, for `run_command`."""
    return [str(PEERS), "--side", side, "--switches", *switches, *options]


def rung_command(options: list[str], script: str, *more: str) -> list[str]:
    """Return a rung with its arguments, for `run_command`."""
    return [str(ROOT / "src" / f"{script}.py"), *options, *more]


def run_command(command: list[str], threads: int | None = None, limit: float | None = None) -> dict:
    """Run a rung, or a script that writes its figures to `--out`, in a process of its own, and return the figures.

    Raises:
        ChildError: It failed.
        subprocess.TimeoutExpired: It took more than `limit` seconds; it and all that it started are gone.
    """
    script, *options = command
    if Path(script).parent == ROOT / "src":
        return run_rung(Path(script).stem, options, threads, limit)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        try:
            run_child([*command, "--out", str(out)], threads, limit)
        except (ChildError, subprocess.TimeoutExpired) as error:
            error.figures = read_results(out)  # as far as it had come
            raise
        return read_results(out)


def shown(command: list[str]) -> str:
    """Return a child's command line as it is kept."""
    return impersonal(shlex.join(["python", *command]))


def impersonal(text: str) -> str:
    """Return a text in which the folders of this machine and of this run have names instead."""
    text = text.replace(f"{ROOT}/", "").replace(sys.prefix, "VENV")
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/[^/\s\"',]+", "$SCRATCH", text)


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


def run_child(command: list[str], threads: int | None = None, limit: float | None = None) -> str:
    """Run a script in a process of its own, and return its stdout; raises as `run_command`."""
    env = child_environment(threads)
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen([sys.executable, *command], env=env, cwd=ROOT, start_new_session=True, **streams)
    CHILDREN.add(child)
    try:
        stdout, stderr = child.communicate(timeout=limit)
    finally:
        end(child)
        child.wait()
        CHILDREN.discard(child)
    if child.returncode:
        text = f"{Path(command[0]).name} ended with status {child.returncode}: {last_line(stderr)}"
        raise ChildError(text, child.returncode)
    return stdout


def end(child: subprocess.Popen) -> None:
    """End a process that may still run, and all that it has started."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(child.pid)
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def last_line(stderr: str) -> str:
    """Return what a process wrote last to stderr."""
    return (stderr.strip().splitlines() or ["no message"])[-1]


def environment(device: torch.device) -> dict:
    """Return what a result depends on beside the code: command, date, versions and hardware."""
    return {
        "command": shown([str(Path(sys.argv[0]).resolve()), *sys.argv[1:]]),
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


def read_results(path: Path) -> dict[str, dict]:
    """Return the records of a results file by part; none where there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_result(path: Path, part: str, record: dict) -> None:
    """Put a part's record into a results file; the other parts of the file stay as they are."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(read_results(path) | {part: record}, indent=2, ensure_ascii=False) + "\n")


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
