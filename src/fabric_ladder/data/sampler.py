"""Batch plans: the samples of each effective batch, and its micro-batches on each rank.

The samples of an effective batch depend only on (seed, epoch): not on the micro-batch, the precision, packing or the
number of devices. So runs with the same seed can be compared step by step.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from fabric_ladder.data.cutting import MicroBatchPlan, cut
from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings

MAX_COMPARED = 3000  # effective batches that `heaviest` compares, those with the highest bounds first
FEWER_COMPARED = 300  # packing takes ten times as long; micro-batches after the first may not exist
TOKENS_BEFORE_FITTING = 1024  # padded tokens of a micro-batch while `micro_batch_tokens` is still `auto`
EVALUATED = 4096  # padded tokens of an evaluation's batch on a GPU whose training micro-batches are smaller


class BatchPlan(NamedTuple):
    """The plan of an effective batch.

    Attributes:
        rows: Row numbers of the split, for all ranks.
        parts: This rank's micro-batch plans; every rank has the same number.
        epoch: Counted from 0.
    """

    rows: list[int]
    parts: list[MicroBatchPlan]
    epoch: int


def check_steps(settings: Settings, samples: int) -> None:
    """Refuse `warmup_steps`, `evaluate_every` and `patience` that do not suit a run on this number of samples."""
    steps_per_epoch = math.ceil(samples / settings.batch_size)
    steps = steps_per_epoch * settings.epochs
    if settings.warmup_steps >= steps:
        raise UserError(f"--warmup_steps {settings.warmup_steps}: the run has only {steps} optimizer steps")
    every, patience = settings.evaluate_every, settings.patience
    within_epochs = sum(step % steps_per_epoch > 0 for step in range(every, steps, every)) if every else 0
    if every and not within_epochs:
        raise UserError(f"--evaluate_every {every}: an epoch has only {steps_per_epoch} optimizer steps; use fewer")
    validations = within_epochs + settings.epochs
    if patience and patience >= validations:
        raise UserError(
            f"--patience {patience}: the run has only {validations} validation{'s' * (validations > 1)}; add "
            "--evaluate_every N (optimizer steps), or raise --epochs"
        )


class EffectiveBatchSampler(Sampler):
    """Batch plans of one epoch, in the order of the permutation that (seed, epoch) gives.

    Attributes:
        epoch: Counted from 0.
        start: Number of effective batches that are skipped at the beginning of the epoch.
        micro_batch_tokens: As in the settings; `auto` until `cut_by_tokens` sets a number.
    """

    def __init__(self, lengths: np.ndarray, items: np.ndarray, settings: Settings, rank: int, ranks: int):
        self.lengths = lengths
        self.items = items
        self.settings = settings
        self.rank = rank
        self.ranks = ranks
        self.micro_batch_tokens = settings.micro_batch_tokens
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        """Return the optimizer steps of an epoch; the last effective batch may be smaller."""
        return math.ceil(len(self.lengths) / self.settings.batch_size)

    def __iter__(self) -> Iterator[BatchPlan]:
        order = self._order()
        for number in range(self.start, len(self)):
            yield self._plan(order, number)

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Go to an epoch, counted from 0, and skip `start` effective batches at its beginning."""
        self.epoch = epoch
        self.start = start

    def cut_by_tokens(self, tokens: int) -> None:
        """Cut effective batches from now on into micro-batches of at most `tokens` padded tokens."""
        self.micro_batch_tokens = tokens

    def heaviest(self) -> list[BatchPlan]:
        """Return the epoch's effective batches that need the most memory, without making all of them.

        One has the largest micro-batch, in padded tokens. One has the largest that is not the first, so that there are
        gradients already. One has the longest sample, whose attention needs the most memory; among equally long ones it
        has the largest micro-batch. Often they are the same effective batch.
        """
        settings = self.settings
        order = self._order()
        starts = np.arange(0, len(order), settings.batch_size)
        longest = np.maximum.reduceat(self._padded(order), starts)
        total = np.add.reduceat(self.lengths[order], starts)
        if settings.packing:  # nearly always: all rows except one are more than half full
            bounds = later = 2 * total + settings.max_length
        else:
            bounds, later = self._bounds(order)
        found = []
        most = FEWER_COMPARED if settings.packing else MAX_COMPARED
        for first, limits, compared in ((0, bounds, most), (1, later, FEWER_COMPARED)):
            numbers = np.lexsort((total, longest, limits))[::-1][:compared]
            found.append(self._with_largest_part(order, numbers, limits, first))
        found.append(np.lexsort((total, bounds, longest))[-1])
        return [self._plan(order, number) for number in dict.fromkeys(map(int, found))]

    def _padded(self, rows: np.ndarray) -> np.ndarray:
        multiple = self.settings.pad_to_multiple_of
        return -(-self.lengths[rows] // multiple) * multiple

    def _bounds(self, order: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return for each effective batch the most padded tokens of a micro-batch, and of one that is not the first.

        A micro-batch has neighbours of the samples sorted by length. So if its longest is sample number i, it has no
        more than the samples from i on, of which each rank has its share. The first one has the rank's longest sample.
        """
        settings = self.settings
        width = np.zeros((len(self), settings.batch_size), int)
        width.flat[: len(order)] = self._padded(order)
        width = np.sort(width)[:, ::-1]
        rows = -(-np.arange(settings.batch_size, 0, -1) // self.ranks)
        most = settings.micro_batch_size or np.maximum(1, self._tokens() // np.maximum(1, width))
        tokens = width * np.minimum(rows, most)
        return tokens.max(axis=1), tokens[:, self.ranks :].max(axis=1, initial=0)

    def first_and_last(self) -> list[MicroBatchPlan]:
        """Return this rank's micro-batch plans of the first and the last effective batch of the epoch."""
        order = self._order()
        last = (len(order) - 1) // self.settings.batch_size
        return [part for number in (0, last) for part in self._plan(order, number).parts]

    def _with_largest_part(self, order: np.ndarray, numbers: np.ndarray, bounds: np.ndarray, first: int) -> int:
        """Return the number of the effective batch with the largest micro-batch.

        Args:
            order: The epoch's permutation.
            numbers: Numbers of the effective batches to compare, sorted by descending bound.
            bounds: Upper bound of the padded tokens of a micro-batch, for each effective batch.
            first: Number of a rank's first micro-batch that counts.
        """
        found = numbers[0]
        most = 0
        for number in numbers:
            if bounds[number] <= most:
                break
            multiple = self.settings.pad_to_multiple_of
            parts = [part for share in self._shares(order, number) for part in share[first:]]
            tokens = max((part.padded(self.lengths, multiple) for part in parts), default=0)
            if tokens > most:
                found = number
                most = tokens
        return found

    def largest(self) -> int:
        """Return the approximate padded tokens per micro-batch, equal on all ranks; 0 while this is still `auto`."""
        settings = self.settings
        if self.micro_batch_tokens == "auto":
            return 0
        width = -(-int(self.lengths.max()) // settings.pad_to_multiple_of) * settings.pad_to_multiple_of
        most = self.micro_batch_tokens or settings.micro_batch_size * width
        share = -(-settings.batch_size // self.ranks) * (self.lengths.mean() if settings.packing else width)
        return max(width, int(min(most, share)))

    def _tokens(self) -> int | None:
        return TOKENS_BEFORE_FITTING if self.micro_batch_tokens == "auto" else self.micro_batch_tokens

    def _order(self) -> np.ndarray:
        return np.random.default_rng([self.settings.seed, self.epoch]).permutation(len(self.lengths))

    def _plan(self, order: np.ndarray, number: int) -> BatchPlan:
        rows = self._rows(order, number)
        return BatchPlan(rows.tolist(), self._shares(order, number)[self.rank], self.epoch)

    def _rows(self, order: np.ndarray, number: int) -> np.ndarray:
        return order[number * self.settings.batch_size : (number + 1) * self.settings.batch_size]

    def _shares(self, order: np.ndarray, number: int) -> list[list[MicroBatchPlan]]:
        rows = self._rows(order, number)
        size = self.settings.micro_batch_size
        return cut(self.settings, rows, self.lengths, self.items, self.ranks, size, self._tokens())


class EvaluationSampler(Sampler):
    """This rank's micro-batch plans for a whole split, sorted by length; it keeps 16 bytes per sample.

    Without `eval_batch_tokens` a batch has as many padded tokens as a training micro-batch, and at least `EVALUATED`.
    The memory suffices, because training also stores activations for its backward pass.

    Args:
        lengths: Tokens of every row of the split.
        items: Items of every row of the split.
        settings: `eval_batch_tokens` and `pad_to_multiple_of` are used.
        rank: This process.
        ranks: Number of processes.
        training: The training sampler, whose micro-batches may still change; None if `eval_batch_tokens` is set.

    Attributes:
        tokens: Tokens of the whole split on all ranks, without padding.
    """

    def __init__(
        self,
        lengths: np.ndarray,
        items: np.ndarray,
        settings: Settings,
        rank: int,
        ranks: int,
        training: EffectiveBatchSampler | None = None,
    ):
        self.tokens = int(lengths.sum())
        self._lengths = lengths
        self._items = items
        self._settings = settings
        self._rank = rank
        self._ranks = ranks
        self._training = training
        self._cut = (0, [])  # tokens, and the plans that were cut by them

    def __len__(self) -> int:
        return len(self._plans())

    def __iter__(self) -> Iterator[MicroBatchPlan]:
        return iter(self._plans())

    def heaviest(self) -> list[MicroBatchPlan]:
        """Return the micro-batches with the longest sample and with the most padded tokens; often they are the same."""
        plans = self._plans()
        longest = np.array([self._lengths[plan.rows].max() for plan in plans])
        padded = np.array([plan.padded(self._lengths, self._settings.pad_to_multiple_of) for plan in plans])
        return [plans[number] for number in {int(longest.argmax()), int(padded.argmax())}]

    def _plans(self) -> list[MicroBatchPlan]:
        """Return the plans, and cut the split again if training's micro-batches have changed."""
        tokens = self._settings.eval_batch_tokens
        if not tokens:  # fewer tokens if samples are longer, because attention may store tokens x tokens
            share = min(1, self._training.lengths.max() / self._lengths.max())
            tokens = max(EVALUATED, int(share * self._training.largest()))
        if tokens != self._cut[0]:
            rows = np.arange(len(self._lengths))
            shares = cut(self._settings, rows, self._lengths, self._items, self._ranks, tokens=tokens)
            self._cut = tokens, shares[self._rank]
        return self._cut[1]
