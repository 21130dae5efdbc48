"""The base class of the losses that this project computes from a model's logits, in place of the model's own loss.

The loss is computed outside the model. Fabric would round labels that are decimal numbers to the model's precision, and
the models of transformers have no place for class weights.
"""

import numpy as np
import torch
from torch import Tensor
from torchmetrics.functional.classification import multiclass_stat_scores


class Objective:
    """A loss, its labels, and its right predictions.

    The loss is a mean over the items of a micro-batch. So the loss of an effective batch is the mean of its
    micro-batches' losses, weighted by their items, in whatever way the effective batch is cut.

    Attributes:
        inputs: Names of the micro-batch's inputs that `loss` and `correct` take, and the model does not.
        notices: Lines that the user should read.
    """

    inputs: tuple[str, ...] = ("labels",)
    notices: tuple[str, ...] = ()

    def collate(self, labels: list, starts: np.ndarray | None = None) -> dict[str, Tensor]:
        """Return `inputs` for the labels of samples, which start at these positions of the flattened rows.

        By default the labels are decimal numbers, (samples, outputs).
        """
        return {"labels": torch.tensor(labels, dtype=torch.float32)}

    def loss(self, logits: Tensor, **labels: Tensor) -> Tensor:
        """Return the mean loss per item, a scalar."""

    def correct(self, logits: Tensor, **labels: Tensor) -> Tensor:
        """Return the number of right predictions, a scalar on the device."""


def count_right(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the number of right predictions, a scalar on the device; `logits` has one more dimension, the classes."""
    predicted, classes = logits.argmax(-1), logits.shape[-1]
    return multiclass_stat_scores(predicted, labels, classes, average="micro", validate_args=False)[0]


def in_32_bit(logits: Tensor) -> Tensor:
    """Return logits in at least 32 bits."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))
