"""Where texts come from: IMDb, made up, the Hub, or files; found and told apart before anything is read."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd

from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

FILE_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".tsv": "tsv"}
FILE_FORMATS |= {f"{suffix}.gz": kind for suffix, kind in FILE_FORMATS.items() if kind != "parquet"}
SEPARATORS = {"csv": ",", "tsv": "\t"}
REVIEWS = ("imdb", "synthetic")  # data sets that are negative or positive
ReadImdb = Callable[[str], tuple[pd.DataFrame, list[np.ndarray]]]
# how a file of a folder begins: val.csv, test-00000-of-00002.parquet, but not testimonials.csv
SPLIT_NAMES = {
    "validation": r"(val|valid|validate|validations?|dev|devel|development|devtest)(set|data)?(?![^\W\d_])",
    "test": r"test(s|ing|set|data)?(?![^\W\d_])",
}


class Source(NamedTuple):
    """Where texts come from.

    Attributes:
        key: Tells the source apart in the cache: `imdb`, `synthetic`, `hub` or `files`, and what each is identified by.
        files: Of `files`, those of each split.
        read_imdb: Of `imdb`, returns all reviews and the row numbers of each split, from the `data_dir`.
    """

    key: list
    files: dict[str, list[Path]] | None = None
    read_imdb: ReadImdb | None = None


def find_source(
    settings: DataSettings, find_imdb: Callable[[str], Path] | None = None, read_imdb: ReadImdb | None = None
) -> Source:
    """Find what `dataset` names; of files and IMDb the path, size and time of change go into the key.

    The two functions are needed for `imdb` alone, see `prepare`.
    """
    name = settings.dataset
    path = None if name in REVIEWS else find_path(settings, tuple(FILE_FORMATS))
    if (settings.validation_file or settings.test_file) and (path is None or path.is_dir()):
        raise UserError(f"--validation_file and --test_file go with a --dataset that is a file, not with {name}")
    if settings.column_names and path is None:
        raise UserError(f"--column_names goes with CSV and TSV files without a header, not with {name}")
    if name == "synthetic":
        return Source([name])
    if name == "imdb":
        found = find_imdb(settings.data_dir)
        paths = [found] if found.is_file() else [found, found / "train"]
        return Source([name, *map(file_stamp, paths)], read_imdb=read_imdb)
    if path is None:
        return Source(["hub", name])
    files = _folder_files(path) if path.is_dir() else {"train": [path]}
    for split, file in (("validation", settings.validation_file), ("test", settings.test_file)):
        if file:
            files[split] = [_find_file(file, settings)]
            if files[split] == [None]:
                raise UserError(f"there is no {split} file {file} here or in {settings.data_dir}")
    files = {split: [path.resolve() for path in paths] for split, paths in files.items()}
    return Source(["files", {split: list(map(file_stamp, paths)) for split, paths in files.items()}], files)


def find_path(settings: DataSettings, suffixes: tuple[str, ...]) -> Path | None:
    """Return the file or folder `dataset`; None if it can only be a name on the Hub, which has none of the suffixes."""
    name = settings.dataset
    path = _find_file(name, settings)
    if path is None and (name.lower().endswith(suffixes) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(:[\w.-]+)?", name)):
        raise UserError(f"there is no file or folder {name} here or in {settings.data_dir}")
    return path


def _find_file(name: str, settings: DataSettings) -> Path | None:
    """Return the file or folder of this name, here or in `data_dir`; None if there is none."""
    return next((path for path in (Path(name), Path(settings.data_dir) / name) if path.exists()), None)


def file_format(path: Path) -> str | None:
    """Return how a file is read, by its name; None if it is not."""
    return next((kind for suffix, kind in FILE_FORMATS.items() if path.name.lower().endswith(suffix)), None)


def file_stamp(path: Path) -> tuple[str, int, int]:
    """Return what tells a file apart: its path, size (bytes) and time of change (ns)."""
    try:
        status = path.stat()
    except OSError as error:
        raise UserError(f"cannot read {path} ({error.strerror})") from error
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def _folder_files(folder: Path) -> dict[str, list[Path]]:
    """Sort a folder's files into splits by their names; files that name no split are training texts."""
    found = {}
    try:
        paths = sorted(folder.iterdir())
    except OSError as error:
        raise UserError(f"cannot read {folder} ({error.strerror})") from error
    for path in paths:
        if file_format(path) and not path.name.startswith("."):  # hidden: macOS leaves ._train.csv beside train.csv
            name = path.stem.lower()
            split = next((split for split, start in SPLIT_NAMES.items() if re.match(start, name)), "train")
            found.setdefault(split, []).append(path)
    if "train" not in found:
        raise UserError(
            f"{folder} holds no training file ({', '.join(FILE_FORMATS)}); for images add --task image-classification"
        )
    return found
