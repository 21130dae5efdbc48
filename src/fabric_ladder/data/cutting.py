"""Share an effective batch out to the ranks, cut each share into micro-batches, and pack samples into rows."""

import heapq
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from fabric_ladder.settings import Settings

MOST_IN_ROW = 127  # samples; seven bits number them and the padding after them
PACKED_TOGETHER = 2048  # samples; packing is quadratic in their number


class MicroBatchPlan(NamedTuple):
    """The plan of a micro-batch.

    Attributes:
        rows: Row numbers of the split.
        items: As in `MicroBatch`.
        weight: As in `MicroBatch`.
        packs: The number of samples in each row of the micro-batch, in the order of `rows`; None without packing.
    """

    rows: np.ndarray
    items: int
    weight: float
    packs: list[int] | None = None

    def padded(self, lengths: np.ndarray, multiple: int) -> int:
        """Return the padded tokens, given the lengths of all samples; rows are rounded up to a multiple."""
        used = lengths[self.rows]
        if self.packs:
            used = np.add.reduceat(used, np.cumsum([0, *self.packs[:-1]]))
        return len(used) * -(-int(used.max()) // multiple) * multiple


def cut(
    settings: Settings,
    rows: np.ndarray,
    lengths: np.ndarray,
    items: np.ndarray,
    ranks: int = 1,
    size: int | None = None,
    tokens: int | None = None,
) -> list[list[MicroBatchPlan]]:
    """Share an effective batch out to the ranks and cut each share into micro-batches.

    Samples are sorted by length, longest first, and dealt out one by one. So the ranks get similar shares with little
    padding, and the largest micro-batch comes first. With packing, short samples of a share are packed into rows,
    and the rows of each micro-batch are made about equally long.

    Every rank gets the same number of micro-batches, because sharded models communicate in every forward pass. Ranks
    with fewer halve their largest ones, and then add fillers: a repeated sample without weight.

    Args:
        settings: Those of packing and padding, and `full_pass`.
        rows: Row numbers of the effective batch.
        lengths: Tokens of every row of the split.
        items: Items of every row of the split.
        ranks: Number of ranks.
        size: Maximum rows of a micro-batch; without packing, a row is a sample.
        tokens: Maximum padded tokens of a micro-batch of several rows; see also `_ends_of_least_cost`.

    Returns:
        The micro-batch plans of each rank.
    """
    rows = rows[np.argsort(-lengths[rows], kind="stable")]
    capacity = settings.max_length if settings.packing else None
    if capacity and tokens:
        capacity = min(capacity, tokens)
    how = size, tokens, settings.pad_to_multiple_of, capacity, settings.full_pass
    shares = [_cut_share(rows[rank::ranks], lengths, *how) for rank in range(ranks)]
    most = max(map(len, shares))
    total = int(items[rows].sum())
    planned = []
    for share in shares:
        while len(share) < most and _halve_largest(share):
            pass
        plans = []
        for packs in share:
            packs = packs if capacity is None else _level(packs, lengths)
            mine = packs[:, 0] if capacity is None else np.concatenate(packs)
            count = int(items[mine].sum())
            plans.append(MicroBatchPlan(mine, count, ranks * count / total, capacity and [len(pack) for pack in packs]))
        planned.append(plans + [MicroBatchPlan(rows[-1:], 0, 0.0, capacity and [1])] * (most - len(plans)))
    return planned


def _cut_share(
    rows: np.ndarray,
    lengths: np.ndarray,
    size: int | None,
    tokens: int | None,
    multiple: int,
    capacity: int | None,
    full_pass: int,
) -> list[np.ndarray | list[list[int]]]:
    """Return the micro-batches of a share: lists of rows, which are lists of samples. Unpacked, these are views."""
    if capacity is None:
        packs = rows[:, None]
        used = lengths[rows]
    else:
        packs, used = _pack_all(rows, lengths, max(1, capacity // multiple * multiple))
    width = -(-used // multiple) * multiple
    if tokens and capacity is None:
        ends = _ends_of_least_cost(width, tokens, full_pass)
        return [packs[start:end] for start, end in pairwise([0, *ends])]
    share = []
    start = 0
    while start < len(packs):
        end = start + (max(1, tokens // int(width[start])) if tokens else size)
        share.append(packs[start:end])
        start = end
    return share


def _ends_of_least_cost(width: np.ndarray, tokens: int, full_pass: int) -> list[int]:
    """Return the ends of consecutive micro-batches that together cost least, by dynamic programming.

    A micro-batch costs its padded tokens, at least `full_pass`, and a quarter of `full_pass` in addition. So many small
    passes are not worth the last bit of padding. `width` has the padded tokens of each row, from the widest.
    """
    cost = np.zeros(len(width) + 1)
    previous = np.zeros(len(width) + 1, int)
    first = 0
    for end in range(1, len(width) + 1):
        while first < end - 1 and width[first] * (end - first) > tokens:
            first += 1
        starts = np.arange(first, end)
        costs = cost[first:end] + np.maximum(width[first:end] * (end - starts), full_pass)
        start = end - 1 - int(costs[::-1].argmin())  # of equal costs the last start, so that the largest come first
        cost[end] = costs[start - first] + full_pass / 4
        previous[end] = start
    ends = []
    end = len(width)
    while end:
        ends.append(end)
        end = int(previous[end])
    return ends[::-1]


def _pack_all(rows: np.ndarray, lengths: np.ndarray, capacity: int) -> tuple[list[list[int]], np.ndarray]:
    """Like `_pack`, in equal chunks, because packing is quadratic in the number of samples."""
    parts = max(1, -(-len(rows) // PACKED_TOGETHER))
    packed = [_pack(rows[part::parts], lengths, capacity) for part in range(parts)]
    packs = [pack for packs, _ in packed for pack in packs]
    used = np.concatenate([used for _, used in packed])
    order = np.argsort(-used, kind="stable")
    return [packs[row] for row in order], used[order]


def _pack(rows: np.ndarray, lengths: np.ndarray, capacity: int) -> tuple[list[list[int]], np.ndarray]:
    """Put each sample, the longest first, into the first row with enough space (first-fit decreasing).

    Return the samples and the tokens of each row.
    """
    packs = []
    free = np.full(len(rows), capacity)
    for sample in rows.tolist():
        row = int(np.argmax(free[: len(packs) + 1] >= min(lengths[sample], capacity)))
        if row == len(packs):
            packs.append([])
        packs[row].append(sample)
        free[row] = free[row] - lengths[sample] if len(packs[row]) < MOST_IN_ROW else 0
    return packs, np.array([lengths[pack].sum() for pack in packs])


def _level(packs: list[list[int]], lengths: np.ndarray) -> list[list[int]]:
    """Redistribute the samples over the same number of rows, if this makes the longest row shorter.

    Otherwise the last row of a share would be mostly padding. This is the largest differencing method (Karmarkar and
    Karp, 1982). It begins with one partial solution per sample. In each step it merges the two most uneven solutions,
    the longest rows of one with the shortest rows of the other, until one solution is left.
    """
    if len(packs) == 1:
        return packs
    solutions = []  # (negative unevenness, a number that breaks ties, rows as (tokens, samples))
    for sample in sorted((sample for pack in packs for sample in pack), key=lambda sample: -lengths[sample]):
        rows = [(int(lengths[sample]), [sample]), *[(0, []) for _ in packs[1:]]]
        heapq.heappush(solutions, (-rows[0][0], len(solutions), rows))
    while len(solutions) > 1:
        _, number, first = heapq.heappop(solutions)
        _, _, second = heapq.heappop(solutions)
        pairs = zip(first, reversed(second), strict=True)
        rows = [(tokens + more, samples + others) for (tokens, samples), (more, others) in pairs]
        rows.sort(key=lambda row: -row[0])
        heapq.heappush(solutions, (rows[-1][0] - rows[0][0], number, rows))
    best = solutions[0][2]
    rows = [samples for tokens, samples in best if tokens]
    if best[0][0] >= max(lengths[pack].sum() for pack in packs) or max(map(len, rows)) > MOST_IN_ROW:
        return packs
    return rows


def _halve_largest(share: list[list[list[int]]]) -> bool:
    """Halve the largest micro-batch in place: the one with the most rows, or the most samples if all have one row.

    Return False if every micro-batch has a single sample.
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
