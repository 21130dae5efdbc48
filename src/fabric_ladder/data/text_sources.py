"""Find the source of the texts: IMDb, synthetic reviews, the Hub, or files. Nothing is read here."""

import glob
import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from fabric_ladder.data.reviews import REVIEWS, review_key
from fabric_ladder.errors import UserError, refused
from fabric_ladder.options import check_files, find_data, find_file
from fabric_ladder.settings import DataSettings

FILE_FORMATS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet", ".tsv": "tsv"}
FILE_FORMATS |= {f"{suffix}.gz": kind for suffix, kind in FILE_FORMATS.items() if kind != "parquet"}
FILE_FORMATS[".arrow"] = "arrow"  # written by `save_to_disk` of `datasets`
SAVED = ("dataset_dict.json", "state.json")  # only folders of `save_to_disk` have these files
FACTS = ("config.json", "dataset_info.json", "dataset_infos.json")  # describe a data set
SEPARATORS = {"csv": ",", "tsv": "\t"}
# words of a path that name a split, between characters that are not letters: reviews_test.csv, but not testimonials.csv
SPLIT_WORDS = {
    "train": "train(ing)?(set|data)?",
    "validation": "(val|valid|validate|validations?|dev|devel|development|devtest)(set|data)?",
    "test": "tests|test(ing)?(set|data)?",
    "eval": "eval(uation)?(set|data)?",
}
IN_EXCEL = "in Excel click File > Save As > CSV UTF-8"
GZIP = b"\x1f\x8b"
ZIP = b"PK\x03\x04"
CONTENTS = {  # how files begin whose names are often wrong
    b"version https://git-lfs": "a pointer of Git LFS, not the data: run git lfs pull in its folder",
    ZIP: f"an XLSX or ZIP file: {IN_EXCEL}, or unpack it",
    b"\xd0\xcf\x11\xe0": f"an XLS file: {IN_EXCEL}",
    b"PAR1": "a Parquet file: rename it to .parquet",
    b"BZh": "compressed by bzip2: unpack it",
    b"\xfd7zXZ": "compressed by xz: unpack it",
    b"\x28\xb5\x2f\xfd": "compressed by zstd: unpack it",
    b"<!doctype html": "an HTML page, not the data: download it again",
    b"\xff\xfe": f"text in UTF-16: save it as UTF-8 ({IN_EXCEL})",
    b"<html": "an HTML page, not the data: download it again",
}


class Source(NamedTuple):
    """The source of the texts.

    Attributes:
        key: Identifies the source in the cache: `imdb`, `synthetic`, `hub` or `files`, followed by details. `prepare`
            adds the commit of a name on the Hub, which needs the network.
        files: The files of each split, if the source is files.
        notices: Lines about files whose names are not those of splits.
    """

    key: list
    files: dict[str, list[Path]] | None = None
    notices: tuple[str, ...] = ()


def find_source(settings: DataSettings) -> Source:
    """Find the data set in the settings; the key of files has their paths, sizes and times of change.

    Raises:
        UserError: The file or folder does not exist, or an option does not fit this kind of data set.
    """
    name = settings.dataset
    path = None if name in REVIEWS else find_data(name, settings.data_dir)
    if (settings.validation_file or settings.test_file) and (path is None or path.is_dir()):
        raise UserError(f"--validation_file and --test_file need a --dataset that is a file, not {name}")
    if settings.column_names and path is None:
        raise UserError(f"--column_names is for CSV and TSV files without a header, not for {name}")
    columns = settings.text_column, settings.label_column
    chosen = columns != (DataSettings.text_column, DataSettings.label_column)
    if name in REVIEWS and chosen:
        raise UserError(f"--text_column and --label_column are for tables, not for {name}; set --dataset")
    if settings.task == "instruction-tuning" and chosen:
        raise UserError(
            "--text_column and --label_column are not for instructions, whose columns are known by their names, such "
            "as instruction, input and output: leave them out"
        )
    if name in REVIEWS:
        return Source(review_key(settings))
    if path is None:
        return Source(["hub", name])
    files, notices = _folder_files(path) if path.is_dir() else ({"train": [path]}, ())
    check_files(vars(settings))
    for split, file in (("validation", settings.validation_file), ("test", settings.test_file)):
        if file:
            files[split] = [find_file(file, settings.data_dir)]
    for given in files.values():
        for each in given:
            read_format(each)
    files = {split: [path.resolve() for path in paths] for split, paths in files.items()}
    stamps = {split: list(map(file_stamp, paths)) for split, paths in files.items()}
    return Source(["files", stamps], files, notices=notices)


def file_format(path: Path) -> str | None:
    """Return the format of a file by its name, or None if this format cannot be read."""
    return next((kind for suffix, kind in FILE_FORMATS.items() if path.name.lower().endswith(suffix)), None)


def read_format(path: Path) -> str:
    """Return the format of a file by its name.

    Raises:
        UserError: This format cannot be read.
    """
    kind = file_format(path)
    if path.suffix.lower() in (".xls", ".xlsx"):
        raise UserError(f"{path} is a workbook, not a table as text: {IN_EXCEL}")
    if kind is None:
        raise UserError(f"{path}: files of this kind cannot be read, only {', '.join(FILE_FORMATS)}")
    return kind


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file."""
    with refused(f"cannot read {path}"), path.open("rb") as file:
        return file.read(40)


def content_problem(head: bytes, kind: str = "") -> str | None:
    """Return what a file with these first bytes is and what to do, if it is not of the kind that its name says."""
    found = (text for start, text in CONTENTS.items() if head.lstrip().lower().startswith(start.lower()))
    return None if kind == "parquet" and head.startswith(b"PAR1") else next(found, None)


def file_stamp(path: Path) -> tuple[str, int, int]:
    """Return the path of a file, its size (bytes) and its time of change (ns), which identify its content."""
    with refused(f"cannot read {path}"):
        status = path.stat()
    return str(path.resolve()), status.st_size, status.st_mtime_ns


def find_splits(names: Iterable[str]) -> dict[str, str | None]:
    """Return the split that each relative path names by a word in it, or None.

    `eval` is the validation split; next to a validation split without a test split, it is the test split.

    Raises:
        UserError: A path names several splits.
    """
    found = {}
    for name in names:
        words = [s for s, word in SPLIT_WORDS.items() if re.search(rf"(?<![^\W\d_])({word})(?![^\W\d_])", name.lower())]
        if len(words) > 1:
            raise UserError(f"the name {name} holds the words of several splits ({', '.join(words)}): rename it")
        found[name] = words[0] if words else None
    has_test = "validation" not in found.values() or "test" in found.values()
    return {name: ("validation" if has_test else "test") if found[name] == "eval" else found[name] for name in found}


def _folder_files(folder: Path) -> tuple[dict[str, list[Path]], tuple[str, ...]]:
    """Sort a folder's files into splits by the words in their paths, and return notices about files without such words.

    These files are training texts if no file is named as one. In subfolders, they are read only if there are no others.
    """
    saved = any((folder / name).exists() for name in SAVED)
    names = sorted(glob.iglob("**/*", root_dir=folder, recursive=True))  # leaves out hidden files, such as ._train.csv
    names = [name for name in names if file_format(Path(name)) and name.endswith(".arrow") == saved]
    names = [name for name in names if not (saved and "cache-" in name) and Path(name).name not in FACTS]
    found = {}
    for name, split in find_splits(names).items():
        found.setdefault(split, []).append(name)
    others = found.pop(None, [])
    notices = []
    if others and "train" not in found:
        found["train"] = [name for name in others if "/" not in name] or others
        others = [name for name in others if name not in found["train"]]
        if len(found) > 1:
            notices.append(f"{folder}: {_some(found['train'])} names no split: used as training data")
    if others:
        notices.append(f"{folder}: {_some(others)} names no split, and is not read: rename it, e.g. train_2.csv")
    if "train" not in found:
        raise UserError(
            f"{folder} holds no training file ({', '.join(FILE_FORMATS)}); for images add --task image-classification"
        )
    return {split: [folder / name for name in paths] for split, paths in found.items()}, tuple(notices)


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5:,} more" if len(names) > 5 else "")
