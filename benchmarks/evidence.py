"""The runs behind the tables of docs/results.md: made here, or taken over, and kept under benchmarks/results/runs/.

    python benchmarks/evidence.py run imdb_2000 [--rungs 2,4] [--seeds 5]    runs what is not kept yet
    python benchmarks/evidence.py search imdb_2000 [--rungs 2,4]             finds each rung's best learning rate
    python benchmarks/evidence.py best imdb_2000 [--rungs 2,4] [--seeds 5]   runs each rung at that rate
    python benchmarks/evidence.py keep imdb_2000 runs/2_grad_accum/1 …       keeps runs that were made elsewhere

Stopped, the same command goes on, in the middle of a run too. `python benchmarks/evidence_tables.py` then writes the
tables. Of a run are kept run.json, log.txt and metrics.csv, as SET/RUNG/LEARNING RATE/SEED, with names in place of this
machine's folders; a run that has other settings than its set says is refused.

The search is the same for every rung: with the first seed, its own learning rate, a quarter of it and four times it; as
long as the best of them is the lowest or the highest, one more beyond. The best has the lowest validation loss:
accuracies of models that have hardly begun to learn are noise. The test decides nothing.
"""

import argparse
import io
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import common  # first of all: it makes the project importable without an installation
from against_blog import model_options
from common import CannotMeasureError
from evidence_sets import SETS

from fabric_ladder.advice import show_errors
from fabric_ladder.comparing.matching import WITHOUT_EFFECT
from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.rungs import RUNGS, check_rung, choose_rungs
from fabric_ladder.settings import Settings

RUNS = common.RESULTS / "runs"
WORK = common.ROOT / "runs" / "evidence"  # of runs that are not finished
SEED, STEP, LIMIT = 123, 4, 6  # the first seed; from one learning rate to the next; how many are tried at most
FILES = ("metrics.csv", "log.txt", "run.json")  # the last tells that a run is kept
DIVERGED = "diverged.txt"  # in place of them, of a run that stopped at a loss that is not finite
# what leaves a run's figures as they are, or says where things lie on a machine
FREE = {*WITHOUT_EFFECT, *"log_every data_dir cache_dir tokenizer config name".split()}


class DivergedError(UserError):
    """A run stopped at a loss that is not finite."""


class Wanted(NamedTuple):
    """A run of a set; `rate` is its learning rate, None: the rung's own."""

    set: str
    rung: Path
    seed: int
    rate: float | None = None

    @property
    def options(self) -> list[str]:
        """Its command line."""
        chosen = SETS[self.set]
        model = model_options("minilm", WORK)[:2] if chosen.minilm else []
        rate = [] if self.rate is None else ["--learning_rate", f"{self.rate:g}"]
        return [*chosen.options, *model, "--seed", str(self.seed), *rate]


def home_of(set: str, rung: str, rate: float, seed: int) -> Path:
    """Return the folder in which a run is kept."""
    return RUNS / set / rung / f"{rate:g}" / str(seed)


def kept(set: str, rung: str) -> dict[float, dict[int, dict]]:
    """Return the records of a rung's kept runs, by learning rate and seed."""
    found: dict[float, dict[int, dict]] = {}
    for path in sorted((RUNS / set / rung).glob("*/*/run.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(record["settings"]["learning_rate"], {})[record["settings"]["seed"]] = record
    return found


def tried(set: str, rung: str) -> dict[float, float]:
    """Return the first seed's last validation loss at each learning rate; infinite where the run diverged."""
    runs = {rate: seeds[SEED] for rate, seeds in kept(set, rung).items() if SEED in seeds}
    losses = {rate: record["results"]["epochs"][-1]["validation_loss"] for rate, record in runs.items()}
    lost = [float(path.parents[1].name) for path in (RUNS / set / rung).glob(f"*/{SEED}/{DIVERGED}")]
    return losses | dict.fromkeys(lost, math.inf)


def best_rate(found: dict[float, float]) -> float | None:
    """Return the learning rate with the lowest of the losses that are given, None where the search is not done.

    It is done when the best of at least three rates has one below and one above it, or `LIMIT` have been tried.
    """
    best = min(found, key=found.get, default=None)
    inside = best is not None and min(found) < best < max(found)
    return best if inside or len(found) >= LIMIT else None


def next_rate(found: dict[float, float], own: float) -> float | None:
    """Return the learning rate that the search tries next, None when it is done."""
    for rate in (own, own / STEP, own * STEP):
        if not any(abs(rate / other - 1) < 1e-5 for other in found):  # but for the rounding of a folder's name
            return rate
    if best_rate(found) is not None:
        return None
    best = min(found, key=found.get)
    return best / STEP if best == min(found) else best * STEP


def decisive(settings: dict) -> dict:
    """Return the settings that decide a run's figures."""
    found = {name: value for name, value in settings.items() if name not in FREE}
    return found | {"model": Path(settings["model"]).name}  # of which the folder is free


def resolved(wanted: Wanted) -> Settings:
    """Return the settings of a run as its rung resolves them here.

    Raises:
        UserError: It cannot run here.
    """
    with redirect_stdout(io.StringIO()):  # "can run here"
        settings = check_rung(wanted.rung, wanted.options)
    if isinstance(settings, str):
        raise UserError(f"{wanted.rung.stem}: {settings}")
    return settings


def impersonal(text: str, settings: dict) -> str:
    """Return a run's file without the folders of this machine."""
    folders = {settings["data_dir"]: "$FABRIC_LADDER_DATA", settings["cache_dir"]: "$CACHE"}
    if Path(settings["model"]).is_dir():
        folders[settings["model"]] = "$MINILM"
    for folder, name in sorted(folders.items(), key=lambda item: -len(item[0])):
        text = text.replace(str(Path(folder).absolute()), name)
    text = re.sub(r"\S*/(src/\d+_)", r"\1", text)
    return common.impersonal(text).replace(str(Path.home()), "~")


def read_record(folder: Path) -> dict:
    """Return what run.json in a run's folder holds.

    Raises:
        UserError: There is none, or it is no record of a run.
    """
    record = read_outside(folder / "run.json")
    settings = record.get("settings") if isinstance(record, dict) else None
    if not isinstance(settings, dict) or not {"name", "seed", "learning_rate", "model", "data_dir"} <= settings.keys():
        raise UserError(f"{folder / 'run.json'} is no record of a run")
    return record


def keep(folder: Path, set: str, rung: str, settings: dict) -> Path:
    """Copy a finished run's files to where its set keeps it; return that folder.

    Args:
        folder: Of the run.
        set: Its name.
        rung: Its name.
        settings: That the run should have.

    Raises:
        UserError: The run is not finished, or is another.
    """
    record = read_record(folder)
    if record.get("status") != "finished":
        raise UserError(f"{folder}: the run is not finished")
    texts = {name: read_outside(folder / name, str, "text") for name in FILES}
    found, expected = decisive(record["settings"]), json.loads(json.dumps(decisive(settings)))  # tuples as lists
    other = [name for name in found if name in expected and found[name] != expected[name]]
    if other:
        what = ", ".join(f"{name} {found[name]} instead of {expected[name]}" for name in other)
        raise UserError(f"{folder} is no run of {set}: {what}")
    target = home_of(set, rung, found["learning_rate"], found["seed"])
    target.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(target / name, impersonal(text, record["settings"]))
    return target


def make(wanted: Wanted) -> None:
    """Run what is wanted, unless it is kept, and keep it.

    Raises:
        DivergedError: Its loss was no longer finite, which is kept, too.
        UserError: It cannot run here, or failed.
    """
    settings = resolved(wanted)
    name = f"{wanted.set}: {wanted.rung.stem}, learning rate {settings.learning_rate:g}, seed {wanted.seed}"
    if wanted.seed in kept(wanted.set, wanted.rung.stem).get(settings.learning_rate, {}):
        return
    print(name, flush=True)
    home = WORK / wanted.set / wanted.rung.stem / f"{settings.learning_rate:g}-{wanted.seed}"
    resumable = ["--save_every", "500", "--keep", "1", "--resume", "auto"]
    command = [sys.executable, str(wanted.rung), *wanted.options, "--runs_dir", str(home), *resumable]
    done = subprocess.run(command, cwd=common.ROOT, check=False, stderr=subprocess.PIPE, text=True)
    print(done.stderr, end="", file=sys.stderr, flush=True)
    if "try a lower --learning_rate" in done.stderr:  # a loss that is not finite
        target = home_of(wanted.set, wanted.rung.stem, settings.learning_rate, wanted.seed)
        target.mkdir(parents=True, exist_ok=True)
        write_whole(target / DIVERGED, done.stderr.splitlines()[-1] + "\n")
        raise DivergedError(f"{name}: ended with status {done.returncode}")
    runs = sorted((home / wanted.rung.stem).glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    if done.returncode or not runs:
        raise UserError(f"{name}: ended with status {done.returncode}")
    print(f"kept {shown(keep(runs[-1].parent, wanted.set, wanted.rung.stem, asdict(settings)))}", flush=True)


def shown(path: Path) -> str:
    """Return a path as it is printed."""
    return str(path.relative_to(common.ROOT) if path.is_relative_to(common.ROOT) else path)


def chosen_rungs(set: str, named: str | None) -> list[Path]:
    """Return the rungs that are named, else those of the set."""
    names = named or SETS[set].rungs
    return choose_rungs(names.split(",")) if names else RUNGS


def keep_all(set: str, folders: Iterable[str]) -> None:
    """Keep finished runs that were made elsewhere, at any learning rate."""
    for folder in map(Path, folders):
        found = read_record(folder)["settings"]
        (rung,) = choose_rungs([found["name"]])
        settings = asdict(resolved(Wanted(set, rung, found["seed"]))) | {"learning_rate": found["learning_rate"]}
        print(f"kept {shown(keep(folder, set, rung.stem, settings))}", flush=True)


def search(set: str, rung: Path) -> None:
    """Try learning rates with the first seed until the search is done."""
    own = resolved(Wanted(set, rung, SEED)).learning_rate
    while (rate := next_rate(tried(set, rung.stem), own)) is not None:
        with suppress(DivergedError):  # which is an answer
            make(Wanted(set, rung, SEED, None if rate == own else rate))
    print(f"{set}: {rung.stem}: best learning rate {best_rate(tried(set, rung.stem)):g}")


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "search", "best", "keep"))
    parser.add_argument("set", choices=SETS)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="of finished runs, for keep")
    parser.add_argument("--rungs", metavar="1,2,…", help="numbers or names; default: those of the set")
    parser.add_argument("--seeds", type=int, help="so many from 123 on; default: as many as the set has")
    args = parser.parse_args()
    if bool(args.folders) != (args.what == "keep"):
        raise UserError("keep takes folders of finished runs, and nothing else does")
    if args.what in ("keep", "search") and args.seeds is not None:
        raise UserError(f"{args.what} takes no --seeds")
    if args.what == "keep" and args.rungs:
        raise UserError("keep takes no --rungs: each run names its own")
    if args.seeds is not None and args.seeds < 1:
        raise UserError(f"--seeds {args.seeds}: must be at least 1")
    SETS[args.set].prepare()
    if args.what == "keep":
        keep_all(args.set, args.folders)
        return 0
    failed = 0
    for rung in chosen_rungs(args.set, args.rungs):
        try:
            if args.what == "search":
                search(args.set, rung)
                continue
            rate = None
            if args.what == "best" and (rate := best_rate(tried(args.set, rung.stem))) is None:
                raise UserError(f"{rung.stem}: search its learning rate first")
            for seed in range(SEED, SEED + (args.seeds or SETS[args.set].seeds)):
                make(Wanted(args.set, rung, seed, rate))
        except UserError as error:  # the other rungs go on
            print(f"left out: {error}", file=sys.stderr)
            failed += 1
    return int(failed > 0 and bool(args.rungs or SETS[args.set].rungs))  # not each of all rungs runs everywhere


if __name__ == "__main__":
    show_errors()
    try:
        sys.exit(main())
    except CannotMeasureError as reason:
        raise UserError(str(reason)) from None
