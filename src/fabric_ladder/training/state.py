"""Where a training is: its position, its sums since the last printed line, and the random numbers of this rank."""

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import torch
from lightning import Fabric
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric_ladder.checkpoints.checkpointer import Checkpointer
from fabric_ladder.data.loaders import EffectiveBatch
from fabric_ladder.distributed.launch import release_ranks
from fabric_ladder.distributed.preemption import StopRequest
from fabric_ladder.runs.metrics import Meter, Score, Step
from fabric_ladder.runs.run import Run
from fabric_ladder.training.graphs import Graphs

SAVED = ("epoch batch samples trained micro_batch_tokens samples_hash validated best best_step not_better").split()


@dataclass
class TrainingState:
    """The position of a training, which a checkpoint holds, and the random numbers before the current step.

    Attributes:
        fabric: For the device and the ranks.
        steps_per_epoch: Optimizer steps of an epoch.
        epoch: Finished epochs, including their validation.
        batch: Finished optimizer steps of the current epoch; `steps_per_epoch` if only its validation is left.
        samples: Samples of the current epoch's finished steps.
        score: Losses and right predictions of these samples, up to the last printed line.
        trained: Whether only the test is left.
        micro_batch_tokens: The number that `micro_batch_tokens` `auto` has found to fit.
        samples_hash: Hash of the samples of all effective batches so far: equal for an equal sample order.
        validated: Optimizer steps before the last validation.
        best: The best validation's `best_metric`; None before the first validation.
        best_step: Optimizer steps before the best validation.
        not_better: Validations since the best one.
        meter: Losses since the last printed line.
    """

    fabric: Fabric
    steps_per_epoch: int
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    score: Score = field(default_factory=Score)
    trained: bool = False
    micro_batch_tokens: int | None = None
    samples_hash: str = ""
    validated: int = 0
    best: float | None = None
    best_step: int = 0
    not_better: int = 0
    meter: Meter = field(init=False)

    def __post_init__(self):
        self.meter = Meter(self.fabric)
        self._random_before_step: dict | None = None
        self._random_of_checkpoint: dict | None = None

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps so far."""
        return self.epoch * self.steps_per_epoch + self.batch

    def step(self, samples: list[int]) -> Step:
        """Return the next optimizer step, with its samples, for messages."""
        return f"epoch {self.epoch + 1}, batch {self.batch + 1}", samples

    def advance(self, batch: EffectiveBatch) -> None:
        """Count a finished optimizer step."""
        self.batch += 1
        self.samples += len(batch.samples)
        content = self.samples_hash.encode() + np.asarray(batch.samples, "<i8").tobytes()
        self.samples_hash = hashlib.sha256(content).hexdigest()[:16]

    def collect(self) -> Score:
        """Return the score since the last printed line, over all ranks, and add it to the epoch's."""
        score = self.meter.collect()
        self.score += score
        return score

    def judge(self, score: Score, metric: str) -> None:
        """Count a validation, and remember it if it is the best so far; of equal ones the first is the best."""
        value = getattr(score, metric)
        self.validated = self.optimizer_steps
        self.not_better += 1
        if self.best is None or (value < self.best if metric == "loss" else value > self.best):
            self.best = value
            self.best_step = self.optimizer_steps
            self.not_better = 0

    @property
    def best_place(self) -> str:
        """The position of the best validation in words."""
        epochs, batches = divmod(self.best_step - 1, self.steps_per_epoch)
        return f"epoch {epochs + 1}, batch {batches + 1}"

    def describe(self) -> str:
        """Return the position in words."""
        if self.batch:
            return f"in epoch {self.epoch + 1} after batch {self.batch}"
        return f"after epoch {self.epoch}" if self.epoch else "before the first batch"

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch += 1
        self.batch = 0
        self.samples = 0
        self.score = Score()

    def iterate(self, loader: DataLoader) -> Iterator[EffectiveBatch]:
        """Return the rest of the epoch, with the random numbers of a loaded checkpoint.

        An iterator draws a random number when it is made. A checkpoint between two epochs was written before that, and
        a checkpoint within an epoch after that.
        """
        if not self.batch:
            self._restore_random()
        self.begin_step()
        batches = iter(loader)
        self._restore_random()
        return batches

    def begin_step(self) -> None:
        """Remember the random numbers, in case the run stops within the next effective batch or validation."""
        self._random_before_step = random_state(self.fabric.device)

    def undo_step(self) -> None:
        """Set random numbers and losses back to `begin_step`."""
        set_random_state(self._random_before_step, self.fabric.device)
        self.meter.discard()

    def _restore_random(self) -> None:
        if self._random_of_checkpoint:
            set_random_state(self._random_of_checkpoint, self.fabric.device)
            self._random_of_checkpoint = None

    def state_dict(self) -> dict:
        """Return the position as plain values, the same on all ranks."""
        return {name: getattr(self, name) for name in SAVED} | {"totals": list(self.score)}

    def rank_state_dict(self) -> dict:
        """Return this rank's sums and random numbers, as tensors and plain values."""
        return {"meter": self.meter.state_dict(), "random": random_state(self.fabric.device)}

    def load_state_dict(self, position: dict, ranks: list[dict], own: dict | None) -> None:
        """Go to a checkpoint's position.

        Args:
            position: From `state_dict`.
            ranks: From `rank_state_dict` of each rank whose sums this rank continues.
            own: From `rank_state_dict` of the rank whose random numbers it continues; None: keep the current ones.
        """
        for name in SAVED:
            setattr(self, name, position[name])
        self.score = Score(*position["totals"])
        for state in ranks:
            self.meter.add_state_dict(state["meter"])
        self._random_of_checkpoint = own and own["random"]


class Training:
    """Everything that an optimizer step needs, and what ends a run; `train` makes it and `evaluate` takes it.

    Attributes:
        checkpointer: Writes and reads checkpoints.
        stop_request: Catches signals.
        graphs: Replay passes; None: without `cuda_graphs`, or on a device without graphs.
    """

    def __init__(
        self, run: Run, model: nn.Module, optimizer: Optimizer, train_loader: DataLoader, val_loader: DataLoader
    ):
        self.run = run
        self.fabric = run.fabric
        self.settings = run.settings
        self.model = model
        self.optimizer = optimizer
        self.train_loader = train_loader
        self.val_loader = val_loader
        self.state = TrainingState(run.fabric, len(train_loader))
        self.checkpointer = Checkpointer(run, model, optimizer, train_loader.dataset.fingerprint)
        self.stop_request = StopRequest(run.fabric.world_size)
        self.graphs = Graphs(run.fabric.device) if run.settings.replays else None

    @property
    def is_over(self) -> bool:
        """Whether no optimizer step follows."""
        state, patience = self.state, self.settings.patience
        impatient = patience is not None and state.not_better >= patience
        return state.trained or impatient or state.epoch == self.settings.epochs

    @property
    def validation_is_due(self) -> bool:
        """Whether a validation within the epoch comes before the next optimizer step."""
        state, every = self.state, self.settings.evaluate_every
        if not every or not 0 < state.batch < state.steps_per_epoch:
            return False
        return state.optimizer_steps % every == 0 and state.validated < state.optimizer_steps

    def __repr__(self) -> str:
        return f"Training({self.settings.name}, {self.state.optimizer_steps} optimizer steps)"

    def close(self) -> None:
        """Close the run's folder, restore the signal handlers and release the ranks. All ranks must call it."""
        self.stop_request.close()
        self.run.close()
        release_ranks(self.fabric)

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Close the folder and restore the signal handlers after an error in this block: a notebook goes on.

        A snapshot of GPU memory is written here, while the error's frames still hold their tensors.
        """
        try:
            yield
        except BaseException:
            self.stop_request.restore()
            self.run.close()
            raise


def random_state(device: torch.device) -> dict:
    """Return the states of all random generators that a run uses: PyTorch's, NumPy's and Python's."""
    name, keys, *rest = np.random.get_state()
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = [name, torch.from_numpy(keys.astype(np.int64)), *rest]
    if device.type in ("cuda", "mps"):
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict, device: torch.device) -> None:
    """Set all random generators to a result of `random_state`."""
    torch.set_rng_state(state["torch"])
    version, numbers, next_gauss = state["python"]
    random.setstate((version, tuple(numbers), next_gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)
