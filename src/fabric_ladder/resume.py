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
from fabric_ladder.folder import CHECKPOINTS, lock
from fabric_ladder.metrics import Meter, Totals
from fabric_ladder.reporting import Run
from fabric_ladder.stopping import leave

PROGRESS = "progress.json"
# Settings that change no gradient but for rounding, and may differ between a run's parts.
FREE = frozenset(
    "micro_batch_size micro_batch_tokens eval_batch_tokens devices num_nodes threads num_workers log_every logger save "
    "runs_dir check_only resume save_every keep max_time cache_dir data_dir config on_nan nan_limit".split()
)


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
        with self.run.beside_training():
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


FINISHED = Path("finished")


def find_checkpoint(settings, fingerprint: str, ranks: int) -> tuple[Path | None, list[str]]:
    """Return the checkpoint to go on from (None: start anew; `FINISHED`: nothing is left to do), and what to print.

    Args:
        settings: `resume` is `no`, `auto`, the folder of a run, or of one of its checkpoints.
        fingerprint: Of the data.
        ranks: Processes of the run.

    Raises:
        UserError: There is no such checkpoint, it is damaged, or belongs to a run of other settings, or to one that is
            still going on.
    """
    if settings.resume == "no":
        return None, []
    wanted = Path(settings.resume)
    if settings.resume == "auto":
        folder = _newest_run(Path(settings.runs_dir) / settings.name)
        if folder is None:
            return None, ["--resume auto: there is no run to go on with; this one starts from the beginning"]
        record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
        if record["status"] == "finished":
            if _differences(record["settings"], settings):
                return None, []
            return FINISHED, [f"{folder} has finished: there is nothing to go on with (leave out --resume to run anew)"]
    elif (wanted / store.MANIFEST).exists():
        folder = wanted.absolute().parent.parent
    else:
        folder = wanted
    if not (folder / CHECKPOINTS).is_dir():
        raise UserError(
            f"--resume {settings.resume}: there is no checkpoint in {folder}; --resume auto finds the newest"
        )
    _release(folder)
    if (wanted / store.MANIFEST).exists():
        try:
            found, notes = store.check(wanted.absolute()).folder, []
        except (OSError, ValueError) as error:
            raise UserError(f"--resume {wanted} cannot be used: {error}; --resume auto finds a whole one") from error
    else:
        stored, notes = store.newest_whole(folder / CHECKPOINTS)
        if stored is None and settings.resume == "auto":
            return None, [*notes, f"{folder} has no whole checkpoint: this run starts from the beginning"]
        if stored is None:
            raise UserError(f"--resume {settings.resume}: no checkpoint is whole: {'; '.join(notes)}")
        found = stored.folder
    store.remove_unfinished(folder / CHECKPOINTS)
    progress = json.loads((found / PROGRESS).read_text(encoding="utf-8"))
    differences = _differences(progress["settings"], settings)
    if differences:
        raise UserError(
            f"--resume: {folder} was made with {'; '.join(differences)}: set them so, or leave out --resume"
        )
    if progress["fingerprint"] != fingerprint:
        raise UserError(f"--resume: {folder} was trained on other data: leave out --resume to start anew")
    if settings.deepspeed and progress["ranks"] != ranks:
        raise UserError(f"--resume: DeepSpeed goes on with as many GPUs as before, {progress['ranks']}, not {ranks}")
    return found, [*notes, f"Resumed from {found}"]


def _newest_run(home: Path) -> Path | None:
    """Return the newest run that has finished or has a checkpoint."""
    folders = sorted((path for path in home.glob("*") if path.name.isdigit()), key=lambda path: -int(path.name))
    for folder in folders:
        try:
            status = json.loads((folder / "run.json").read_text(encoding="utf-8"))["status"]
        except (OSError, ValueError, LookupError, TypeError):
            continue
        if status == "finished" or any((folder / CHECKPOINTS).glob("step-*")):
            return folder
    return None


def _differences(saved: dict, settings) -> list[str]:
    """Name the settings that would make another run of it."""
    mine = json.loads(json.dumps(dataclasses.asdict(settings)))
    names = (saved.keys() | mine.keys()) - FREE - {"notices"}
    return [
        f"--{name} {saved.get(name)}, not {mine.get(name)}"
        for name in sorted(names)
        if saved.get(name) != mine.get(name)
    ]


def _release(folder: Path) -> None:
    """Refuse a run that is still going on."""
    taken = lock(folder)
    taken.release()


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
