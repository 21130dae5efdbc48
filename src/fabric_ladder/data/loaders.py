"""Effective batches, their micro-batches, and the loaders that yield them."""

import math
from dataclasses import replace
from itertools import chain, islice
from typing import NamedTuple

import datasets as hf
import numpy as np
import torch
from lightning import Fabric
from torch import Tensor
from torch.nn.functional import interpolate, pad
from torch.utils.data import DataLoader, Dataset

from fabric_ladder.data.class_weights import ClassWeights
from fabric_ladder.data.cutting import MicroBatchPlan
from fabric_ladder.data.kinds import kind_of
from fabric_ladder.data.label_kind import describe_imbalance, describe_rare
from fabric_ladder.data.objective import Objective
from fabric_ladder.data.sampler import BatchPlan, EffectiveBatchSampler, EvaluationSampler
from fabric_ladder.data.splits import IGNORED, SPLITS, ImageDatasets, TextDatasets
from fabric_ladder.settings import Settings


class MicroBatch(NamedTuple):
    """The input of one forward pass.

    Attributes:
        inputs: The model's keyword arguments. For texts, `input_ids` and `attention_mask` (samples, length), and
            `labels` (samples,) or (samples, length). For images, `pixel_values` (samples, 3, size, size) and `labels`
            (samples,). Packed texts have `input_ids` and `position_ids` (rows, length), and no `attention_mask`;
            positions count from 0 in each sample and in a row's padding. Packed classification adds `spans`
            (samples, 2): the flat start and end of each sample. Instruction tuning adds `predicting` (items,): the
            positions in the flattened `input_ids` before trained tokens.
        items: Number of samples, or of trained tokens: the loss is their mean. 0 marks a filler, which must not count.
        weight: Factor of the loss. The sum over all micro-batches, averaged over the ranks by DDP, is the mean over the
            items of the whole effective batch.
        tokens: Tokens without padding; 0 in a filler. An image has a token per patch and a class token.
        padded: Tokens with padding.
        masked: Whether `attention_mask` may hide a token.
        objective: The loss that takes the place of the model's own; None: the model computes its loss from `labels`.
    """

    inputs: dict[str, Tensor]
    items: int
    weight: float
    tokens: int
    padded: int
    masked: bool = True
    objective: Objective | None = None

    def without_values(self) -> "MicroBatch":
        """Return the micro-batch with its inputs on the meta device, which need no memory."""
        return self._replace(inputs={name: torch.empty_like(each, device="meta") for name, each in self.inputs.items()})


class EffectiveBatch(NamedTuple):
    """One rank's share of the samples of one optimizer step.

    Attributes:
        samples: Row numbers of the whole effective batch, of all ranks.
        micro_batches: This rank's micro-batches; every rank has the same number.
    """

    samples: list[int]
    micro_batches: list[MicroBatch]


class Collator(Dataset):
    """A split that turns a sampler's plans into (micro-)batches of tensors."""

    def __init__(self, datasets: TextDatasets | ImageDatasets, name: str, settings: Settings):
        self.split = datasets.splits[name]
        self.fingerprint = datasets.fingerprint
        self.commit = datasets.commit
        self.class_names = datasets.class_names
        self.kind = kind_of(settings, self.class_names)
        self.imbalance = []
        self.objective: Objective | None = self.kind
        if name == "train" and self.kind:
            self.imbalance = self.kind.notes(self.split)
        elif name == "train" and self.class_names:
            counts = count_classes(datasets)
            rare = describe_rare(counts) if settings.task == "text-classification" else []
            self.imbalance = [*rare, *describe_imbalance(counts, self.class_names)]
            if settings.label_smoothing or settings.class_weights:
                self.objective = ClassWeights(settings, counts, self.class_names)
        self.summary = datasets.summary
        self.notices = [*datasets.notices, *(self.objective.notices if self.objective else ())]

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, plan: MicroBatchPlan | BatchPlan) -> MicroBatch | EffectiveBatch:
        if isinstance(plan, MicroBatchPlan):
            return self.micro_batch(plan)
        return EffectiveBatch(plan.rows, [self.micro_batch(part, plan.epoch) for part in plan.parts])


class TextCollator(Collator):
    """Packs texts into rows if the plan has `packs`, and pads the rows."""

    def __init__(self, datasets: TextDatasets, name: str, settings: Settings):
        super().__init__(datasets, name, settings)
        self.multiple = settings.pad_to_multiple_of
        self.tokenizer = datasets.tokenizer
        self.compiled = settings.compile  # with and without a mask would be two graphs
        self.with_predicting = settings.task == "instruction-tuning"
        self.most = settings.batch_size if settings.replays and name == "train" else 0  # documents

    def micro_batch(self, plan: MicroBatchPlan, epoch: int | None = None) -> MicroBatch:
        """Pad a plan's rows on the right to the longest one, rounded up to the multiple; epochs do not differ."""
        columns = self.split[plan.rows]
        ids = columns["input_ids"]
        labels = columns["labels"]
        samples = list(map(len, ids))
        if plan.packs:
            ids = _joined(ids, plan.packs)
        lengths = [len(row) for row in ids]
        shape = len(lengths), -(-max(lengths) // self.multiple) * self.multiple
        inputs = {"input_ids": _padded(ids, shape, self.tokenizer.pad_token_id)}
        spans = _spans(samples, plan.packs or [1] * len(samples), shape[1])
        if plan.packs:
            inputs["position_ids"] = torch.from_numpy(_positions(spans, shape))
            per_token = self.kind.per_token if self.kind else isinstance(labels[0], list)
            inputs |= {} if per_token else {"spans": torch.from_numpy(spans)}
        else:
            inputs["attention_mask"] = _padded([[1] * length for length in lengths], shape, 0)
        if self.objective:
            inputs |= self.objective.collate(labels, spans[:, 0])
        else:
            inputs |= self._label_inputs(labels, plan.packs, shape)
            if "spans" in inputs and (missing := self.most - len(samples)) > 0:  # fillers, for fewer shapes
                end = math.prod(shape)
                inputs["spans"] = torch.cat([inputs["spans"], torch.tensor([[end - 1, end]]).expand(missing, 2)])
                inputs["labels"] = pad(inputs["labels"], (0, missing), value=IGNORED)
        tokens = sum(lengths)
        padded = math.prod(shape)
        masked = self.compiled or tokens < padded
        counted = tokens if plan.items else 0
        return MicroBatch(inputs, plan.items, plan.weight, counted, padded, masked, self.objective)

    def _label_inputs(self, labels: list, packs: list[int] | None, shape: tuple[int, int]) -> dict[str, Tensor]:
        """Return the labels of samples or tokens, with all other inputs that are made from them."""
        if not isinstance(labels[0], list):
            return {"labels": torch.tensor(labels)}
        if packs:  # the first token of a sample is not predicted from the sample before
            labels = _joined([[IGNORED, *row[1:]] for row in labels], packs)
        inputs = {"labels": _padded(labels, shape, IGNORED)}
        if self.with_predicting:
            following = pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
            inputs["predicting"] = (following != IGNORED).flatten().nonzero().squeeze(1)
        return inputs


class ImageCollator(Collator):
    """Enlarges, crops, mirrors and normalises images."""

    def __init__(self, datasets: ImageDatasets, name: str, settings: Settings):
        super().__init__(datasets, name, settings)
        self.format = datasets.format
        self.seed = settings.seed
        self.drawn = (None, None)  # an epoch and its random numbers
        mean, std = (torch.tensor(value).view(3, 1, 1) for value in (self.format.mean, self.format.std))
        self.scale = 1 / (255 * std)
        self.shift = mean / std

    def micro_batch(self, plan: MicroBatchPlan, epoch: int | None = None) -> MicroBatch:
        """Return the model's input; crops and mirrors depend only on (seed, epoch, row).

        Without an epoch, for evaluation, the centre is cropped and nothing is mirrored.
        """
        size = self.format.size
        count = len(plan.rows)
        columns = self.split[plan.rows]
        margin = self.format.resize_to - size
        corners = np.full((count, 2), margin // 2)
        mirrored = []
        if epoch is not None:
            draws = self._draws(epoch)[plan.rows]
            corners = (draws[:, :2] * (margin + 1)).astype(int)
            mirrored = np.flatnonzero(draws[:, 2] < 0.5) if self.format.random_flip else []
        images = self._squares(columns)
        if margin:
            squares = images
            images = _empty_images(count, size)
            for index, (top, left) in enumerate(corners):
                images[index] = squares[index, :, top : top + size, left : left + size]
        for index in mirrored:
            images[index] = images[index].flip(2)
        pixels = torch.empty(images.shape).copy_(images).mul_(self.scale).sub_(self.shift)
        labels = columns["labels"]
        inputs = {"pixel_values": pixels}
        inputs |= self.objective.collate(labels) if self.objective else {"labels": torch.tensor(labels)}
        tokens = count * self.format.tokens
        counted = tokens if plan.items else 0
        return MicroBatch(inputs, plan.items, plan.weight, counted, tokens, objective=self.objective)

    def _draws(self, epoch: int) -> np.ndarray:
        """Return three random numbers in [0, 1) for every row of the split, and keep them until the next epoch."""
        if self.drawn[0] != epoch:
            self.drawn = epoch, np.random.default_rng([self.seed, epoch, 1]).random((len(self), 3))
        return self.drawn[1]

    def _squares(self, columns: dict[str, list]) -> Tensor:
        """Return squares of `resize_to` pixels; smaller images are enlarged, those of equal size together.

        With bytes and the colours last, PyTorch is ten times as fast as with floats, and rounds like Pillow.
        """
        side = self.format.resize_to
        sizes = list(zip(columns["height"], columns["width"], strict=True))
        squares = _empty_images(len(sizes), side)
        for size in set(sizes):
            chosen = [index for index, other in enumerate(sizes) if other == size]
            pixels = np.stack([np.frombuffer(columns["image"][index], np.uint8).reshape(*size, 3) for index in chosen])
            images = torch.from_numpy(pixels).permute(0, 3, 1, 2)
            if size != (side, side):
                images = interpolate(images, (side, side), mode=self.format.resample, antialias=True)
            if len(chosen) == len(sizes):
                return images
            squares[chosen] = images
        return squares


def build_dataloaders(
    fabric: Fabric, datasets: TextDatasets | ImageDatasets, settings: Settings
) -> tuple[DataLoader, DataLoader, DataLoader]:
    """Return the loaders of training, validation and test.

    Training yields `EffectiveBatch`es. Validation and test yield `MicroBatch`es of the whole split, sorted by length;
    each sample counts once on any number of ranks. With `packing`, all are packed.
    """
    collator = TextCollator
    if isinstance(datasets, ImageDatasets):
        collator, settings = ImageCollator, replace(settings, pad_to_multiple_of=1)  # images need no padding
    if fabric.world_size > 1:  # all must cut alike, even on GPUs of different kinds: they wait for each other
        full_pass = fabric.all_reduce(torch.tensor(settings.full_pass), reduce_op="min")
        settings = replace(settings, full_pass=int(full_pass))
    loaders = []
    training = None
    where = settings, fabric.global_rank, fabric.world_size
    for name in SPLITS:
        split = datasets.splits[name]
        lengths = _numbers(split, "length")
        items = _numbers(split, "items") if "items" in split.column_names else np.ones_like(lengths)
        values = lengths, items, *where
        sampler = EvaluationSampler(*values, training) if training else EffectiveBatchSampler(*values)
        training = training or sampler
        loader = DataLoader(
            collator(datasets, name, settings), sampler=sampler, batch_size=None, collate_fn=_unchanged,
            num_workers=settings.num_workers, pin_memory=settings.accelerator == "cuda",
        )  # fmt: skip
        loaders.append(loader)
    return tuple(loaders)


def count_classes(datasets: TextDatasets | ImageDatasets) -> np.ndarray:
    """Return the training samples of each class."""
    return np.bincount(_numbers(datasets.splits["train"], "labels"), minlength=len(datasets.class_names))


def _numbers(split: hf.Dataset, column: str) -> np.ndarray:
    """Return a column of 64-bit integers without creating Python objects."""
    return split.with_format("arrow")[column][:].to_numpy()


def _empty_images(count: int, side: int) -> Tensor:
    return torch.empty((count, 3, side, side), dtype=torch.uint8, memory_format=torch.channels_last)


def _joined(rows: list, packs: list[int]) -> list[list[int]]:
    """Join consecutive rows: the first `packs[0]` into one row, and so on."""
    rows = iter(rows)
    return [list(chain.from_iterable(islice(rows, count))) for count in packs]


def _spans(lengths: list[int], packs: list[int], width: int) -> np.ndarray:
    """Return the flat start and end of each sample (samples, 2) in rows of this width with `packs` samples each."""
    ends = np.cumsum(lengths)
    starts = ends - lengths
    moved = np.arange(len(packs)) * width - starts[np.cumsum([0, *packs[:-1]])]
    return np.stack([starts, ends], 1) + np.repeat(moved, packs)[:, None]


def _positions(spans: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """Return positions that count from 0 in each sample and in each row's padding."""
    index = np.arange(math.prod(shape))
    begins = index % shape[1] == 0
    begins[spans[spans < len(index)]] = True
    return (index - np.maximum.accumulate(np.where(begins, index, 0))).reshape(shape)


def _padded(rows: list[list[int]], shape: tuple[int, int], filler: int) -> Tensor:
    """Return a tensor of this shape, filled up with `filler`, also in additional rows."""
    padded = np.full(shape, filler, np.int64)
    for target, row in zip(padded[: len(rows)], rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def _unchanged(batch):
    """Return the batch; the default collation would convert all of it again."""
    return batch
