"""PyTorch's history of CUDA memory: which line allocated what, as a file for the viewer at pytorch.org/memory_viz."""

from pathlib import Path

import torch
from lightning import Fabric

from fabric_ladder.errors import UserError, first_line
from fabric_ladder.runs.folder import check_writable
from fabric_ladder.settings import Settings

STEPS = 3  # recorded optimizer steps; the first one makes the optimizer's state
MOST = 100_000  # newest allocations and frees that are kept, about 1 KB of CPU memory each


class MemoryHistory:
    """Records CUDA memory from the start of a run until its third optimizer step or its end, and writes the file.

    Raises:
        UserError: `file` is given, and this allocator keeps no history.
    """

    def __init__(self, fabric: Fabric, file: str | None):
        self._steps = 0
        self._file = Path(file) if file else None
        if self._file and fabric.global_rank:
            self._file = self._file.with_stem(f"{self._file.stem}_rank{fabric.global_rank}")
        try:
            if self._file:
                torch.cuda.memory._record_memory_history(stacks="python", max_entries=MOST)
        except RuntimeError as error:  # for example with PYTORCH_ALLOC_CONF=backend:cudaMallocAsync
            raise UserError(f"--memory_snapshot {file}: {first_line(error)}; leave it out") from error

    def end_step(self) -> str | None:
        """Count an optimizer step, and write the file after the third one; return a line about it."""
        self._steps += 1
        return self.write() if self._steps == STEPS else None

    def write(self) -> str | None:
        """Write the file, unless it is written, and stop recording; return a line about it."""
        file, self._file = self._file, None
        if not file:
            return None
        try:
            torch.cuda.memory._dump_snapshot(str(file))
            return f"Wrote {file}; open it at pytorch.org/memory_viz"
        except (OSError, RuntimeError, MemoryError) as error:
            return f"cannot write --memory_snapshot {file} ({first_line(error)}); the run goes on without"
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)


def check_snapshot(settings: Settings) -> None:
    """Refuse a snapshot on a device without a history of memory, and a file that cannot be written.

    Raises:
        UserError: The reason and the remedy.
    """
    if settings.memory_snapshot is None:
        return
    option, path = f"--memory_snapshot {settings.memory_snapshot}", Path(settings.memory_snapshot)
    if settings.accelerator != "cuda":
        raise UserError(f"{option}: PyTorch records memory on CUDA GPUs, not on {settings.accelerator}; leave it out")
    if path.is_dir():
        raise UserError(f"{option} is a folder; name a file in it, for example {path / 'memory_snapshot.pickle'}")
    check_writable(path.parent, option)
