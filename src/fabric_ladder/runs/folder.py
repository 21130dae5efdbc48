"""The folder of a run, `runs/<script>/<n>`: its number, its lock, and whether it can be written."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from fabric_ladder.errors import UserError

CHECKPOINTS = "checkpoints"
LOCK = ".lock"
UNNAMED = ("model", "merged", "adapter", "export")  # folders that say nothing about the model in them


def short_name(name: str) -> str:
    """Return the name of a model or a data set for a line: of a path the last part, or three that say which run."""
    path = Path(name)
    if not path.exists() and not name.startswith(("/", "~")):
        return name
    return "/".join(path.parts[-3:]).lstrip("/") if path.name in UNNAMED else path.name


@contextmanager
def writing(option: str) -> Iterator[None]:
    """Turn an OSError in this block into a UserError; `option` is the option with its value, for the message."""
    try:
        yield
    except OSError as error:
        raise UserError(f"cannot write {option} ({error.strerror or error}): choose another") from error


def check_writable(folder: Path, option: str) -> None:
    """Try to write into the folder, or into its nearest parent that exists.

    Raises:
        UserError: It cannot be written.
    """
    folder = folder.absolute()
    with writing(option):
        while not folder.exists():
            if folder.is_symlink():
                folder.stat()  # raises the error: it points to itself, or to nothing
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass


def next_folder(parent: Path) -> Path:
    """Make the folder with the next number; a run that starts at the same time gets the number after it."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name) for path in parent.iterdir() if path.name.isdecimal()), default=0)
    while True:
        try:
            (parent / str(number)).mkdir()
            return parent / str(number)
        except FileExistsError:
            number += 1


def lock(folder: Path) -> FileLock:
    """Lock a run's folder. The operating system releases the lock when the process ends, even if it is killed.

    A process may lock a folder twice, and must release it as often.

    Raises:
        UserError: Another process has locked it.
    """
    found = FileLock((folder / LOCK).absolute(), is_singleton=True)
    try:
        found.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{folder} belongs to a run that is still going on: wait for its end, or stop it") from None
    return found


def unlock(folder_lock: FileLock) -> None:
    """Release a run's folder and remove the file of its lock."""
    folder_lock.release(force=True)
    Path(folder_lock.lock_file).unlink(missing_ok=True)
