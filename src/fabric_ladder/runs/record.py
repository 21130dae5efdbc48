"""What a run leaves behind: lines on stdout and in log.txt, rows in metrics.csv, and run.json; written by rank 0."""

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from time import strftime
from typing import TypeVar

from lightning import Fabric

from fabric_ladder.environment import describe_hardware, describe_versions
from fabric_ladder.errors import UserError
from fabric_ladder.runs.folder import RunFolder, check_writable
from fabric_ladder.settings import Settings

T = TypeVar("T")


class RunRecord:
    """The printed lines and the figures of a run.

    No file is written before `open`, so that a run refused for bad input leaves nothing behind.

    Attributes:
        values: What run.json holds.

    Raises:
        UserError: `runs_dir` cannot be written.
    """

    def __init__(self, fabric: Fabric, settings: Settings):
        self.fabric, self.settings = fabric, settings
        self._files: RunFolder | None = None
        self._unwritten: list[str] = []
        self.values = {
            "format": 1,
            "status": "running",
            "begun": strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": shlex.join([os.path.basename(sys.executable), *sys.argv]),
            "settings": {key: value for key, value in dataclasses.asdict(settings).items() if key != "notices"},
            "versions": describe_versions(*_more_packages(settings)),
            "hardware": describe_hardware(fabric.device),
            "ranks": fabric.world_size,
            "results": {"epochs": []},
        }
        self.on_rank_zero(lambda: check_writable(Path(settings.runs_dir)))

    @property
    def folder(self) -> Path | None:
        """`runs/<script>/<n>` on rank 0, once it is open."""
        return self._files.path if self._files else None

    def open(self, folder: Path | None = None, state: dict | None = None) -> None:
        """Open a new folder, or one to go on with, whose log has this run's first lines already.

        Args:
            folder: Of a run to go on with.
            state: Its `state_dict` so far.
        """
        self.on_rank_zero(lambda: self._open(folder, state))

    def print(self, line: str, log: bool = True) -> None:
        """Print a line on rank 0 and, unless it is of this start of the run alone, add it to log.txt."""
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
        """Add figures to the results, which `write` writes."""
        self.values["results"] |= figures

    def add(self, **values: object) -> None:
        """Add values to run.json, which `write` writes."""
        self.values |= values

    def write(self) -> None:
        """Write run.json."""
        if self._files:
            self._write(lambda: self._files.write_record(self.values))

    def state_dict(self) -> dict:
        """Return, as plain values, what a run needs to go on with its lines and figures."""
        lines, rows = (self._files.lines, self._files.rows) if self._files else ([], [])
        return {"record": self.values, "lines": lines, "rows": rows}

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return its result on all; if it fails, every rank says so and none waits."""
        result = problem = None
        if self.fabric.global_rank == 0:
            try:
                result = action()
            except OSError as error:
                problem = f"cannot write --runs_dir {self.settings.runs_dir} ({error.strerror}): choose another"
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

    def _open(self, folder: Path | None, state: dict | None) -> None:
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
        """Write into the run's folder; where that fails, say so once, and let the run go on without its log."""
        try:
            action()
        except OSError as error:
            first = not self._files.lost
            self._files.give_up()
            if first:
                reason = f"cannot write into {self.folder} ({error.strerror})"
                print(f"No more log: {reason}; the run goes on without, and comparisons leave it out", flush=True)


def _more_packages(settings: Settings) -> list[str]:
    bits = settings.quantization != "no" or settings.optimizer == "adam-8bit"
    used = {"deepspeed": settings.deepspeed, "peft": settings.lora, "bitsandbytes": bits}
    return [name for name, is_used in used.items() if is_used]
