"""The IMDb reviews, by the four names of the blog's module of the same name, and the data of every script.

`download_dataset`, `load_dataset_into_to_dataframe`, `partition_dataset` and `IMDBDataset` do what the blog's do, and
need no other file of this project: a script written for the blog runs with this file beside it, unchanged.
"""

import os
import re
import socket
import sys
import tarfile
import zlib
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.error import URLError

import numpy as np
import pandas as pd
from torch.hub import download_url_to_file
from torch.utils.data import Dataset

if TYPE_CHECKING:
    from fabric_ladder.data.splits import ImageDatasets, TextDatasets
    from fabric_ladder.settings import DataSettings

try:
    from fabric_ladder.errors import UserError
except ModuleNotFoundError:  # this file alone, beside a script of the blog

    class UserError(ValueError):
        """Something that the user can fix; the message is one line that says what is wrong and what to do."""


IMDB_ARCHIVE = "aclImdb_v1.tar.gz"
IMDB_URL = f"https://ai.stanford.edu/~amaas/data/sentiment/{IMDB_ARCHIVE}"
IMDB_SHA256 = "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"
IMDB_REVIEWS = 50_000


def download_dataset(data_dir: "str | Path | None" = None) -> Path:
    """Return the IMDb archive or its unpacked folder `aclImdb`, and download the archive (84 MB) if neither is there.

    Both are looked for in `data_dir` and in the current folder. Nothing is unpacked: the reviews are read straight
    from the archive, which takes 2 seconds instead of writing 50,000 files.

    Raises:
        UserError: No network, a wrong checksum, or a folder that cannot be written. No file is left then.
    """
    folder = Path(data_dir or os.environ.get("FABRIC_LADDER_DATA") or "data")
    for parent in (folder, Path()):
        for name in ("aclImdb", IMDB_ARCHIVE):
            if (parent / name).exists():
                return parent / name
    archive = folder / IMDB_ARCHIVE
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)  # seconds without an answer
    try:
        folder.mkdir(parents=True, exist_ok=True)
        download_url_to_file(IMDB_URL, str(archive), IMDB_SHA256, progress=sys.stderr.isatty())
    except (URLError, ConnectionError, TimeoutError) as error:
        if not any(folder.iterdir()):
            folder.rmdir()
        raise UserError(
            f"IMDb is neither in {folder.resolve()} nor can it be downloaded ({type(error).__name__}): save {IMDB_URL} "
            f"as {archive}, or set FABRIC_LADDER_DATA to a folder that holds it, or try --dataset synthetic, which "
            "needs no network"
        ) from error
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error}): choose another --data_dir") from error
    except RuntimeError as error:  # of the checksum
        raise UserError(
            f"the download of {IMDB_URL} has a wrong checksum: try again, or save it as {archive}"
        ) from error
    finally:
        socket.setdefaulttimeout(timeout)
    return archive


def load_dataset_into_to_dataframe(data_dir: "str | Path | None" = None) -> pd.DataFrame:
    """Return all 50,000 reviews with the columns `text` and `label` (0 negative, 1 positive), in the blog's order.

    As in the blog, where each review was a frame of its own, every row has the index 0.

    Raises:
        UserError: The archive is damaged or hostile, or it does not hold 50,000 labelled reviews.
    """
    return _read_imdb(download_dataset(data_dir), IMDB_REVIEWS)


def partition_dataset(df: pd.DataFrame) -> None:
    """Write the blog's split into the current folder: train.csv (35,000), val.csv (5,000) and test.csv (the rest)."""
    for name, part in zip(("train", "val", "test"), _split(df), strict=True):
        temporary = Path(f".{name}.csv.{os.getpid()}")
        part.reset_index().to_csv(temporary, index=False, encoding="utf-8")
        temporary.replace(f"{name}.csv")


class IMDBDataset(Dataset):
    """One split of a dictionary of `datasets` splits, as a PyTorch data set."""

    def __init__(self, dataset_dict, partition_key="train"):
        self.partition = dataset_dict[partition_key]

    def __getitem__(self, index):
        return self.partition[index]

    def __len__(self):
        return self.partition.num_rows


def load_datasets(settings: "DataSettings") -> "TextDatasets | ImageDatasets":
    """Return what the settings name, split, and tokenized or decoded: see `fabric_ladder.data.prepare`."""
    from fabric_ladder.data import prepare

    return prepare(settings, download_dataset, read_split)


def read_split(data_dir: str) -> tuple[pd.DataFrame, list[np.ndarray]]:
    """Return all reviews, and the row numbers of each part of the blog's split."""
    reviews = load_dataset_into_to_dataframe(data_dir)
    return reviews, [part.index.to_numpy() for part in _split(reviews[["label"]].reset_index(drop=True))]


def _split(df: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Shuffle and cut as the blog does, 7 : 1 : 2, so that the same pandas version gives the same rows."""
    shuffled = df.sample(frac=1, random_state=1)
    first, second = len(df) * 7 // 10, len(df) * 8 // 10
    return shuffled.iloc[:first], shuffled.iloc[first:second], shuffled.iloc[second:]


def _read_imdb(source: Path, expected: int) -> pd.DataFrame:
    """Read an archive or an unpacked folder; the rows stand as in the blog: test before train, pos before neg."""
    member = re.compile(r"(?:\./)?aclImdb/(train|test)/(pos|neg)/([^/]+\.txt)")
    reviews = {}
    try:
        if source.is_dir():
            for path in source.glob("*/*/*.txt"):
                if found := member.fullmatch(f"aclImdb/{path.relative_to(source).as_posix()}"):
                    reviews[found.groups()] = path.read_bytes()
        else:
            with tarfile.open(source, "r|gz") as archive:
                for entry in archive:
                    if entry.name.startswith("/") or ".." in PurePosixPath(entry.name).parts:
                        raise UserError(f"{source} is not to be trusted: it holds {entry.name!r}")
                    if entry.isfile() and (found := member.fullmatch(entry.name)):
                        reviews[found.groups()] = archive.extractfile(entry).read()
                    archive.members.clear()  # `tarfile` would keep 100 MB of what it has passed
        order = sorted(reviews, key=lambda key: (key[0] != "test", key[1] != "pos", key[2]))
        rows = [(_decode(reviews.pop(key)), int(key[1] == "pos")) for key in order]  # never both in memory
    except (tarfile.TarError, EOFError, zlib.error, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source} is damaged ({error}): delete it and get it again") from error
    if len(rows) != expected:
        raise UserError(f"{source} holds {len(rows):,} reviews instead of {expected:,}: delete it and get it again")
    return pd.DataFrame(rows, columns=["text", "label"], index=np.zeros(len(rows), int))


def _decode(review: bytes) -> str:
    """Return a review's text, its line ends as from a file opened for reading."""
    return review.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
