"""What a run leaves behind, written by rank 0: lines on stdout and in log.txt, rows in metrics.csv, and run.json."""

import dataclasses
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import strftime
from typing import TypeVar

from lightning import Fabric

from fabric_ladder.distributed.launch import command_line
from fabric_ladder.environment import describe_hardware, describe_versions
from fabric_ladder.errors import UserError
from fabric_ladder.runs.folder import RunFolder, check_writable
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import used

T = TypeVar("T")


class RunRecord:
    """The printed lines and the figures of a run.

    No file is written before `open`. So a run that is refused for bad input leaves nothing behind.

    Attributes:
        values: The content of run.json.

    Raises:
        UserError: `runs_dir` cannot be written.
    """

    def __init__(self, fabric: Fabric, settings: Settings):
        self.fabric = fabric
        self.settings = settings
        self._files: RunFolder | None = None
        self._unwritten: list[str] = []
        packages = dict.fromkeys(name for technique in used(settings) for name in technique.packages(settings))
        self.values = {
            "format": 1,
            "status": "running",
            "begun": strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": command_line(Path(sys.argv[0]), sys.argv[1:]),
            "settings": {key: value for key, value in dataclasses.asdict(settings).items() if key != "notices"},
            "versions": describe_versions(*packages),
            "hardware": describe_hardware(fabric.device),
            "ranks": fabric.world_size,
            "results": {"epochs": []},
        }
        self.on_rank_zero(self._check_writable)

    @property
    def folder(self) -> Path | None:
        """`runs/<script>/<n>` on rank 0, once it is open."""
        return self._files.path if self._files else None

    def open(self, folder: Path | None = None, state: dict | None = None) -> None:
        """Open a new folder, or the folder of a resumed run, whose log has this run's first lines already.

        Args:
            folder: The folder of the resumed run.
            state: Its saved `state_dict`.
        """
        self.on_rank_zero(lambda: self._open(folder, state))

    def print(self, line: str, log: bool = True) -> None:
        """Print a line on rank 0. `log` also adds it to log.txt; leave it out for lines about this start only."""
        if self.fabric.global_rank:
            return
        print(line, flush=True)
        if log:
            self._unwritten.append(line)
        if self._files and self._unwritten:
            lines, self._unwritten = self._unwritten, []
            self._write(lambda: self._files.append(lines))

    def add_row(self, step: int, samples: int, **figures: float) -> None:
        """Add a row to metrics.csv and to live curves."""
        if self._files:
            self._write(lambda: self._files.add_row(step, samples, **figures))

    def add_results(self, **figures: object) -> None:
        """Add figures to the results; `write` writes them."""
        self.values["results"] |= figures

    def add(self, **values: object) -> None:
        """Add values to run.json; `write` writes them."""
        self.values |= values

    def write(self) -> None:
        """Write run.json."""
        if self._files:
            self._write(lambda: self._files.write_record(self.values))

    def state_dict(self) -> dict:
        """Return lines and figures as plain values, to resume from."""
        lines, rows = (self._files.lines, self._files.rows) if self._files else ([], [])
        return {"record": self.values, "lines": lines, "rows": rows}

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on all ranks.

        Raises:
            UserError: `action` raised it, or an OSError, on rank 0. It is raised on all ranks, so that none waits.
        """
        result = problem = None
        if self.fabric.global_rank == 0:
            try:
                result = action()
            except OSError as error:
                problem = f"cannot use {error.filename or 'a file'} ({error.strerror or error})"
            except UserError as error:
                problem = str(error)
        result, problem = self.fabric.broadcast((result, problem))
        if problem:
            raise UserError(problem)
        return result

    def close(self) -> None:
        """Close the folder."""
        if self._files:
            self._files.close()

    def _check_writable(self) -> None:
        with self._writing():
            check_writable(Path(self.settings.runs_dir))

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Turn an OSError into a UserError about `runs_dir`."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise UserError(f"cannot write --runs_dir {self.settings.runs_dir} ({reason}): choose another") from error

    def _open(self, folder: Path | None, state: dict | None) -> None:
        with self._writing():
            self._open_files(folder, state)

    def _open_files(self, folder: Path | None, state: dict | None) -> None:
        if folder is None:
            self._files = RunFolder(self.settings)
        else:
            self._files = RunFolder(self.settings, folder, state["lines"], state["rows"])
            self._unwritten.clear()
            part = {name: self.values[name] for name in ("begun", "command", "versions", "hardware", "ranks")}
            resumed = [*state["record"].get("resumed", []), part | {"samples": state["samples"]}]
            self.values = state["record"] | {"resumed": resumed}
        self._files.write_record(self.values)

    def _write(self, action: Callable[[], None]) -> None:
        """Write into the run's folder. If that fails, print it once, and let the run go on without its log."""
        try:
            action()
        except OSError as error:
            first = not self._files.lost
            self._files.give_up()
            if first:
                reason = f"cannot write into {self.folder} ({error.strerror})"
                print(f"No more log: {reason}; the run goes on without, and comparisons leave it out", flush=True)
