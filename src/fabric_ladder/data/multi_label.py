"""Classification with any number of labels per text: `--problem_type multi_label_classification`.

The labels of a text are 0 or 1 for each class. The loss is the binary cross-entropy, as a mean over the classes and
then over the samples. A class is predicted if its logit is above 0, that is, its probability above 0.5.
"""

from collections.abc import Callable

import datasets as hf
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import Metric
from torchmetrics.classification import MultilabelStatScores

from fabric_ladder.data.label_kind import Described, LabelKind, class_lines, describe_f1, matrix, percent
from fabric_ladder.data.labels import (
    PRINTED,
    class_numbers,
    find_classes,
    label_texts,
    number_lists,
    refuse_printed_list,
)
from fabric_ladder.data.objective import in_32_bit
from fabric_ladder.data.rows import shown
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

SPLIT_BY = "separate labels by | or commas"
FLAGS = {"0": 0, "1": 1, "false": 0, "true": 1, "0.0": 0, "1.0": 1}


class MultiLabel(LabelKind):
    """Any number of labels per text, from one column with lists of labels or from several columns of 0 and 1."""

    def reader(self, settings: DataSettings, features: dict) -> tuple[object, Callable[[dict], list]]:
        columns = self.columns(settings)
        if len(columns) > 1:
            return hf.Sequence(hf.Value("int8")), lambda row: [_flag(row.get(column), column) for column in columns]
        column = columns[0]
        feature = getattr(features.get(column), "feature", None)
        if isinstance(feature, hf.ClassLabel):
            return hf.Sequence(feature), lambda row: class_numbers(row.get(column), column, feature.num_classes)
        return hf.Sequence(hf.Value("string")), lambda row: _labels(row.get(column), column)

    def number(self, splits: dict[str, hf.Dataset], settings: DataSettings) -> dict[str, hf.Dataset]:
        columns = self.columns(settings)
        if len(columns) > 1:
            self.names = list(columns)
            splits = {split: table.rename_column("label", "labels") for split, table in splits.items()}
        else:
            values, self.names, self.notices = find_classes(splits["train"], columns[0], SPLIT_BY)
            splits = {split: _with_flags(table, values, split) for split, table in splits.items()}
        if len(splits["train"]) > 1 and not np.ptp(matrix(splits["train"]), axis=0).any():
            raise UserError("all training texts have the same labels: there is nothing to learn")
        return splits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = in_32_bit(logits)
        return binary_cross_entropy_with_logits(logits, labels.to(logits.dtype))

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        return ((logits > 0) == (labels > 0)).all(-1).sum()

    def notes(self, split: hf.Dataset) -> list[str]:
        sets, counts = np.unique(matrix(split), axis=0, return_counts=True)
        share = counts.max() / len(split)
        if share <= 0.6:
            return []
        found = [name for name, flag in zip(self.names, sets[counts.argmax()], strict=True) if flag]
        labels = f"only the labels {', '.join(found)}" if found else "no label"
        return [
            f"Imbalanced labels: {share:.1%} of the training samples have {labels}; an accuracy below that is worse "
            "than always guessing this"
        ]

    def start_counts(self, device: torch.device) -> Metric:
        return MultilabelStatScores(len(self.names), average=None, validate_args=False).to(device)

    def count(self, counts: Metric, logits: Tensor, labels: Tensor) -> None:
        counts.update(logits > 0, labels)

    def describe(self, figures: Tensor) -> Described:
        classes = describe_f1(self.names, figures)
        lines = [f"Test {kind}-F1 {percent(classes[f'{kind}_f1'])}" for kind in ("micro", "macro")]
        return Described({"classes": classes}, lines + class_lines(classes))


def _flag(value: object, column: str) -> int:
    if value is None or value == "":
        raise ValueError(f"no {column}")
    flag = FLAGS.get(str(value).strip().lower())
    if flag is None:
        raise ValueError(f"{column} is {shown(value)}, not 0 or 1")
    return flag


def _labels(value: object, column: str) -> list[str]:
    """Return a row's labels as texts, from a list, or from a text with `|` or else commas between them."""
    if value is None:
        raise ValueError(f"no {column}")
    if isinstance(value, str):
        refuse_printed_list(value, column)
        refuse_printed_list(value, column, PRINTED)
        value = value.split("|" if "|" in value else ",") if value.strip() else []
    texts = label_texts(value if isinstance(value, list) else [value], column)
    if len(set(texts)) < len(texts):
        raise ValueError(f"{column} is {shown(value)} and names a label twice: give flags of 0 and 1 as columns")
    return texts


def _with_flags(table: hf.Dataset, values: dict[object, int], split: str) -> hf.Dataset:
    """Replace the lists in `label` by the column `labels`: 0 or 1 for each class."""
    lists, numbers = number_lists(table, values, split)
    classes = max(values.values()) + 1
    flags = np.zeros((len(table), classes), np.int8)
    flags[pc.list_parent_indices(lists).to_numpy(), numbers] = 1
    offsets = pa.array(np.arange(len(table) + 1) * classes, pa.int32())
    column = pa.ListArray.from_arrays(offsets, pa.array(flags.ravel()))
    return table.remove_columns("label").add_column("labels", column)
