"""The sets of runs behind the tables of docs/results.md: options, rungs, seeds, and data that is made first."""

import csv
import io
import re
import tarfile
from collections.abc import Callable
from typing import NamedTuple

import common  # first of all: it makes the project importable without an installation

from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError
from local_dataset_utilities import IMDB_ARCHIVE, download_dataset

MINILM = "--config configs/imdb_minilm.yaml --max_length 128 --threads 1".split()
STARS = "runs/evidence/stars.csv"


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
