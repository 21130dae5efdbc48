"""Where a training is: its position, its sums since the last printed line, and the random numbers of this rank."""

import hashlib
import random
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from lightning import Fabric
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric_ladder.runs.metrics import Meter, Step, Totals
from fabric_ladder.runs.run import Run

NOTHING = Totals(0.0, 0, 0)
SAVED = ("epoch", "batch", "samples", "trained", "skipped", "micro_batch_tokens", "samples_hash")


@dataclass
class TrainingState:
    """The position of a training, which a checkpoint holds, and what a stop within a step is set back to.

    Attributes:
        fabric: Of the run.
        steps_per_epoch: Optimizer steps of an epoch.
        epoch: Epochs done, with their validation.
        batch: Optimizer steps of the next epoch done; all of them if only its validation is left.
        samples: Samples of these.
        totals: Their losses and right predictions, up to the last printed line.
        trained: Whether only the test is left.
        skipped: Effective batches left out so far, in all epochs, because of numbers that are not finite.
        micro_batch_tokens: What `micro_batch_tokens` `auto` has found to fit.
        samples_hash: Of the samples of every effective batch so far, in order: the same for the same sample order.
        meter: Losses since the last printed line.
    """

    fabric: Fabric
    steps_per_epoch: int
    epoch: int = 0
    batch: int = 0
    samples: int = 0
    totals: Totals = field(default_factory=lambda: NOTHING)
    trained: bool = False
    skipped: int = 0
    micro_batch_tokens: int | None = None
    samples_hash: str = ""
    meter: Meter = field(init=False)

    def __post_init__(self):
        self.meter = Meter(self.fabric)
        self._marked: dict | None = None
        self._random: dict | None = None  # from a checkpoint, to be set once the loader's iterator is made

    @property
    def optimizer_steps(self) -> int:
        """Optimizer steps so far."""
        return self.epoch * self.steps_per_epoch + self.batch

    def step(self, samples: list[int]) -> Step:
        """Name the next optimizer step, of these samples, for messages."""
        return f"epoch {self.epoch + 1}, batch {self.batch + 1}", samples

    def advance(self, samples: list[int]) -> None:
        """Count an optimizer step that is done."""
        self.batch += 1
        self.samples += len(samples)
        content = self.samples_hash.encode() + np.asarray(samples, "<i8").tobytes()
        self.samples_hash = hashlib.sha256(content).hexdigest()[:16]

    def collect(self) -> Totals:
        """Return the totals since the last printed line, over all ranks, and add them to the epoch's."""
        totals = self.meter.collect()
        self.totals += totals
        return totals

    def check(self) -> None:
        """Stop the run at a loss or a gradient that is not finite, as the next printed line would."""
        self.meter.totals()

    def discard_step(self) -> None:
        """Leave an effective batch out that is not finite."""
        self.meter.discard()
        self.skipped += 1

    def finish(self) -> None:
        """Note that only the test is left."""
        self.trained = True

    def fit(self, tokens: int) -> None:
        """Note the `micro_batch_tokens` that `auto` has found to fit."""
        self.micro_batch_tokens = tokens

    def describe(self) -> str:
        """Say where the training is, for people."""
        return f"in epoch {self.epoch + 1} after batch {self.batch}"

    def next_epoch(self) -> None:
        """Go to the start of the next epoch."""
        self.epoch, self.batch, self.samples, self.totals = self.epoch + 1, 0, 0, NOTHING

    def mark(self) -> None:
        """Remember the random numbers, for a stop within the next effective batch or the validation."""
        self._marked = random_state(self.fabric.device)

    def rewind(self) -> None:
        """Forget what has happened since `mark`, but for gradients."""
        set_random_state(self._marked, self.fabric.device)
        self.meter.discard()

    def restore_random(self) -> None:
        """Set the random numbers of a checkpoint, if one was loaded; making a loader's iterator draws some."""
        if self._random:
            set_random_state(self._random, self.fabric.device)
            self._random = None

    def state_dict(self) -> dict:
        """Return the position as plain values, the same on all ranks."""
        return {name: getattr(self, name) for name in SAVED} | {"totals": list(self.totals)}

    def rank_state_dict(self) -> dict:
        """Return this rank's sums and random numbers, as tensors and plain values."""
        return {"meter": self.meter.state_dict(), "random": random_state(self.fabric.device)}

    def load_state_dict(self, position: dict, ranks: list[dict], own: dict | None) -> None:
        """Go to a checkpoint's position.

        Args:
            position: From `state_dict`.
            ranks: From `rank_state_dict`, of the ranks whose sums this rank goes on with.
            own: The one whose random numbers it goes on with; None leaves those that are.
        """
        for name in SAVED:
            setattr(self, name, position[name])
        self.totals = Totals(*position["totals"])
        for state in ranks:
            self.meter.add_state_dict(state["meter"])
        self._random = own and own["random"]


class Training(NamedTuple):
    """All that an optimizer step needs; model, optimizer and loaders are set up by Fabric."""

    run: Run
    model: nn.Module
    optimizer: Optimizer
    train_loader: DataLoader
    val_loader: DataLoader
    state: TrainingState


def random_state(device: torch.device) -> dict:
    """Return the states of all random numbers that a run draws: PyTorch's, NumPy's and Python's."""
    name, keys, *rest = np.random.get_state()
    state = {"torch": torch.get_rng_state(), "python": random.getstate()}
    state["numpy"] = [name, torch.from_numpy(keys.astype(np.int64)), *rest]
    if device.type in ("cuda", "mps"):
        state[device.type] = torch.get_device_module(device).get_rng_state(device)
    return state


def set_random_state(state: dict, device: torch.device) -> None:
    """Set all random numbers back to what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, numbers, following = state["python"]
    random.setstate((version, tuple(numbers), following))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    if device.type in state:
        torch.get_device_module(device).set_rng_state(state[device.type], device)
