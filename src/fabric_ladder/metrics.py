"""Loss and accuracy, summed on the device: adding a micro-batch never waits for the GPU."""

import math
from typing import NamedTuple

import torch
from lightning import Fabric
from torch import Tensor

from fabric_ladder.errors import UserError
from fabric_ladder.vocabulary import TokenOutput
from local_dataset_utilities import IGNORED

Step = tuple[str, list[int]]  # its name, and the row numbers of its training samples


class Totals(NamedTuple):
    """Sums over all ranks: of the losses, of right predictions, and of the items (samples or trained tokens)."""

    loss_sum: float
    correct: int
    items: int

    @property
    def loss(self) -> float:
        """Mean loss per item."""
        return self.loss_sum / self.items

    @property
    def perplexity(self) -> float:
        """See `perplexity`."""
        return perplexity(self.loss)

    @property
    def accuracy(self) -> float:
        """Share of right predictions, from 0 to 1."""
        return self.correct / self.items

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(*(mine + its for mine, its in zip(self, other, strict=True)))


def perplexity(loss: float) -> float:
    """Exponential of the loss: among how many tokens a language model is as if in doubt; infinite above e^700."""
    return math.exp(loss) if loss < 700 else math.inf


class Meter:
    """Collects the losses and right predictions of micro-batches until `collect` takes them off the device."""

    def __init__(self, fabric: Fabric):
        self.fabric = fabric
        self._clear()

    def _clear(self) -> None:
        self.losses, self.correct, self.items, self.steps = [], [], [], []

    def add(self, loss: Tensor, correct: Tensor, items: int, step: Step) -> None:
        """Add a micro-batch.

        Args:
            loss: Mean loss per item, a scalar.
            correct: Right predictions, a scalar.
            items: Items of the micro-batch; a filler (0) is left out.
            step: To be named if a loss is not finite.
        """
        if items:
            self.losses.append(loss.detach())
            self.correct.append(correct)
            self.items.append(items)
            self.steps.append(step)

    def keep_first(self, count: int) -> None:
        """Forget all but the first `count` micro-batches."""
        for kept in (self.losses, self.correct, self.items, self.steps):
            del kept[count:]

    def collect(self) -> Totals:
        """Return the totals over all ranks since the last call. All ranks must call it.

        Raises:
            UserError: A loss is NaN or infinite; the message names the first step that had one, and its samples.
        """
        device = self.fabric.device
        losses = torch.stack(self.losses).double() if self.losses else torch.zeros(0, device=device).double()
        items = torch.tensor(self.items, dtype=torch.float64, device=device)
        correct = torch.stack(self.correct).sum() if self.correct else torch.zeros((), device=device)
        sums = torch.stack([losses @ items, correct.double(), items.sum()])
        sums = self.fabric.all_reduce(sums, reduce_op="sum").tolist()
        if not math.isfinite(sums[0]):
            self._name_bad_step(losses)
        self._clear()
        return Totals(sums[0], round(sums[1]), round(sums[2]))

    def _name_bad_step(self, losses: Tensor) -> None:
        bad = torch.nonzero(~torch.isfinite(losses)).flatten().tolist()
        if bad:
            value = losses[bad[0]].item()
            name, samples = self.steps[bad[0]]
            some = ", ".join(map(str, samples[:32])) + (", …" if len(samples) > 32 else "")
            text = f"the loss is {value} at {name}" + (f" (training samples {some})" if samples else "")
        else:
            text = "the loss is not finite on another rank"
        raise UserError(f"{text}: the run stops; try a lower --learning_rate, --max_grad_norm 1 or another --precision")


def count_correct(outputs, labels: Tensor) -> Tensor:
    """Right predictions, a scalar on the device: per sample, or per trained token, which the one before it predicts.

    Args:
        outputs: Of a forward pass: `correct`, or `logits` (samples, classes) or (samples, length, vocabulary).
        labels: (samples,) or (samples, length).
    """
    if isinstance(outputs, TokenOutput):
        return outputs.correct
    logits = outputs.logits.detach()
    if labels.ndim == 1:
        return (logits.argmax(-1) == labels).sum()
    predicted, expected = logits[:, :-1].argmax(-1), labels[:, 1:]
    return ((predicted == expected) & (expected != IGNORED)).sum()
