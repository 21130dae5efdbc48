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

from fabric_ladder.errors import read_outside

MANIFEST = "manifest.json"
FORMAT = 2  # the tensors are safetensors files


def unfinished_folder(home: Path, name: str) -> Path:
    """Return the folder that a checkpoint is written into, before it becomes `step-<name>`."""
    return home / f".step-{name}.part"


def make_empty(folder: Path) -> None:
    """Make the folder of an unfinished checkpoint anew; what a killed run has left there goes."""
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "state").mkdir(parents=True)


def finish(folder: Path, validation_loss: float | None) -> Path:
    """Make an unfinished folder a checkpoint, and return where it is.

    Raises:
        OSError: The disk does not keep it; then it is no checkpoint.
    """
    manifest = {"format": FORMAT, "validation_loss": validation_loss, "files": _files(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        _sync(path)
    whole = folder.with_name(folder.name.removeprefix(".").removesuffix(".part"))
    old = _hide(whole) if whole.exists() else None  # damaged, or the one that the run went on from
    folder.rename(whole)
    _sync(whole.parent)
    if old:
        shutil.rmtree(old)
    return whole


def check(folder: Path) -> None:
    """Read a checkpoint through.

    Raises:
        OSError: A file cannot be read.
        ValueError: The message says what is damaged.
    """
    if not (folder / MANIFEST).exists():
        raise ValueError(f"{MANIFEST} is missing")
    try:
        manifest = read_outside(folder / MANIFEST)
        expected = {name: (size, checksum) for name, (size, checksum) in manifest["files"].items()}
        if manifest["format"] != FORMAT or not isinstance(manifest["validation_loss"], float | None):
            raise ValueError("of another version")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{MANIFEST} is damaged: {error}") from error
    found = _files(folder)
    for name, (size, checksum) in expected.items():
        if name not in found:
            raise ValueError(f"{name} is missing")
        if found[name][0] != size:
            raise ValueError(f"{name} has {found[name][0]} bytes instead of {size}")
        if found[name][1] != checksum:
            raise ValueError(f"{name} is damaged: its checksum is another")


def newest_whole(home: Path) -> tuple[Path | None, list[str]]:
    """Return the newest checkpoint that is whole, and why newer ones are not."""
    skipped = []
    for folder in reversed(_folders(home)):
        try:
            check(folder)
            return folder, skipped
        except (OSError, ValueError) as error:
            skipped.append(f"{folder} is skipped: {error}")
    return None, skipped


def prune(newest: Path, keep: int) -> Path | None:
    """Remove all but `keep` checkpoints up to the newest and the best, which has the lowest validation loss; return it.

    Those of later steps are damaged, or of a run which went on from an older one: they would be taken for the newest.
    """
    folders = _folders(newest.parent)
    while _step(folders[-1]) > _step(newest):
        _remove(folders.pop())
    losses = {folder: loss for folder in folders if (loss := _loss(folder)) is not None}
    best = min(losses, key=losses.get, default=None)
    for folder in folders[:-keep]:
        if folder not in (best, newest):
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
    return sorted(path for path in home.glob("step-*") if _step(path).isdigit())


def _step(folder: Path) -> str:
    return folder.name.split("-")[1]


def _loss(folder: Path) -> float | None:
    try:
        return read_outside(folder / MANIFEST)["validation_loss"]
    except (ValueError, LookupError, TypeError):
        return None  # damaged


def _remove(folder: Path) -> None:
    shutil.rmtree(_hide(folder))


def _hide(folder: Path) -> Path:
    """Rename a checkpoint that is to be removed, or a crash would leave half of one under its name."""
    hidden = folder.with_name(f".{folder.name}.old")
    if hidden.exists():
        shutil.rmtree(hidden)
    return folder.rename(hidden)


def _files(folder: Path) -> dict[str, list]:
    """Return size and checksum of each file by its path in the folder, but for the manifest's."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST):
        with open(path, "rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(folder).as_posix()] = [path.stat().st_size, checksum]
    return files


def _sync(path: Path) -> None:
    """Have the disk keep a file, or the names in a folder; Windows syncs neither by a handle that only reads."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
