"""Loss and accuracy, summed on the device: adding an effective batch never waits for it."""

import math
from typing import NamedTuple

import torch
from lightning import Fabric
from torch import Tensor
from torchmetrics import SumMetric

from fabric_ladder.data.splits import IGNORED
from fabric_ladder.environment import NO_FLOAT64
from fabric_ladder.errors import UserError
from fabric_ladder.models.chunked_loss import ChunkedLossOutput

MOST_CLASSES = 20  # for which a run keeps which class is taken for which
Step = tuple[str, list[int]]  # its name, and the row numbers of its training samples


class Totals(NamedTuple):
    """Sums over all ranks: of the losses, of right predictions, and of the items (samples or trained tokens)."""

    loss_sum: float
    correct: int
    items: int

    @property
    def loss(self) -> float:
        """Mean loss per item; NaN of none, as when all batches were skipped."""
        return self.loss_sum / self.items if self.items else math.nan

    @property
    def perplexity(self) -> float:
        """See `perplexity`."""
        return perplexity(self.loss)

    @property
    def accuracy(self) -> float:
        """Share of right predictions, from 0 to 1; NaN of none."""
        return self.correct / self.items if self.items else math.nan

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(mine + its for mine, its in zip(self, other, strict=True)))


def perplexity(loss: float) -> float:
    """Exponential of the loss: among how many tokens a language model is as if in doubt; infinite above e^700."""
    return math.exp(loss) if loss < 700 else math.inf


class Meter:
    """Sums losses and right predictions until `collect` takes the sums off the device.

    What `add` was given is pending until `commit` counts it or `discard` forgets it: an effective batch counts as a
    whole. The losses are also kept one by one until `collect`, to name the step of one that is not finite.
    """

    def __init__(self, fabric: Fabric):
        self.fabric = fabric
        self._dtype = torch.float32 if fabric.device.type in NO_FLOAT64 else torch.float64
        # not MeanMetric: with nan_strategy "disable", which alone never waits, torchmetrics 1.9 drops its weights
        names = ("loss", "correct", "items")
        self._sums = {name: SumMetric(nan_strategy="disable", sync_on_compute=False) for name in names}
        for metric in self._sums.values():
            metric.to(fabric.device).set_dtype(self._dtype)  # in this order: `to` would set it back
        self._pending: list[tuple[Tensor, Tensor, int]] = []
        self._clear()

    def _clear(self) -> None:
        self.discard()
        self._steps: list[Step] = []
        self._losses: list[Tensor] = []  # of each step, those of its micro-batches
        self._gradients: list[Tensor | None] = []  # of each step, whether its gradient is broken
        for metric in self._sums.values():
            metric.reset()

    def add(self, loss: Tensor, correct: Tensor, items: int) -> None:
        """Add a micro-batch to what is pending.

        Args:
            loss: Mean loss per item, a scalar.
            correct: Right predictions, a scalar.
            items: Items of the micro-batch; a filler (0) is left out.
        """
        if items:
            self._pending.append((loss.detach(), correct, items))

    def pending_losses(self) -> Tensor:
        """Return the losses of the pending micro-batches; none if this rank has only fillers."""
        losses = [loss for loss, _, _ in self._pending]
        return torch.stack(losses) if losses else torch.zeros(0, device=self.fabric.device)

    def discard(self) -> None:
        """Forget the pending micro-batches."""
        self._pending.clear()

    def commit(self, step: Step, broken_gradient: Tensor | None = None) -> None:
        """Count the pending micro-batches.

        Args:
            step: To be named if a loss or the gradient is not finite.
            broken_gradient: Whether the gradient is not finite, a boolean on the device.
        """
        losses = self.pending_losses()
        if self._pending:
            _, correct, items = zip(*self._pending, strict=True)
            weights = torch.tensor(items, dtype=self._dtype).to(self.fabric.device, non_blocking=True)
            self._sums["loss"].update(losses.to(self._dtype) * weights)
            self._sums["correct"].update(torch.stack(correct))
            self._sums["items"].update(weights)
        self._steps.append(step)
        self._losses.append(losses)
        self._gradients.append(broken_gradient)
        self.discard()

    def state_dict(self) -> dict:
        """Return what was counted on this rank since the last `collect`, which waits for the device."""
        return {name: metric.sum_value.cpu() for name, metric in self._sums.items()}

    def add_state_dict(self, state: dict) -> None:
        """Count what a meter had counted, this one or another rank's."""
        for name, metric in self._sums.items():
            metric.update(state[name].to(self.fabric.device, self._dtype))

    def collect(self) -> Totals:
        """Return the totals, and count from 0 again; see `totals`."""
        totals = self.totals()
        self._clear()
        return totals

    def totals(self) -> Totals:
        """Return the totals over all ranks since the last `collect`. All ranks must call it.

        Raises:
            UserError: A loss or a gradient is NaN or infinite; the message names the first such step and its samples.
        """
        device = self.fabric.device
        gradients = [broken for broken in self._gradients if broken is not None]
        broken = torch.stack(gradients).any() if gradients else torch.zeros((), device=device)
        sums = [self._sums[name].sum_value for name in ("loss", "correct", "items")]
        sums = torch.stack([*sums, broken.to(self._dtype)])
        loss, correct, items, problems = self.fabric.all_reduce(sums, reduce_op="sum").tolist()
        if not math.isfinite(loss) or problems:
            text = self._find_problem() or "the loss or the gradient is not finite on another rank"
            skip = ", or --on_nan skip, which leaves such batches out" if gradients else ""
            raise UserError(
                f"{text}: the run stops; try a lower --learning_rate, --max_grad_norm 1 or another --precision{skip}"
            )
        return Totals(loss, round(correct), round(items))

    def _find_problem(self) -> str | None:
        """Name the first step on this rank whose loss or gradient is not finite."""
        for step, losses, gradient in zip(self._steps, self._losses, self._gradients, strict=True):
            if bad := [loss for loss in losses.tolist() if not math.isfinite(loss)]:
                return f"the loss is {bad[0]} at {describe_step(step)}"
            if gradient is not None and gradient.item():
                return f"the gradient is not finite at {describe_step(step)}"
        return None


def describe_step(step: Step) -> str:
    """Return a step's name and its samples, of many the first 32."""
    name, samples = step
    listed = ", ".join(map(str, samples[:32])) + (", …" if len(samples) > 32 else "")
    return name + (f" (training samples {listed})" if samples else "")


def count_pairs(confusion: Tensor, outputs, labels: Tensor) -> None:
    """Add each sample to `confusion` (classes, classes), at its class and the predicted one, without waiting for it."""
    predicted = outputs.logits.detach().argmax(-1)
    confusion.view(-1).scatter_add_(0, labels * len(confusion) + predicted, torch.ones_like(labels))


def describe_classes(names: list[str], confusion: list[list[int]]) -> dict:
    """Return, for run.json, how well each class is found.

    Args:
        names: Of the classes.
        confusion: Samples by their class (rows) and the predicted one (columns).

    Returns:
        `names`, `confusion`, `accuracy` (the share of each class's samples that is found, None of a class without any)
        and `macro_f1`: the mean of the classes' F1 scores (twice the right predictions over the class's samples and the
        predictions of it), without those that are neither there nor predicted.
    """
    right = [row[index] for index, row in enumerate(confusion)]
    samples, predictions = list(map(sum, confusion)), list(map(sum, zip(*confusion, strict=True)))
    scores = [2 * hits / (of + by) for hits, of, by in zip(right, samples, predictions, strict=True) if of + by]
    accuracy = [hits / of if of else None for hits, of in zip(right, samples, strict=True)]
    return {"names": names, "confusion": confusion, "accuracy": accuracy, "macro_f1": sum(scores) / len(scores)}


def count_correct(outputs, labels: Tensor) -> Tensor:
    """Count right predictions, a scalar on the device: per sample, or per trained token by the token before it.

    Args:
        outputs: Of a forward pass: `correct`, or `logits` (samples, classes) or (samples, length, vocabulary).
        labels: (samples,) or (samples, length).
    """
    if isinstance(outputs, ChunkedLossOutput):
        return outputs.correct
    logits = outputs.logits.detach()
    if labels.ndim == 1:
        return (logits.argmax(-1) == labels).sum()
    predicted, expected = logits[:, :-1].argmax(-1), labels[:, 1:]
    return ((predicted == expected) & (expected != IGNORED)).sum()
