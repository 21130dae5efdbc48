"""Folders on a local disk for DeepSpeed's offload to NVMe, one for each process."""

import atexit
import os
import shutil
import tempfile
from pathlib import Path

PREFIX = "fabric_ladder-"
LOCK = "lock"


def own_folder(parent: Path) -> Path:
    """Make a folder for this process, which removes it at its end.

    DeepSpeed names its files by the numbers of ranks and weights alone, so two runs in one folder would overwrite each
    other's optimizer state. Folders of killed processes are removed here, since the operating system has released
    their locks.
    """
    for lock in parent.glob(f"{PREFIX}*/{LOCK}"):
        if _lock(lock):
            shutil.rmtree(lock.parent, ignore_errors=True)
    made = Path(tempfile.mkdtemp(prefix=".", dir=parent))
    _lock(made / LOCK)
    # another process that starts now sees the folder with its lock, or not at all
    folder = made.rename(made.with_name(PREFIX + made.name.removeprefix(".")))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def _lock(file: Path) -> bool:
    """Lock a file until this process ends, and return whether no other process has locked it."""
    import fcntl  # missing on Windows, where DeepSpeed cannot offload to disks

    try:
        fcntl.flock(os.open(file, os.O_CREAT | os.O_RDWR), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
