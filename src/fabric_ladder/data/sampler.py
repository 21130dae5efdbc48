"""Batch plans: which samples make an effective batch, and the micro-batches that each rank has of it.

Which samples make an effective batch depends on (seed, epoch) alone: not on the micro-batch, the precision, packing or
the number of devices. So the runs of one seed can be compared step by step.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from fabric_ladder.data.cutting import MicroBatchPlan, cut_by
from fabric_ladder.settings import Settings

MOST_COMPARED = 3000  # effective batches; of more, those are left out whose bound is lower
MOST_PACKED = 300  # of them where they are packed, which takes ten times as long
EVALUATED = 4096  # padded tokens of an evaluation's batch on a GPU, where training has no more at once


class BatchPlan(NamedTuple):
    """What an effective batch is made of.

    Attributes:
        rows: Row numbers of the split, those of all ranks.
        parts: This rank's micro-batch plans; every rank has as many.
        epoch: Counted from 0.
    """

    rows: list[int]
    parts: list[MicroBatchPlan]
    epoch: int


class EffectiveBatchSampler(Sampler):
    """Batch plans of one epoch, in the order of the permutation that (seed, epoch) gives.

    Set `epoch` before each pass, and `start`, the effective batches that are left out at its beginning.

    Attributes:
        micro_batch_tokens: As in the settings; `auto` until `cut_by_tokens` sets what was chosen.
    """

    def __init__(self, lengths: np.ndarray, items: np.ndarray, settings: Settings, rank: int, ranks: int):
        self.lengths, self.items, self.settings, self.rank, self.ranks = lengths, items, settings, rank, ranks
        self.micro_batch_tokens = settings.micro_batch_tokens
        self.epoch = self.start = 0

    def __len__(self) -> int:
        """Return the optimizer steps of an epoch; the last one may be smaller, none is dropped."""
        return math.ceil(len(self.lengths) / self.settings.batch_size)

    def __iter__(self) -> Iterator[BatchPlan]:
        order = self._order()
        for number in range(self.start, len(self)):
            yield self._plan(order, number)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Go to an epoch, counted from 0, and leave out so many effective batches at its beginning."""
        self.epoch, self.start = epoch, start

    def cut_by_tokens(self, tokens: int) -> None:
        """Cut effective batches from now on into micro-batches of so many padded tokens."""
        self.micro_batch_tokens = tokens

    def heaviest(self) -> list[BatchPlan]:
        """Return the epoch's effective batches that need the most memory, found without making any.

        These are the one with the most padded tokens in a micro-batch, and the one with the longest sample,
        whose attention needs the most; of equals, the one with the most tokens. They are often the same.
        """
        settings, order = self.settings, self._order()
        starts = np.arange(0, len(order), settings.batch_size)
        longest = np.maximum.reduceat(self.lengths[order], starts)
        width = -(-longest // settings.pad_to_multiple_of) * settings.pad_to_multiple_of
        total = np.add.reduceat(self.lengths[order], starts)
        if settings.packing:  # rows but one are more than half full, whatever their samples
            tokens, compared = 2 * total + settings.max_length, MOST_PACKED
        else:
            share = -(-np.diff(starts, append=len(order)) // self.ranks)
            most = settings.micro_batch_size or np.maximum(1, self.micro_batch_tokens // width)
            tokens, compared = np.minimum(share, most) * width, MOST_COMPARED
        by_tokens, by_width = np.lexsort((total, width, tokens))[::-1], np.lexsort((total, tokens, width))[::-1]
        numbers = [self._largest_part(order, by_tokens[:compared], tokens), by_width[0]]
        return [self._plan(order, number) for number in dict.fromkeys(map(int, numbers))]

    def _largest_part(self, order: np.ndarray, numbers: np.ndarray, bounds: np.ndarray) -> int:
        """Return the effective batch with the largest micro-batch.

        Args:
            order: Of the epoch.
            numbers: Of the effective batches, those with the highest bounds first.
            bounds: The most tokens that a micro-batch of each effective batch may have.
        """
        found, most, multiple = numbers[0], 0, self.settings.pad_to_multiple_of
        for number in numbers:
            if bounds[number] <= most:
                break
            shares = self._shares(order, number)
            tokens = max(part.padded(self.lengths, multiple) for parts in shares for part in parts)
            if tokens > most:
                found, most = number, tokens
        return found

    def largest(self) -> int:
        """Return about what training has at once, in padded tokens, alike on all ranks; 0 while that is `auto`."""
        settings = self.settings
        if self.micro_batch_tokens == "auto":
            return 0
        width = -(-int(self.lengths.max()) // settings.pad_to_multiple_of) * settings.pad_to_multiple_of
        most = self.micro_batch_tokens or settings.micro_batch_size * width
        share = -(-settings.batch_size // self.ranks) * (self.lengths.mean() if settings.packing else width)
        return max(width, int(min(most, share)))

    def _order(self) -> np.ndarray:
        return np.random.default_rng([self.settings.seed, self.epoch]).permutation(len(self.lengths))

    def _plan(self, order: np.ndarray, number: int) -> BatchPlan:
        rows = self._rows(order, number)
        return BatchPlan(rows.tolist(), self._shares(order, number)[self.rank], self.epoch)

    def _rows(self, order: np.ndarray, number: int) -> np.ndarray:
        return order[number * self.settings.batch_size : (number + 1) * self.settings.batch_size]

    def _shares(self, order: np.ndarray, number: int) -> list[list[MicroBatchPlan]]:
        rows, size = self._rows(order, number), self.settings.micro_batch_size
        return cut_by(self.settings, rows, self.lengths, self.items, self.ranks, size, self.micro_batch_tokens)


class EvaluationSampler(Sampler):
    """Micro-batch plans of this rank for a whole split, sorted by length; 16 bytes are kept of a sample.

    Without `eval_batch_tokens` they have as many padded tokens as training may have at once, which also holds what its
    backward pass needs, and at least `EVALUATED`.

    Args:
        lengths: Tokens of every row of the split.
        items: Items of every row of the split.
        settings: `eval_batch_tokens` and `pad_to_multiple_of`.
        rank: This process.
        ranks: How many there are.
        training: The sampler of the training, whose micro-batches may yet change; None where the settings say it all.

    Attributes:
        tokens: Tokens of the whole split, of all ranks, without padding.
    """

    def __init__(
        self, lengths: np.ndarray, items: np.ndarray, settings: Settings, rank: int, ranks: int,
        training: EffectiveBatchSampler | None = None,
    ):  # fmt: skip
        self.tokens = int(lengths.sum())
        self._split, self._settings, self._rank, self._ranks = (lengths, items), settings, rank, ranks
        self._training, self._cut = training, (0, [])

    def __len__(self) -> int:
        return len(self._plans())

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        return iter(self._plans())

    def heaviest(self) -> list[MicroBatchPlan]:
        """Return the micro-batches with the longest sample and with the most padded tokens, often the same one."""
        plans, lengths = self._plans(), self._split[0]
        longest = np.array([lengths[plan.rows].max() for plan in plans])
        padded = np.array([plan.padded(lengths, self._settings.pad_to_multiple_of) for plan in plans])
        return [plans[number] for number in {int(longest.argmax()), int(padded.argmax())}]

    def _plans(self) -> list[MicroBatchPlan]:
        """Return the plans, cut anew where training's micro-batches have changed."""
        lengths, items = self._split
        tokens = self._settings.eval_batch_tokens
        if not tokens:  # fewer of longer samples, whose attention may keep a matrix of tokens x tokens
            share = min(1, self._training.lengths.max() / lengths.max())
            tokens = max(EVALUATED, int(share * self._training.largest()))
        if tokens != self._cut[0]:
            shares = cut_by(self._settings, np.arange(len(lengths)), lengths, items, self._ranks, tokens=tokens)
            self._cut = tokens, shares[self._rank]
        return self._cut[1]
