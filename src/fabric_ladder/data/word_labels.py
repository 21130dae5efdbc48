"""A label for each word, such as names of persons and places: `--task token-classification`.

A word's label belongs to its first token. Loss and accuracy are means over the labelled words.

If the labels are IOB2 (`B-PER` begins a person, `I-PER` continues one, `O` is outside), the test also prints the F1
score of whole entities. An entity is right if its first word, its last word and its type are right. `I-PER` after
another label begins an entity, as in CoNLL's script and in seqeval. The entities are counted on the device: seqeval
would need all predictions of all ranks as texts.
"""

import re
from collections.abc import Callable
from typing import NamedTuple

import datasets as hf
import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torchmetrics import Metric
from torchmetrics.classification import MultilabelStatScores

from fabric_ladder.data.label_kind import (
    Described,
    LabelKind,
    class_lines,
    describe_f1,
    describe_imbalance,
    percent,
)
from fabric_ladder.data.labels import (
    class_numbers,
    find_classes,
    label_texts,
    number_lists,
    refuse_printed_list,
)
from fabric_ladder.data.objective import count_right, in_32_bit
from fabric_ladder.data.splits import IGNORED
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

IOB2 = re.compile(r"([BI])-(.+)")
OTHER_SCHEME = re.compile(r"[ELMSU]-.+")  # such as IOBES, whose entities are not counted
ENTITY = re.compile(r"[BIELMSU][-_].+|.+[-_][BIELMSU]|O", re.IGNORECASE)  # a label of entities in any scheme
OUTSIDE = -1
UNLABELLED = str(IGNORED)  # PyTorch and transformers leave words with this label out of the loss


class WordLabels(LabelKind):
    """A label for each word."""

    per_token = True
    inputs = ("labels", "words", "begins")

    def __init__(self, names: list[str] = ()):
        super().__init__(names)
        parts = [IOB2.fullmatch(name) for name in names]
        if any(map(OTHER_SCHEME.fullmatch, names)):
            parts = [None] * len(names)
        self.types = sorted({part[2] for part in parts if part})
        numbers = [self.types.index(part[2]) if part else OUTSIDE for part in parts]
        firsts = [int(part is not None and part[1] == "B") for part in parts]
        self.table = list(zip(firsts, numbers, strict=True))  # whether a label begins an entity, and its type

    def columns(self, settings: DataSettings) -> tuple[str, ...]:
        return ("ner_tags" if settings.label_column == "label" else settings.label_column,)

    def reader(self, settings: DataSettings, features: dict) -> tuple[object, Callable[[dict], list]]:
        (column,) = self.columns(settings)
        feature = features.get(column)
        feature = getattr(feature, "feature", feature)  # of one label in each row
        if isinstance(feature, hf.ClassLabel):
            return hf.List(feature), lambda row: class_numbers(
                word_list(row, column), column, feature.num_classes, IGNORED
            )
        return hf.List(hf.Value("string")), lambda row: label_texts(word_list(row, column), column)

    def number(self, splits: dict[str, hf.Dataset], settings: DataSettings) -> dict[str, hf.Dataset]:
        columns = self.columns(settings)
        values, self.names, self.notices = find_classes(splits["train"], *columns, several="", ignored=UNLABELLED)
        named = isinstance(splits["train"].features["label"].feature, hf.ClassLabel)
        values |= {IGNORED if named else UNLABELLED: IGNORED}
        for split, table in splits.items():
            lists, numbers = number_lists(table, values, split)
            if split == "train" and len(np.unique(numbers[numbers != IGNORED])) < 2:
                raise UserError("all training words have the same label: there is nothing to learn")
            ends = pc.list_value_length(lists).to_numpy().cumsum()
            rows = [part.tolist() for part in np.split(numbers, ends[:-1])]
            splits[split] = table.remove_columns("label").add_column("labels", rows)
        return splits

    def collate(self, labels: list[list[int]], starts: np.ndarray) -> dict[str, Tensor]:
        """Return the labels of all words, the flat positions of their tokens, and which words begin a text."""
        found = [np.flatnonzero(np.asarray(row) != IGNORED) for row in labels]
        values = [np.asarray(row)[places] for row, places in zip(labels, found, strict=True)]
        words = [start + places for start, places in zip(starts, found, strict=True)]
        begins = [np.arange(len(places)) == 0 for places in found]
        parts = (values, words, begins)
        return {name: torch.from_numpy(np.concatenate(part)) for name, part in zip(self.inputs, parts, strict=True)}

    def blank(self, samples: int, length: int) -> dict[str, Tensor]:
        """Return `inputs` without values, as if each token were a word."""
        dtypes = (torch.int64, torch.int64, torch.bool)
        size = samples * length
        return {
            name: torch.empty(size, dtype=dtype, device="meta") for name, dtype in zip(self.inputs, dtypes, strict=True)
        }

    def loss(self, logits: Tensor, labels: Tensor, words: Tensor, begins: Tensor) -> Tensor:
        return cross_entropy(in_32_bit(logits.flatten(0, 1)[words]), labels)

    def correct(self, logits: Tensor, labels: Tensor, words: Tensor, begins: Tensor) -> Tensor:
        return count_right(logits.flatten(0, 1)[words], labels)

    def notes(self, split: hf.Dataset) -> list[str]:
        """Return lines about the most frequent label, and about a scheme whose entities are not counted."""
        other = [name for name in self.names if name != "O" and not IOB2.fullmatch(name)]
        lines = []
        if not self.types and other and any(map(ENTITY.fullmatch, self.names)):
            lines = [f"No entity F1: it needs labels such as B-PER, I-PER and O (IOB2), unlike {other[0]!r}"]
        labels = pc.list_flatten(split.with_format("arrow")["labels"][:]).to_numpy()
        return describe_imbalance(np.bincount(labels[labels != IGNORED]), self.names, "words") + lines

    def start_counts(self, device: torch.device) -> Metric | None:
        """Return counts for each type of entities, or None if the labels are not IOB2."""
        classes = len(self.types)
        return MultilabelStatScores(classes, average=None, validate_args=False).to(device) if classes else None

    def count(self, counts: Metric, logits: Tensor, labels: Tensor, words: Tensor, begins: Tensor) -> None:
        """Add the predicted and the true entities. They share a row if they are equal."""
        table = torch.tensor(self.table).to(logits.device, non_blocking=True)
        predicted = logits.flatten(0, 1)[words].argmax(-1)
        found, true = (_find_entities(*table[each].unbind(1), begins) for each in (predicted, labels))
        types = torch.arange(len(self.types), device=logits.device)
        ours, theirs = (each.first[:, None] & (each.type[:, None] == types) for each in (found, true))
        both = ours & theirs & (found.end == true.end)[:, None]
        counts.update(torch.cat([ours, torch.zeros_like(both)]), torch.cat([both, theirs & ~both]))

    def describe(self, figures: Tensor) -> Described:
        entities = describe_f1(self.types, figures)
        lines = [f"Test entity F1 {percent(entities['micro_f1'])}", *class_lines(entities)]
        return Described({"entities": entities}, lines)


class _Entities(NamedTuple):
    """The entities of all words of a micro-batch.

    Attributes:
        first: Whether a word is the first of an entity.
        type: The type of the entity that a word belongs to, or `OUTSIDE`.
        end: The last word of the entity that a word belongs to, or of the next one.
    """

    first: Tensor
    type: Tensor
    end: Tensor


def _find_entities(firsts: Tensor, types: Tensor, begins: Tensor) -> _Entities:
    """Return the entities, given which labels begin an entity, their types, and which words begin a text."""
    before = torch.where(begins, OUTSIDE, types.roll(1))
    inside = types != OUTSIDE
    first = inside & ((firsts == 1) | (before != types))
    goes_on = (inside & ~first).roll(-1)  # the first word of all never continues an entity
    index = torch.arange(len(types), device=types.device)
    end = torch.where(inside & ~goes_on, index, len(types)).flip(0).cummin(0).values.flip(0)
    return _Entities(first, types, end)


def word_list(row: dict, column: str) -> list:
    """Return a list of words or labels, also from a text with spaces between them, or raise ValueError."""
    value = row.get(column)
    if value is None:
        raise ValueError(f"no {column}")
    if isinstance(value, str):
        refuse_printed_list(value, column)
        value = value.split()
    if isinstance(value, int):  # one word in each row
        value = [value]
    if not isinstance(value, list) or not value:
        raise ValueError(f"{column} is {value!r:.40}, not a list of words")
    return value
