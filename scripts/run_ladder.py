"""Run all rungs that this machine can run, one after the other, and compare them.

python scripts/run_ladder.py --config configs/imdb_minilm.yaml
python scripts/run_ladder.py --rungs 1,2,4,13 --seeds 3 --html report.html --train_samples 1000
python scripts/run_ladder.py --rungs 13 --search learning_rate=1e-4,4e-4,1.6e-3 --seeds 3

All other options are passed to every rung. If a rung fails, the others still run. The same command again continues an
interrupted ladder: it skips runs that are finished in --runs_dir. --search runs each rung with each value, and ends
with the best one by the validation; several --search try all combinations.
"""

import argparse
import itertools
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.options import drop_unneeded, read_words, script_defaults, without_options
from fabric_ladder.rungs import RUNGS, check_rung
from fabric_ladder.settings import Settings
from fabric_ladder.tools.arguments import Arguments, at_least_1, new_path, rungs, searched, write_new


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options, and the settings for the rungs."""
    parser = Arguments(__doc__, epilog="All other options are passed to every rung.")
    parser.add_argument(
        "--rungs", metavar="1,2,…", type=rungs, help="numbers or names, separated by commas; default: all"
    )
    parser.add_argument("--seeds", metavar="N", type=at_least_1, default=1, help="runs of each rung; default: 1")
    parser.add_argument("--seed", metavar="N", type=int, default=123, help="the first seed; default: 123")
    parser.add_argument("--runs_dir", default="runs/ladder", help="folder of the runs; default: runs/ladder")
    parser.add_argument(
        "--search", metavar="NAME=V,V,…", type=searched, action="append", default=[], help="values of a setting to try"
    )
    parser.add_argument("--html", metavar="FILE", type=new_path, help="also write the comparison as a page")
    arguments, settings = parser.parse_with_settings()
    names = [name for name, _ in arguments.search]
    given = read_words(settings)
    for place, name in enumerate(names):
        if name in names[:place] or name in given:
            parser.error(f"--search {name}: {name} is given twice")
    return arguments, [*settings, "--runs_dir", arguments.runs_dir]


class Planned(NamedTuple):
    """A run of the plan: its rung, the values that are searched, its seed, its command line and its settings."""

    rung: Path
    values: dict[str, str]
    seed: int
    words: list[str]
    settings: Settings


def in_words(values: dict[str, str]) -> list[str]:
    """Return values as words of a command line."""
    return [word for name, value in values.items() for word in (f"--{name}", value)]


def named(rung: Path, values: dict[str, str]) -> str:
    """Return a rung with the values of a search, for a line."""
    return " ".join([rung.stem, *in_words(values)])


def deciding(settings: dict) -> dict:
    """Return the settings that decide a run's figures."""
    from fabric_ladder.comparing.matching import WITHOUT_EFFECT

    return {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT}


def finished_run(folder: Path, settings: Settings) -> Path | None:
    """Return the folder of a finished run with the same settings and model, later than its files, if there is one."""
    from fabric_ladder.data.hub import hash_files
    from fabric_ladder.options import find_file

    wanted = deciding(asdict(settings))
    contents = {name: hash_files(wanted[name]) for name in ("model", "load")}
    paths = ("dataset", "validation_file", "test_file", "tokenizer", "deepspeed")
    names = [wanted[name] for name in paths if wanted[name]]
    files = [
        file for name in names if (path := find_file(name, settings.data_dir)) for file in (path, *path.rglob("*"))
    ]
    changed = max((file.stat().st_mtime for file in files if file.exists()), default=0)  # links may lead to nothing
    for record in sorted(folder.glob("*/run.json")):
        if record.stat().st_mtime < changed:
            continue
        try:
            found = read_outside(record)
            same = deciding(found["settings"]) == wanted and found.get("contents", contents) == contents
            if found["status"] == "finished" and same:
                return record.parent
        except (ValueError, LookupError, TypeError):
            continue  # a damaged or foreign file
    return None


def run(rung: Path, options: list[str]) -> str | None:
    """Run a rung in a new process and pass its output on; return the line of its error if it fails."""
    with subprocess.Popen([sys.executable, str(rung), *options], stderr=subprocess.PIPE, text=True) as process:
        last = ""
        try:
            for line in process.stderr:
                print(line, end="", file=sys.stderr, flush=True)
                last = line.strip() or last
        except KeyboardInterrupt:  # the run has it too, and saves a checkpoint
            print(process.stderr.read(), end="", file=sys.stderr, flush=True)
            raise
    if process.returncode:
        return last.removeprefix("error: ") or f"ended with status {process.returncode} and without a message"
    return None


def make_plan(arguments: argparse.Namespace, options: list[str]) -> list[Planned]:
    """Return the runs that this machine can run, and print the reasons for the others.

    Raises:
        UserError: No run is possible.
    """
    plan, reasons = [], {}
    tried = [[(name, value) for value in values] for name, values in arguments.search]
    for rung, *pairs in itertools.product(arguments.rungs or RUNGS, *tried):
        values = dict(pairs)
        kept = drop_unneeded([*options, *in_words(values)], script_defaults(rung.stem))
        # a searched value without effect stays, and is refused
        words = [*without_options(kept, values), *in_words(values), "--seed"]
        checked = check_rung(rung, [*words, str(arguments.seed)])
        if isinstance(checked, str):
            reasons[f"Left out: {named(rung, values)}: {checked}"] = checked
            continue
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            plan.append(Planned(rung, values, seed, [*words, str(seed)], replace(checked, seed=seed)))
    if not plan and len(set(reasons.values())) == 1:
        raise UserError(f"no rung can run here: {checked}")
    for line in reasons:
        print(line, flush=True)
    if not plan:
        raise UserError("no rung can run here with these options, for the reasons above")
    return plan


def run_all(plan: list[Planned]) -> tuple[list[Path | None], list[str]]:
    """Run everything that is not finished yet; return the folder of each run (None: it failed), and the failures."""
    folders, failed = [], []
    for number, planned in enumerate(plan, start=1):
        home = Path(planned.settings.runs_dir) / planned.rung.stem
        name = f"{named(planned.rung, planned.values)}, seed {planned.seed}"
        start = f"[{number}/{len(plan)}] {name}"
        folder = finished_run(home, planned.settings)
        if folder:
            print(f"{start}: finished before, in {folder}", flush=True)
        else:
            print(start, flush=True)
            try:
                problem = run(planned.rung, planned.words)
            except KeyboardInterrupt:
                raise SystemExit("Stopped; the same command continues") from None
            folder = finished_run(home, planned.settings)
            if problem or folder is None:
                failed.append(f"{name}: {problem or 'it left no finished run'}")
                print(f"{start}: failed; the others continue", flush=True)
        folders.append(folder)
    return folders, failed


def print_best(plan: list[Planned], folders: list[Path | None]) -> None:
    """Print the best values of a search for each rung."""
    from fabric_ladder.comparing.search import best_line

    tried = {(planned.rung, *in_words(planned.values)): (planned.values, []) for planned in plan}
    for planned, folder in zip(plan, folders, strict=True):
        tried[planned.rung, *in_words(planned.values)][1].append(folder)
    for planned in {planned.rung: planned for planned in plan}.values():
        found = [each for (rung, *_), each in tried.items() if rung == planned.rung]
        print(best_line(planned.rung.stem, planned.settings.best_metric, found))


def print_comparison(arguments: argparse.Namespace, runs: dict[str, Planned]) -> None:
    """Print the comparison of the runs, by their folders, and write its page."""
    from rich.console import Console

    from fabric_ladder.comparing.page import to_html
    from fabric_ladder.comparing.sources import read_sources
    from fabric_ladder.comparing.table import compare, print_table

    comparison = compare(
        read_sources([*runs]), {planned.rung.stem: script_defaults(planned.rung.stem) for planned in runs.values()}
    )
    if arguments.search:
        names = [name for name, _ in arguments.search]
        comparison.differences = [each for each in comparison.differences if each.split()[0] not in names]
        for row in comparison.rows:
            planned = runs[row.first.source]
            row.label = named(planned.rung, planned.values)
    print_table(comparison, Console())
    if arguments.html:
        write_new(arguments.html, to_html(comparison))
        print(f"Saved {arguments.html}")


def main(arguments: argparse.Namespace, options: list[str]) -> None:
    """Check the rungs, run them and compare the runs."""
    from fabric_ladder.techniques.advice import explain_errors

    explain_errors()
    plan = make_plan(arguments, options)
    if "check_only" in read_words(options):
        return
    folders, failed = run_all(plan)
    for line in failed:
        print(f"Failed: {line}")
    if any(folders):
        print_comparison(arguments, {str(each): planned for planned, each in zip(plan, folders, strict=True) if each})
    if arguments.search:
        print_best(plan, folders)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(*parse())
