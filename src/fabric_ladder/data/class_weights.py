"""Label smoothing and class weights of a classification with one label per sample; see `ClassWeights`."""

import math

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fabric_ladder.data.objective import Objective, count_right, in_32_bit
from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings, show

TASKS = ("text-classification", "image-classification")
SINGLE = "single_label_classification"
MOST_SHOWN = 20  # classes


def check_class_weights(settings: Settings, names: list[str] | None = None) -> None:
    """Refuse label smoothing and class weights without classes, and weights that are not a number above 0 for each."""
    for name in ("label_smoothing", "class_weights"):
        value = getattr(settings, name)
        if value and (settings.task not in TASKS or settings.problem_type != SINGLE):
            raise UserError(
                f"--{name} {show(value)}: only for --task {' and '.join(TASKS)} with one label per sample; leave it out"
            )
    if settings.class_weights not in (None, "balanced"):
        _read_numbers(settings.class_weights, names)


def class_weights(given: str, counts: np.ndarray, names: list[str]) -> np.ndarray:
    """Return the weight of each class: `balanced` by its training samples, or the given numbers.

    Raises:
        UserError: There are fewer or more numbers than classes.
    """
    if given == "balanced":  # a class without samples never needs its weight
        return counts.sum() / (len(names) * np.maximum(counts, 1))
    return np.array(_read_numbers(given, names))


def _read_numbers(given: str, names: list[str] | None) -> list[float]:
    try:
        numbers = [float(part) for part in given.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < number < math.inf for number in numbers):
        raise UserError(
            f"--class_weights {given:.60}: expected balanced, or one number above 0 for each class, e.g. 0.5,2.0"
        )
    if names and len(numbers) != len(names):
        shown = ", ".join(names[:MOST_SHOWN]) + (", …" if len(names) > MOST_SHOWN else "")
        raise UserError(
            f"--class_weights {given:.60}: {len(numbers)} numbers for {len(names)} classes; give one for each: {shown}"
        )
    return numbers


class ClassWeights(Objective):
    """Cross-entropy with label smoothing and class weights, for training only.

    The loss of an effective batch is sum(weight of the class * cross-entropy) / number of samples. PyTorch divides by
    the sum of the weights instead. That sum differs between micro-batches, so accumulated gradients would depend on
    how the effective batch is cut. `balanced` weights have a mean of 1 over the training samples, so the scale of the
    loss is the same in both ways.
    """

    inputs = ("labels", "weights")

    def __init__(self, settings: Settings, counts: np.ndarray, names: list[str]):
        self.smoothing = settings.label_smoothing
        self.weights = None
        if settings.class_weights:
            self.weights = class_weights(settings.class_weights, counts, names)
        if settings.class_weights == "balanced" and len(names) <= MOST_SHOWN:
            shown = (f"{name} {weight:.3g}" for name, weight in zip(names, self.weights, strict=True))
            self.notices = (f"Class weights: {', '.join(shown)}",)

    def collate(self, labels: list[int], starts: np.ndarray | None = None) -> dict[str, Tensor]:
        inputs = {"labels": torch.tensor(labels)}
        if self.weights is not None:
            inputs["weights"] = torch.tensor(self.weights[labels], dtype=torch.float32)
        return inputs

    def loss(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        losses = cross_entropy(in_32_bit(logits), labels, reduction="none", label_smoothing=self.smoothing)
        return losses.mean() if weights is None else (losses * weights).mean()

    def correct(self, logits: Tensor, labels: Tensor, weights: Tensor | None = None) -> Tensor:
        return count_right(logits, labels)
