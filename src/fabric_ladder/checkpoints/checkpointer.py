"""Checkpoints of a run: when they are written, and their contents. A resumed run ends like an undisturbed one."""

import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer

from fabric_ladder.checkpoints import store
from fabric_ladder.checkpoints.disk import try_on_all
from fabric_ladder.checkpoints.resume import PROGRESS, Found, find_checkpoint
from fabric_ladder.checkpoints.save import read_state, write_state
from fabric_ladder.distributed.launch import release_ranks
from fabric_ladder.errors import refused
from fabric_ladder.runs.folder import CHECKPOINTS
from fabric_ladder.runs.run import Run


class Checkpointer:
    """Writes and reads the checkpoints of a run. All ranks must call all methods.

    Args:
        run: Its folder gets `checkpoints/`.
        model: Set up by Fabric.
        optimizer: Set up by Fabric, still without state.
        fingerprint: The fingerprint of the data.
    """

    def __init__(self, run: Run, model: nn.Module, optimizer: Optimizer, fingerprint: str):
        self.run = run
        self.model = model
        self.optimizer = optimizer
        self.fabric = run.fabric
        self.settings = run.settings
        self.fingerprint = fingerprint
        self._found = Found()

    def find(self) -> tuple[Path, dict] | None:
        """Find the checkpoint to resume from, or end the process if the run has finished already.

        Returns:
            The run's folder, and the run's state in the checkpoint; None to start from the beginning.

        Raises:
            UserError: The checkpoint does not exist, is damaged, or belongs to another run.
        """
        self._found = found = self.run.record.on_rank_zero(lambda: find_checkpoint(self.settings, self.fingerprint))
        for note in found.notes:
            self.run.print(note, log=False)
        if found.finished:
            release_ranks(self.fabric)
            raise SystemExit(0)
        return (found.folder.parent.parent, found.progress["run"]) if found.folder else None

    def count(self) -> int:
        """Return how many checkpoints of the run that `find` has found this start may remove."""
        found = self._found
        return len(store.list_steps(found.folder.parent)) - len(found.kept) if found.folder else 0

    def restore(self, load_state: Callable[[dict, list[dict], dict | None], None]) -> None:
        """Load model, optimizer and training state from the checkpoint that `find` has found, if any.

        Args:
            load_state: Sets the training state. It gets the saved position, the states of the ranks whose sums this
                rank continues, and the state whose random numbers it continues, or None to keep the current ones.
        """
        folder = self._found.folder
        if folder is None:
            return
        progress = self._found.progress
        rank = self.fabric.global_rank
        ranks = self.fabric.world_size
        saved_ranks = progress["ranks"]
        read_state(f"--resume {folder}", folder / "state", self.model, self.optimizer)
        numbers = [rank]
        if ranks != saved_ranks:  # rank 0 adds up the sums of all ranks
            numbers = range(saved_ranks) if rank == 0 else []
            self.run.print(f"The checkpoint is of {saved_ranks} devices: dropout on {ranks} will differ", log=False)
        with refused(f"--resume {folder}: cannot read the state of the run"):
            self.fabric.strategy.precision.load_state_dict(progress["precision"])
            own = _read_rank(folder, rank) if rank < saved_ranks else None
            load_state(progress["position"], [_read_rank(folder, number) for number in numbers], own)

    def save(self, step: int, position: dict, rank_state: dict, minimized: float | None = None) -> bool:
        """Write a checkpoint. After a failure, print the reason, keep the previous checkpoint and return False.

        Args:
            step: Optimizer steps so far.
            position: The position of the training as plain values, the same on all ranks.
            rank_state: This rank's sums and random numbers.
            minimized: The figure of the validation at this step, which the best checkpoint has lowest.
        """
        with self.run.throughput.excluded():
            progress = {
                "position": position,
                "settings": self.run.record.values["settings"],
                "fingerprint": self.fingerprint,
                "ranks": self.fabric.world_size,
                "precision": self.fabric.strategy.precision.state_dict(),
                "run": self.run.state_dict(),
            }
            stage = "trained" if position["trained"] else "" if minimized is None else "validated"
            part = store.unfinished_folder(Path(self.fabric.broadcast(self.run.folder)) / CHECKPOINTS, step, stage)
            rank = self.fabric.global_rank

            def write_rank():
                buffer = io.BytesIO()  # on a full disk, torch.save would raise no error
                torch.save(rank_state, buffer)
                (part / f"rank-{rank}.pt").write_bytes(buffer.getvalue())

            def finish():
                (part / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
                kept = self._found.kept
                best = store.prune(store.finish(part, minimized), self.settings.keep, kept)
                best = best if self.settings.save_every else store.find_best(kept)  # no others are left after the run
                self.run.record.add(best_checkpoint=best and best.relative_to(part.parent.parent).as_posix())
                self.run.record.write()

            problem = try_on_all(
                self.fabric,
                lambda: rank or store.make_empty(part),
                write_rank,
                lambda: write_state(part / "state", self.model, self.optimizer, rank),
                lambda: rank or finish(),
            )
        if problem:
            if not rank:
                shutil.rmtree(part, ignore_errors=True)
            self.run.print(f"No checkpoint after step {step}: {problem}; the previous one is kept", log=False)
        return not problem

    def read_best(self, step: int) -> bool:
        """Read model and optimizer of the checkpoint with the best validation; return False if it was not written.

        Args:
            step: Optimizer steps before the best validation.
        """
        folder = self.run.record.on_rank_zero(lambda: store.find_best(store.list_steps(self.run.folder / CHECKPOINTS)))
        if folder is None or store.step_of(folder) != step:
            return False
        read_state(f"--best_weights true: {folder}", folder / "state", self.model, self.optimizer)
        return True

    def finish(self) -> None:
        """Remove the checkpoints of stops and of the best validation; those of `save_every` stay."""
        if self.run.folder and (folder := self.run.folder / CHECKPOINTS).exists():
            store.remove_unfinished(folder)
            if not self.settings.save_every:
                store.remove_all(folder, self._found.kept)


def _read_rank(folder: Path, rank: int) -> dict:
    return torch.load(folder / f"rank-{rank}.pt", weights_only=True)
