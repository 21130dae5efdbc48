"""Effective batches: what is in them, how they are cut and shared out."""

import hashlib
import json
import math
import tracemalloc
from itertools import chain

import numpy as np
import pytest
from helpers import settings_for, token_datasets

from fabric_ladder import build_dataloaders
from fabric_ladder.batching import TextCollator
from fabric_ladder.cutting import EffectiveBatchSampler, EvaluationSampler, Part, cut

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 200, 1000)
ITEMS = RNG.integers(1, 9, 1000)


LIMITS = [{"size": 1}, {"size": 4}, {"size": 16}, {"tokens": 1}, {"tokens": 256}, {"tokens": 9999}]
UNPACKED = [  # what `cut` gave before there was packing
    "c157380d8453d3cbf17275cd552ed849bdd977c5de31f5bae8e63d18ca9bce67",
    "66701d2cbdbb46bb53e47c1f57c893348a4bd10121fead0f6442a851764dc5fb",
    "a08eaa30aba2716fe454174cb711d082ad4a4ee312dddc519cef78b8ab038967",
]


def row_tokens(part):
    """Tokens of each row of a micro-batch."""
    packs = part.packs or [1] * len(part.rows)
    return [LENGTHS[list(rows)].sum() for rows in np.split(np.array(part.rows), np.cumsum(packs)[:-1])]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("count", [1, 2, 5, 16, 33])
@pytest.mark.parametrize("capacity", [None, 5, 300])
def test_a_cut_holds_each_sample_once_in_equally_many_micro_batches(ranks, limit, count, capacity):
    rows = RNG.permutation(1000)[:count]
    plan = cut(rows, LENGTHS, ITEMS, ranks, **limit, multiple=8, capacity=capacity)
    assert len(plan) == ranks
    assert len({len(share) for share in plan}) == 1
    real = [part for share in plan for part in share if part.items]
    assert sorted(row for part in real for row in part.rows) == sorted(rows.tolist())
    assert sum(part.items for part in real) == ITEMS[rows].sum()
    assert sum(part.weight for part in real) == pytest.approx(ranks)
    for part in real:
        tokens = row_tokens(part)
        width = math.ceil(max(tokens) / 8) * 8
        assert len(tokens) <= limit.get("size", 99)
        assert len(tokens) == 1 or width * len(tokens) <= limit.get("tokens", 10**9)
        if capacity:
            assert sum(part.packs) == len(part.rows)
            assert all(math.ceil(total / 8) * 8 <= capacity or count == 1
                       for total, count in zip(tokens, part.packs, strict=True))  # fmt: skip
        else:
            assert part.packs is None
    for share in plan:
        widths = [max(row_tokens(part)) for part in share if part.items]
        if ranks == 1:  # else a row may have been halved for another rank
            assert widths == sorted(widths, reverse=True)
    fillers = [part for share in plan for part in share if not part.items]
    assert all(part.packs == (capacity and [1]) for part in fillers)
    assert all(part.weight == 0 and len(part.rows) == 1 for part in fillers)
    if ranks == 1:
        assert not fillers


@pytest.mark.parametrize(("seed", "digest"), list(enumerate(UNPACKED)))
def test_without_packing_a_cut_is_what_it_was(seed, digest):
    rng, seen = np.random.default_rng(seed), hashlib.sha256()
    lengths, items = rng.integers(1, 200, 300), rng.integers(1, 9, 300)
    for count in (1, 2, 5, 16, 33):
        rows = rng.permutation(300)[:count]
        for ranks in (1, 2, 3, 5):
            for limit in LIMITS:
                for multiple in (1, 8):
                    plan = cut(rows, lengths, items, ranks, **limit, multiple=multiple)
                    plain = [[[part.rows, part.items, round(part.weight, 9)] for part in share] for share in plan]
                    seen.update(json.dumps(plain).encode())
    assert seen.hexdigest() == digest


@pytest.mark.parametrize("limit", [{"size": 4}, {"tokens": 2048}])
@pytest.mark.parametrize(("median", "spread"), [(230, 0.65), (90, 0.75)], ids=["IMDb", "instructions"])
@pytest.mark.parametrize(("batch", "ranks", "most"), [(16, 1, 0.06), (64, 1, 0.03), (256, 4, 0.03)])
def test_packing_leaves_hardly_any_padding_in_fewer_micro_batches(limit, median, spread, batch, ranks, most):
    draws = np.random.default_rng(0).lognormal(np.log(median), spread, 2048)
    lengths = np.clip(draws.astype(int), 8, 512)

    def padding(capacity):
        padded = count = 0
        for start in range(0, 2048, batch):
            rows = np.arange(start, start + batch)
            for part in chain(*cut(rows, lengths, np.ones_like(lengths), ranks, **limit, capacity=capacity)):
                if part.items:
                    starts = np.cumsum([0, *(part.packs or [1] * len(part.rows))[:-1]])
                    widths = np.add.reduceat(lengths[part.rows], starts)
                    padded, count = padded + len(widths) * widths.max(), count + 1
        return 1 - lengths.sum() / padded, count

    (before, many), (after, few) = padding(None), padding(512)
    assert after < min(most, before / 2)
    assert few < many


def test_a_row_of_several_samples_is_halved_before_a_filler_stands_in():
    ones = np.ones(6, int)
    shares = cut(np.arange(6), np.array([100, 60, 10, 10, 10, 10]), ones, ranks=2, size=1, capacity=80)
    assert [[(part.rows, part.packs) for part in share] for share in shares] == [
        [([0], [1]), ([2, 4], [2])],
        [([1, 5], [2]), ([3], [1])],
    ]
    shares = cut(np.arange(3), np.array([100, 90, 80]), ones, ranks=2, size=1, capacity=80)
    assert [[part.items for part in share] for share in shares] == [[1, 1], [1, 0]]


def test_the_longest_sample_comes_first_and_padding_is_small():
    rows = np.arange(64)
    (share,) = cut(rows, LENGTHS, ITEMS, size=8)
    widths = [LENGTHS[part.rows].max() for part in share]
    assert widths == sorted(widths, reverse=True)
    padded = sum(len(part.rows) * LENGTHS[part.rows].max() for part in share)
    unsorted = sum(8 * LENGTHS[start : start + 8].max() for start in range(0, 64, 8))
    assert LENGTHS[rows].sum() / padded > 0.8
    assert padded < unsorted


def sampler(tmp_path, rank=0, ranks=1, count=1000, **values):
    return EffectiveBatchSampler(LENGTHS[:count], ITEMS[:count], settings_for(tmp_path, **values), rank, ranks)


@pytest.mark.parametrize(("count", "batch_size"), [(1000, 16), (37, 16), (16, 16), (5, 16), (7, 1)])
def test_an_epoch_has_ceil_steps_and_each_sample_once(tmp_path, count, batch_size):
    steps = list(sampler(tmp_path, count=count, batch_size=batch_size))
    assert len(steps) == math.ceil(count / batch_size) == len(sampler(tmp_path, count=count, batch_size=batch_size))
    assert sorted(row for plan in steps for row in plan.rows) == list(range(count))


def test_effective_batches_depend_on_seed_and_epoch_alone(tmp_path):
    def batches(epoch=0, **values):
        one = sampler(tmp_path, **values)
        one.epoch = epoch
        return [plan.rows for plan in one]

    first = batches()
    assert batches(micro_batch_size=1) == batches(micro_batch_tokens=99) == batches(rank=1, ranks=3) == first
    assert batches(epoch=1) != first
    assert batches(seed=124) != first


def test_the_ranks_share_every_effective_batch_out(tmp_path):
    shares = [list(sampler(tmp_path, rank, 3, micro_batch_size=2)) for rank in range(3)]
    for one_step in zip(*shares, strict=True):
        mine = [row for plan in one_step for part in plan.parts if part.items for row in part.rows]
        assert sorted(mine) == sorted(one_step[0].rows)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_give_padded_tensors_and_count_tokens(tmp_path, fabric, num_workers):
    datasets = token_datasets()
    settings = settings_for(tmp_path, micro_batch_size=4, pad_to_multiple_of=8, num_workers=num_workers)
    train_loader, val_loader, test_loader = build_dataloaders(fabric, datasets, settings)
    assert [len(batch.samples) for batch in train_loader] == [16, 16, 8]
    seen = 0
    for batch in train_loader:
        for micro_batch in batch.micro_batches:
            inputs = micro_batch.inputs
            assert inputs["input_ids"].shape == inputs["attention_mask"].shape
            assert inputs["input_ids"].shape[1] % 8 == 0
            assert micro_batch.padded == inputs["input_ids"].numel()
            assert micro_batch.tokens == inputs["attention_mask"].sum() == (inputs["input_ids"] != 0).sum()
            assert (inputs["attention_mask"].diff(dim=1) <= 0).all(), "padding is on the right"
            seen += len(inputs["labels"])
    assert seen == 40
    assert sum(micro_batch.items for micro_batch in val_loader) == 11
    assert sum(micro_batch.items for micro_batch in test_loader) == 13


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_evaluation_is_cut_like_one_batch_of_the_whole_split(tmp_path, ranks):
    settings = settings_for(tmp_path, eval_batch_tokens=500, pad_to_multiple_of=8)
    for rank, share in enumerate(cut(np.arange(1000), LENGTHS, ITEMS, ranks, tokens=500, multiple=8)):
        sampler = EvaluationSampler(LENGTHS, ITEMS, settings, rank, ranks)
        assert list(sampler) == list(sampler) == share
        assert len(sampler) == len(share)
        assert sampler.tokens == LENGTHS.sum()


def test_an_evaluation_keeps_8_bytes_of_a_sample(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 20, 200_000)
    settings = settings_for(tmp_path, eval_batch_tokens=4096)
    tracemalloc.start()
    try:
        kept = EvaluationSampler(lengths, np.ones_like(lengths), settings, 0, 1)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert sum(len(part.rows) for part in kept) == 200_000
    assert held < 10 * 200_000
    assert peak < 50 * 200_000


def test_packing_changes_no_effective_batch_and_no_evaluation(tmp_path, fabric):
    how = {"task": "instruction-tuning", "micro_batch_size": 2, "max_length": 64}
    packed, plain = (
        build_dataloaders(fabric, token_datasets(per_token=True), settings_for(tmp_path, packing=packing, **how))
        for packing in (True, False)
    )
    for mine, theirs in zip(packed[0], plain[0], strict=True):
        assert mine.samples == theirs.samples
        assert sum(batch.items for batch in mine.micro_batches) == sum(batch.items for batch in theirs.micro_batches)
        assert sum(batch.tokens for batch in mine.micro_batches) == sum(batch.tokens for batch in theirs.micro_batches)
        assert len(mine.micro_batches) < len(theirs.micro_batches)
    for mine, theirs in zip([*packed[1], *packed[2]], [*plain[1], *plain[2]], strict=True):
        assert mine.items == theirs.items
        assert all(mine.inputs[name].equal(theirs.inputs[name]) for name in mine.inputs.keys() | theirs.inputs.keys())


def test_a_packed_micro_batch_holds_its_samples_one_after_the_other(tmp_path):
    datasets = token_datasets(per_token=True)
    settings = settings_for(tmp_path, task="instruction-tuning", packing=True, pad_to_multiple_of=8)
    samples = [datasets.splits["train"][row] for row in range(5)]
    items = sum(sample["items"] for sample in samples)
    batch = TextCollator(datasets, "train", settings).micro_batch(Part([0, 1, 2, 3, 4], items, 1.0, [3, 2]))
    assert set(batch.inputs) == {"input_ids", "position_ids", "labels", "predicting"}
    rows = [samples[:3], samples[3:]]
    width = math.ceil(max(sum(sample["length"] for sample in row) for row in rows) / 8) * 8
    expected = {"input_ids": [], "position_ids": [], "labels": []}
    for row in rows:
        padding = width - sum(sample["length"] for sample in row)
        ids, places = [sample["input_ids"] for sample in row], [range(sample["length"]) for sample in row]
        expected["input_ids"].append([*chain(*ids), *[0] * padding])
        expected["position_ids"].append([*chain(*places, range(padding))])
        expected["labels"].append([*chain(*([-100, *sample["labels"][1:]] for sample in row)), *[-100] * padding])
    assert {name: batch.inputs[name].tolist() for name in expected} == expected
    assert (batch.tokens, batch.padded) == (sum(sample["length"] for sample in samples), 2 * width)
    filler = TextCollator(datasets, "train", settings).micro_batch(Part([3], 0, 0.0, [1]))
    assert (filler.items, filler.tokens, len(filler.inputs["predicting"])) == (0, 0, samples[3]["items"])


@pytest.mark.parametrize("packing", [True, False])
def test_predicting_says_where_the_next_token_is_trained(tmp_path, fabric, packing):
    settings = settings_for(tmp_path, task="instruction-tuning", packing=packing, max_length=64, micro_batch_size=3)
    train_loader, val_loader, test_loader = build_dataloaders(fabric, token_datasets(per_token=True), settings)
    training = [micro_batch for batch in train_loader for micro_batch in batch.micro_batches]
    for micro_batch in [*training, *val_loader, *test_loader]:
        labels, predicting = micro_batch.inputs["labels"], micro_batch.inputs["predicting"].tolist()
        length = labels.shape[1]
        assert predicting == [
            row * length + column
            for row in range(len(labels))
            for column in range(length - 1)
            if labels[row, column + 1] != -100
        ]
        assert len(predicting) == micro_batch.items


def test_other_tasks_get_no_positions(tmp_path, fabric):
    for datasets in (token_datasets(), token_datasets(per_token=True)):
        for loader in build_dataloaders(fabric, datasets, settings_for(tmp_path))[1:]:
            for micro_batch in loader:
                assert list(micro_batch.inputs) == ["input_ids", "attention_mask", "labels"]
