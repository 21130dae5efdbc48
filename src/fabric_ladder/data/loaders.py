"""Effective batches, the micro-batches that they are cut into, and the loaders that yield them."""

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

from fabric_ladder.data.cutting import MicroBatchPlan
from fabric_ladder.data.sampler import BatchPlan, EffectiveBatchSampler, EvaluationSampler
from fabric_ladder.data.splits import IGNORED, SPLITS, ImageDatasets, TextDatasets
from fabric_ladder.settings import Settings


class MicroBatch(NamedTuple):
    """What one forward pass gets.

    Attributes:
        inputs: `input_ids` and `attention_mask` (samples, length), `labels` (samples,) or (samples, length); of images
            `pixel_values` (samples, 3, size, size) and `labels` (samples,). Packed, `input_ids` and `position_ids`,
            which count from 0 in each sample and in a row's padding, are (rows, length), and there is no
            `attention_mask`; in classification `spans` (samples, 2) are the flat positions of each sample's first token
            and after its last one. In instruction tuning also `predicting` (items,): where in the flattened `input_ids`
            the tokens are whose next one is trained.
        items: What the loss is a mean of: samples, or trained tokens. 0 marks a filler that must not count.
        weight: Factor of the loss, so that the sum over all micro-batches and the mean over all ranks, which DDP
            takes, is the mean over the items of the whole effective batch.
        tokens: Tokens without padding; 0 in a filler. Those of an image are its patches and the one for the class.
        padded: Tokens with padding.
        masked: Whether `attention_mask` may hide a token.
    """

    inputs: dict[str, Tensor]
    items: int
    weight: float
    tokens: int
    padded: int
    masked: bool = True


class EffectiveBatch(NamedTuple):
    """One rank's share of the samples of one optimizer step.

    Attributes:
        samples: Row numbers of the whole effective batch, of all ranks.
        micro_batches: This rank's micro-batches; every rank has as many.
    """

    samples: list[int]
    micro_batches: list[MicroBatch]


class Collator(Dataset):
    """A split whose items are (micro-)batches: makes tensors of the plans that a sampler yields."""

    def __init__(self, datasets: TextDatasets | ImageDatasets, name: str):
        self.split, self.fingerprint, self.notices = datasets.splits[name], datasets.fingerprint, datasets.notices
        self.class_names = datasets.class_names
        self.imbalance = describe_imbalance(self.split, self.class_names) if name == "train" else []

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, plan: MicroBatchPlan | BatchPlan) -> MicroBatch | EffectiveBatch:
        if isinstance(plan, MicroBatchPlan):
            return self.micro_batch(plan)
        return EffectiveBatch(plan.rows, [self.micro_batch(part, plan.epoch) for part in plan.parts])


class TextCollator(Collator):
    """Pads texts, after packing them into rows where the plan says so, or into as many as `pack_rows` says."""

    def __init__(self, datasets: TextDatasets, name: str, settings: Settings):
        super().__init__(datasets, name)
        self.multiple, self.tokenizer = settings.pad_to_multiple_of, datasets.tokenizer
        self.fixed = (settings.pack_rows, settings.max_length) if settings.pack_rows else None
        self.compiled = settings.compile  # masks now there, now not would be two graphs
        self.with_predicting = settings.task == "instruction-tuning"

    def micro_batch(self, plan: MicroBatchPlan, epoch: int | None = None) -> MicroBatch:
        """Pad a plan's rows on the right to its longest, rounded up to the multiple; alike in each epoch."""
        columns = self.split[plan.rows]
        ids, labels = columns["input_ids"], columns["labels"]
        of_tokens, samples = isinstance(labels[0], list), list(map(len, ids))
        if plan.packs:
            ids = _joined(ids, plan.packs)
            if of_tokens:  # no sample says how the next one begins
                labels = _joined([[IGNORED, *row[1:]] for row in labels], plan.packs)
        lengths = [len(row) for row in ids]
        shape = self.fixed or (len(lengths), -(-max(lengths) // self.multiple) * self.multiple)
        inputs = {"input_ids": _padded(ids, shape, self.tokenizer.pad_token_id)}
        if plan.packs:
            spans = _spans(samples, plan.packs, shape[1])
            inputs["position_ids"] = torch.from_numpy(_positions(spans, shape))
            inputs |= {} if of_tokens else {"spans": torch.from_numpy(spans)}
        else:
            inputs["attention_mask"] = _padded([[1] * length for length in lengths], shape, 0)
        inputs["labels"] = _padded(labels, shape, IGNORED) if of_tokens else torch.tensor(labels)
        if self.with_predicting:
            following = pad(inputs["labels"][:, 1:], (0, 1), value=IGNORED)
            inputs["predicting"] = (following != IGNORED).flatten().nonzero().squeeze(1)
        tokens, padded = sum(lengths), math.prod(shape)
        masked = self.compiled or tokens < padded
        return MicroBatch(inputs, plan.items, plan.weight, tokens if plan.items else 0, padded, masked)


class ImageCollator(Collator):
    """Enlarges, cuts out, mirrors and normalises images."""

    def __init__(self, datasets: ImageDatasets, name: str, settings: Settings):
        super().__init__(datasets, name)
        self.format, self.seed, self.drawn = datasets.format, settings.seed, (None, None)
        mean, std = (torch.tensor(value).view(3, 1, 1) for value in (self.format.mean, self.format.std))
        self.scale, self.shift = 1 / (255 * std), mean / std

    def micro_batch(self, plan: MicroBatchPlan, epoch: int | None = None) -> MicroBatch:
        """Make what the model sees; where to cut and what to mirror depends on (seed, epoch, row) alone.

        Without an epoch, in evaluation, the centre is cut out and nothing is mirrored.
        """
        size, count = self.format.size, len(plan.rows)
        columns = self.split[plan.rows]
        margin = self.format.resize_to - size
        corners, mirrored = np.full((count, 2), margin // 2), []
        if epoch is not None:
            draws = self._draws(epoch)[plan.rows]
            corners = (draws[:, :2] * (margin + 1)).astype(int)
            mirrored = np.flatnonzero(draws[:, 2] < 0.5) if self.format.random_flip else []
        shown = self._squares(columns)
        if margin:
            shown, squares = _empty_images(count, size), shown
            for index, (top, left) in enumerate(corners):
                shown[index] = squares[index, :, top : top + size, left : left + size]
        for index in mirrored:
            shown[index] = shown[index].flip(2)
        pixels = torch.empty(shown.shape).copy_(shown).mul_(self.scale).sub_(self.shift)
        inputs = {"pixel_values": pixels, "labels": torch.tensor(columns["labels"])}
        tokens = count * self.format.tokens
        return MicroBatch(inputs, plan.items, plan.weight, tokens if plan.items else 0, tokens)

    def _draws(self, epoch: int) -> np.ndarray:
        """Return three numbers in [0, 1) for every row of the split; the last epoch's are kept."""
        if self.drawn[0] != epoch:
            self.drawn = epoch, np.random.default_rng([self.seed, epoch, 1]).random((len(self), 3))
        return self.drawn[1]

    def _squares(self, columns: dict[str, list]) -> Tensor:
        """Return squares of `resize_to` pixels, enlarged where need be, all images of one size at once.

        On bytes with the colours last, PyTorch does this ten times as fast as on floats, and rounds like Pillow.
        """
        side, sizes = self.format.resize_to, list(zip(columns["height"], columns["width"], strict=True))
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

    Training yields `EffectiveBatch`es; validation and test yield `MicroBatch`es of the whole split, sorted by length,
    where each sample counts once, whatever the number of ranks. All are packed where the settings say so.
    """
    collator = TextCollator
    if isinstance(datasets, ImageDatasets):
        collator, settings = ImageCollator, replace(settings, pad_to_multiple_of=1)  # there is nothing to pad
    loaders, training = [], None
    for name in SPLITS:
        split = datasets.splits[name]
        lengths = _numbers(split, "length")
        items = _numbers(split, "items") if "items" in split.column_names else np.ones_like(lengths)
        values = lengths, items, settings, fabric.global_rank, fabric.world_size
        sampler = EvaluationSampler(*values, training) if training else EffectiveBatchSampler(*values)
        training = training or sampler
        loader = DataLoader(
            collator(datasets, name, settings), sampler=sampler, batch_size=None, collate_fn=_as_it_is,
            num_workers=settings.num_workers, pin_memory=settings.accelerator == "cuda",
        )  # fmt: skip
        loaders.append(loader)
    return tuple(loaders)


def describe_imbalance(split: hf.Dataset, class_names: list[str]) -> list[str]:
    """Return a line on the largest class, if it has over 60 % of the samples or over twice its even share."""
    if not class_names:
        return []
    counts = np.bincount(_numbers(split, "labels"))
    share, name = counts.max() / len(split), class_names[counts.argmax()]
    if share <= min(0.6, 2 / len(class_names)):
        return []
    return [
        f"Imbalanced classes: {share:.1%} of the training samples are {name!r}, one of {len(class_names)} classes; an "
        "accuracy below that is worse than always guessing it"
    ]


def _numbers(split: hf.Dataset, column: str) -> np.ndarray:
    """Return a column of integers, 8 bytes each, without making an object of each on the way."""
    return split.with_format("arrow")[column][:].to_numpy()


def _empty_images(count: int, side: int) -> Tensor:
    return torch.empty((count, 3, side, side), dtype=torch.uint8, memory_format=torch.channels_last)


def _joined(rows: list, packs: list[int]) -> list[list[int]]:
    """Join so many rows, one after the other, into one each."""
    rows = iter(rows)
    return [list(chain.from_iterable(islice(rows, count))) for count in packs]


def _spans(lengths: list[int], packs: list[int], width: int) -> np.ndarray:
    """Return the flat start and end of each sample, (samples, 2), in rows of this width that hold so many samples."""
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
    """Return a tensor of this shape, which may have more rows than there are."""
    padded = np.full(shape, filler, np.int64)
    for target, row in zip(padded[: len(rows)], rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def _as_it_is(batch):
    """Return the batch in place of the default collation, which would walk through all of it once more."""
    return batch
