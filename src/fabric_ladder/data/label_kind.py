"""The base class of the kinds of labels: how they are read, trained, and described after the test."""

import math
from collections.abc import Callable
from typing import NamedTuple

import datasets as hf
import numpy as np
import pandas as pd
import pyarrow.compute as pc
import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection

from fabric_ladder.data.objective import Objective
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

Counts = Metric | MetricCollection
MOST_CLASSES = 20  # scores of more classes are not printed, and no confusion matrix is kept
MOST_IN_MATRIX = 10  # the confusion matrix of more classes is not printed


class Described(NamedTuple):
    """The results of a test, in addition to its loss and its accuracy: figures for run.json, and lines to print."""

    results: dict
    lines: list[str]


class LabelKind(Objective):
    """A kind of labels other than one class per sample.

    Args:
        names: Names of the model's outputs: classes, or columns of numbers. Not known while labels are read.

    Attributes:
        per_token: Whether a label belongs to a token, not to a sample.
    """

    per_token = False

    def __init__(self, names: list[str] = ()):
        self.names = list(names)

    def columns(self, settings: DataSettings) -> tuple[str, ...]:
        """Return the columns of the labels."""
        return tuple(name.strip() for name in settings.label_column.split(","))

    def reader(self, settings: DataSettings, features: dict) -> tuple[object, Callable[[dict], list]]:
        """Return the type of the labels, and a function that returns a row's labels or raises ValueError."""

    def number(self, splits: dict[str, hf.Dataset], settings: DataSettings) -> dict[str, hf.Dataset]:
        """Return the splits with numbers in `labels` in place of `label`, and set `names`."""

    def blank(self, samples: int, length: int) -> dict[str, Tensor]:
        """Return `inputs` without values: the largest ones for N samples of this length."""
        return {"labels": torch.empty(samples, len(self.names), device="meta")}

    def notes(self, split: hf.Dataset) -> list[str]:
        """Return lines about the labels of the training split."""

    def start_counts(self, device: torch.device) -> Counts | None:
        """Return the metric that `count` adds to; None: the kind counts nothing."""

    def count(self, counts: Counts, logits: Tensor, **labels: Tensor) -> None:
        """Add a micro-batch of the test to the metric, without waiting for the device."""

    def describe(self, figures: Tensor | dict[str, Tensor]) -> Described:
        """Return the results, given what the metric has computed over all ranks."""


def join(tables: dict[str, list[hf.Dataset]], column: str) -> dict[str, hf.Dataset]:
    """Return the joined tables of each split, whose labels come from this column."""
    if len({str(table.features["label"]) for parts in tables.values() for table in parts}) > 1:
        raise UserError(f"the class names in column {column!r} differ between the files: make them equal")
    return {split: hf.concatenate_datasets(parts) for split, parts in tables.items()}


def matrix(split: hf.Dataset) -> np.ndarray:
    """Return the labels of all samples, (samples, outputs)."""
    return pc.list_flatten(split.with_format("arrow")["labels"][:]).to_numpy().reshape(len(split), -1)


def describe_imbalance(counts: np.ndarray, names: list[str], items: str = "samples") -> list[str]:
    """Return a line about the largest class, if it has over 60 % of the items or over twice its even share."""
    share = counts.max() / counts.sum()
    if share <= min(0.6, 2 / len(names)):
        return []
    return [
        f"Imbalanced classes: {share:.1%} of the training {items} are {names[counts.argmax()]!r}, one of {len(names)} "
        "classes; an accuracy below that is worse than always guessing this class"
    ]


def describe_rare(counts: np.ndarray) -> list[str]:
    """Return a line if most classes have at most one training sample, as in a column of numbers or of texts."""
    rare = int((counts < 2).sum())
    if len(counts) < 5 or 2 * rare <= len(counts):
        return []
    return [
        f"{rare} of {len(counts)} classes have at most one training sample: is --label_column right? --problem_type "
        "regression predicts numbers"
    ]


def describe_f1(names: list[str], counts: Tensor) -> dict:
    """Return precision, recall and F1 of each class, and their micro and macro average.

    A figure without a denominator is None. Classes that are neither predicted nor true are left out of the macro
    average, where torchmetrics would count them as 0.

    Args:
        names: Names of the classes.
        counts: From `MultilabelStatScores`: true and false positives, true and false negatives, and true labels of
            each class.
    """
    right, wrong, _, missed, _ = counts.cpu().double().unbind(1)
    f1 = 2 * right / (2 * right + wrong + missed)
    return {
        "names": names,
        "true": counts[:, 4].tolist(),
        "precision": without_nan(right / (right + wrong)),
        "recall": without_nan(right / (right + missed)),
        "f1": without_nan(f1),
        "micro_f1": without_nan(2 * right.sum() / (2 * right + wrong + missed).sum())[0],
        "macro_f1": without_nan(f1.nanmean())[0],
    }


def class_lines(classes: dict) -> list[str]:
    """Return a printed table: precision, recall and F1 of each class, and the confusion matrix of at most ten classes.

    Args:
        classes: From `describe_f1`, if possible with `confusion`: samples by their class and the predicted class.
    """
    names = classes["names"]
    if len(names) > MOST_CLASSES:
        return []
    scores = pd.DataFrame({title: map(percent, classes[title]) for title in ("precision", "recall", "f1")})
    scores["support"], corner = classes["true"], "class"
    if "confusion" in classes and len(names) <= MOST_IN_MATRIX:
        corner = "class \\ predicted"
        short = [" ".join(name.split())[:12] for name in names]
        scores = pd.concat([pd.DataFrame(classes["confusion"], columns=short), scores], axis="columns")
    scores.index = pd.Index(map(repr, names))
    return scores.rename_axis(columns=corner).to_string().splitlines()


def without_nan(figures: Tensor) -> list[float | None]:
    """Return figures as a list, with None in place of NaN."""
    return [None if math.isnan(figure) else figure for figure in figures.flatten().tolist()]


def percent(share: float | None) -> str:
    """Return a share in percent for a printed line, or nan."""
    return "nan%" if share is None else f"{share * 100:.2f}%"
