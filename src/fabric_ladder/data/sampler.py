"""Batch plans: which samples make an effective batch, and how they are shared out, cut and packed into rows.

Which samples make an effective batch depends on (seed, epoch) alone: not on the micro-batch, the precision, packing or
the number of devices. So the runs of one seed can be compared step by step.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler

from fabric_ladder.settings import Settings

EVALUATED = 4096  # padded tokens of an evaluation's batch on a GPU, where training has no more at once


class MicroBatchPlan(NamedTuple):
    """What a micro-batch is made of.

    Attributes:
        rows: Row numbers of the split.
        items: As in `MicroBatch`.
        weight: As in `MicroBatch`.
        packs: Packed: how many of `rows`, one after the other, share each row of the micro-batch; None: not packed.
    """

    rows: np.ndarray
    items: int
    weight: float
    packs: list[int] | None = None


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


def cut(
    rows: np.ndarray, lengths: np.ndarray, items: np.ndarray, ranks: int = 1, size: int | None = None,
    tokens: int | None = None, multiple: int = 1, capacity: int | None = None,
) -> list[list[MicroBatchPlan]]:  # fmt: skip
    """Share an effective batch out to the ranks and cut each share into micro-batches.

    Samples are sorted by length, longest first, and dealt out one by one, so that the ranks get alike shares with
    hardly any padding, and the largest micro-batch comes first. With `capacity`, short samples of a share are packed
    into rows, and those of each micro-batch made about equally long. Every rank gets the same number of micro-batches,
    since sharded models talk to each other in every forward pass: large ones are halved, by rows and then by the
    samples of a row, and where samples run out a filler (a repeated sample without weight) stands in.

    Args:
        rows: Row numbers of the effective batch.
        lengths: Tokens of every row of the split.
        items: Items of every row of the split.
        ranks: Number of ranks.
        size: Most rows of a micro-batch, which are samples unless they are packed.
        tokens: Most padded tokens of a micro-batch; a row that is longer stands alone.
        multiple: Lengths are padded to a multiple of this.
        capacity: Most padded tokens of a row that samples share; a sample that is longer stands alone. None: none do.

    Returns:
        For each rank its micro-batch plans.
    """
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    shares = [_cut_share(rows[rank::ranks], lengths, size, tokens, multiple, capacity) for rank in range(ranks)]
    most, total = max(map(len, shares)), int(items[rows].sum())
    filler, planned = MicroBatchPlan(rows[-1:], 0, 0.0, capacity and [1]), []
    for share in shares:
        while len(share) < most and _halve_largest(share):
            pass
        plans = []
        for packs in share:
            packs = packs if capacity is None else _level(packs, lengths)
            mine = packs[:, 0] if capacity is None else np.concatenate(packs)
            count = int(items[mine].sum())
            plans.append(MicroBatchPlan(mine, count, ranks * count / total, capacity and [len(pack) for pack in packs]))
        planned.append(plans + [filler] * (most - len(plans)))
    return planned


def _cut_share(
    rows: np.ndarray, lengths: np.ndarray, size: int | None, tokens: int | None, multiple: int, capacity: int | None
) -> list[np.ndarray | list[list[int]]]:
    """Return the rows of each micro-batch, and of each row its samples; unpacked, as views of `rows`."""
    if capacity is None:
        packs, used = rows[:, None], lengths[rows]
    else:
        packs, used = _pack(rows, lengths, max(1, capacity // multiple * multiple))
    share, width, start = [], -(-used // multiple) * multiple, 0
    while start < len(packs):
        count = max(1, tokens // int(width[start])) if tokens else size
        share.append(packs[start : start + count])
        start += count
    return share


def _pack(rows: np.ndarray, lengths: np.ndarray, capacity: int) -> tuple[list[list[int]], np.ndarray]:
    """Give each sample, the longest first, to the first row that has room for it.

    Returns:
        The samples that share a row, and the tokens of each row; the fullest first.
    """
    packs, free = [], np.full(len(rows), capacity)
    for sample in rows.tolist():
        row = int(np.argmax(free[: len(packs) + 1] >= min(lengths[sample], capacity)))
        if row == len(packs):
            packs.append([])
        packs[row].append(sample)
        free[row] -= lengths[sample]
    used = capacity - free[: len(packs)]
    order = np.argsort(-used, kind="stable")
    return [packs[row] for row in order], used[order]


def _level(packs: list[list[int]], lengths: np.ndarray) -> list[list[int]]:
    """Give each sample, the longest first, to the emptiest of as many rows, where this makes the longest one shorter.

    Else the last row of a share, which takes what is left, would be mostly padding.
    """
    samples = sorted((sample for pack in packs for sample in pack), key=lambda sample: -lengths[sample])
    rows, used = [[] for _ in packs], np.zeros(len(packs), int)
    for sample in samples:
        emptiest = int(used.argmin())
        rows[emptiest].append(sample)
        used[emptiest] += lengths[sample]
    if used.max() >= max(lengths[pack].sum() for pack in packs):
        return packs
    return [rows[row] for row in np.argsort(-used, kind="stable")]


def _halve_largest(share: list[list[list[int]]]) -> bool:
    """Halve, in the share itself, the micro-batch of most rows, or where each has one, of most samples.

    Returns:
        False if each has a single sample.
    """
    largest = max(range(len(share)), key=lambda index: (len(share[index]), len(share[index][0])), default=None)
    if largest is None:
        return False
    packs = share[largest]
    if len(packs) > 1:
        half = (len(packs) + 1) // 2
        share[largest : largest + 1] = [packs[:half], packs[half:]]
    elif len(packs[0]) > 1:
        share[largest : largest + 1] = [[packs[0][::2]], [packs[0][1::2]]]
    else:
        return False
    return True


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

        These are the one with the most padded tokens in its first micro-batch, and the one with the longest sample,
        whose attention needs the most; of equals, the one with the most tokens. They are often the same.
        """
        settings, order = self.settings, self._order()
        starts = np.arange(0, len(order), settings.batch_size)
        longest = np.maximum.reduceat(self.lengths[order], starts)
        width = -(-longest // settings.pad_to_multiple_of) * settings.pad_to_multiple_of
        total = np.add.reduceat(self.lengths[order], starts)
        if settings.packing:  # whose rows are alike
            tokens = total
        else:
            share = -(-np.diff(starts, append=len(order)) // self.ranks)
            most = settings.micro_batch_size or np.maximum(1, self.micro_batch_tokens // width)
            tokens = np.minimum(share, most) * width
        numbers = [np.lexsort((total, width, tokens))[-1], np.lexsort((total, tokens, width))[-1]]
        return [self._plan(order, number) for number in dict.fromkeys(map(int, numbers))]

    def largest(self) -> int:
        """Return the padded tokens of the largest micro-batch, alike on all ranks; 0 while their number is `auto`."""
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
        settings = self.settings
        rows = order[number * settings.batch_size : (number + 1) * settings.batch_size]
        shares = cut(
            rows, self.lengths, self.items, self.ranks, settings.micro_batch_size, self.micro_batch_tokens,
            settings.pad_to_multiple_of, settings.max_length if settings.packing else None,
        )  # fmt: skip
        return BatchPlan(rows.tolist(), shares[self.rank], self.epoch)


class EvaluationSampler(Sampler):
    """Micro-batch plans of this rank for a whole split, sorted by length; 16 bytes are kept of a sample.

    Without `eval_batch_tokens` they have as many padded tokens as the largest micro-batch of the training, which also
    holds what its backward pass needs: so the evaluation is never what runs out of memory.

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
        padded = longest * [len(plan.rows) for plan in plans]
        return [plans[number] for number in {int(longest.argmax()), int(padded.argmax())}]

    def _plans(self) -> list[MicroBatchPlan]:
        """Return the plans, cut anew where training's micro-batches have changed."""
        lengths, items = self._split
        tokens = self._settings.eval_batch_tokens
        if not tokens:  # fewer of longer samples, whose attention may keep a matrix of tokens x tokens
            share = min(1, self._training.lengths.max() / lengths.max())
            tokens = max(EVALUATED, int(share * self._training.largest()))
        if tokens != self._cut[0]:
            multiple = self._settings.pad_to_multiple_of
            shares = cut(np.arange(len(lengths)), lengths, items, self._ranks, tokens=tokens, multiple=multiple)
            self._cut = tokens, shares[self._rank]
        return self._cut[1]
