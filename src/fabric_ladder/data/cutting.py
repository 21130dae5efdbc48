"""Cutting an effective batch: shared out to the ranks, cut into micro-batches, and packed into rows."""

import heapq
from typing import NamedTuple

import numpy as np

from fabric_ladder.settings import Settings

MOST_IN_ROW = 127  # samples; seven binary digits tell them, and the padding after them, apart
MOST_AT_ONCE = 2048  # samples that are packed in one go
FULL_PASS = 1024  # padded tokens; below, a GPU waits for its kernels to be launched: an estimate, for BLOOM-560m


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

    def padded(self, lengths: np.ndarray, multiple: int) -> int:
        """Return the tokens with padding, of samples with these lengths, in rows rounded up to a multiple."""
        used = lengths[self.rows]
        if self.packs:
            used = np.add.reduceat(used, np.cumsum([0, *self.packs[:-1]]))
        return len(used) * -(-int(used.max()) // multiple) * multiple


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
        tokens: Most padded tokens of a micro-batch; a row that is longer stands alone. What is cut by it is cut further
            where that saves much padding, but not below `FULL_PASS`.
        multiple: Lengths are padded to a multiple of this.
        capacity: Most padded tokens of a row that samples share, and never more than `tokens`; a sample that is longer
            stands alone. None: none do.

    Returns:
        For each rank its micro-batch plans.
    """
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    if capacity and tokens:
        capacity = min(capacity, tokens)
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


def cut_by(
    settings: Settings, rows: np.ndarray, lengths: np.ndarray, items: np.ndarray, ranks: int,
    size: int | None = None, tokens: int | None = None,
) -> list[list[MicroBatchPlan]]:  # fmt: skip
    """Do as `cut`, packed and padded as the settings say; `pack_rows` takes the place of `size` and `tokens`."""
    if settings.pack_rows:
        size, tokens = settings.pack_rows, None
    capacity = settings.max_length if settings.packing else None
    return cut(rows, lengths, items, ranks, size, tokens, settings.pad_to_multiple_of, capacity)


def _cut_share(
    rows: np.ndarray, lengths: np.ndarray, size: int | None, tokens: int | None, multiple: int, capacity: int | None
) -> list[np.ndarray | list[list[int]]]:
    """Return the rows of each micro-batch, and of each row its samples; unpacked, as views of `rows`."""
    if capacity is None:
        packs, used = rows[:, None], lengths[rows]
    else:
        packs, used = _pack_all(rows, lengths, max(1, capacity // multiple * multiple))
    share, width, start = [], -(-used // multiple) * multiple, 0
    while start < len(packs):
        end = start + (max(1, tokens // int(width[start])) if tokens else size)
        ends = _cut_off_padding(width[start:end]) if tokens and capacity is None else []
        share += np.split(packs[start:end], ends) if ends else [packs[start:end]]
        start = end
    return share


def _cut_off_padding(width: np.ndarray) -> list[int]:
    """Return where to cut a micro-batch, whose rows have these widths, the widest first, to compute on less padding.

    Each cut saves an eighth of the tokens at the least; a pass of fewer than `FULL_PASS` counts as one of so many.
    """
    rows = len(width)
    if width[0] * rows <= FULL_PASS:
        return []
    cuts = np.arange(1, rows)
    tokens = np.maximum(width[0] * cuts, FULL_PASS) + np.maximum(width[1:] * (rows - cuts), FULL_PASS)
    if not len(cuts) or tokens.min() > 7 / 8 * width[0] * rows:
        return []
    best = int(cuts[tokens.argmin()])
    return [*_cut_off_padding(width[:best]), best, *(best + cut for cut in _cut_off_padding(width[best:]))]


def _pack_all(rows: np.ndarray, lengths: np.ndarray, capacity: int) -> tuple[list[list[int]], np.ndarray]:
    """Do as `_pack`, of many samples in parts that are alike, since it takes time by the square of their number."""
    parts = max(1, -(-len(rows) // MOST_AT_ONCE))
    packed = [_pack(rows[part::parts], lengths, capacity) for part in range(parts)]
    packs, used = [pack for packs, _ in packed for pack in packs], np.concatenate([used for _, used in packed])
    order = np.argsort(-used, kind="stable")
    return [packs[row] for row in order], used[order]


def _pack(rows: np.ndarray, lengths: np.ndarray, capacity: int) -> tuple[list[list[int]], np.ndarray]:
    """Give each sample, the longest first, to the first row that has room for it.

    Returns:
        The samples that share a row, and the tokens of each row.
    """
    packs, free = [], np.full(len(rows), capacity)
    for sample in rows.tolist():
        row = int(np.argmax(free[: len(packs) + 1] >= min(lengths[sample], capacity)))
        if row == len(packs):
            packs.append([])
        packs[row].append(sample)
        free[row] = free[row] - lengths[sample] if len(packs[row]) < MOST_IN_ROW else 0
    return packs, np.array([lengths[pack].sum() for pack in packs])


def _level(packs: list[list[int]], lengths: np.ndarray) -> list[list[int]]:
    """Share the samples of these rows out to as many rows anew, where this makes the longest one shorter.

    Else the last row of a share, which takes what is left, would be mostly padding. By differences (Karmarkar and Karp,
    1982): of the two ways to fill some rows that are the most uneven, the longest rows of one get the shortest of the
    other, until one way is left.
    """
    if len(packs) == 1:
        return packs
    ways = []  # each with its unevenness, below 0 as a heap wants it, a number that no other has, and its rows
    for sample in sorted((sample for pack in packs for sample in pack), key=lambda sample: -lengths[sample]):
        rows = [(int(lengths[sample]), [sample]), *[(0, []) for _ in packs[1:]]]
        heapq.heappush(ways, (-rows[0][0], len(ways), rows))
    while len(ways) > 1:
        (_, number, one), (_, _, other) = heapq.heappop(ways), heapq.heappop(ways)
        rows = [(of + by, mine + its) for (of, mine), (by, its) in zip(one, reversed(other), strict=True)]
        rows.sort(key=lambda row: -row[0])
        heapq.heappush(ways, (rows[-1][0] - rows[0][0], number, rows))
    rows = [row for used, row in ways[0][2] if used]
    if ways[0][2][0][0] >= max(lengths[pack].sum() for pack in packs) or max(map(len, rows)) > MOST_IN_ROW:
        return packs
    return rows


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
