"""The loaders return tensors that are padded or packed according to the plans."""

import math
from itertools import chain
from types import SimpleNamespace

import pytest
from support.helpers import settings_for, token_datasets

from fabric_ladder import build_dataloaders
from fabric_ladder.data.cutting import MicroBatchPlan
from fabric_ladder.data.loaders import TextCollator


def test_loaders_give_padded_tensors_and_count_tokens(tmp_path, fabric):
    datasets = token_datasets()
    settings = settings_for(tmp_path, micro_batch_size=4, pad_to_multiple_of=8, num_workers=2)
    train_loader, val_loader, test_loader = build_dataloaders(fabric, datasets, settings)
    assert [len(batch.samples) for batch in train_loader] == [16, 16, 8]
    seen = 0
    for batch in train_loader:
        for micro_batch in batch.micro_batches:
            inputs = micro_batch.inputs
            assert list(inputs) == ["input_ids", "attention_mask", "labels"]
            assert inputs["input_ids"].shape == inputs["attention_mask"].shape
            assert inputs["input_ids"].shape[1] % 8 == 0
            assert micro_batch.padded == inputs["input_ids"].numel()
            assert micro_batch.tokens == inputs["attention_mask"].sum() == (inputs["input_ids"] != 0).sum()
            assert (inputs["attention_mask"].diff(dim=1) <= 0).all(), "the padding is on the right"
            seen += len(inputs["labels"])
    assert seen == 40
    assert sum(micro_batch.items for micro_batch in val_loader) == 11
    assert sum(micro_batch.items for micro_batch in test_loader) == 13


def test_ranks_on_gpus_of_different_kinds_cut_alike(tmp_path):
    def all_reduce(price, reduce_op):
        return {"min": min, "max": max}[reduce_op](int(price), 128)

    fabric = SimpleNamespace(global_rank=0, world_size=2, all_reduce=all_reduce)
    loader, _, _ = build_dataloaders(fabric, token_datasets(), settings_for(tmp_path))
    assert loader.sampler.settings.full_pass == 128 < settings_for(tmp_path).full_pass


def test_a_packed_micro_batch_joins_its_samples(tmp_path):
    datasets = token_datasets(per_token=True)
    settings = settings_for(tmp_path, task="instruction-tuning", packing=True, pad_to_multiple_of=8)
    samples = [datasets.splits["train"][row] for row in range(5)]
    items = sum(sample["items"] for sample in samples)
    batch = TextCollator(datasets, "train", settings).micro_batch(MicroBatchPlan([0, 1, 2, 3, 4], items, 1.0, [3, 2]))
    assert set(batch.inputs) == {"input_ids", "position_ids", "labels", "predicting"}
    assert batch.inputs["input_ids"].shape[1] % 8 == 0
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
def test_predicting_has_the_positions_before_trained_tokens(tmp_path, fabric, packing):
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


def test_a_packed_classifier_gets_the_spans_of_its_samples(tmp_path):
    datasets = token_datasets()
    samples = [datasets.splits["train"][row] for row in range(5)]
    settings = settings_for(tmp_path, packing=True, max_length=96)
    batch = TextCollator(datasets, "train", settings).micro_batch(MicroBatchPlan([0, 1, 2, 3, 4], 5, 1.0, [3, 2]))
    assert set(batch.inputs) == {"input_ids", "position_ids", "labels", "spans"}
    ids = batch.inputs["input_ids"].flatten()
    spans = batch.inputs["spans"].tolist()
    assert [ids[start:end].tolist() for start, end in spans] == [sample["input_ids"] for sample in samples]
    assert batch.inputs["labels"].tolist() == [sample["labels"] for sample in samples]
    assert all(batch.inputs["position_ids"].flatten()[start] == 0 for start, _ in spans)
    outside = [place for place in range(len(ids)) if not any(start <= place < end for start, end in spans)]
    assert not ids[outside].any(), "all other tokens are padding"
    assert (batch.tokens, batch.padded) == (sum(sample["length"] for sample in samples), ids.numel())
