"""The folder of a run, `runs/<script>/<n>/`: log.txt, metrics.csv and run.json, written by rank 0 alone."""

import json
import shutil
import tempfile
from pathlib import Path

from filelock import FileLock, Timeout

from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError
from fabric_ladder.runs.loggers import RunLog
from fabric_ladder.settings import Settings

CHECKPOINTS, LOCK = "checkpoints", ".lock"


class RunFolder:
    """The files of one run, which no other process may write meanwhile.

    Args:
        settings: `runs_dir`, the script's name, the logger.
        path: Folder of a run to go on with; None makes the first free one.
        lines: What log.txt is to begin with.
        rows: What metrics.csv is to begin with: optimizer step, samples and figures.

    Attributes:
        lines: All lines so far, for checkpoints, whether they could be written or not.
        rows: All rows so far.
        lost: Whether the files end before the run does.

    Raises:
        UserError: Another process has the folder.
        OSError: It cannot be written.
    """

    def __init__(self, settings: Settings, path: Path | None = None, lines: list[str] = (), rows: list[tuple] = ()):
        self.path = path or _next_folder(Path(settings.runs_dir) / settings.name)
        self._lock = lock(self.path)
        self.lines, self.rows = list(lines), [tuple(row) for row in rows]
        self.lost = False
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
        if self.lost:
            return
        with open(self.path / "log.txt", "a", encoding="utf-8") as log:
            log.writelines(f"{line}\n" for line in lines)

    def add_row(self, step: int, samples: int, **figures: float) -> None:
        """Add a row to metrics.csv and to live curves."""
        self.rows.append((step, samples, figures))
        self._log.write(step, samples, **figures)

    def give_up(self) -> None:
        """Write no more lines and rows: one of them, on a full disk, may be there in half."""
        self.lost = self._log.lost = True

    def write_record(self, record: dict) -> None:
        """Write run.json as a whole; it says so where the log ends before the run."""
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
    """Try to write into the nearest folder that there is.

    Raises:
        OSError: It cannot be written.
    """
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    with tempfile.TemporaryFile(dir=folder):
        pass


def lock(folder: Path) -> FileLock:
    """Lock a run's folder; the operating system releases it when the process ends, however that is.

    A process may lock it twice, and must release it as often.

    Raises:
        UserError: Another process has it.
    """
    found = FileLock((folder / LOCK).absolute(), is_singleton=True)
    try:
        found.acquire(timeout=0)
    except Timeout:
        raise UserError(f"{folder} belongs to a run that is still going on: wait for its end, or stop it") from None
    return found


def _next_folder(home: Path) -> Path:
    """Make the first free `<n>`; a run that starts at the same time takes the next."""
    home.mkdir(parents=True, exist_ok=True)
    number = 1 + max((int(path.name) for path in home.iterdir() if path.name.isdigit()), default=0)
    while True:
        try:
            (home / str(number)).mkdir()
            return home / str(number)
        except FileExistsError:
            number += 1
