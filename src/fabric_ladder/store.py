"""Checkpoints on the disk: whole or not there, whatever happens while one is written.

A checkpoint is written beside its place, gets a manifest of sizes and checksums once all of it is on the disk, and is
then renamed, which a file system does at one instant. One that was damaged later is found by its manifest.
"""

import hashlib
import json
import os
import shutil
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

MANIFEST = "manifest.json"
FORMAT = 1


class Stored(NamedTuple):
    """A checkpoint that is whole: its folder, optimizer steps so far, and its validation loss if it ends an epoch."""

    folder: Path
    step: int
    validation_loss: float | None


def part_of(home: Path, name: str) -> Path:
    """Return where a checkpoint is written, which becomes `step-<name>`."""
    return home / f".step-{name}.part"


def begin(part: Path) -> None:
    """Make an empty folder; what a killed run has left there goes."""
    if part.exists():
        shutil.rmtree(part)
    (part / "state").mkdir(parents=True)


def finish(part: Path, validation_loss: float | None) -> Path:
    """Make a written folder a checkpoint, and return where it is.

    Raises:
        OSError: The disk does not keep it; then it is no checkpoint.
    """
    files = {}
    for path in sorted(path for path in part.rglob("*") if path.is_file()):
        with open(path, "rb") as file:
            os.fsync(file.fileno())
            files[path.relative_to(part).as_posix()] = [path.stat().st_size, _checksum(file)]
    manifest = {"format": FORMAT, "validation_loss": validation_loss, "files": files}
    with open(part / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for folder in (*(path for path in part.rglob("*") if path.is_dir()), part):
        _sync(folder)
    place = part.with_name(part.name.removeprefix(".").removesuffix(".part"))
    if place.exists():  # a damaged one, or that of a run which went on from an older one
        _remove(place)
    part.rename(place)
    _sync(place.parent)
    return place


def check(folder: Path) -> Stored:
    """Read a checkpoint through, and return what is known of it.

    Raises:
        OSError: A file cannot be read.
        ValueError: The message says what is damaged.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files, loss, step = manifest["files"], manifest["validation_loss"], int(folder.name.split("-")[1])
        expected = {str(name): (int(size), str(checksum)) for name, (size, checksum) in files.items()}
        if manifest["format"] != FORMAT or not isinstance(loss, float | None):
            raise ValueError("of another version")
    except FileNotFoundError:
        raise ValueError(f"{MANIFEST} is missing") from None
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from error
    for name, (size, checksum) in expected.items():
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{name} is missing")
        if path.stat().st_size != size:
            raise ValueError(f"{name} has {path.stat().st_size} bytes instead of {size}")
        with open(path, "rb") as file:
            if _checksum(file) != checksum:
                raise ValueError(f"{name} is damaged: its checksum is another")
    return Stored(folder, step, loss)


def newest_whole(home: Path) -> tuple[Stored | None, list[str]]:
    """Return the newest checkpoint that is whole, and why newer ones are not."""
    skipped = []
    for folder in reversed(_folders(home)):
        try:
            return check(folder), skipped
        except (OSError, ValueError) as error:
            skipped.append(f"{folder} is skipped: {error}")
    return None, skipped


def prune(home: Path, keep: int) -> Path | None:
    """Remove all but the newest `keep` checkpoints and the best, which has the lowest validation loss; return this."""
    folders = _folders(home)
    losses = {folder: loss for folder in folders if (loss := _loss(folder)) is not None}
    best = min(losses, key=losses.get, default=None)
    for folder in folders[:-keep]:
        if folder != best:
            _remove(folder)
    return best


def remove_unfinished(home: Path) -> None:
    """Remove what a run that was killed has left half-written or half-removed."""
    for path in home.glob(".step-*"):
        shutil.rmtree(path)


def remove_all(home: Path) -> None:
    """Remove the checkpoints of a run, each at one instant."""
    for folder in _folders(home):
        _remove(folder)
    with suppress(OSError):  # somebody has put other things there
        home.rmdir()


def _folders(home: Path) -> list[Path]:
    return sorted(path for path in home.glob("step-*") if path.name.split("-")[1].isdigit())


def _loss(folder: Path) -> float | None:
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["validation_loss"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # damaged


def _remove(folder: Path) -> None:
    hidden = folder.with_name(f".{folder.name}.old")
    if hidden.exists():
        shutil.rmtree(hidden)
    folder.rename(hidden)  # or a crash in between would leave half a checkpoint under its name
    shutil.rmtree(hidden)


def _checksum(file) -> str:
    return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(folder: Path) -> None:
    """Have the disk keep the names in a folder; there is nothing to open on Windows."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
