"""The IMDb reviews under the four names of the blog's module; the package's own source of IMDb, and the plain scripts'.

`download_dataset`, `load_dataset_into_to_dataframe`, `partition_dataset` and `IMDBDataset` do the same as in the blog.
They need no other file of this project: a script written for the blog runs unchanged with a copy of this file.
"""

import os
import re
import socket
import sys
import tarfile
import zlib
from contextlib import suppress
from pathlib import Path
from urllib.error import URLError

import numpy as np
import pandas as pd
from torch.hub import download_url_to_file
from torch.utils.data import Dataset

try:
    from fabric_ladder.errors import UserError
except ModuleNotFoundError:  # this file is used alone, with a script of the blog

    class UserError(ValueError):
        """An error that the user can fix, with the problem and the remedy in one line."""


IMDB_ARCHIVE = "aclImdb_v1.tar.gz"
IMDB_BYTES = 84_125_825
IMDB_URL = f"https://ai.stanford.edu/~amaas/data/sentiment/{IMDB_ARCHIVE}"
IMDB_SHA256 = "c40f74a18d3b61f90feba1e17730e0d38e8b97c05fde7008942e91923d1658fe"
IMDB_REVIEWS = 50_000


def find_dataset(data_dir: "str | Path | None" = None) -> Path | None:
    """Return the IMDb archive or its unpacked folder `aclImdb`, from `data_dir` or the current folder, or None."""
    for parent in (data_folder(data_dir), Path()):
        for name in ("aclImdb", IMDB_ARCHIVE):
            if (parent / name).exists():
                return parent / name
    return None


def download_dataset(data_dir: "str | Path | None" = None) -> Path:
    """Return the IMDb archive or its unpacked folder, after downloading the archive (84 MB) if neither exists.

    Nothing is unpacked. The reviews are read from the archive in 2 seconds; unpacking writes 50,000 files.

    Raises:
        UserError: The network fails, the checksum is wrong, or the folder cannot be written. No file is left then.
    """
    if found := find_dataset(data_dir):
        return found
    instead = ", or use --dataset synthetic, which needs no network"
    return download_file(IMDB_URL, IMDB_SHA256, data_folder(data_dir), "IMDb", instead)


def download_file(url: str, sha256: str, folder: Path, name: str, instead: str = "") -> Path:
    """Download a file into a folder and return its path; no file is left after an error.

    Args:
        name: What the file is, for the error.
        instead: Another remedy when the network fails.
    """
    archive = folder / url.rpartition("/")[2]
    new = not folder.exists()
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(30)  # seconds
    try:
        folder.mkdir(parents=True, exist_ok=True)
        download_url_to_file(url, str(archive), sha256, progress=sys.stderr.isatty())
    except (URLError, ConnectionError, TimeoutError) as error:
        if new:
            with suppress(OSError):  # another process may have begun to use it
                folder.rmdir()
        raise UserError(
            f"{name} is not in {folder.resolve()} and cannot be downloaded ({type(error).__name__}): save {url} "
            f"as {archive}, or set FABRIC_LADDER_DATA to the folder that holds it{instead}"
        ) from error
    except OSError as error:
        raise UserError(f"cannot write {folder} ({error}): set FABRIC_LADDER_DATA to another folder") from error
    except RuntimeError as error:  # torch.hub found a wrong checksum
        raise UserError(f"the download of {url} has a wrong checksum: try again, or save it as {archive}") from error
    finally:
        socket.setdefaulttimeout(timeout)
    return archive


def load_dataset_into_to_dataframe(data_dir: "str | Path | None" = None) -> pd.DataFrame:
    """Return all 50,000 reviews with the columns `text` and `label` (0 negative, 1 positive), in the blog's order.

    The order is test before train, pos before neg, then by name. Every row has the index 0, as in the blog, which joins
    one frame per review.

    Raises:
        UserError: The archive is damaged, or it does not hold 50,000 labelled reviews.
    """
    source = download_dataset(data_dir)
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
                    if entry.isfile() and (found := member.fullmatch(entry.name)):
                        reviews[found.groups()] = archive.extractfile(entry).read()
                    archive.members.clear()  # otherwise `tarfile` keeps 100 MB of headers
        order = sorted(reviews, key=lambda key: (key[0] != "test", key[1] != "pos", key[2]))
        rows = [(_decode(reviews.pop(key)), int(key[1] == "pos")) for key in order]  # `pop` frees each review's bytes
    except (tarfile.TarError, EOFError, zlib.error, OSError, UnicodeDecodeError) as error:
        raise UserError(f"{source} is damaged ({error}): delete it and download it again") from error
    if len(rows) != IMDB_REVIEWS:
        raise UserError(
            f"{source} holds {len(rows):,} reviews instead of {IMDB_REVIEWS:,}: delete it and download it again"
        )
    return pd.DataFrame(rows, columns=["text", "label"], index=np.zeros(len(rows), int))


def partition_dataset(df: pd.DataFrame) -> None:
    """Write the blog's split into the current folder: train.csv (35,000), val.csv (5,000) and test.csv (10,000)."""
    for name, part in zip(("train", "val", "test"), split_reviews(df), strict=True):
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


def data_folder(data_dir: "str | Path | None" = None) -> Path:
    """Return the folder of downloaded data: this one, or the one in FABRIC_LADDER_DATA, or `data`."""
    return Path(data_dir or os.environ.get("FABRIC_LADDER_DATA") or "data")


def split_reviews(df: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame, pd.DataFrame]:
    """Shuffle and cut 7 : 1 : 2 with the blog's calls: the same pandas version gives the same rows."""
    shuffled = df.sample(frac=1, random_state=1)
    first = len(df) * 7 // 10
    second = len(df) * 8 // 10
    return shuffled.iloc[:first], shuffled.iloc[first:second], shuffled.iloc[second:]


def _decode(review: bytes) -> str:
    """Return a review's text with the line ends that a file opened in text mode has."""
    return review.decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
