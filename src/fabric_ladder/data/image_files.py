"""Image files: found in folders, archives and on the Hub, and sorted into splits and classes; none is decoded here."""

import hashlib
import itertools
import os
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path, PurePosixPath

import datasets as hf
import numpy as np
import pyarrow as pa

from fabric_ladder.data.cache import write_rows
from fabric_ladder.data.hub import load_hub
from fabric_ladder.data.rows import table_rows, write_checked
from fabric_ladder.data.sources import REVIEWS, file_stamp, find_path
from fabric_ladder.data.tables import check_column, join_parts, label_reader, number_labels
from fabric_ladder.errors import UserError, first_line
from fabric_ladder.settings import DataSettings

ARCHIVES = (".tar", ".tar.gz", ".tgz", ".zip")
IMAGES = (".png", ".jpg", ".jpeg", ".jfif", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm", ".pbm", ".avif")
IMAGES += (".jp2", ".heic")  # the last is not read, and therefore not passed over in silence
FOLDER_SPLITS = {"train": "train", "test": "test"} | dict.fromkeys(("validation", "valid", "val", "dev"), "validation")
FILE = pa.struct({"bytes": pa.binary(), "path": pa.string()})  # as `datasets` keeps an image that is not decoded
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, OSError, RuntimeError)  # the last: a password


def find_images(settings: DataSettings) -> tuple[Path | None, list]:
    """Return the folder or archive that `dataset` names (None: on the Hub), and what it is identified by.

    Of files these are path, size and time of change.
    """
    name = settings.dataset
    if name in REVIEWS:
        raise UserError(
            f"--dataset {name} holds texts: --task image-classification needs a folder with a folder for each class, "
            f"an archive ({', '.join(ARCHIVES)}) of one, or a name on the Hub"
        )
    if settings.validation_file or settings.test_file:
        raise UserError(
            "--validation_file and --test_file are for texts: put images into the folders train, validation and test "
            "of --dataset"
        )
    path = find_path(settings, ARCHIVES)
    if path is None:
        return None, ["hub", name]
    if not path.is_dir():
        if not name.lower().endswith(ARCHIVES):
            raise UserError(f"{path} is neither a folder nor an archive ({', '.join(ARCHIVES)}) of images")
        return path, ["archive", file_stamp(path)]
    digest = hashlib.sha256()
    try:
        for file in _walk(path)[0]:
            status = (path / file).stat()
            digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode(errors="surrogateescape"))
    except OSError as error:
        raise UserError(f"cannot read {path} ({first_line(error)})") from error
    return path, ["folder", str(path.resolve()), digest.hexdigest()]


def read_images(
    settings: DataSettings, path: Path | None, scratch: Path, notices: list[str]
) -> tuple[hf.Dataset, dict[str, hf.Dataset], list[str]]:
    """Return all image files, the splits that the source has, and the names of the classes.

    The splits have the columns `row` (of the table of files) and `label`, so that no image moves when they are cut.
    `notices` gets what is left out.
    """
    if path is None:
        files, splits = _read_hub(settings, scratch, notices)
    elif path.is_dir():
        names, folders = _walk(path)
        files = hf.Dataset.from_dict({"image": [{"path": str(path / name), "bytes": None} for name in names]})
        splits = _sort({name: row for row, name in enumerate(names)}, folders, path)
    else:
        files, rows, folders = _read_archive(path, scratch / "files.arrow")
        splits = _sort(rows, folders, path)
    return files, *number_labels(splits, "images")


def _read_hub(settings: DataSettings, scratch: Path, notices: list[str]) -> tuple[hf.Dataset, dict[str, hf.Dataset]]:
    parts, tables, start, label = {}, [], 0, settings.label_column
    for split, table in load_hub(settings, scratch, notices).items():
        name = f"{settings.dataset} ({split})"
        check_column(table.column_names, label, name, ": set --label_column")
        column = _image_column(table, name, settings)
        images = table.select_columns([column]).rename_columns({column: "image"})
        tables.append(images.cast_column("image", hf.Image(decode=False)))
        feature, label_of = label_reader(label, table.features)
        schema = hf.Features({"row": hf.Value("int64"), "label": feature}).arrow_schema

        def check(_, row, label_of=label_of):
            return {"row": row["row"], "label": label_of(row)}

        rows = table_rows(table.select_columns([label]).add_column("row", np.arange(start, start + len(table))))
        labels = write_checked(rows, name, check, schema, scratch / f"{split}-labels.arrow", settings, notices)
        parts[split] = [(name, labels)]
        start += len(table)
    return hf.concatenate_datasets(tables), join_parts(parts, label)


def _image_column(table: hf.Dataset, name: str, settings: DataSettings) -> str:
    images = [column for column, feature in table.features.items() if isinstance(feature, hf.Image)]
    if settings.image_column in images:
        return settings.image_column
    if settings.image_column not in table.column_names and len(images) == 1:
        return images[0]
    if not images:
        raise UserError(f"{name} has no column of images, only {', '.join(table.column_names)}")
    raise UserError(
        f"{name} has no column of images {settings.image_column!r}, only {', '.join(images)}: set --image_column"
    )


def _walk(folder: Path) -> tuple[list[str], list[str]]:
    """Return the images and the folders below a folder, by their paths from there, as far down as they may lie."""

    def stop(error: OSError):
        raise error

    files, folders = [], []
    for path, below, names in os.walk(folder, onerror=stop, followlinks=True):
        here = PurePosixPath(Path(path).relative_to(folder).as_posix())
        below[:] = [name for name in below if _shown(here / name)] if len(here.parts) < 5 else []
        folders += [str(here / name) for name in below]
        files += [str(here / name) for name in names if _is_image(here / name)]
    return sorted(files), sorted(folders)


def _shown(path: PurePosixPath) -> bool:
    """Tell files and folders of the user's from those that file managers add."""
    return not any(part.startswith(".") or part == "__MACOSX" for part in path.parts)


def _is_image(path: PurePosixPath) -> bool:
    found = path.suffix.lower() in IMAGES and _shown(path)
    try:
        str(path).encode()
    except UnicodeEncodeError:
        if found:
            raise UserError(f"the name of the image {str(path)!a} is not UTF-8: rename it, say by convmv") from None
    return found


def _sort(rows: dict[str, int], folders: list[str], source: Path) -> dict[str, hf.Dataset]:
    """Tell splits and classes (columns `row` and `label`) from the paths of images, whose rows are given.

    The paths are `<class>/<file>` or `<split>/<class>/<file>`; a folder that holds all else is looked through.
    """
    if not rows:
        raise UserError(f"{source} holds no image ({', '.join(IMAGES)})")
    paths = {name: PurePosixPath(name).parts for name in rows}
    above = {PurePosixPath(name).parts for name in folders}
    while len({path[0] for path in (*paths.values(), *above)}) == 1 and max(map(len, paths.values())) > 2:
        paths = {name: path[1:] for name, path in paths.items()}
        above = {path[1:] for path in above if len(path) > 1}
    split_of = {path[0]: FOLDER_SPLITS.get(path[0].lower()) for path in above}
    has_splits = "train" in split_of.values() and not any(
        len(path) == 2 and split_of[path[0]] == "train" for path in paths.values()
    )
    depth = 3 if has_splits else 2
    if wrong := [name for name, path in paths.items() if len(path) != depth]:
        examples = ", ".join(wrong[:3]) + (", …" if len(wrong) > 3 else "")
        raise UserError(
            f"{source}: {len(wrong):,} of {len(rows):,} images do not lie in the folder of a class ({examples}): move "
            f"them so that all paths are {'<split>/' * has_splits}<class>/<image>"
        )
    if has_splits and (strange := sorted(top for top, split in split_of.items() if split is None)):
        raise UserError(f"{source}: the folder {strange[0]} beside train is no split: name it validation or test")
    for path in sorted(above - {path[:-1] for path in paths.values()}):
        if len(path) == depth - 1 and (not has_splits or split_of[path[0]] == "train"):
            raise UserError(f"{source}: the folder {'/'.join(path)} holds no image: fill or remove it")
    found = {}
    for name, path in sorted(paths.items()):
        split = found.setdefault(split_of[path[0]] if has_splits else "train", {"row": [], "label": []})
        split["row"].append(rows[name])
        split["label"].append(path[-2])
    if "train" not in found:
        raise UserError(f"{source} holds no training image")
    return {split: hf.Dataset.from_dict(columns) for split, columns in found.items()}


def _read_archive(path: Path, target: Path) -> tuple[hf.Dataset, dict[str, int], list[str]]:
    """Copy the image files of an archive, as they are, into one Arrow file; return it, its rows' names, and folders.

    A compressed archive can only be read from its beginning to its end, while splits are read in an order of their own.
    """
    rows, folders, count = {}, set(), itertools.count()

    def images() -> Iterator[dict]:
        try:
            for name, read in _members(path):
                member = PurePosixPath(name)
                if member.is_absolute() or ".." in member.parts:
                    raise UserError(f"{path} is not to be trusted: it holds {name!r}")
                above = member if read is None else member.parent
                folders.update(str(folder) for folder in (above, *above.parents) if folder.parts and _shown(folder))
                if read and _is_image(member):
                    rows[str(member)] = next(count)  # of two of one name the later counts, as on unpacking
                    yield {"image": {"bytes": read(), "path": str(member)}}
        except DAMAGED as error:
            raise UserError(f"{path} is damaged ({first_line(error)}): get it or pack it again") from error

    return write_rows(target, pa.schema({"image": FILE}), images()), rows, sorted(folders)


def _members(path: Path) -> Iterator[tuple[str, Callable[[], bytes] | None]]:
    """Go through an archive: yield the names of files with what reads them, those of folders with None."""
    if path.name.lower().endswith(".zip"):
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                yield entry.filename, None if entry.is_dir() else partial(archive.read, entry)
    else:
        with tarfile.open(path) as archive:
            for entry in archive:
                if entry.isdir() or entry.isfile():
                    yield entry.name, None if entry.isdir() else archive.extractfile(entry).read
                archive.members.clear()  # which `tarfile` would keep
            archive.fileobj.seek(archive.offset)  # `tarfile` passes over a fault in any header but the first
            if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("it has no end")
