"""Effective batches: what is in them, how they are cut and shared out."""

import math

import numpy as np
import pytest
from helpers import settings_for, token_datasets

from fabric_ladder import build_dataloaders
from fabric_ladder.batching import EffectiveBatchSampler, cut

RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, 200, 1000)
ITEMS = RNG.integers(1, 9, 1000)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize(
    "limit", [{"size": 1}, {"size": 4}, {"size": 16}, {"tokens": 1}, {"tokens": 256}, {"tokens": 9999}]
)
@pytest.mark.parametrize("count", [1, 2, 5, 16, 33])
def test_a_cut_holds_each_sample_once_in_equally_many_micro_batches(ranks, limit, count):
    rows = RNG.permutation(1000)[:count]
    plan = cut(rows, LENGTHS, ITEMS, ranks, **limit, multiple=8)
    assert len(plan) == ranks
    assert len({len(share) for share in plan}) == 1
    real = [part for share in plan for part in share if part.items]
    assert sorted(row for part in real for row in part.rows) == sorted(rows.tolist())
    assert sum(part.items for part in real) == ITEMS[rows].sum()
    assert sum(part.weight for part in real) == pytest.approx(ranks)
    for part in real:
        width = math.ceil(LENGTHS[part.rows].max() / 8) * 8
        assert len(part.rows) <= limit.get("size", 99)
        assert len(part.rows) == 1 or width * len(part.rows) <= limit.get("tokens", 10**9)
    fillers = [part for share in plan for part in share if not part.items]
    assert all(part.weight == 0 and len(part.rows) == 1 for part in fillers)
    if ranks == 1:
        assert not fillers


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
