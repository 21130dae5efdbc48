"""Make the runs behind the tables of docs/results.md, and store them under benchmarks/results/runs/.

    python benchmarks/evidence.py run imdb_2000 [--rungs 2,4] [--seeds 5]    make the runs that are missing
    python benchmarks/evidence.py search imdb_2000 [--rungs 2,4]             find each rung's best learning rate
    python benchmarks/evidence.py best imdb_2000 [--rungs 2,4] [--seeds 5]   run each rung at that rate

An interrupted command continues when it is run again, even in the middle of a run. `--together 8` makes eight runs at
once; their speeds mean nothing then. The log of a run in progress is under runs/evidence/. run.json, log.txt and
metrics.csv of a finished one are stored as SET/RUNG/LEARNING RATE/SEED; names replace this machine's folders. Then
evidence_tables.py writes the tables.

The search is the same for every rung. It runs the first seed at the rung's own learning rate, a quarter of it and four
times it. While the best rate is the lowest or the highest, it tries one more beyond. The best rate has the lowest
validation loss, because accuracies near chance are noise. The test split decides nothing.
"""

import io
import json
import math
import re
import shutil
import sys
import tarfile
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import common  # first import: it makes the project importable
import pandas as pd
from common import MINILM, model_options
from filelock import FileLock
from forking import run_together, start_forks

from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError
from fabric_ladder.rungs import RUNGS, check_rung, choose_rungs
from fabric_ladder.settings import DataSettings
from fabric_ladder.techniques.advice import explain_errors
from local_dataset_utilities import IMDB_ARCHIVE

RUNS = common.RESULTS / "runs"
WORK = common.ROOT / "runs" / "evidence"  # runs in progress
SEED, STEP, LIMIT = 123, 4, 6  # first seed, ratio of learning rates, most rates of a search
FILES = ("metrics.csv", "log.txt", "run.json")  # run.json is written last: a run with it is complete
DIVERGED = "diverged.txt"  # replaces them if the loss was not finite


class Set(NamedTuple):
    """The runs of one table: shared options, rungs, whether they use MiniLM, and seeds."""

    options: list[str]
    rungs: str = ""
    minilm: bool = True
    seeds: int = 1


IMDB_2000 = [*MINILM, "--log_every", "96"]
ATTENTION = ("--lora_targets", "attention")
RATINGS = ("--dataset", "runs/evidence/ratings.csv", "--label_column", "rating")
WHOLE = "--train_samples 35000 --validation_samples 5000 --test_samples 10000 --log_every 1600".split()
SETS = {
    "quickstart": Set([], minilm=False),
    "imdb_2000": Set(IMDB_2000, "1,2,4,5,6,13,14,15,16,17,18,22,25,26", seeds=5),
    "imdb_2000_cpu": Set(IMDB_2000, "6,16,17,18,25,26", seeds=5),  # another device
    "imdb_2000_8_bit_error": Set([*IMDB_2000, "--kahan_summation", "8-bit"], "16", seeds=5),
    "imdb_2000_halved": Set([*IMDB_2000, "--train_samples", "1000"], "5,16", seeds=5),
    "imdb_2000_attention": Set([*IMDB_2000, *ATTENTION], "13,14", seeds=5),
    "imdb_2000_attention_cpu": Set([*IMDB_2000, *ATTENTION], "13,14", seeds=5),
    "imdb_2000_adam_4bit": Set([*IMDB_2000, "--optimizer", "adam-4bit"], "18", seeds=5),
    "imdb_2000_32_bit": Set([*IMDB_2000, "--precision", "32-true"], "6,25,26", seeds=5),
    "imdb": Set([*MINILM, *WHOLE], "1,2,4,15,16"),
    "imdb_256": Set([*MINILM, *WHOLE, "--max_length", "256"], "2,4,15,16"),
    "cifar10": Set(["--config", "configs/cifar10_vit_small.yaml"], "2,13", minilm=False, seeds=3),
    "ratings": Set([*IMDB_2000, *RATINGS, "--max_length", "64"], "2,13", seeds=5),
}
CLASSES = {"1": "1", "2": "2-4", "3": "2-4", "4": "2-4", "7": "7-8", "8": "7-8", "9": "9", "10": "10"}  # of `ratings`


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


def write_ratings() -> None:
    """Write the table of `ratings` once: IMDb's reviews with the stars that their writers gave, in five classes."""
    if (WORK / "ratings.csv").exists():
        return
    if not common.has_imdb():
        raise UserError("ratings: the archive of IMDb is not in FABRIC_LADDER_DATA")
    rows = []
    with tarfile.open(Path(DataSettings().data_dir) / IMDB_ARCHIVE) as archive:
        for member in archive:
            if found := re.search(r"/(?:neg|pos)/\d+_(\d+)\.txt$", member.name):
                rows.append((archive.extractfile(member).read().decode(), CLASSES[found[1]]))
    write_whole(WORK / "ratings.csv", pd.DataFrame(rows, columns=["text", "rating"]).to_csv(index=False))


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
    """Return the rate with the lowest loss, or None until rates on both sides of it, or `LIMIT` rates, were tried."""
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


def own_rate(set: str, rung: Path) -> float:
    """Return a rung's own learning rate in a set; refuse a rung that cannot run here."""
    with redirect_stdout(io.StringIO()):  # the check prints "can run here"
        settings = check_rung(rung, Wanted(set, rung, SEED).options)
    if isinstance(settings, str):
        raise UserError(f"{rung.stem}: {settings}")
    return settings.learning_rate


def device(hardware: dict) -> str:
    """Return the device in a record's hardware: the GPU's name, or CPU."""
    return hardware.get("gpu", "CPU").removeprefix("NVIDIA ")


def impersonal(text: str, settings: dict) -> str:
    """Replace the folders of this machine in a run's file by names."""
    folders = {settings["data_dir"]: "$FABRIC_LADDER_DATA", settings["cache_dir"]: "$CACHE"}
    if Path(settings["model"]).is_dir():
        folders[settings["model"]] = "$MINILM"
    for folder, name in sorted(folders.items(), key=lambda item: -len(item[0])):
        text = text.replace(str(Path(folder).absolute()), name)
    text = re.sub(r"\S*/(src/\d+_)", r"\1", text)
    return common.impersonal(text).replace(str(Path.home()), "~")


def keep(folder: Path, target: Path) -> None:
    """Store a finished run's files in another folder, without the folders of this machine."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    common.check_commit(record["resumed"][-1] if "resumed" in record else record, f"; remove {folder}")
    settings = record["settings"]
    texts = {name: impersonal((folder / name).read_text(encoding="utf-8"), settings) for name in FILES}
    target.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_whole(target / name, text)


def make(wanted: Wanted, own: float) -> None:
    """Make and store a run, unless it is stored; `own` is the rung's own learning rate.

    A loss that is not finite raises DivergedError, and is stored, too. A run that fails otherwise raises a UserError.
    """
    rate = own if wanted.rate is None else wanted.rate
    name = f"{wanted.set}: {wanted.rung.stem}, learning rate {rate:g}, seed {wanted.seed}"
    home = WORK / wanted.set / wanted.rung.stem / f"{rate:g}-{wanted.seed}"
    home.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{home}.lock"):  # another command may make the same run
        if wanted.seed in kept(wanted.set, wanted.rung.stem).get(rate, {}):
            return
        print(name, flush=True)
        train(wanted, home, name, RUNS / wanted.set / wanted.rung.stem / f"{rate:g}" / str(wanted.seed))


def train(wanted: Wanted, home: Path, name: str, target: Path) -> None:
    """Make a run in the folder `home` and store it in `target`; raises the errors of `make`."""
    resumable = ["--save_every", "500", "--keep", "1", "--resume", "auto"]
    command = [str(wanted.rung), *wanted.options, "--runs_dir", str(home), *resumable]
    try:
        common.run_child(command)
    except common.ChildError as error:
        reason = next((line for line in error.stderr.splitlines() if "try a lower --learning_rate" in line), "")
        if not reason:
            print(error.stderr, end="", file=sys.stderr, flush=True)
            raise UserError(f"{name}: {error}") from error
        target.mkdir(parents=True, exist_ok=True)
        write_whole(target / DIVERGED, reason + "\n")
        raise DivergedError(f"{name}: {error}") from error
    made = max((home / wanted.rung.stem).glob("*/run.json"), key=lambda path: path.stat().st_mtime)
    keep(made.parent, target)
    print(f"kept {target.relative_to(RUNS)}", flush=True)
    shutil.rmtree(home)


def search(set: str, rung: Path, own: float) -> None:
    """Try learning rates with the first seed until the search is done."""
    while (rate := next_rate(tried(set, rung.stem), own)) is not None:
        with suppress(DivergedError):  # the search goes on
            make(Wanted(set, rung, SEED, None if rate == own else rate), own)
    print(f"{set}: {rung.stem}: best learning rate {best_rate(tried(set, rung.stem)):g}")


def found_rate(set: str, rung: str) -> float | None:
    """Return the learning rate of a finished search, or None. imdb_2000_cpu takes that of imdb_2000."""
    return best_rate(tried(set.removesuffix("_cpu"), rung))


def tasks(what: str, set: str, rung: Path, seeds: int) -> list[Callable[[], None]]:
    """Return what a command has to do for a rung, as tasks that can run at the same time."""
    own = own_rate(set, rung)
    if what == "search":
        return [partial(search, set, rung, own)]
    rate = found_rate(set, rung.stem) if what == "best" else own
    if rate is None:
        raise UserError(f"{rung.stem}: search its learning rate first")
    wanted = [Wanted(set, rung, seed, None if rate == own else rate) for seed in range(SEED, SEED + seeds)]
    return [partial(make, each, own) for each in wanted]


def main() -> int:
    """Run the command line; return the exit status."""
    parser = common.new_parser(__doc__)
    parser.add_argument("what", choices=("run", "search", "best"))
    parser.add_argument("set", choices=SETS)
    parser.add_argument("--rungs", metavar="1,2,…", help="numbers or names; default: those of the set")
    parser.add_argument("--seeds", type=int, help="how many from 123 on; default: as many as the set has")
    parser.add_argument("--together", type=int, default=1, help="runs or searches at the same time (default: 1)")
    args = parser.parse_args()
    if args.together < 1:
        parser.error(f"--together {args.together}: must be positive")
    if args.seeds and args.what == "search":
        parser.error("--seeds has no effect on search, which tries the first seed")
    common.check_storable(RUNS)
    start_forks()
    named = args.rungs or SETS[args.set].rungs
    rungs = choose_rungs(named.split(",")) if named else RUNGS
    seeds = args.seeds or SETS[args.set].seeds
    found, failures = [], []
    WORK.mkdir(parents=True, exist_ok=True)
    if args.set == "ratings":
        write_ratings()

    def attempt(task: Callable[[], None]) -> None:
        try:
            task()
        except UserError as error:  # the others continue
            print(f"left out: {error}", file=sys.stderr)
            failures.append(error)

    for rung in rungs:
        attempt(lambda rung=rung: found.extend(tasks(args.what, args.set, rung, seeds)))
    run_together(attempt, found, args.together)
    return int(bool(failures) and bool(named))  # some rungs cannot run on every machine


if __name__ == "__main__":
    explain_errors()
    sys.exit(main())
