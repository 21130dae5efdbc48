"""Run all rungs that this machine can run, one after the other, and compare them.

python scripts/run_ladder.py --config configs/imdb_minilm.yaml
python scripts/run_ladder.py --rungs 1,2,4,13 --seeds 3 --html report.html --train_samples 1000

All other options are passed to every rung. If a rung fails, the others still run. The same command again continues an
interrupted ladder: it skips runs that are finished in --runs_dir.
"""

import argparse
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.options import drop_unneeded
from fabric_ladder.rungs import RUNGS, check_rung, script_defaults
from fabric_ladder.settings import Settings
from fabric_ladder.tools.arguments import Arguments, at_least_1, new_path, rungs, write_new


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options, and the settings for the rungs."""
    parser = Arguments(__doc__, epilog="All other options are passed to every rung.")
    parser.add_argument(
        "--rungs", metavar="1,2,…", type=rungs, help="numbers or names, separated by commas; default: all"
    )
    parser.add_argument("--seeds", metavar="N", type=at_least_1, default=1, help="runs of each rung; default: 1")
    parser.add_argument("--seed", metavar="N", type=int, default=123, help="the first seed; default: 123")
    parser.add_argument("--runs_dir", default="runs/ladder", help="folder of the runs; default: runs/ladder")
    parser.add_argument("--html", metavar="FILE", type=new_path, help="also write the comparison as a page")
    arguments, settings = parser.parse_with_settings()
    return arguments, [*settings, "--runs_dir", arguments.runs_dir]


def deciding(settings: dict) -> dict:
    """Return the settings that decide a run's figures."""
    from fabric_ladder.comparing.matching import WITHOUT_EFFECT

    return {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT}


def finished_run(folder: Path, settings: Settings) -> Path | None:
    """Return the folder of a finished run with the same settings, if there is one."""
    wanted = deciding(asdict(settings))
    for record in sorted(folder.glob("*/run.json")):
        try:
            found = read_outside(record)
            if found["status"] == "finished" and deciding(found["settings"]) == wanted:
                return record.parent
        except (ValueError, LookupError, TypeError):
            continue  # a damaged or foreign file
    return None


def run(rung: Path, options: list[str]) -> str | None:
    """Run a rung in a new process and pass its output on; return the line of its error if it fails."""
    with subprocess.Popen([sys.executable, str(rung), *options], stderr=subprocess.PIPE, text=True) as process:
        last = ""
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
    if process.returncode:
        return last.removeprefix("error: ") or f"ended with status {process.returncode} and without a message"
    return None


def main(arguments: argparse.Namespace, options: list[str]) -> None:
    """Check the rungs, run them and compare the runs."""
    from rich.console import Console

    from fabric_ladder.comparing.page import to_html
    from fabric_ladder.comparing.sources import read_sources
    from fabric_ladder.comparing.table import compare, print_table
    from fabric_ladder.techniques.advice import show_errors

    show_errors()
    runs_dir = Path(arguments.runs_dir)
    chosen = arguments.rungs or RUNGS

    ### 1 Rungs that can run here
    plan, reasons = [], {}
    for rung in chosen:
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            with_seed = [*drop_unneeded(options, script_defaults(rung.stem)), "--seed", str(seed)]
            checked = check_rung(rung, with_seed)
            if isinstance(checked, str):
                reasons[f"Left out: {rung.stem}: {checked}"] = checked
                break
            plan.append((rung, seed, with_seed, checked))
    if not plan and len(set(reasons.values())) == 1:
        raise UserError(f"no rung can run here: {checked}")
    for line in reasons:
        print(line, flush=True)
    if not plan:
        raise UserError("no rung can run here with these options, for the reasons above")

    ### 2 Runs
    folders, failed = [], []
    for number, (rung, seed, with_seed, settings) in enumerate(plan, start=1):
        start = f"[{number}/{len(plan)}] {rung.stem}, seed {seed}"
        folder = finished_run(runs_dir / rung.stem, settings)
        if folder:
            print(f"{start}: finished before, in {folder}", flush=True)
        else:
            print(start, flush=True)
            try:
                problem = run(rung, with_seed)
            except KeyboardInterrupt:
                raise SystemExit("Stopped; the same command continues") from None
            folder = finished_run(runs_dir / rung.stem, settings)
            if problem or folder is None:
                failed.append(f"{rung.stem}, seed {seed}: {problem or 'it left no finished run'}")
                print(f"{start}: failed; the others continue", flush=True)
        if folder:
            folders.append(str(folder))

    ### 3 Comparison
    for line in failed:
        print(f"Failed: {line}")
    if folders:
        comparison = compare(read_sources(folders), {rung.stem: script_defaults(rung.stem) for rung in chosen})
        print_table(comparison, Console())
        if arguments.html:
            write_new(arguments.html, to_html(comparison))
            print(f"Saved {arguments.html}")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main(*parse())
