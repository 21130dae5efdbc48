"""Checkpoints on the disk, which are complete whenever a process dies.

A checkpoint is written under a temporary name. When all its files are on the disk, it gets a manifest with sizes and
checksums and is renamed, which is atomic. The manifest also finds damage that happens later.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fabric_ladder.errors import UserError, refused

MANIFEST = "manifest.json"
STAGES = ("", "validated", "trained")  # of checkpoints after the same optimizer step, oldest first
NAME = re.compile(rf"step-(\d+)(?:-({'|'.join(STAGES[1:])}))?")
FORMAT = 2  # the tensors are safetensors files


def unfinished_folder(folder: Path, step: int, stage: str) -> Path:
    """Return the temporary folder of a checkpoint after an optimizer step; `stage`: one of `STAGES`."""
    return folder / f".step-{step:09d}{'-' * bool(stage)}{stage}.part"


def make_empty(folder: Path) -> None:
    """Create the folder of an unfinished checkpoint, and delete the remains of a killed run there."""
    if folder.exists():
        shutil.rmtree(folder)
    (folder / "state").mkdir(parents=True)


def finish(folder: Path, minimized: float | None) -> Path:
    """Turn an unfinished folder into a checkpoint, and return its path.

    Args:
        folder: From `unfinished_folder`.
        minimized: The figure of a validation that the best checkpoint has lowest; None without a validation.

    Raises:
        OSError: The disk cannot store it. The folder stays unfinished.
    """
    manifest = {"format": FORMAT, "minimized": minimized, "files": _files(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*folder.rglob("*"), folder):
        _sync(path)
    whole = folder.with_name(folder.name.removeprefix(".").removesuffix(".part"))
    old = _hide(whole) if whole.exists() else None  # it is damaged, or the run resumed from it
    folder.rename(whole)
    _sync(whole.parent)
    if old:
        shutil.rmtree(old)
    return whole


def check(folder: Path) -> None:
    """Read all files of a checkpoint and compare them with its manifest.

    Raises:
        OSError, ValueError, LookupError, TypeError, AttributeError: A file is missing or damaged.
    """
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    if manifest["format"] != FORMAT:
        raise ValueError("it is from another version")
    found = _files(folder)
    for name, size_and_checksum in manifest["files"].items():
        if name not in found:
            raise ValueError(f"{name} is missing")
        if found[name] != size_and_checksum:
            raise ValueError(f"{name} is damaged: its size or checksum differs")


def newest_whole(checkpoints: Path) -> tuple[Path | None, list[str]]:
    """Return the newest undamaged checkpoint, and a line about each newer one that is damaged."""
    skipped = []
    for folder in reversed(list_steps(checkpoints)):
        try:
            with refused(f"{folder} is skipped"):
                check(folder)
            return folder, skipped
        except UserError as error:
            skipped.append(str(error))
    return None, skipped


def prune(newest: Path, keep: int, kept: Sequence[Path] = ()) -> Path | None:
    """Remove all checkpoints except `kept`, the last `keep` and the best, and return the best.

    Checkpoints of later steps than `newest` are damaged, or the run has resumed from an earlier one. They are removed,
    or the next resumed run would take them for the newest.
    """
    folders = list_steps(newest.parent)
    while step_of(folders[-1]) > step_of(newest):
        _remove(folders.pop())
    if folders[-1] != newest and folders[-1].name.endswith("-trained"):  # in one branch only the test follows it
        _remove(folders.pop())
    best = find_best(folders)
    for folder in folders[:-keep]:
        if folder not in (best, newest, *kept):
            _remove(folder)
    return best


def find_best(folders: Sequence[Path]) -> Path | None:
    """Return the checkpoint with the best validation, or None if none has a validation."""
    figures = {folder: figure for folder in folders if (figure := _minimized(folder)) is not None}
    return min(figures, key=figures.get, default=None)


def list_steps(checkpoints: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [(NAME.fullmatch(path.name), path) for path in checkpoints.glob("step-*")]
    order = {path: (match[1], STAGES.index(match[2] or "")) for match, path in found if match}
    return sorted(order, key=order.get)


def step_of(folder: Path) -> int:
    """Return the optimizer steps before a checkpoint."""
    return int(folder.name.split("-")[1])


def remove_unfinished(checkpoints: Path) -> None:
    """Remove checkpoints that a killed run has written or removed only in part."""
    for path in checkpoints.glob(".step-*"):
        shutil.rmtree(path)


def remove_all(checkpoints: Path, kept: Sequence[Path] = ()) -> None:
    """Remove all checkpoints of a run except `kept`."""
    for folder in list_steps(checkpoints):
        if folder not in kept:
            _remove(folder)
    with suppress(OSError):  # other files are there
        checkpoints.rmdir()


def _minimized(folder: Path) -> float | None:
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["minimized"]
    except (OSError, ValueError, LookupError, TypeError):
        return None  # damaged


def _remove(folder: Path) -> None:
    shutil.rmtree(_hide(folder))


def _hide(folder: Path) -> Path:
    """Rename a checkpoint before its removal, so that a crash never leaves an incomplete one under its name."""
    hidden = folder.with_name(f".{folder.name}.old")
    if hidden.exists():
        shutil.rmtree(hidden)
    return folder.rename(hidden)


def _files(folder: Path) -> dict[str, list]:
    """Return size and checksum of each file by its path in the folder, except the manifest."""
    files = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST):
        with open(path, "rb") as file:
            checksum = hashlib.file_digest(file, "sha256").hexdigest()
        files[path.relative_to(folder).as_posix()] = [path.stat().st_size, checksum]
    return files


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk; Windows cannot flush through a read-only handle."""
    if os.name == "posix":
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
