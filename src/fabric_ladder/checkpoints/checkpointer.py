"""Checkpoints of a run, from which it resumes as if it had never stopped: when they are written, and what they hold."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
from torch import nn
from torch.optim import Optimizer

from fabric_ladder.checkpoints import store
from fabric_ladder.checkpoints.resume import PROGRESS, find_checkpoint, read_progress
from fabric_ladder.checkpoints.room import try_on_all
from fabric_ladder.checkpoints.save import read_state, write_state
from fabric_ladder.errors import refused
from fabric_ladder.runs.folder import CHECKPOINTS
from fabric_ladder.runs.metrics import Totals
from fabric_ladder.runs.run import Run


class State(Protocol):
    """What a checkpointer needs of the training's state, see `training/state.py`."""

    steps_per_epoch: int
    batch: int
    optimizer_steps: int

    def check(self) -> None:
        """Raise UserError if a loss or a gradient was not finite."""

    def describe(self) -> str:
        """Say where the training is, for people."""

    def state_dict(self) -> dict:
        """Return the position as plain values, the same on all ranks."""

    def rank_state_dict(self) -> dict:
        """Return this rank's sums and random numbers."""

    def load_state_dict(self, position: dict, ranks: list[dict], own: dict | None) -> None:
        """Go to a checkpoint's position."""


class Checkpointer:
    """Writes and reads the checkpoints of a run. All ranks must call all methods.

    Args:
        run: Its folder gets `checkpoints/`.
        model: Set up by Fabric.
        optimizer: Set up by Fabric, without any state yet.
        state: Where the training is.
        fingerprint: Of the data.
    """

    def __init__(self, run: Run, model: nn.Module, optimizer: Optimizer, state: State, fingerprint: str):
        self.run, self.model, self.optimizer, self.state = run, model, optimizer, state
        self.fabric, self.settings, self.fingerprint = run.fabric, run.settings, fingerprint
        self._found: Path | None = None
        self._progress: dict = {}

    def find(self) -> tuple[Path, dict] | None:
        """Find the checkpoint to resume from, or end the process if the run has finished already.

        Returns:
            The run's folder, and the run's own state in the checkpoint; None to start from the beginning.

        Raises:
            UserError: There is no such checkpoint, it is damaged, or of another run.
        """
        found = self.run.record.on_rank_zero(
            lambda: find_checkpoint(self.settings, self.fingerprint, self.fabric.world_size)
        )
        for note in found.notes:
            self.run.print(note, log=False)
        if found.finished:
            self.run.leave()
        if found.folder is None:
            return None
        self._found = found.folder
        self._progress = read_progress(found.folder)
        return found.folder.parent.parent, self._progress["run"]

    def restore(self) -> None:
        """Set model, optimizer and training state back to the checkpoint that `find` has found, if any."""
        folder, progress, rank = self._found, self._progress, self.fabric.global_rank
        if folder is None:
            return
        read_state(f"--resume {folder}", folder / "state", self.model, self.optimizer)
        saved, ranks = progress["ranks"], self.fabric.world_size
        numbers = [rank] if saved == ranks else range(saved) if rank == 0 else []
        with refused(f"--resume {folder} holds no state of a run"):
            self.fabric.strategy.precision.load_state_dict(progress["precision"])
            own = _read_rank(folder, rank) if rank < saved else None
            self.state.load_state_dict(progress["position"], [_read_rank(folder, number) for number in numbers], own)
        if saved != ranks:
            self.run.print(f"The checkpoint is of {saved} devices: dropout is drawn anew on {ranks}", log=False)

    def after_step(self) -> None:
        """Stop if that is requested, or write a checkpoint if one is due."""
        steps, state = self.settings.save_every, self.state
        if self.run.stop_request.made():
            self.stop()
        elif steps and state.optimizer_steps % steps == 0 and state.batch < state.steps_per_epoch:
            self.save()

    def after_epoch(self, validation: Totals) -> None:
        """Write the checkpoint of an epoch."""
        if self.settings.save_every:
            self.save(validation.loss)

    def save(self, validation_loss: float | None = None) -> bool:
        """Write a checkpoint; if that fails, say so and let the run go on.

        Raises:
            UserError: A loss or a gradient was not finite: the weights may be spoilt, and the checkpoint before stays.
        """
        self.state.check()
        with self.run.throughput.excluded():
            progress = {
                "position": self.state.state_dict(),
                "settings": self.run.record.values["settings"],
                "fingerprint": self.fingerprint,
                "ranks": self.fabric.world_size,
                "precision": self.fabric.strategy.precision.state_dict(),
                "run": self.run.state_dict(),
            }
            name = f"{self.state.optimizer_steps:09d}{'' if validation_loss is None else '-validated'}"
            home = Path(self.fabric.broadcast(self.run.folder)) / CHECKPOINTS
            part, first = store.unfinished_folder(home, name), self.fabric.global_rank == 0
            problem = (
                self._try(lambda: first and store.make_empty(part))
                or self._try(lambda: self._write_rank(part))
                or try_on_all(
                    self.fabric,
                    lambda: write_state(part / "state", self.model, self.optimizer, self.fabric.global_rank),
                )
                or self._try(lambda: first and self._finish(part, progress, validation_loss))
            )
        if problem:
            self._try(lambda: first and shutil.rmtree(part, ignore_errors=True))
            step = self.state.optimizer_steps
            self.run.print(f"No checkpoint after step {step}: {problem}; the one before stays", log=False)
        return not problem

    def stop(self) -> None:
        """Write a checkpoint, say how to resume, and end the process."""
        self.run.stop(self.state.describe() if self.save() else None)

    def finish(self) -> None:
        """Remove what only served to resume: `save_every` asks for checkpoints that stay."""
        if self.run.folder and (home := self.run.folder / CHECKPOINTS).exists():
            store.remove_unfinished(home)
            if not self.settings.save_every:
                store.remove_all(home)

    def _finish(self, part: Path, progress: dict, validation_loss: float | None) -> None:
        (part / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
        best = store.prune(store.finish(part, validation_loss), self.settings.keep)
        self.run.record.add(best_checkpoint=best and best.relative_to(part.parent.parent).as_posix())

    def _write_rank(self, part: Path) -> None:
        buffer = io.BytesIO()  # written to a full disk, torch.save would not say so
        torch.save(self.state.rank_state_dict(), buffer)
        (part / f"rank-{self.fabric.global_rank}.pt").write_bytes(buffer.getvalue())

    def _try(self, action: Callable[[], object]) -> str | None:
        return try_on_all(self.fabric, action)


def _read_rank(folder: Path, rank: int) -> dict:
    with refused(f"--resume {folder}: rank-{rank}.pt is none of ours"):
        return torch.load(folder / f"rank-{rank}.pt", weights_only=True)
