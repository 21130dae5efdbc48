"""Loss and accuracy, summed on the device: adding an effective batch never waits for the device."""

import math
from typing import NamedTuple

import torch
from lightning import Fabric
from torch import Tensor

from fabric_ladder.data.label_kind import describe_f1
from fabric_ladder.environment import NO_FLOAT64
from fabric_ladder.errors import NotFiniteError

Step = tuple[str, list[int]]  # a name for messages, and the row numbers of the training samples


class Score(NamedTuple):
    """Sums over all ranks: of the losses, of the right predictions, and of the items (samples or trained tokens)."""

    loss_sum: float = 0.0
    correct: int = 0
    items: int = 0

    @property
    def loss(self) -> float:
        """Mean loss per item, or NaN if there are no items."""
        return self.loss_sum / self.items if self.items else math.nan

    @property
    def perplexity(self) -> float:
        """The exponential of the loss; infinity for a loss above 700."""
        return math.exp(self.loss) if self.loss < 700 else math.inf

    @property
    def accuracy(self) -> float:
        """Share of right predictions, from 0 to 1, or NaN if there are no items."""
        return self.correct / self.items if self.items else math.nan

    def __add__(self, other: "Score") -> "Score":
        return Score(*(own + others for own, others in zip(self, other, strict=True)))

    def __repr__(self) -> str:
        return f"Score(loss={self.loss:.4f}, accuracy={self.accuracy:.2%}, items={self.items})"


class Meter:
    """Sums losses and right predictions until `collect` takes the sums off the device.

    `add` only keeps values as pending, so that an effective batch counts as a whole: `commit` counts the pending
    values, `discard` drops them. Until `collect`, the losses are also kept separately, to name the step with the first
    loss that is not finite.
    """

    def __init__(self, fabric: Fabric):
        self.fabric = fabric
        self._dtype = torch.float32 if fabric.device.type in NO_FLOAT64 else torch.float64
        self._reset()

    def _reset(self) -> None:
        self._sums = torch.zeros(3, dtype=self._dtype, device=self.fabric.device)  # as in Score
        self._pending: list[tuple[Tensor, Tensor, int]] = []
        self._steps: list[tuple[Step, Tensor, Tensor | None]] = []  # step, losses, whether its gradient is broken

    def add(self, loss: Tensor, correct: Tensor, items: int) -> None:
        """Add a micro-batch to the pending ones.

        Args:
            loss: Mean loss per item, a scalar.
            correct: Right predictions, a scalar.
            items: Items of the micro-batch; a filler (0) is left out.
        """
        if items:
            self._pending.append((loss.detach(), correct, items))

    def pending_losses(self) -> Tensor:
        """Return the losses of the pending micro-batches; empty if this rank has only fillers."""
        losses = [loss for loss, _, _ in self._pending]
        return torch.stack(losses) if losses else torch.zeros(0, device=self.fabric.device)

    def discard(self) -> None:
        """Drop the pending micro-batches."""
        self._pending = []

    def commit(self, step: Step, broken_gradient: Tensor | None = None) -> None:
        """Count the pending micro-batches.

        Args:
            step: The step to name if a loss or the gradient is not finite.
            broken_gradient: Whether the gradient is not finite, a boolean on the device.
        """
        losses = self.pending_losses()
        if self._pending:
            _, correct, items = zip(*self._pending, strict=True)
            weights = torch.tensor(items, dtype=self._dtype).to(self.fabric.device, non_blocking=True)
            weighted = losses.to(self._dtype) * weights
            self._sums += torch.stack([weighted.sum(), torch.stack(correct).to(self._dtype).sum(), weights.sum()])
        self._steps.append((step, losses, broken_gradient))
        self.discard()

    def state_dict(self) -> dict:
        """Return this rank's sums since the last `collect`, which waits for the device."""
        return {"sums": self._sums.cpu()}

    def add_state_dict(self, state: dict) -> None:
        """Add the sums of another meter, for example of another rank."""
        self._sums += state["sums"].to(self.fabric.device, self._dtype)

    def collect(self) -> Score:
        """Return the score as `score` does, and start again from 0."""
        score = self.score()
        self._reset()
        return score

    def score(self) -> Score:
        """Return the sums over all ranks since the last `collect`. All ranks must call it.

        Raises:
            NotFiniteError: A loss or a gradient is NaN or infinite; the message has the first such step and samples.
        """
        gradients = [broken for *_, broken in self._steps if broken is not None]
        broken = torch.stack(gradients).any() if gradients else torch.zeros((), device=self.fabric.device)
        sums = torch.cat([self._sums, broken.to(self._dtype)[None]])
        loss, correct, items, problems = self.fabric.all_reduce(sums, reduce_op="sum").tolist()
        if not math.isfinite(loss) or problems:
            text = self._find_problem() or "the loss or the gradient is not finite on another rank"
            raise NotFiniteError(f"{text}: the run stops")
        return Score(loss, round(correct), round(items))

    def _find_problem(self) -> str | None:
        """Name the first step on this rank whose loss or gradient is not finite."""
        for step, losses, broken_gradient in self._steps:
            if bad := [loss for loss in losses.tolist() if not math.isfinite(loss)]:
                return f"the loss is {bad[0]} at {describe_step(step)}"
            if broken_gradient is not None and broken_gradient.item():
                return f"the gradient is not finite at {describe_step(step)}"
        return None


def describe_step(step: Step) -> str:
    """Return a step's name and its first 32 samples."""
    name, samples = step
    listed = ", ".join(map(str, samples[:32])) + (", …" if len(samples) > 32 else "")
    return name + (f" (training samples {listed})" if samples else "")


def add_to_confusion(confusion: Tensor, outputs, labels: Tensor) -> None:
    """Add samples to a confusion matrix (class, predicted class), without waiting for the device."""
    predicted = outputs.logits.detach().argmax(-1)
    # torchmetrics counts with `torch.bincount`, which would wait for the device
    confusion.view(-1).scatter_add_(0, labels * len(confusion) + predicted, torch.ones_like(labels))


def describe_classes(names: list[str], confusion: list[list[int]]) -> dict:
    """Return the figures of each class for run.json.

    Args:
        names: The names of the classes.
        confusion: Samples by their class (rows) and the predicted class (columns).

    Returns:
        `confusion`, and from `describe_f1`: `names`, `true`, `precision`, `recall`, `f1` and `macro_f1`.
    """
    counts = torch.tensor(confusion)
    right, predicted, true = counts.diag(), counts.sum(0), counts.sum(1)
    state = [right, predicted - right, counts.sum() - predicted - true + right, true - right, true]
    scores = describe_f1(names, torch.stack(state, 1))
    del scores["micro_f1"]  # it is the accuracy
    return scores | {"confusion": confusion}


def over_ranks(fabric: Fabric, operation: str, *counts: int) -> list[int]:
    """Return the `sum` or the `max` of each count over the ranks. All ranks must call it."""
    device = torch.device("cpu") if fabric.device.type in NO_FLOAT64 else fabric.device
    counts = torch.tensor(counts, dtype=torch.float64, device=device)
    return [int(count) for count in fabric.all_reduce(counts, reduce_op=operation).tolist()]
