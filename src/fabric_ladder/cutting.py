"""Plans of effective batches: which samples make one, and how they are shared out, cut and packed into rows.

Which samples make an effective batch depends on (seed, epoch) alone: not on the micro-batch, the precision, packing or
the number of devices. So the runs of one seed can be compared step by step.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from torch.utils.data import Sampler


class Part(NamedTuple):
    """The plan of a micro-batch: rows of the split, and what `MicroBatch` says of items and weight.

    Attributes:
        rows: Row numbers of the split.
        items: As in `MicroBatch`.
        weight: As in `MicroBatch`.
        packs: Packed: how many of `rows`, one after the other, share each row of the micro-batch; None: not packed.
    """

    rows: list[int]
    items: int
    weight: float
    packs: list[int] | None = None


class Plan(NamedTuple):
    """The plan of an effective batch: its rows, this rank's parts of it, and the epoch, counted from 0."""

    rows: list[int]
    parts: list[Part]
    epoch: int


def cut(
    rows: np.ndarray, lengths: np.ndarray, items: np.ndarray, ranks: int = 1, size: int | None = None,
    tokens: int | None = None, multiple: int = 1, capacity: int | None = None,
) -> list[list[Part]]:  # fmt: skip
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
        For each rank its parts.
    """
    shares = _shares(rows, lengths, items, ranks, size, tokens, multiple, capacity)
    return [[part._replace(rows=part.rows.tolist()) for part in share] for share in shares]


def _shares(
    rows: np.ndarray, lengths: np.ndarray, items: np.ndarray, ranks: int, size: int | None, tokens: int | None,
    multiple: int, capacity: int | None,
) -> list[list[Part]]:  # fmt: skip
    """Do the work of `cut`; a part's rows are an array, unless they are packed a view of one that all parts share."""
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    shares = []
    for rank in range(ranks):
        mine = rows[rank::ranks]
        if capacity is None:
            packs, used = mine[:, None], lengths[mine]
        else:
            packs, used = _pack(mine, lengths, max(1, capacity // multiple * multiple))
        share, width, start = [], -(-used // multiple) * multiple, 0
        while start < len(packs):
            count = max(1, tokens // int(width[start])) if tokens else size
            share.append(packs[start : start + count])
            start += count
        shares.append(share)
    most = max(len(share) for share in shares)
    total = int(items[rows].sum())
    plan = []
    for share in shares:
        while len(share) < most and _halve_largest(share):
            pass
        parts = []
        for packs in share:
            packs = packs if capacity is None else _level(packs, lengths)
            part = packs[:, 0] if capacity is None else np.concatenate(packs)
            count = int(items[part].sum())
            parts.append(Part(part, count, ranks * count / total, capacity and [len(pack) for pack in packs]))
        filler = Part(rows[-1:], 0, 0.0, capacity and [1])
        plan.append(parts + [filler] * (most - len(parts)))
    return plan


def _pack(rows: np.ndarray, lengths: np.ndarray, capacity: int) -> tuple[list[list[int]], np.ndarray]:
    """Give each sample, the longest first, the first place that has room for it.

    Returns:
        The samples that share a place, and the tokens of each place; the fullest first.
    """
    packs, free = [], np.full(len(rows), capacity)
    for row in rows.tolist():
        place = int(np.argmax(free[: len(packs) + 1] >= min(lengths[row], capacity)))
        if place == len(packs):
            packs.append([])
        packs[place].append(row)
        free[place] -= lengths[row]
    used = capacity - free[: len(packs)]
    order = np.argsort(-used, kind="stable")
    return [packs[place] for place in order], used[order]


def _level(packs: list[list[int]], lengths: np.ndarray) -> list[list[int]]:
    """Give each sample, the longest first, to the emptiest of as many rows, where this makes the longest one shorter.

    Else the last row of a share, which takes what is left, would be mostly padding.
    """
    samples = sorted((row for pack in packs for row in pack), key=lambda row: -lengths[row])
    rows, used = [[] for _ in packs], np.zeros(len(packs), int)
    for sample in samples:
        place = int(used.argmin())
        rows[place].append(sample)
        used[place] += lengths[sample]
    if used.max() >= max(lengths[pack].sum() for pack in packs):
        return packs
    return [rows[place] for place in np.argsort(-used, kind="stable")]


def _halve_largest(share: list[list[list[int]]]) -> bool:
    """Halve, in place, the micro-batch of most rows, or where each has one, of most samples; False: each has one."""
    place = max(range(len(share)), key=lambda index: (len(share[index]), len(share[index][0])), default=None)
    if place is None:
        return False
    packs = share[place]
    if len(packs) > 1:
        half = (len(packs) + 1) // 2
        share[place : place + 1] = [packs[:half], packs[half:]]
    elif len(packs[0]) > 1:
        share[place : place + 1] = [[packs[0][::2]], [packs[0][1::2]]]
    else:
        return False
    return True


class EvaluationSampler(Sampler):
    """Plans of this rank's micro-batches of a whole split, sorted by length; 8 bytes are kept of a sample.

    Attributes:
        tokens: Tokens of the whole split, of all ranks, without padding.
    """

    def __init__(self, lengths: np.ndarray, items: np.ndarray, settings, rank: int, ranks: int):
        self.tokens = int(lengths.sum())
        how = {"size": None, "tokens": settings.eval_batch_tokens, "multiple": settings.pad_to_multiple_of}
        self._lengths, rows = lengths, np.arange(len(lengths))
        self._parts = _shares(rows, lengths, items, ranks, **how, capacity=None)[rank]

    def __len__(self) -> int:
        return len(self._parts)

    def __iter__(self) -> Iterator[Part]:
        for part in self._parts:
            yield part._replace(rows=part.rows.tolist())

    def heaviest(self) -> list[Part]:
        """Return the micro-batches with the longest sample and with the most padded tokens, often the same one."""
        longest = np.array([self._lengths[part.rows].max() for part in self._parts])
        padded = longest * [len(part.rows) for part in self._parts]
        chosen = dict.fromkeys((int(longest.argmax()), int(padded.argmax())))
        return [self._parts[number]._replace(rows=self._parts[number].rows.tolist()) for number in chosen]


class EffectiveBatchSampler(Sampler):
    """Plans of the effective batches of one epoch, in the order of the permutation that (seed, epoch) gives.

    Set `epoch` before each pass, and `start`, the effective batches that are left out at its beginning.
    """

    def __init__(self, lengths: np.ndarray, items: np.ndarray, settings, rank: int, ranks: int):
        self.lengths, self.items, self.settings, self.rank, self.ranks = lengths, items, settings, rank, ranks
        self.epoch = self.start = 0

    def __len__(self) -> int:
        """Optimizer steps of an epoch; the last one may be smaller, none is dropped."""
        return math.ceil(len(self.lengths) / self.settings.batch_size)

    def __iter__(self) -> Iterator[Plan]:
        order = self._order()
        for number in range(self.start, len(self)):
            yield self._plan(order, number)

    def heaviest(self) -> list[Plan]:
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
            most = settings.micro_batch_size or np.maximum(1, (settings.micro_batch_tokens or 0) // width)
            tokens = np.minimum(share, most) * width
        numbers = [np.lexsort((total, width, tokens))[-1], np.lexsort((total, tokens, width))[-1]]
        return [self._plan(order, number) for number in dict.fromkeys(map(int, numbers))]

    def _order(self) -> np.ndarray:
        return np.random.default_rng([self.settings.seed, self.epoch]).permutation(len(self.lengths))

    def _plan(self, order: np.ndarray, number: int) -> Plan:
        settings = self.settings
        rows = order[number * settings.batch_size : (number + 1) * settings.batch_size]
        plan = cut(
            rows, self.lengths, self.items, self.ranks, settings.micro_batch_size, settings.micro_batch_tokens,
            settings.pad_to_multiple_of, settings.max_length if settings.packing else None,
        )  # fmt: skip
        return Plan(rows.tolist(), plan[self.rank], self.epoch)
