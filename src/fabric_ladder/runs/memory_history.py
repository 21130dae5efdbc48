"""PyTorch's history of CUDA memory: which line allocated what, as a file for the viewer at pytorch.org/memory_viz."""

import pickle
from contextlib import suppress
from pathlib import Path

import torch
from lightning import Fabric

from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError, first_line, is_out_of_memory
from fabric_ladder.runs.folder import check_writable
from fabric_ladder.settings import Settings

RECORDED = ("cuda",)  # devices whose allocator keeps a history
STEPS = 3  # recorded optimizer steps; the first one makes the optimizer's state
MOST = 100_000  # newest allocations and frees that are kept, about 1 KB of CPU memory each
NAME = "memory_snapshot.pickle"


class MemoryHistory:
    """Records CUDA memory from the start of a run until its third optimizer step, and writes snapshots of it.

    A snapshot has all blocks of memory, the lines that allocated them, and the allocations and frees over time. An
    allocation takes 2 microseconds longer while it is recorded (PyTorch's documentation). For a model of short kernels
    this is up to a quarter of the time, so recording stops after a few steps. Later snapshots still have the blocks,
    and the lines that allocated weights and optimizer state.

    Args:
        fabric: Launched.
        file: Where to write a snapshot after the third step; None: nowhere. Ranks above 0 add their number.

    Attributes:
        folder: The run's folder on all ranks, for a snapshot when memory runs out.
        recording: Whether allocations are recorded now.

    Raises:
        UserError: `file` is given, and this allocator keeps no history.
    """

    def __init__(self, fabric: Fabric, file: str | None = None):
        self.folder: Path | None = None
        self._suffix = f"_rank{fabric.global_rank}" if fabric.global_rank else ""
        self._file = Path(file) if file else None
        self._steps = 0
        self._on_device = fabric.device.type in RECORDED
        self.recording = self._on_device and self._begin()

    def end_step(self) -> str | None:
        """Count an optimizer step. After the third one write `file` and stop; return a line about the file."""
        if not self.recording:
            return None
        self._steps += 1
        if self._steps < STEPS:
            return None
        line = None
        if self._file:
            try:
                line = f"Wrote {self._write(self._file)}; open it at pytorch.org/memory_viz"
            except OSError as error:
                line = f"cannot write --memory_snapshot {self._file} ({error.strerror}); the run goes on without"
        self.stop()
        return line

    def explain(self, error: BaseException) -> None:
        """Write a snapshot into the run's folder if GPU memory ran out, and add its path to the error.

        Nothing that fails here may hide the error.
        """
        if self._on_device and self.folder and is_out_of_memory(error):
            with suppress(Exception):
                error.memory_snapshot = self._write(self.folder / NAME)

    def missing(self) -> str | None:
        """Return a line about a `file` that was not written."""
        if self.recording and self._file:
            return f"no --memory_snapshot {self._file}: the run has ended before its optimizer step {STEPS}"
        return None

    def stop(self) -> None:
        """Stop recording, and forget the history."""
        if self.recording:
            torch.cuda.memory._record_memory_history(enabled=None)
            self.recording = False

    def _begin(self) -> bool:
        try:
            torch.cuda.memory._record_memory_history(context="alloc", stacks="python", max_entries=MOST)
        except RuntimeError as error:  # for example with PYTORCH_ALLOC_CONF=backend:cudaMallocAsync
            if self._file:
                raise UserError(f"--memory_snapshot {self._file}: {first_line(error)}; leave it out") from error
            return False
        return True

    def _write(self, path: Path) -> Path:
        path = path.with_stem(path.stem + self._suffix)
        write_whole(path, pickle.dumps(torch.cuda.memory._snapshot()))
        return path


def check_snapshot(settings: Settings) -> None:
    """Refuse a snapshot on a device without a history of memory, and a file that cannot be written.

    Raises:
        UserError: The reason and the remedy.
    """
    if settings.memory_snapshot is None:
        return
    option, path = f"--memory_snapshot {settings.memory_snapshot}", Path(settings.memory_snapshot)
    if settings.accelerator not in RECORDED:
        raise UserError(f"{option}: PyTorch records memory on CUDA GPUs, not on {settings.accelerator}; leave it out")
    if path.is_dir():
        raise UserError(f"{option} is a folder; name a file in it, for example {path / NAME}")
    check_writable(path.parent, option)
