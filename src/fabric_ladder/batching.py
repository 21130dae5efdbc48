"""Effective batches, the micro-batches that they are cut into, and the loaders that yield them.

Which samples make an effective batch depends on (seed, epoch) alone: not on the micro-batch, the precision or the
number of devices. So the runs of one seed can be compared step by step.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from lightning import Fabric
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from local_dataset_utilities import TextDatasets

IGNORED = -100  # label of a token that is not trained, as in PyTorch's cross entropy


class MicroBatch(NamedTuple):
    """What one forward pass gets.

    Attributes:
        inputs: `input_ids` and `attention_mask` (samples, length), `labels` (samples,) or (samples, length).
        items: What the loss is a mean of: samples, or trained tokens. 0 marks a filler that must not count.
        weight: Factor of the loss, so that the sum over all micro-batches and the mean over all ranks, which DDP
            takes, is the mean over the items of the whole effective batch.
        tokens: Tokens without padding.
    """

    inputs: dict[str, Tensor]
    items: int
    weight: float
    tokens: int


class EffectiveBatch(NamedTuple):
    """One rank's share of the samples of one optimizer step.

    Attributes:
        samples: Row numbers of the whole effective batch, of all ranks.
        micro_batches: This rank's micro-batches; every rank has as many.
    """

    samples: list[int]
    micro_batches: list[MicroBatch]


class Part(NamedTuple):
    """The plan of a micro-batch: rows of the split, and what `MicroBatch` says of items and weight."""

    rows: list[int]
    items: int
    weight: float


def cut(
    rows: np.ndarray, lengths: np.ndarray, items: np.ndarray, ranks: int = 1, size: int | None = None,
    tokens: int | None = None, multiple: int = 1,
) -> list[list[Part]]:  # fmt: skip
    """Share an effective batch out to the ranks and cut each share into micro-batches.

    Samples are sorted by length, longest first, and dealt out one by one, so that the ranks get alike shares with
    hardly any padding, and the largest micro-batch comes first. Every rank gets the same number of micro-batches, since
    sharded models talk to each other in every forward pass: large ones are halved, and where samples run out a filler
    (a repeated sample without weight) stands in.

    Args:
        rows: Row numbers of the effective batch.
        lengths: Tokens of every row of the split.
        items: Items of every row of the split.
        ranks: Number of ranks.
        size: Most samples of a micro-batch.
        tokens: Most padded tokens of a micro-batch; a sample that is longer stands alone.
        multiple: Lengths are padded to a multiple of this.

    Returns:
        For each rank its parts.
    """
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    padded = -(-lengths[rows] // multiple) * multiple
    shares = []
    for rank in range(ranks):
        share, width, start = [], padded[rank::ranks], 0
        mine = rows[rank::ranks].tolist()
        while start < len(mine):
            count = max(1, tokens // int(width[start])) if tokens else size
            share.append(mine[start : start + count])
            start += count
        shares.append(share)
    most = max(len(share) for share in shares)
    total = int(items[rows].sum())
    plan = []
    for share in shares:
        while len(share) < most and any(len(part) > 1 for part in share):
            largest = max(range(len(share)), key=lambda index: len(share[index]))
            half = (len(share[largest]) + 1) // 2
            share[largest : largest + 1] = [share[largest][:half], share[largest][half:]]
        counts = [int(items[part].sum()) for part in share]
        parts = [Part(part, count, ranks * count / total) for part, count in zip(share, counts, strict=True)]
        plan.append(parts + [Part([int(rows[-1])], 0, 0.0)] * (most - len(parts)))
    return plan


class EffectiveBatchSampler(Sampler):
    """Plans of the effective batches of one epoch, in the order of the permutation that (seed, epoch) gives.

    Set `epoch` before each pass.
    """

    def __init__(self, lengths: np.ndarray, items: np.ndarray, settings, rank: int, ranks: int):
        self.lengths, self.items, self.settings, self.rank, self.ranks = lengths, items, settings, rank, ranks
        self.epoch = 0

    def __len__(self) -> int:
        """Optimizer steps of an epoch; the last one may be smaller, none is dropped."""
        return math.ceil(len(self.lengths) / self.settings.batch_size)

    def __iter__(self) -> Iterator[tuple[list[int], list[Part]]]:
        settings = self.settings
        order = np.random.default_rng([settings.seed, self.epoch]).permutation(len(self.lengths))
        for start in range(0, len(order), settings.batch_size):
            rows = order[start : start + settings.batch_size]
            plan = cut(
                rows, self.lengths, self.items, self.ranks, settings.micro_batch_size, settings.micro_batch_tokens,
                settings.pad_to_multiple_of,
            )  # fmt: skip
            yield rows.tolist(), plan[self.rank]


class Collator(Dataset):
    """Makes tensors of the plans that a sampler yields."""

    def __init__(self, datasets: TextDatasets, name: str, multiple: int):
        self.split, self.multiple = datasets.splits[name], multiple
        self.pad_token_id, self.fingerprint = datasets.tokenizer.pad_token_id, datasets.fingerprint

    def __len__(self) -> int:
        return len(self.split)

    def __getitem__(self, plan: Part | tuple[list[int], list[Part]]) -> MicroBatch | EffectiveBatch:
        if isinstance(plan, Part):
            return self.micro_batch(plan)
        samples, parts = plan
        return EffectiveBatch(samples, [self.micro_batch(part) for part in parts])

    def micro_batch(self, part: Part) -> MicroBatch:
        """Pad a part's samples on the right to its longest, rounded up to the multiple."""
        rows = self.split[part.rows]
        lengths = [len(ids) for ids in rows["input_ids"]]
        shape = (len(lengths), -(-max(lengths) // self.multiple) * self.multiple)
        inputs = {
            "input_ids": _padded(rows["input_ids"], shape, self.pad_token_id),
            "attention_mask": _padded([[1] * length for length in lengths], shape, 0),
        }
        labels = rows["labels"]
        inputs["labels"] = _padded(labels, shape, IGNORED) if isinstance(labels[0], list) else torch.tensor(labels)
        return MicroBatch(inputs, part.items, part.weight, sum(lengths) if part.items else 0)


def build_dataloaders(fabric: Fabric, datasets: TextDatasets, settings) -> tuple[DataLoader, DataLoader, DataLoader]:
    """Return the loaders of training, validation and test.

    Training yields `EffectiveBatch`es. Validation and test yield `MicroBatch`es of the whole split, sorted by length:
    each sample counts once, whatever the number of ranks.
    """
    loaders = []
    for name in ("train", "validation", "test"):
        split = datasets.splits[name]
        lengths = np.asarray(split["length"][:])
        items = np.asarray(split["items"][:]) if "items" in split.column_names else np.ones_like(lengths)
        multiple = settings.pad_to_multiple_of
        if name == "train":
            sampler = EffectiveBatchSampler(lengths, items, settings, fabric.global_rank, fabric.world_size)
        else:
            rows, tokens = np.arange(len(lengths)), settings.eval_batch_tokens
            sampler = cut(rows, lengths, items, fabric.world_size, tokens=tokens, multiple=multiple)[fabric.global_rank]
        loader = DataLoader(
            Collator(datasets, name, multiple), sampler=sampler, batch_size=None, collate_fn=_as_it_is,
            num_workers=settings.num_workers, pin_memory=settings.accelerator == "cuda",
        )  # fmt: skip
        loaders.append(loader)
    return tuple(loaders)


def _padded(rows: list[list[int]], shape: tuple[int, int], filler: int) -> Tensor:
    padded = np.full(shape, filler, np.int64)
    for target, row in zip(padded, rows, strict=True):
        target[: len(row)] = row
    return torch.from_numpy(padded)


def _as_it_is(batch):
    """Stands in for the default collation, which would walk through every batch once more."""
    return batch
