"""Loss and accuracy, summed on the device: adding a micro-batch never waits for the GPU."""

import math
from itertools import takewhile
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
    """Collects the losses and right predictions of micro-batches until `collect` takes them off the device."""

    def __init__(self, fabric: Fabric):
        self.fabric = fabric
        self._clear()

    def _clear(self) -> None:
        self.losses, self.correct, self.items, self.steps = [], [], [], []
        self.broken_gradients, self.gradient_steps = [], []

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

    def add_gradient(self, broken: Tensor, step: Step) -> None:
        """Note of a step, after its losses, whether its gradient is broken: a boolean on the device."""
        self.broken_gradients.append(broken)
        self.gradient_steps.append(step)

    def losses_of(self, step: Step) -> list[Tensor]:
        """Return the losses of the newest step; none if this rank has only fillers there."""
        newest = zip(reversed(self.losses), reversed(self.steps), strict=True)
        return [loss for loss, _ in takewhile(lambda pair: pair[1] is step, newest)]

    def drop(self, step: Step) -> None:
        """Forget the newest step."""
        self.keep_first(len(self.steps) - len(self.losses_of(step)))

    def state(self) -> dict:
        """Return all that was added since the last `collect`, as `add_state` takes it."""
        return {
            "losses": torch.stack(self.losses).cpu() if self.losses else torch.zeros(0),
            "correct": torch.stack(self.correct).cpu() if self.losses else torch.zeros(0),
            "items": self.items,
            "steps": self.steps,
            "broken_gradients": torch.stack(self.broken_gradients).cpu() if self.broken_gradients else torch.zeros(0),
            "gradient_steps": self.gradient_steps,
        }

    def add_state(self, state: dict) -> None:
        """Add what a meter had collected, this one or another rank's."""
        device = self.fabric.device
        for loss, correct, items, (name, samples) in zip(
            state["losses"].to(device), state["correct"].to(device), state["items"], state["steps"], strict=True
        ):
            self.add(loss, correct, items, (name, samples))
        for broken, step in zip(state["broken_gradients"].to(device), state["gradient_steps"], strict=True):
            self.add_gradient(broken, step)

    def keep_first(self, count: int) -> None:
        """Forget all but the first `count` micro-batches."""
        for kept in (self.losses, self.correct, self.items, self.steps):
            del kept[count:]

    def collect(self) -> Totals:
        """Return the totals over all ranks since the last call. All ranks must call it.

        Raises:
            UserError: A loss or a gradient is NaN or infinite; the message names the first such step and its samples.
        """
        device = self.fabric.device
        losses = torch.stack(self.losses).double() if self.losses else torch.zeros(0, device=device).double()
        items = torch.tensor(self.items, dtype=torch.float64, device=device)
        correct = torch.stack(self.correct).sum() if self.correct else torch.zeros((), device=device)
        broken = torch.stack(self.broken_gradients) if self.broken_gradients else torch.zeros(0, device=device)
        sums = torch.stack([losses @ items, correct.double(), items.sum(), broken.double().sum()])
        sums = self.fabric.all_reduce(sums, reduce_op="sum").tolist()
        if not math.isfinite(sums[0]) or sums[3]:
            self._name_bad_step(losses, broken)
        self._clear()
        return Totals(sums[0], round(sums[1]), round(sums[2]))

    def _name_bad_step(self, losses: Tensor, broken: Tensor) -> None:
        bad_losses = torch.nonzero(~torch.isfinite(losses)).flatten().tolist()
        bad_gradients = [self.gradient_steps[number] for number in torch.nonzero(broken).flatten().tolist()]
        order = {name: number for number, (name, _) in enumerate(self.gradient_steps)}
        loss_step = self.steps[bad_losses[0]] if bad_losses else None
        # a loss comes before the gradient that it spoils, and after one that has spoilt the weights
        if loss_step and (not bad_gradients or order.get(loss_step[0], -1) <= order[bad_gradients[0][0]]):
            text = f"the loss is {losses[bad_losses[0]].item()} at {in_words(loss_step)}"
        elif bad_gradients:
            text = f"the gradient is not finite at {in_words(bad_gradients[0])}"
        else:
            text = "the loss or the gradient is not finite on another rank"
        skip = ", or --on_nan skip, which leaves such batches out" if self.gradient_steps else ""
        raise UserError(
            f"{text}: the run stops; try a lower --learning_rate, --max_grad_norm 1 or another --precision{skip}"
        )


def in_words(step: Step) -> str:
    """Return a step's name and its samples, of many the first 32."""
    name, samples = step
    some = ", ".join(map(str, samples[:32])) + (", …" if len(samples) > 32 else "")
    return name + (f" (training samples {some})" if samples else "")


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
