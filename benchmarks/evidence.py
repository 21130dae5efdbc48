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
import csv
import io
import json
import math
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterable
from contextlib import redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import common  # first of all: it makes the project importable without an installation
from against_blog import model_options
from common import CannotMeasureError

from fabric_ladder.advice import show_errors
from fabric_ladder.comparing.matching import WITHOUT_EFFECT
from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.rungs import RUNGS, check_rung, choose_rungs
from fabric_ladder.settings import Settings
from local_dataset_utilities import IMDB_ARCHIVE, download_dataset

RUNS = common.RESULTS / "runs"
WORK = common.ROOT / "runs" / "evidence"  # of runs that are not finished
STARS = "runs/evidence/stars.csv"
SEED, STEP, LIMIT = 123, 4, 6  # the first seed; from one learning rate to the next; how many are tried at most
FILES = ("run.json", "log.txt", "metrics.csv")
# what leaves a run's figures as they are, or says where things lie on a machine
FREE = {*WITHOUT_EFFECT, *"log_every data_dir cache_dir model tokenizer config threads name".split()}
MINILM = "--config configs/imdb_minilm.yaml --max_length 128 --threads 1".split()


class Set(NamedTuple):
    """Runs of one table: options of all rungs, which rungs, whether the model is MiniLM's package, what makes data."""

    options: list[str]
    rungs: str = ""
    minilm: bool = True
    seeds: int = 1
    prepare: Callable[[], None] = lambda: None


def write_stars() -> None:
    """Write IMDb's reviews in four classes, of 1 or 2, 3 or 4, 7 or 8, 9 or 10 stars, unless it is done.

    The archive's files are named by number and stars: `train/pos/127_8.txt`.
    """
    path = common.ROOT / STARS
    archive = download_dataset()
    if path.exists():
        return
    if archive.is_dir():
        raise UserError(f"the stars are read from {IMDB_ARCHIVE}, and {archive} is unpacked: move it away")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["text", "label"])
    with tarfile.open(archive) as members:
        for member in members:
            if found := re.search(r"/(?:pos|neg)/\d+_(\d+)\.txt$", member.name):
                stars = int(found[1]) + int(found[1]) % 2  # the even one of the two
                rows.writerow([members.extractfile(member).read().decode(), f"{stars - 1} or {stars} stars"])
    write_whole(path, text.getvalue())


IMDB_2000 = [*MINILM, "--log_every", "96"]
SETS = {
    "quickstart": Set([], minilm=False),
    "imdb_2000": Set(IMDB_2000, "1,2,4,5,6,7,13,15,16,17,18", seeds=5),
    "imdb_2000_one_by_one": Set([*IMDB_2000, "--micro_batch_size", "1"], "5,16", seeds=5),
    "imdb_2000_halved": Set([*IMDB_2000, "--train_samples", "1000"], "5,16", seeds=5),
    "imdb_2000_all_linear": Set([*IMDB_2000, "--lora_targets", "all-linear"], "13", seeds=5),
    "imdb_2000_adam_4bit": Set([*IMDB_2000, "--optimizer", "adam-4bit"], "18", seeds=5),
    "imdb": Set(
        [*MINILM, *"--train_samples 35000 --validation_samples 5000 --test_samples 10000 --log_every 1600".split()],
        "1,2,4,15",
    ),
    "stars": Set([*IMDB_2000, "--dataset", STARS], "2,16", prepare=write_stars),
    "cifar10": Set(["--config", "configs/cifar10_vit_small.yaml", "--threads", "1"], "2,4,16", minilm=False),
}


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


def kept(set: str, rung: str) -> dict[float, dict[int, dict]]:
    """Return the records of a rung's kept runs, by learning rate and seed."""
    found: dict[float, dict[int, dict]] = {}
    for path in sorted((RUNS / set / rung).glob("*/*/run.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(record["settings"]["learning_rate"], {})[record["settings"]["seed"]] = record
    return found


def tried(runs: dict[float, dict[int, dict]]) -> dict[float, float]:
    """Return the first seed's last validation loss of each learning rate; infinite where it is no number."""
    last = {rate: seeds[SEED]["results"]["epochs"][-1] for rate, seeds in runs.items() if SEED in seeds}
    losses = {rate: epoch["validation_loss"] for rate, epoch in last.items()}
    return {rate: math.inf if loss is None or math.isnan(loss) else loss for rate, loss in losses.items()}


def best_rate(runs: dict[float, dict[int, dict]]) -> float | None:
    """Return the learning rate that was best on validation with the first seed, None where the search is not done.

    It is done when the best of at least three rates has one below and one above it, or `LIMIT` have been tried.
    """
    found = tried(runs)
    best = min(found, key=found.get, default=None)
    inside = best is not None and min(found) < best < max(found)
    return best if inside or len(found) >= LIMIT else None


def next_rate(runs: dict[float, dict[int, dict]], own: float) -> float | None:
    """Return the learning rate that the search tries next, None when it is done."""
    found = tried(runs)
    for rate in (own, own / STEP, own * STEP):
        if not any(abs(rate / other - 1) < 1e-6 for other in found):
            return rate
    if best_rate(runs) is not None:
        return None
    best = min(found, key=found.get)
    return best / STEP if best == min(found) else best * STEP


def decisive(settings: dict) -> dict:
    """Return the settings that decide a run's figures."""
    return {name: value for name, value in settings.items() if name not in FREE}


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
    record = read_outside(folder / "run.json")
    if record.get("status") != "finished":
        raise UserError(f"{folder}: the run is not finished")
    found, expected = decisive(record["settings"]), json.loads(json.dumps(decisive(settings)))  # tuples as lists
    other = [name for name in found if name in expected and found[name] != expected[name]]
    if other:
        what = ", ".join(f"{name} {found[name]} instead of {expected[name]}" for name in other)
        raise UserError(f"{folder} is no run of {set}: {what}")
    target = RUNS / set / rung / f"{found['learning_rate']:g}" / str(found["seed"])
    target.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        write_whole(target / name, impersonal((folder / name).read_text(encoding="utf-8"), record["settings"]))
    return target


def make(wanted: Wanted) -> None:
    """Run what is wanted, unless it is kept, and keep it.

    Raises:
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
    done = subprocess.run(command, cwd=common.ROOT, check=False)
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
        found = read_outside(folder / "run.json")["settings"]
        (rung,) = choose_rungs([found["name"]])
        settings = asdict(resolved(Wanted(set, rung, found["seed"]))) | {"learning_rate": found["learning_rate"]}
        print(f"kept {shown(keep(folder, set, rung.stem, settings))}", flush=True)


def search(set: str, rung: Path) -> None:
    """Try learning rates with the first seed until the search is done."""
    own = resolved(Wanted(set, rung, SEED)).learning_rate
    while (rate := next_rate(kept(set, rung.stem), own)) is not None:
        make(Wanted(set, rung, SEED, None if rate == own else rate))
    print(f"{set}: {rung.stem}: best learning rate {best_rate(kept(set, rung.stem)):g}")


def main() -> int:
    """Do what the command line says; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "search", "best", "keep"))
    parser.add_argument("set", choices=SETS)
    parser.add_argument("folders", nargs="*", metavar="FOLDER", help="of finished runs, for keep")
    parser.add_argument("--rungs", metavar="1,2,…", help="numbers or names; default: those of the set")
    parser.add_argument("--seeds", type=int, help="so many from 123 on; default: as many as the set has")
    args = parser.parse_args()
    if args.folders and args.what != "keep":
        raise UserError(f"{args.what} takes no folders; keep does")
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
            if args.what == "best" and (rate := best_rate(kept(args.set, rung.stem))) is None:
                raise UserError(f"{rung.stem}: search its learning rate first")
            for seed in range(SEED, SEED + (args.seeds or SETS[args.set].seeds)):
                make(Wanted(args.set, rung, seed, rate))
        except UserError as error:  # the other rungs go on
            print(f"left out: {error}", file=sys.stderr)
            failed += 1
    return int(failed > 0 and bool(args.rungs))


if __name__ == "__main__":
    show_errors()
    try:
        sys.exit(main())
    except CannotMeasureError as reason:
        raise UserError(str(reason)) from None
