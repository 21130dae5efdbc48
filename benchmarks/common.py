"""What the benchmarks share: texts, child processes that measure one side, sides in turns, targets, written results."""

import argparse
import csv
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from time import strftime

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]  # so that no installation is needed

import datasets as hf  # noqa: E402
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
BASE = ["--config", str(ROOT / "configs" / "imdb_bloom_560m.yaml")]  # without it, a machine without a GPU does less


MEASURES = ("samples_per_second", "evaluation_samples_per_second", "peak_memory_bytes")


class ChildError(RuntimeError):
    """A measured process failed; the message is the last line that it wrote to stderr."""


class CannotMeasureError(Exception):
    """A part cannot be measured here; the message says why."""


def imdb_archive() -> Path:
    """Return the archive of IMDb; a benchmark downloads nothing.

    Raises:
        CannotMeasureError: It is not there.
    """
    path = Path(DataSettings().data_dir) / IMDB_ARCHIVE
    if not path.is_file():
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
    results = record["results"]
    last, epoch = ([row for row in rows if row[name]][-1] for name in ("loss", "validation_loss"))
    validating = float(epoch["seconds"]) - float(last["seconds"])
    return {name: results[name] for name in KEPT} | {
        "late_samples_per_second": float(last["samples_per_second"]),
        "seconds_to_last_step": float(last["seconds"]),
        "evaluation_samples_per_second": record["settings"]["validation_samples"] / validating,
        "evaluation_seconds": validating,
        "compile_seconds": results.get("compile_seconds", 0.0),
        "tokens": round(results["tokens_per_second"] * results["training_seconds"]),
        "updates": int(rows[-1]["step"]),
        "threads": record["hardware"]["threads"],
    }


def blog_command(texts: Path, options: list[str]) -> list[str]:
    """Return the blog's recipe with its arguments, for `run_command`."""
    return [str(BLOG), "--texts", str(texts), "--padding", "max_length", *options]


def peer_command(side: str, options: list[str], *switches: str) -> list[str]:
    """Return a side of peers.py with its arguments, for `run_command`."""
    return [str(PEERS), "--side", side, "--switches", *switches, *options]


def rung_command(options: list[str], script: str, *more: str) -> list[str]:
    """Return a rung with its arguments, for `run_command`."""
    return [str(ROOT / "src" / f"{script}.py"), *options, *more]


def run_command(command: list[str], threads: int | None = None) -> dict:
    """Run a rung, or a script that writes its figures to `--out`, in a process of its own, and return the figures."""
    script, *options = command
    if Path(script).parent == ROOT / "src":
        return run_rung(Path(script).stem, options, threads)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        _run_child([*command, "--out", str(out)], threads)
        return json.loads(out.read_text(encoding="utf-8"))


def shown(command: list[str]) -> str:
    """Return a child's command line as it is kept: the folders of this machine and of this run have names instead."""
    text = shlex.join(["python", *command]).replace(f"{ROOT}/", "").replace(sys.prefix, "VENV")
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/[^/\s]+", "$SCRATCH", text)


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
        raise ChildError(f"{Path(command[0]).name} ended with status {done.returncode}: {last_line(done.stderr)}")


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
