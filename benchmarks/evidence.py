"""Make the runs behind the tables of docs/results.md, and store them under benchmarks/results/runs/.

    python benchmarks/evidence.py run imdb_2000 [--rungs 2,4] [--seeds 5]    make the runs that are missing
    python benchmarks/evidence.py search imdb_2000 [--rungs 2,4]             find each rung's best learning rate
    python benchmarks/evidence.py best imdb_2000 [--rungs 2,4] [--seeds 5]   run each rung at that rate

An interrupted command continues when it is run again, even in the middle of a run. Then evidence_tables.py writes the
tables. run.json, log.txt and metrics.csv of a run are stored as SET/RUNG/LEARNING RATE/SEED. Names
replace this machine's folders.

The search is the same for every rung. It runs the first seed at the rung's own learning rate, a quarter of it and four
times it. While the best rate is the lowest or the highest, it tries one more beyond. The best rate has the lowest
validation loss, because accuracies near chance are noise. The test split decides nothing.
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
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

import common  # first import: it makes the project importable
from against_blog import MINILM, model_options
from common import CannotMeasureError

from fabric_ladder.comparing.matching import WITHOUT_EFFECT
from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.rungs import RUNGS, check_rung, choose_rungs
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.advice import show_errors
from local_dataset_utilities import IMDB_ARCHIVE, download_dataset

STARS = "runs/evidence/stars.csv"
RUNS = common.RESULTS / "runs"
WORK = common.ROOT / "runs" / "evidence"  # runs in progress
SEED, STEP, LIMIT = 123, 4, 6  # first seed, ratio of learning rates, most rates of a search
FILES = ("metrics.csv", "log.txt", "run.json")  # run.json is written last: a run with it is complete
DIVERGED = "diverged.txt"  # replaces them if the loss was not finite
# settings that change no figure, or name folders of a machine
NEUTRAL = {*WITHOUT_EFFECT, *"log_every data_dir cache_dir tokenizer config name".split()}


class Set(NamedTuple):
    """The runs of one table: shared options, rungs, whether they use MiniLM, seeds, and a function that makes data."""

    options: list[str]
    rungs: str = ""
    minilm: bool = True
    seeds: int = 1
    prepare: Callable[[], None] = lambda: None


def write_stars() -> None:
    """Write IMDb's reviews in four classes: 1 or 2, 3 or 4, 7 or 8, 9 or 10 stars, unless the file exists.

    File names in the archive contain number and stars: `train/pos/127_8.txt`.
    """
    path = common.ROOT / STARS
    archive = download_dataset()
    if path.exists():
        return
    if archive.is_dir():
        raise UserError(f"the stars are read from {IMDB_ARCHIVE}, but {archive} is an unpacked folder: move it away")
    path.parent.mkdir(parents=True, exist_ok=True)
    text = io.StringIO(newline="")
    rows = csv.writer(text)
    rows.writerow(["text", "label"])
    with tarfile.open(archive) as members:
        for member in members:
            if found := re.search(r"/(?:pos|neg)/\d+_(\d+)\.txt$", member.name):
                stars = int(found[1]) + int(found[1]) % 2  # two stars are one class
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


class DivergedError(UserError):
    """A run stopped at a loss that is not finite."""


class Wanted(NamedTuple):
    """A run of a set; `rate` is its learning rate, or None for the rung's own."""

    set: str
    rung: Path
    seed: int
    rate: float | None = None

    @property
    def options(self) -> list[str]:
        """The options of its command line."""
        chosen = SETS[self.set]
        model = model_options("minilm", WORK)[:2] if chosen.minilm else []
        rate = [] if self.rate is None else ["--learning_rate", f"{self.rate:g}"]
        return [*chosen.options, *model, "--seed", str(self.seed), *rate]


def folder_of(set: str, rung: str, rate: float, seed: int) -> Path:
    """Return the folder of a stored run."""
    return RUNS / set / rung / f"{rate:g}" / str(seed)


def kept(set: str, rung: str) -> dict[float, dict[int, dict]]:
    """Return the records of a rung's stored runs by learning rate and seed."""
    found: dict[float, dict[int, dict]] = {}
    for path in sorted((RUNS / set / rung).glob("*/*/run.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(record["settings"]["learning_rate"], {})[record["settings"]["seed"]] = record
    return found


def tried(set: str, rung: str) -> dict[float, float]:
    """Return the first seed's last validation loss at each learning rate; infinity if the run diverged."""
    runs = {rate: seeds[SEED] for rate, seeds in kept(set, rung).items() if SEED in seeds}
    losses = {rate: record["results"]["epochs"][-1]["validation_loss"] for rate, record in runs.items()}
    lost = [float(path.parents[1].name) for path in (RUNS / set / rung).glob(f"*/{SEED}/{DIVERGED}")]
    return losses | dict.fromkeys(lost, math.inf)


def best_rate(found: dict[float, float]) -> float | None:
    """Return the learning rate with the lowest loss, or None if the search is not done.

    The search is done when rates on both sides of the best one were tried, or after `LIMIT` rates.
    """
    best = min(found, key=found.get, default=None)
    inside = best is not None and min(found) < best < max(found)
    return best if inside or len(found) >= LIMIT else None


def next_rate(found: dict[float, float], own: float) -> float | None:
    """Return the next learning rate of the search, or None when it is done."""
    for rate in (own, own / STEP, own * STEP):
        if not any(abs(rate / other - 1) < 1e-5 for other in found):  # folder names round the rates
            return rate
    if best_rate(found) is not None:
        return None
    best = min(found, key=found.get)
    return best / STEP if best == min(found) else best * STEP


def decisive(settings: dict) -> dict:
    """Return the settings that can change a run's figures."""
    found = {name: value for name, value in settings.items() if name not in NEUTRAL}
    return found | {"model": Path(settings["model"]).name}


def resolved(wanted: Wanted) -> Settings:
    """Return the settings of a run as its rung resolves them here.

    Raises:
        UserError: It cannot run here.
    """
    with redirect_stdout(io.StringIO()):  # the check prints "can run here"
        settings = check_rung(wanted.rung, wanted.options)
    if isinstance(settings, str):
        raise UserError(f"{wanted.rung.stem}: {settings}")
    return settings


def impersonal(text: str, settings: dict) -> str:
    """Replace the folders of this machine in a run's file by names."""
    folders = {settings["data_dir"]: "$FABRIC_LADDER_DATA", settings["cache_dir"]: "$CACHE"}
    if Path(settings["model"]).is_dir():
        folders[settings["model"]] = "$MINILM"
    for folder, name in sorted(folders.items(), key=lambda item: -len(item[0])):
        text = text.replace(str(Path(folder).absolute()), name)
    text = re.sub(r"\S*/(src/\d+_)", r"\1", text)
    return common.impersonal(text).replace(str(Path.home()), "~")


def keep(folder: Path, set: str, rung: str, settings: dict) -> Path:
    """Store a finished run's files in its set; return the folder.

    Raises:
        UserError: The run is not finished, or has other settings.
    """
    record = read_outside(folder / "run.json")
    if record.get("status") != "finished":
        raise UserError(f"{folder}: the run is not finished")
    texts = {name: read_outside(folder / name, str, "text") for name in FILES}
    found, expected = decisive(record["settings"]), json.loads(json.dumps(decisive(settings)))  # tuples as lists
    other = [name for name in found if name in expected and found[name] != expected[name]]
    if other:
        what = ", ".join(f"{name} {found[name]} instead of {expected[name]}" for name in other)
        raise UserError(f"{folder} has other settings than {set}: {what}")
    target = folder_of(set, rung, found["learning_rate"], found["seed"])
    target.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(target / name, impersonal(text, record["settings"]))
    return target


def make(wanted: Wanted) -> None:
    """Make and store a run, unless it is stored.

    Raises:
        DivergedError: The loss was not finite. This is stored, too.
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
    if "try a lower --learning_rate" in done.stderr:
        target = folder_of(wanted.set, wanted.rung.stem, settings.learning_rate, wanted.seed)
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
    """Return the named rungs, or those of the set."""
    names = named or SETS[set].rungs
    return choose_rungs(names.split(",")) if names else RUNGS


def search(set: str, rung: Path) -> None:
    """Try learning rates with the first seed until the search is done."""
    own = resolved(Wanted(set, rung, SEED)).learning_rate
    while (rate := next_rate(tried(set, rung.stem), own)) is not None:
        with suppress(DivergedError):  # the search goes on
            make(Wanted(set, rung, SEED, None if rate == own else rate))
    print(f"{set}: {rung.stem}: best learning rate {best_rate(tried(set, rung.stem)):g}")


def main() -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("run", "search", "best"))
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--rungs", metavar="1,2,…", help="numbers or names; default: those of the set")
    parser.add_argument("--seeds", type=int, help="how many from 123 on; default: as many as the set has")
    args = parser.parse_args()
    if args.what == "search" and args.seeds is not None:
        raise UserError("search takes no --seeds: it uses the first one")
    if args.seeds is not None and args.seeds < 1:
        raise UserError(f"--seeds {args.seeds}: must be at least 1")
    common.check_storable(RUNS)
    SETS[args.set].prepare()
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
        except UserError as error:  # the other rungs continue
            print(f"left out: {error}", file=sys.stderr)
            failed += 1
    return int(failed > 0 and bool(args.rungs or SETS[args.set].rungs))  # some rungs cannot run on every machine


if __name__ == "__main__":
    show_errors()
    try:
        sys.exit(main())
    except CannotMeasureError as reason:
        raise UserError(str(reason)) from None
