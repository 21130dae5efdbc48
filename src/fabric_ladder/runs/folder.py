"""The folder of a run, `runs/<script>/<n>/`, with log.txt, metrics.csv and run.json; only rank 0 writes it."""

import json
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError
from fabric_ladder.runs.loggers import RunLog
from fabric_ladder.settings import Settings

CHECKPOINTS = "checkpoints"
LOCK = ".lock"


class RunFolder:
    """The files of one run, locked against other processes.

    Args:
        settings: `runs_dir`, the script's name, the logger.
        path: The folder of a resumed run; None: make a new one.
        lines: The lines of log.txt so far.
        rows: The rows of metrics.csv so far: optimizer step, samples and figures.

    Attributes:
        lines: All lines so far, for checkpoints, even if they could not be written.
        rows: All rows so far.
        lost: Whether log.txt and metrics.csv end before the run does.

    Raises:
        UserError: Another process has locked the folder.
        OSError: The folder cannot be written.
    """

    def __init__(self, settings: Settings, path: Path | None = None, lines: list[str] = (), rows: list[tuple] = ()):
        self.path = path or _next_folder(Path(settings.runs_dir) / settings.name)
        self.lines = list(lines)
        self.rows = [tuple(row) for row in rows]
        self.lost = False
        self._lock = lock(self.path)
        try:
            write_whole(self.path / "log.txt", "".join(f"{line}\n" for line in lines))
            self._log = RunLog(self.path, settings, self.rows)
        except BaseException:
            self._unlock()
            if path is None:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def append(self, lines: list[str]) -> None:
        """Add lines to log.txt."""
        self.lines += lines
        if not self.lost:
            with open(self.path / "log.txt", "a", encoding="utf-8") as log:
                log.writelines(f"{line}\n" for line in lines)

    def add_row(self, step: int, samples: int, **figures: float) -> None:
        """Add a row to metrics.csv and to live curves."""
        self.rows.append((step, samples, figures))
        self._log.write(step, samples, figures, in_file=not self.lost)

    def give_up(self) -> None:
        """Write no more lines and rows: the disk is full, and the last line may be incomplete."""
        self.lost = True

    def write_record(self, record: dict) -> None:
        """Replace run.json. It gets `log_lost` if the log ends before the run does."""
        record = record | ({"log_lost": True} if self.lost else {})
        write_whole(self.path / "run.json", json.dumps(record, indent=2, ensure_ascii=False) + "\n")

    def close(self) -> None:
        """Release the folder."""
        if self._lock.is_locked:
            self._log.close()
            self._unlock()

    def _unlock(self) -> None:
        self._lock.release(force=True)
        Path(self._lock.lock_file).unlink(missing_ok=True)


def check_writable(folder: Path) -> None:
    """Try to write into the folder, or into its nearest parent that exists.

    Raises:
        OSError: It cannot be written.
    """
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass


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


def _next_folder(parent: Path) -> Path:
    """Make the folder with the next number; a run that starts at the same time gets the number after it."""
    parent.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name) for path in parent.iterdir() if path.name.isdigit()), default=0)
    while True:
        try:
            (parent / str(number)).mkdir()
            return parent / str(number)
        except FileExistsError:
            number += 1
