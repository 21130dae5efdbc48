"""Find image files in folders, archives and on the Hub, and sort them into splits and classes, without decoding them.

`datasets`' image-folder builder is not used. It takes splits from the names of files too: with one image called
`test.png`, it drops all the others. It also ignores formats such as HEIC.
"""

import glob
import hashlib
import re
import tarfile
import zipfile
from collections import Counter
from contextlib import suppress
from pathlib import Path

import datasets as hf
import numpy as np
import pandas as pd

from fabric_ladder.data.hub import find_commit, load_hub
from fabric_ladder.data.reviews import REVIEWS
from fabric_ladder.data.rows import list_columns, table_rows, write_checked
from fabric_ladder.data.tables import check_column, join_parts, label_reader, number_labels
from fabric_ladder.data.text_sources import (
    SEPARATORS,
    content_problem,
    file_format,
    file_stamp,
    find_splits,
    read_head,
)
from fabric_ladder.errors import UserError, refused
from fabric_ladder.options import find_data
from fabric_ladder.settings import DataSettings

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
IMAGES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".avif")
NAME_COLUMNS = ("file_name", "filename", "image", "image_id", "path", "id")  # of images, in tables of their labels
IMAGES += (".jp2", ".heic")  # HEIC cannot be decoded: this is reported, while files of other kinds are ignored


def find_images(settings: DataSettings) -> tuple[Path | None, list]:
    """Return the folder or archive `dataset` (None: a name on the Hub), and its key in the cache.

    The key has the paths, sizes and times of change of the files, or the commit on the Hub.
    """
    name = settings.dataset
    if name in REVIEWS:
        raise UserError(
            f"--dataset {name} holds texts: --task image-classification needs a folder with a folder for each class, "
            f"an archive ({', '.join(ARCHIVES)}) of one, or a name on the Hub"
        )
    defaults = DataSettings()
    for option in ("text_column", "column_names", "tokenizer"):
        if getattr(settings, option) != getattr(defaults, option):
            raise UserError(f"--{option} is for texts, not for images: leave it out")
    if settings.validation_file or settings.test_file:
        raise UserError(
            "--validation_file and --test_file are for texts: put images into the folders train, validation and test "
            "of --dataset"
        )
    path = find_data(name, settings.data_dir)
    if path is None:
        return None, ["hub", name, find_commit(settings)]
    if settings.label_column != defaults.label_column:
        raise UserError(
            f"--label_column is for a --dataset on the Hub; {name} has its classes as folders: leave it out"
        )
    if not path.is_dir():
        if not name.lower().endswith(ARCHIVES):
            raise UserError(f"{path} is neither a folder nor an archive ({', '.join(ARCHIVES)}) of images")
        return path, ["archive", file_stamp(path)]
    digest = hashlib.sha256()
    for file in [*list_images(path), *_list_tables(path)]:
        digest.update(repr(file_stamp(file)).encode())
    return path, ["folder", str(path.resolve()), digest.hexdigest()]


def read_images(
    settings: DataSettings, path: Path | None, key: list, scratch: Path, notices: list[str]
) -> tuple[hf.Dataset, dict[str, hf.Dataset], list[str]]:
    """Return a table of all image files, the splits of the source, and the names of the classes.

    The splits have the columns `row` (of the table of files) and `label`, so no image is copied when they are cut.
    `notices` gets a line about rows that are left out.
    """
    if path is None:
        files, splits = _read_hub(settings, key[-1], scratch, notices)
    else:
        folder = path if path.is_dir() else _unpack(path, scratch / "unpacked", notices)
        images, tables = list_images(folder), _list_tables(folder)
        files = hf.Dataset.from_dict({"image": [{"path": str(image), "bytes": None} for image in images]})
        parents = {image.parent.name for image in images}
        has_classes = len(parents) > 3 or sum(split is None for split in find_splits(parents).values()) > 1
        if images and tables and not has_classes:
            splits = _sort_by_tables(folder, images, tables, path, notices)
        else:
            splits = _sort([image.relative_to(folder) for image in images], path)
    return files, *number_labels(splits, "images")


def _unpack(path: Path, folder: Path, notices: list[str]) -> Path:
    """Unpack an archive into a new folder and return it; the folder is deleted when the images are decoded."""
    if (problem := content_problem(read_head(path))) and not path.name.lower().endswith(".zip"):
        raise UserError(f"{path} is {problem}")
    with refused(f"{path} cannot be unpacked: download it or pack it again"):
        if path.name.lower().endswith(".zip"):
            with zipfile.ZipFile(path, metadata_encoding=_encoding(path, notices)) as archive:
                for entry in archive.infolist():
                    entry.filename = entry.filename.replace("\\", "/")  # written by some programs on Windows
                    archive.extract(entry, folder)
        else:
            with tarfile.open(path) as archive:
                archive.extractall(folder, filter="data")
                archive.fileobj.seek(archive.offset)  # `tarfile` ignores a fault in any header except the first
                if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                    raise tarfile.ReadError("its end is missing")
    return folder


def _encoding(path: Path, notices: list[str]) -> str:
    """Return the encoding of the names in a ZIP archive that are not marked as UTF-8, and name the folders read by it.

    Such names are in the code page of the computer that wrote them: GBK in China, 437 in the USA. Names in GBK have two
    bytes above 0x80 in a row, which is rare in European names of page 437.
    """
    with zipfile.ZipFile(path) as archive:
        raw = "\n".join(entry.filename for entry in archive.infolist() if not entry.flag_bits & 0x800).encode("cp437")
    for encoding in ("utf-8", "gbk", "cp437"):
        with suppress(UnicodeDecodeError):
            text = raw.decode(encoding)
            if encoding != "gbk" or re.search(rb"[\x81-\xfe][\xa1-\xfe]", raw):
                break
    folders = {part for name in text.split("\n") for part in re.split(r"[\\/]", name)[:-1] if not part.isascii()}
    if encoding != "utf-8" and folders:
        shown = ", ".join(sorted(folders)[:5])
        notices.append(f"{path}: names are not marked as UTF-8 and read as {encoding} ({shown}): is this right?")
    return encoding


def list_images(folder: Path) -> list[Path]:
    """Return the image files below a folder, sorted, without hidden ones and `__MACOSX`."""
    names = glob.iglob("**/*", root_dir=folder, recursive=True)  # `Path.rglob` would not follow links
    return sorted(folder / name for name in names if name.lower().endswith(IMAGES) and "__MACOSX" not in name)


def _list_tables(folder: Path) -> list[Path]:
    """Return the tables below a folder, such as metadata.csv, sorted."""
    return sorted(
        folder / name for name in glob.iglob("**/*", root_dir=folder, recursive=True) if file_format(Path(name))
    )


def _sort_by_tables(
    folder: Path, images: list[Path], tables: list[Path], source: Path, notices: list[str]
) -> dict[str, hf.Dataset]:
    """Return the splits by tables of images and labels. Images that no table names are left out.

    Hugging Face's image folders have `file_name` (from the table's folder) and `label` in a table of each split. Tables
    of competitions have other columns of names (`NAME_COLUMNS`), sometimes without the folder or the ending.

    Raises:
        UserError: A table cannot be read, lacks a column or a label, or names an image that does not exist.
    """
    rows, found = {image: row for row, image in enumerate(images)}, {}
    known = Counter(name for image in images for name in {image.name, image.stem})
    by_name = {name: row for image, row in rows.items() for name in {image.name, image.stem} if known[name] == 1}
    names = {table: str(table.relative_to(folder)) for table in tables}
    split_of = find_splits({*names.values()})
    for table, name in names.items():
        split = split_of[name] or "train"
        with refused(f"{source}: {name} cannot be read as {file_format(table)}"):
            content = _read_table(table)
        column = next((each for each in NAME_COLUMNS if each in content.columns), "file_name")
        if missing := {column, "label"} - {*content.columns}:
            if split != "train" and missing == {"label"}:
                notices.append(f"{source}: {name} has no labels and is left out")
                continue
            raise UserError(
                f"{source}: {name} has no column {min(missing)}, only {', '.join(map(str, content.columns))}: images "
                "need a table with file_name and label, or a folder for each class, <class>/<image>"
            )
        places = [rows.get(table.parent / each, by_name.get(each)) for each in content[column]]
        if None in places or "" in content["label"].tolist():
            row = next(row for row, place in enumerate(places) if place is None or not content["label"].iloc[row])
            problem = "names no image" if places[row] is None else "has no label"
            raise UserError(f"{source}: row {row + 1} of {name} {problem} ({content[column].iloc[row]})")
        part = found.setdefault(split, {"row": [], "label": []})
        part["row"] += places
        part["label"] += content["label"].tolist()
    if "train" not in found:
        raise UserError(f"{source} holds no labels for training, only {', '.join(names.values())}")
    if left := len(images) - len({row for part in found.values() for row in part["row"]}):
        notices.append(f"{source}: {left:,} of {len(images):,} images are in no table and are left out")
    return {split: hf.Dataset.from_dict(columns) for split, columns in found.items()}


def _read_table(path: Path) -> pd.DataFrame:
    """Return a table whose cells are texts."""
    kind = file_format(path)
    if kind == "parquet":
        return pd.read_parquet(path).astype(str)
    if kind == "json":
        return pd.read_json(path, lines=".jsonl" in path.name or ".ndjson" in path.name, dtype=False).astype(str)
    return pd.read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True, sep=SEPARATORS[kind])


def _sort(images: list[Path], source: Path) -> dict[str, hf.Dataset]:
    """Return the splits, with the columns `row` and `label`, by the relative paths of the images.

    The paths are `<class>/<image>` or `<split>/<class>/<image>`; a single folder that holds everything is skipped.
    """
    if not images:
        raise UserError(f"{source} holds no image ({', '.join(IMAGES)})")
    paths = [image.parts for image in images]
    if odd := [image for image in images if not str(image).isprintable() and re.search("[\udc80-\udcff]", str(image))]:
        raise UserError(
            f"{source}: the names of {len(odd):,} images are not UTF-8: rename their folders, or pack a ZIP"
        )
    split_of = {}
    while max(map(len, paths)) > 2:
        split_of = find_splits({parts[0] for parts in paths})
        if None not in split_of.values() and "train" not in split_of.values():
            raise UserError(f"{source} holds no training image, only {', '.join(sorted(split_of))}: add a folder train")
        if len(split_of) > 1:
            break
        paths = [parts[1:] for parts in paths]
    has_splits = any(split_of.get(parts[0]) == "train" and len(parts) > 2 for parts in paths)
    depth = 3 if has_splits else 2
    if wrong := [str(image) for image, parts in zip(images, paths, strict=True) if len(parts) != depth]:
        examples = ", ".join(wrong[:3]) + (", …" if len(wrong) > 3 else "")
        raise UserError(
            f"{source}: {len(wrong):,} of {len(images):,} images are not in the folder of a class ({examples}): move "
            f"them so that all paths are {'<split>/' * has_splits}<class>/<image>"
        )
    if has_splits and (unknown := sorted(top for top, split in split_of.items() if split is None)):
        raise UserError(f"{source}: the folder {unknown[0]} is not a split: name it validation or test")
    found = {}
    for row, parts in sorted(enumerate(paths), key=lambda each: each[1]):
        split = found.setdefault(split_of[parts[0]] if has_splits else "train", {"row": [], "label": []})
        split["row"].append(row)
        split["label"].append(parts[-2])
    return {split: hf.Dataset.from_dict(columns) for split, columns in found.items()}


def _read_hub(
    settings: DataSettings, commit: str, scratch: Path, notices: list[str]
) -> tuple[hf.Dataset, dict[str, hf.Dataset]]:
    parts = {}
    tables = []
    start = 0
    column = settings.label_column
    for split, table in load_hub(settings, commit, scratch, notices).items():
        name = f"{settings.dataset} ({split})"
        check_column(table.column_names, column, name)
        image_column = _image_column(table, name)
        images = table.select_columns([image_column]).rename_columns({image_column: "image"})
        tables.append(images.cast_column("image", hf.Image(decode=False)))
        feature, label_of = label_reader(column, table.features)
        schema = hf.Features({"row": hf.Value("int64"), "label": feature}).arrow_schema

        def check(_, row, label_of=label_of):
            return {"row": row["row"], "label": label_of(row)}

        rows = table_rows(table.select_columns([column]).add_column("row", np.arange(start, start + len(table))))
        labels = write_checked(rows, name, check, schema, scratch / f"{split}-labels.arrow", settings, notices)
        parts[split] = [labels]
        start += len(table)
    return hf.concatenate_datasets(tables), join_parts(parts, column, notices)


def _image_column(table: hf.Dataset, name: str) -> str:
    images = [column for column, feature in table.features.items() if isinstance(feature, hf.Image)]
    if "image" in images or len(images) == 1:
        return "image" if "image" in images else images[0]
    found = list_columns(images or table.column_names)
    raise UserError(f"{name} must have one column of images, or one with the name 'image'; it has {found}")
