"""The files of a run, written by rank 0: log.txt with its printed lines, metrics.csv and run.json."""

import dataclasses
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from time import strftime
from typing import TypeVar

from lightning import Fabric

from fabric_ladder.distributed.launch import command_line
from fabric_ladder.environment import code_commit, describe_hardware, describe_versions, write_whole
from fabric_ladder.errors import UserError
from fabric_ladder.runs.folder import check_writable, lock, next_folder, unlock, writing
from fabric_ladder.runs.loggers import RunLog
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import used

T = TypeVar("T")


class RunRecord:
    """The printed lines and the figures of a run.

    No file is written before `open`. So a run that is refused for bad input leaves nothing behind. A disk that becomes
    full later ends the log and not the run; checkpoints hold all lines and rows.

    Attributes:
        values: The content of run.json.
        folder: `runs/<script>/<n>` on rank 0, once it is open.

    Raises:
        UserError: `runs_dir` cannot be written.
    """

    def __init__(self, fabric: Fabric, settings: Settings):
        self.fabric = fabric
        self.settings = settings
        self.folder: Path | None = None
        self._lines: list[str] = []  # of log.txt
        self._rows: list[tuple[int, int, dict]] = []  # of metrics.csv: optimizer step, samples and figures
        self._log_lost = False  # log.txt and metrics.csv end before the run does
        packages = dict.fromkeys(name for technique in used(settings) for name in technique.packages(settings))
        self.values = {
            "format": 1,
            "status": "running",
            "begun": strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": command_line(Path(sys.argv[0]), sys.argv[1:]),
            "settings": {key: value for key, value in dataclasses.asdict(settings).items() if key != "notices"},
            "commit": None if fabric.global_rank else code_commit(),  # rank 0 alone writes the record
            "versions": describe_versions(*packages),
            "hardware": describe_hardware(fabric.device),
            "ranks": fabric.world_size,
            "results": {"epochs": []},
        }
        self._given = f"--runs_dir {settings.runs_dir}"
        self.on_rank_zero(lambda: check_writable(Path(settings.runs_dir), self._given))

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
        try:
            print(line, flush=True)
        except OSError as error:
            self._stop_printing(error)
        if log:
            self._lines.append(line)
            self._write(lambda: self._append(line))

    def add_row(self, step: int, samples: int, **figures: float) -> None:
        """Add a row to metrics.csv and to live curves."""
        if self.folder:
            self._rows.append((step, samples, figures))
            self._write(lambda: self._log.write(step, samples, figures, in_file=not self._log_lost))

    def add_results(self, **figures: object) -> None:
        """Add figures to the results; `write` writes them."""
        self.values["results"] |= figures

    def add(self, **values: object) -> None:
        """Add values to run.json; `write` writes them."""
        self.values |= values

    def write(self) -> None:
        """Write run.json."""
        self._write(self._write_values)

    def state_dict(self) -> dict:
        """Return lines and figures as plain values, to resume from."""
        return {"record": self.values, "lines": self._lines, "rows": self._rows}

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on all ranks.

        Raises:
            UserError: `action` raised it, or an OSError, on rank 0. It is raised on all ranks, so that none waits.
        """
        result = problem = None
        if self.fabric.global_rank == 0:
            try:
                result = action()
            except UserError as error:
                problem = str(error)
            except OSError as error:
                problem = f"cannot use {error.filename or 'a file'} ({error.strerror or error})"
        result, problem = self.fabric.broadcast((result, problem))
        if problem:
            raise UserError(problem)
        return result

    def close(self) -> None:
        """Close and release the folder."""
        if self.folder and self._lock.is_locked:
            self._log.close()
            unlock(self._lock)

    def _open(self, folder: Path | None, state: dict | None) -> None:
        if folder:
            self._lines = state["lines"]
            self._rows = [tuple(row) for row in state["rows"]]
            part = {name: self.values[name] for name in ("begun", "command", "commit", "versions", "hardware", "ranks")}
            resumed = [*state["record"].get("resumed", []), part | {"samples": state["samples"]}]
            # a resumed run may change some settings, for example --patience, and with them the predicted memory
            newest = {name: self.values[name] for name in ("settings", "attention_kernels") if name in self.values}
            before = state["record"]["results"]
            kept = {name: value for name, value in before.items() if not name.startswith("predicted")}
            results = kept | self.values["results"] | {"epochs": before["epochs"]}
            self.values = state["record"] | newest | {"results": results, "resumed": resumed}
        with writing(self._given):
            path = folder or next_folder(Path(self.settings.runs_dir) / self.settings.name)
            self._lock = lock(path)
            try:
                write_whole(path / "log.txt", "".join(f"{line}\n" for line in self._lines))
                self._log = RunLog(path, self.settings, self._rows)
                self.folder = path
                self._write_values()
            except BaseException:
                unlock(self._lock)
                if folder is None:
                    shutil.rmtree(path, ignore_errors=True)
                raise

    def _stop_printing(self, error: OSError) -> None:
        """Go on without standard output, which is on a full disk or a closed pipe."""
        lines = f"{self.folder / 'log.txt'} has all lines" if self.folder else "log.txt will have all lines"
        print(f"Cannot print any more ({error.strerror}); the run goes on, and {lines}", file=sys.stderr, flush=True)
        # lines that are left in the buffer go there too; otherwise Python would fail again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())

    def _append(self, line: str) -> None:
        if not self._log_lost:
            with open(self.folder / "log.txt", "a", encoding="utf-8") as log:
                log.write(f"{line}\n")

    def _write_values(self) -> None:
        values = self.values | ({"log_lost": True} if self._log_lost else {})
        write_whole(self.folder / "run.json", json.dumps(values, indent=2, ensure_ascii=False) + "\n")

    def _write(self, action: Callable[[], None]) -> None:
        """Write into the run's folder if it is open. If that fails, print it once, and go on without the log."""
        if self.folder is None:
            return
        try:
            action()
        except OSError as error:
            first = not self._log_lost
            self._log_lost = True  # the last line may be incomplete
            if first:
                reason = f"cannot write into {self.folder} ({error.strerror})"
                print(f"No more log: {reason}; the run goes on without, and comparisons leave it out", flush=True)
