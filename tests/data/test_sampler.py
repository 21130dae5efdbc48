"""Batch plans: the samples of effective batches, and how they are distributed to ranks, cut and packed."""

import dataclasses
import hashlib
import json
import math
from itertools import chain

import numpy as np
import pytest
from support.helpers import settings_for

from fabric_ladder.data.cutting import cut
from fabric_ladder.data.sampler import TOKENS_BEFORE_FITTING, EffectiveBatchSampler, EvaluationSampler
from fabric_ladder.settings import FULL_PASS, Settings

RNG = np.random.default_rng(0)

LENGTHS = RNG.integers(1, 200, 1000)

ITEMS = RNG.integers(1, 9, 1000)

LIMITS = [{"size": 1}, {"size": 4}, {"size": 16}, {"tokens": 1}, {"tokens": 256}, {"tokens": 9999}]

UNPACKED = "db54ffc5aa0285677a732e134b32e126de867f5759c47ce35732cfce351f80ac"  # of `cut` without packing


def how(multiple=1, capacity=None, full_pass=FULL_PASS):
    """Return the settings of a cut."""
    packed = {"packing": True, "max_length": capacity} if capacity else {}
    return Settings(pad_to_multiple_of=multiple, full_pass=full_pass, **packed)


def row_tokens(part):
    """Return the tokens of each row of a micro-batch."""
    packs = part.packs or [1] * len(part.rows)
    return [LENGTHS[list(rows)].sum() for rows in np.split(np.array(part.rows), np.cumsum(packs)[:-1])]


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("ranks", "count", "capacity"), [(5, 33, None), (1, 5, 5), (2, 33, 300), (1, 33, 300)])
def test_a_cut_holds_each_sample_once_in_equally_many_micro_batches(ranks, limit, count, capacity):
    rows = RNG.permutation(1000)[:count]
    plan = cut(how(8, capacity), rows, LENGTHS, ITEMS, ranks, **limit)
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
    fillers = [part for share in plan for part in share if not part.items]
    assert all(part.packs == (capacity and [1]) for part in fillers)
    assert all(part.weight == 0 and len(part.rows) == 1 for part in fillers)
    if ranks == 1:  # otherwise a row may have been split for another rank
        widths = [max(row_tokens(part)) for part in plan[0]]
        assert widths == sorted(widths, reverse=True)
        assert not fillers


def test_without_packing_a_cut_never_changes():
    """The digest is that of the cuts of least cost, and of cuts by size."""
    rng, seen = np.random.default_rng(0), hashlib.sha256()
    lengths, items = rng.integers(1, 200, 300), rng.integers(1, 9, 300)
    for count in (1, 2, 5, 16, 33):
        rows = rng.permutation(300)[:count]
        for ranks in (1, 2, 3, 5):
            for limit in LIMITS:
                for multiple in (1, 8):
                    plan = cut(how(multiple, full_pass=256), rows, lengths, items, ranks, **limit)
                    plain = [
                        [[part.rows.tolist(), part.items, round(part.weight, 9)] for part in share] for share in plan
                    ]
                    seen.update(json.dumps(plain).encode())
    assert seen.hexdigest() == UNPACKED


def test_packing_leaves_little_padding_in_fewer_micro_batches():
    lengths = np.clip(np.random.default_rng(0).lognormal(np.log(90), 0.7, 2048).astype(int), 8, 512)
    ones = np.ones(2048, int)

    def padding(capacity):
        batches = np.split(np.arange(2048), 8)
        shares = chain(*(cut(how(1, capacity), rows, lengths, ones, 4, tokens=2048) for rows in batches))
        parts = [part for part in chain(*shares) if part.items]
        return 1 - lengths.sum() / sum(part.padded(lengths, 1) for part in parts), len(parts)

    (before, many), (after, few) = padding(None), padding(512)
    assert after < min(0.03, before / 2)
    assert few < many


def test_a_row_of_several_samples_is_halved_before_a_filler_is_added():
    ones = np.ones(6, int)
    shares = cut(how(1, 80), np.arange(6), np.array([100, 60, 10, 10, 10, 10]), ones, 2, size=1)
    assert [[(part.rows.tolist(), part.packs) for part in share] for share in shares] == [
        [([0], [1]), ([2, 4], [2])],
        [([1, 5], [2]), ([3], [1])],
    ]
    shares = cut(how(1, 80), np.arange(3), np.array([100, 90, 80]), ones, 2, size=1)
    assert [[part.items for part in share] for share in shares] == [[1, 1], [1, 0]]


@pytest.mark.parametrize(("limit", "full_pass"), [(700, 0), (2048, 64), (2**62, FULL_PASS), (2048, FULL_PASS)])
def test_micro_batches_limited_by_tokens_cost_least(limit, full_pass):
    """A pass costs its padded tokens, at least `full_pass`, and a quarter of it; all cuts are compared."""
    lengths = np.array([900, 850, 800, 300, 280, 260, 250, 240, 20, 10])
    rows, ones = np.arange(len(lengths)), np.ones(len(lengths), int)

    def cost(parts):
        sizes = [int(lengths[part].max()) * len(part) for part in parts]
        allowed = all(size <= limit or len(part) == 1 for size, part in zip(sizes, parts, strict=True))
        return sum(max(full_pass, size) + full_pass / 4 for size in sizes) if allowed else np.inf

    (parts,) = cut(how(full_pass=full_pass), rows, lengths, ones, tokens=limit)
    assert [row for part in parts for row in part.rows] == list(rows)
    assert sum(part.weight for part in parts) == pytest.approx(1)
    every = (
        np.split(rows, [at for at in range(1, len(rows)) if choice >> at & 1]) for choice in range(0, 2 ** len(rows), 2)
    )
    assert cost([part.rows for part in parts]) == min(map(cost, every))


def sampler(tmp_path, rank=0, ranks=1, count=1000, **values):
    return EffectiveBatchSampler(LENGTHS[:count], ITEMS[:count], settings_for(tmp_path, **values), rank, ranks)


def test_an_epoch_has_ceil_steps_and_each_sample_once(tmp_path):
    for count, expected in ((37, 3), (16, 1), (5, 1)):
        plans = sampler(tmp_path, count=count)
        assert len(list(plans)) == len(plans) == expected
        assert sorted(row for plan in plans for row in plan.rows) == list(range(count))


def test_effective_batches_depend_on_seed_and_epoch_alone(tmp_path):
    def batches(epoch=0, **values):
        one = sampler(tmp_path, **values)
        one.epoch = epoch
        return [plan.rows for plan in one]

    first = batches()
    assert batches(micro_batch_size=1) == batches(micro_batch_tokens=99) == batches(rank=1, ranks=3) == first
    assert batches(epoch=1) != first
    assert batches(seed=124) != first


def test_auto_changes_the_cut_but_not_the_settings(tmp_path):
    settings = settings_for(tmp_path, micro_batch_tokens="auto")
    plans = EffectiveBatchSampler(LENGTHS, ITEMS, settings, 0, 1)
    drawn = [part for plan in plans for part in plan.parts]
    assert max(len(part.rows) * LENGTHS[part.rows].max() for part in drawn) <= TOKENS_BEFORE_FITTING
    plans.cut_by_tokens(300)
    assert str(list(plans)) == str(list(sampler(tmp_path, micro_batch_tokens=300)))
    assert str(plans.heaviest()) == str(sampler(tmp_path, micro_batch_tokens=300).heaviest())
    assert settings.micro_batch_tokens == "auto"


def test_an_evaluation_is_cut_like_one_batch_of_the_whole_split(tmp_path):
    settings = settings_for(tmp_path, eval_batch_tokens=500, pad_to_multiple_of=8)
    for rank, share in enumerate(cut(settings, np.arange(1000), LENGTHS, ITEMS, 3, tokens=500)):
        sampler = EvaluationSampler(LENGTHS, ITEMS, settings, rank, 3)
        assert str(list(sampler)) == str(list(sampler)) == str(share)
        assert len(sampler) == len(share)
        assert sampler.tokens == LENGTHS.sum()


CUTS = [{"micro_batch_size": 4}, {"micro_batch_size": 64}, {"micro_batch_tokens": 700}, {"micro_batch_tokens": 10**6}]


def padded_tokens(part):
    return len(part.rows) * math.ceil(LENGTHS[part.rows].max() / 8) * 8


@pytest.mark.parametrize(("values", "ranks"), [*zip(CUTS, (3, 1, 3, 1), strict=True)], ids=str)
def test_an_evaluation_batch_is_as_large_as_a_training_micro_batch(tmp_path, monkeypatch, ranks, values):
    monkeypatch.setattr("fabric_ladder.data.sampler.EVALUATED", 1)
    values |= {"batch_size": 64, "pad_to_multiple_of": 8}
    settings = dataclasses.replace(settings_for(tmp_path, **values), eval_batch_tokens=None)
    found = set()
    for rank in range(ranks):
        training = EffectiveBatchSampler(LENGTHS, ITEMS, settings, rank, ranks)
        plans = EvaluationSampler(LENGTHS, ITEMS, settings, rank, ranks, training)
        trained = max(padded_tokens(part) for plan in training for part in plan.parts)
        evaluated = max(map(padded_tokens, plans))
        limit = values.get("micro_batch_tokens", 0)
        if rank == 0:  # rank 0 has the longest sample
            assert trained / 2 < evaluated <= max(trained, min(limit, 22 * 200 if ranks == 3 else 64 * 200))
        found.add((len(plans), training.largest()))
    assert len(found) == 1, "all ranks have the same number of batches"


def test_an_evaluation_follows_auto_unless_its_size_is_set(tmp_path):
    auto = settings_for(tmp_path, micro_batch_tokens="auto", batch_size=200)
    settings = dataclasses.replace(auto, eval_batch_tokens=None)
    training = EffectiveBatchSampler(LENGTHS, ITEMS, settings, 0, 1)
    plans = EvaluationSampler(LENGTHS, ITEMS, settings, 0, 1, training)
    given = EvaluationSampler(LENGTHS, ITEMS, settings_for(tmp_path, eval_batch_tokens=500), 0, 1, training)
    before = str(list(given))
    for tokens, evaluated in (("auto", 4096), (100, 4096), (9000, 9000)):  # the minimum on a GPU is 4,096
        training.cut_by_tokens(tokens)
        expected = cut(settings, np.arange(1000), LENGTHS, ITEMS, tokens=evaluated)
        assert str(list(plans)) == str(expected[0])
        assert str(list(given)) == before


def test_an_evaluation_of_longer_samples_needs_no_more_attention_memory(tmp_path):
    values = {"batch_size": 64, "micro_batch_size": 64, "pad_to_multiple_of": 1}
    settings = dataclasses.replace(settings_for(tmp_path, **values), eval_batch_tokens=None)
    training = EffectiveBatchSampler(LENGTHS, ITEMS, settings, 0, 1)
    longer = LENGTHS * 2
    for lengths in (LENGTHS, longer, LENGTHS // 2 + 1):
        sizes = [(len(part.rows), lengths[part.rows].max()) for part in
                 EvaluationSampler(lengths, ITEMS, settings, 0, 1, training)]  # fmt: skip
        assert max(rows * width * width for rows, width in sizes) <= 64 * LENGTHS.max() ** 2


@pytest.mark.parametrize("limit", [{"micro_batch_tokens": 16_384}, {"micro_batch_size": 2}])
def test_the_heaviest_packed_batch_is_found(tmp_path, limit):
    """The heaviest batch may have fewer tokens than others: samples longer than half a row leave padding."""
    lengths = np.random.default_rng(0).integers(300, 900, 16 * 200)
    settings = settings_for(tmp_path, batch_size=16, packing=True, max_length=1024, **limit)
    plans = EffectiveBatchSampler(lengths, np.ones_like(lengths), settings, 0, 1)
    padded = [max(part.padded(lengths, 16) for part in plan.parts) for plan in plans]
    assert max(max(part.padded(lengths, 16) for part in plan.parts) for plan in plans.heaviest()) == max(padded)
