"""Going on with a run as if it had never stopped: what a checkpoint holds, when one is made, and which one is taken."""

import dataclasses
import io
import json
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError

import numpy as np
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric_ladder import store
from fabric_ladder.checkpoint import read_state, write_state
from fabric_ladder.errors import UserError, notebook_shell
from fabric_ladder.folder import CHECKPOINTS
from fabric_ladder.lookup import FINISHED, PROGRESS, find_checkpoint
from fabric_ladder.metrics import Meter, Totals
from fabric_ladder.reporting import Run
from fabric_ladder.stopping import leave


@dataclass
class Place:
    """Where a run is.

    Attributes:
        epoch: Epochs done, with their validation.
        batch: Optimizer steps of the next epoch done; all of them if only its validation is left.
        seen: Samples of these.
        totals: Their losses and right predictions, up to the last printed line.
        trained: Whether only the test is left.
        skipped: Effective batches left out so far, in all epochs, because of numbers that are not finite.
        fitted: The `micro_batch_tokens` that `auto` has chosen.
    """

    epoch: int = 0
    batch: int = 0
    seen: int = 0
    totals: Totals = field(default_factory=lambda: Totals(0.0, 0, 0))
    trained: bool = False
    skipped: int = 0
    fitted: int | None = None


class Keeper:
    """Writes and reads the checkpoints of a run. All ranks must call all methods.

    Args:
        run: Its folder gets `checkpoints/`.
        model: Set up by Fabric.
        optimizer: Set up by Fabric, without any state yet.
        train_loader: Knows the data.
    """

    def __init__(self, run: Run, model: nn.Module, optimizer: Optimizer, train_loader: DataLoader):
        self.run, self.model, self.optimizer, self.loader = run, model, optimizer, train_loader
        self.fabric, self.settings = run.fabric, run.settings
        self.meter, self.place = Meter(run.fabric), Place()
        self._random: dict | None = None

    def begin(self) -> None:
        """Start the run, or set all back to where a checkpoint was made; then `restore_random` must follow.

        Raises:
            UserError: There is no such checkpoint, it is damaged, or of another run.
        """
        settings, rank = self.settings, self.fabric.global_rank
        fingerprint = self.loader.dataset.fingerprint
        folder, notes = self.run.on_rank_zero(lambda: find_checkpoint(settings, fingerprint, self.fabric.world_size))
        for note in notes:
            self.run.print(note, log=False)
        if folder is None:
            self.run.start(self.model, self.loader)
            return
        if folder == FINISHED:
            self.run.leave_finished()
        progress = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
        self.run.start(self.model, self.loader, (folder.parent.parent, progress["run"]))
        read_state(f"--resume {folder}", folder / "state", self.model, self.optimizer)
        self.fabric.strategy.precision.load_state_dict(progress["precision"])
        self.place = Place(**progress["place"] | {"totals": Totals(*progress["place"]["totals"])})
        saved, ranks = progress["ranks"], self.fabric.world_size
        mine = [rank] if saved == ranks else range(saved) if rank == 0 else []
        for number in mine:
            self.meter.add_state(_read_rank(folder, number)["meter"])
        if rank < saved:
            self._random = _read_rank(folder, rank)["random"]
        if saved != ranks:
            self.run.print(f"The checkpoint is of {saved} devices: dropout is drawn anew on {ranks}", log=False)

    def restore_random(self) -> None:
        """Set the random numbers back; making a loader's iterator has drawn some."""
        if self._random:
            set_random_state(self._random, self.fabric.device)
            self._random = None

    def mark(self) -> None:
        """Remember what a stop within the next effective batch, or the validation, must be set back to."""
        self._mark = random_state(self.fabric.device), len(self.meter.losses)

    def set_back(self) -> None:
        """Forget the micro-batches since `mark`."""
        self._random, count = self._mark
        self.restore_random()
        self.optimizer.zero_grad()
        self.meter.keep_first(count)

    def after_step(self) -> None:
        """Stop if that is asked for, or write a checkpoint if one is due."""
        steps = self.settings.save_every
        if self.run.stopper.asked():
            self.leave()
        elif steps and self.done % steps == 0 and self.place.batch < len(self.loader):
            self.save()

    def after_epoch(self, validation: Totals) -> None:
        """Go to the next epoch, and write the checkpoint of the last one."""
        self.place = Place(self.place.epoch + 1, skipped=self.place.skipped, fitted=self.place.fitted)
        if self.settings.save_every:
            self.save(validation.loss)

    @property
    def done(self) -> int:
        """Optimizer steps so far."""
        return self.place.epoch * len(self.loader) + self.place.batch

    def save(self, validation_loss: float | None = None) -> bool:
        """Write a checkpoint; if that fails, say so and let the run go on."""
        with self.run.pace.beside():
            progress = {
                "place": dataclasses.asdict(self.place),
                "settings": self.run.record["settings"],
                "fingerprint": self.loader.dataset.fingerprint,
                "ranks": self.fabric.world_size,
                "precision": self.fabric.strategy.precision.state_dict(),
                "run": self.run.state(),
            }
            name = f"{self.done:09d}{'' if validation_loss is None else '-validated'}"
            home = Path(self.fabric.broadcast(self.run.folder)) / CHECKPOINTS
            part, first = store.part_of(home, name), self.fabric.global_rank == 0
            problem = (
                self._try(lambda: first and store.begin(part))
                or self._try(lambda: self._write_rank(part))
                or self._try(lambda: write_state(part / "state", self.model, self.optimizer, self.fabric.global_rank))
                or self._try(lambda: first and self._finish(part, progress, validation_loss))
            )
        if problem:
            self._try(lambda: first and shutil.rmtree(part, ignore_errors=True))
            self.run.print(f"No checkpoint after step {self.done}: {problem}; the one before stays", log=False)
        return not problem

    def leave(self) -> None:
        """Write a checkpoint, say how to go on, and end the process."""
        saved, reason = self.save(), self.run.stopper.reason
        where = f"in epoch {self.place.epoch + 1} after batch {self.place.batch}"
        command = self.run.record["command"].replace(" --resume auto", "") + " --resume auto"
        how = 'parse_settings(resume="auto", …)' if notebook_shell() else command
        self.run.record["status"] = "stopped"
        self.run.write_record()
        self.run.print(
            f"Stopped by {reason} {where}; go on with: {how}" if saved else f"Stopped by {reason}", log=False
        )
        self.run.close()
        leave(reason, self.fabric.global_rank)

    def end(self) -> None:
        """Remove what only served to go on: `save_every` asks for checkpoints that stay."""
        if self.run.folder and (home := self.run.folder / CHECKPOINTS).exists():
            store.remove_unfinished(home)
            if not self.settings.save_every:
                store.remove_all(home)

    def _finish(self, part: Path, progress: dict, validation_loss: float | None) -> None:
        (part / PROGRESS).write_text(json.dumps(progress), encoding="utf-8")
        store.finish(part, validation_loss)
        best = store.prune(part.parent, self.settings.keep)
        self.run.record["best_checkpoint"] = best and best.relative_to(part.parent.parent).as_posix()

    def _write_rank(self, part: Path) -> None:
        mine = {"random": random_state(self.fabric.device), "meter": self.meter.state()}
        buffer = io.BytesIO()  # written to a full disk, torch.save would not say so
        torch.save(mine, buffer)
        (part / f"rank-{self.fabric.global_rank}.pt").write_bytes(buffer.getvalue())

    def _try(self, action) -> str | None:
        """Run `action`; return why it failed, on whichever rank."""
        problem = None
        try:
            action()
        except dcp.api.CheckpointException as error:
            problem = _brief(next(iter(error.failures.values()))[0])
        except (OSError, RuntimeError) as error:
            problem = _brief(error)
        flag = torch.tensor(float(problem is not None), device=self.fabric.device)
        if self.fabric.all_reduce(flag, reduce_op="max"):
            return problem or "another rank could not write"
        return None


def _read_rank(folder: Path, rank: int) -> dict:
    try:
        return torch.load(folder / f"rank-{rank}.pt", weights_only=True)
    except (OSError, RuntimeError, UnpicklingError) as error:
        raise UserError(f"--resume {folder}: rank-{rank}.pt is none of ours ({_brief(error)})") from error


def random_state(device: torch.device) -> dict:
    """Return the states of all random numbers that a run draws: PyTorch's, NumPy's and Python's."""
    kind, keys, *rest = np.random.get_state()
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = [kind, torch.from_numpy(keys.astype(np.int64)), *rest]
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict, device: torch.device) -> None:
    """Set all random numbers back to what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _brief(error: BaseException) -> str:
    text = getattr(error, "strerror", None) or str(error)
    if "inline_container" in text:  # where PyTorch writes files
        text = "the file system took a part of it only; is the disk full?"
    return " ".join(text.split())[:160]
