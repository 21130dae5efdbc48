"""Run the rungs that this machine can run, one after the other, and lay them side by side.

python scripts/run_ladder.py --config configs/imdb_minilm.yaml                     # all that it can
python scripts/run_ladder.py --rungs 1,2,4,13 --seeds 3 --html report.html --train_samples 1000

Whatever is no option of this script is given to every rung. A rung that fails does not stop the others. Stopped and
started again with the same options, it goes on where it was: what is finished in --runs_dir is not run again.
"""

import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from fabric_ladder.advice import show_errors
from fabric_ladder.checkpoints.export import Arguments
from fabric_ladder.comparing.matching import WITHOUT_EFFECT
from fabric_ladder.comparing.page import to_html
from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.comparing.table import compare, print_table
from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.rungs import RUNGS, check_rung, choose_rungs, script_defaults
from fabric_ladder.tools.outputs import check_outputs, write_outputs


def comparable(settings: dict) -> dict:
    """Return the settings that decide a run's figures."""
    return {name: value for name, value in settings.items() if name not in WITHOUT_EFFECT}


def finished_run(home: Path, settings: dict) -> Path | None:
    """Return the folder of a finished run of just these settings."""
    for record in sorted(home.glob("*/run.json")):
        try:
            found = read_outside(record)
            if found["status"] == "finished" and comparable(found["settings"]) == settings:
                return record.parent
        except (ValueError, LookupError, TypeError):
            continue  # a run that was killed while it wrote, or something else
    return None


def run(rung: Path, options: list[str]) -> str | None:
    """Run a rung in a process of its own, whose lines appear as they come; return its error's line if it fails."""
    with subprocess.Popen([sys.executable, str(rung), *options], stderr=subprocess.PIPE, text=True) as process:
        last = ""
        for line in process.stderr:
            print(line, end="", file=sys.stderr, flush=True)
            last = line.strip() or last
    if process.returncode:
        return last.removeprefix("error: ") or f"ended with status {process.returncode} and without a word"
    return None


def parse() -> tuple[object, list[str]]:
    """Return this script's options, and those for the rungs."""
    parser = Arguments(description=__doc__.split("\n\n")[0], epilog="All other options are given to every rung.")
    parser.add_argument("--rungs", metavar="1,2,…", help="numbers or names, separated by commas; default: all")
    parser.add_argument("--seeds", type=int, default=1, help="run each rung with so many seeds; default: 1")
    parser.add_argument("--seed", type=int, default=123, help="the first of them; default: 123")
    parser.add_argument("--runs_dir", default="runs/ladder", help="folder of the runs; default: runs/ladder")
    parser.add_argument("--html", metavar="FILE", help="write the comparison as a page, too")
    found, options = parser.parse_known_args()
    if found.seeds < 1:
        raise UserError(f"--seeds {found.seeds}: must be at least 1")
    return found, [*options, "--runs_dir", found.runs_dir]


if __name__ == "__main__":
    show_errors()
    arguments, options = parse()
    named = [name for name in (arguments.rungs or "").split(",") if name.strip()]
    rungs = choose_rungs(named) if named else RUNGS
    check_outputs({"--html": arguments.html} if arguments.html else {})

    ### 1 What can run here
    plan, reasons = [], {}
    for rung in rungs:
        for seed in range(arguments.seed, arguments.seed + arguments.seeds):
            with_seed = [*options, "--seed", str(seed)]
            checked = check_rung(rung, with_seed)
            if isinstance(checked, str):
                reasons[f"Left out: {rung.stem}: {checked}"] = checked
                break
            settings = comparable(asdict(checked))
            plan.append((rung, seed, with_seed, finished_run(Path(arguments.runs_dir) / rung.stem, settings), settings))
    if not plan and len(set(reasons.values())) == 1:
        raise UserError(f"none of these rungs can run here: {checked}")
    for line in reasons:
        print(line, flush=True)
    if not plan:
        raise UserError("none of these rungs can run here with these options, for the reasons above")

    ### 2 The runs
    folders, failed = [], []
    for number, (rung, seed, with_seed, folder, settings) in enumerate(plan, start=1):
        start = f"[{number}/{len(plan)}] {rung.stem}, seed {seed}"
        if folder:
            print(f"{start}: finished before, in {folder}", flush=True)
        else:
            print(start, flush=True)
            try:
                problem = run(rung, with_seed)
            except KeyboardInterrupt:
                raise SystemExit("Stopped; the same command goes on from here") from None
            folder = finished_run(Path(arguments.runs_dir) / rung.stem, settings)
            if problem or folder is None:
                failed.append(f"{rung.stem}, seed {seed}: {problem or 'it left no finished run'}")
                print(f"{start}: failed; the others go on", flush=True)
        if folder:
            folders.append(str(folder))

    ### 3 The comparison
    for line in failed:
        print(f"Failed: {line}")
    if folders:
        own = {rung.stem: script_defaults(rung.stem) for rung in rungs}
        comparison = compare(read_sources(folders), own)
        print_table(comparison, Console())
        if arguments.html:
            write_outputs({arguments.html: to_html(comparison)})
            print(f"Saved {arguments.html}")
    sys.exit(1 if failed else 0)
