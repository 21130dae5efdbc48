"""The loaders' tensors: padded or packed as the plans say."""

import dataclasses
import math
from itertools import chain

import pytest
from support.helpers import settings_for, token_datasets

from fabric_ladder import build_dataloaders
from fabric_ladder.data.cutting import MicroBatchPlan
from fabric_ladder.data.loaders import TextCollator


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


def test_packing_changes_no_effective_batch_and_no_evaluation(tmp_path, fabric):
    options = {"task": "instruction-tuning", "micro_batch_size": 2, "max_length": 64}
    packed, plain = (
        build_dataloaders(fabric, token_datasets(per_token=True), settings_for(tmp_path, packing=packing, **options))
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
    batch = TextCollator(datasets, "train", settings).micro_batch(MicroBatchPlan([0, 1, 2, 3, 4], items, 1.0, [3, 2]))
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
    filler = TextCollator(datasets, "train", settings).micro_batch(MicroBatchPlan([3], 0, 0.0, [1]))
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


def test_on_a_gpu_validation_and_test_are_cut_like_the_training(tmp_path, fabric, monkeypatch):
    monkeypatch.setattr("fabric_ladder.data.cutting.FULL_PASS", 10**6)  # else these few are cut for their padding
    values = {"batch_size": 400, "micro_batch_size": 400}
    settings = dataclasses.replace(settings_for(tmp_path, **values), eval_batch_tokens=None)
    training, *others = build_dataloaders(fabric, token_datasets(train=400, validation=300, test=300), settings)
    [largest] = [part.padded for batch in training for part in batch.micro_batches]
    assert largest > 4096
    for loader in others:
        padded = [batch.padded for batch in loader]
        assert 4096 < max(padded) <= largest
