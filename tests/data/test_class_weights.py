"""Label smoothing and class weights: the formula, every cut of the effective batch, and the values that are refused."""

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from support.helpers import settings_for, tiny_model, token_datasets
from support.objectives import accumulated, assert_exact, packable

from fabric_ladder import UserError, build_dataloaders
from fabric_ladder.checks import check_values

BOTH = {"label_smoothing": 0.2, "class_weights": "0.5,2.5"}


def test_no_cut_of_the_effective_batch_changes_the_gradient(tmp_path):
    model = packable(tiny_model("bert").double())
    score = assert_exact(tmp_path, model, token_datasets(), 1e-12, **BOTH)
    plain = accumulated(tmp_path, model, token_datasets())[1]
    assert abs(score.loss - plain.loss) > 1e-4, "the options had no effect"
    assert score.correct == plain.correct


def test_the_loss_is_the_sum_of_weighted_losses_over_the_number_of_samples(tmp_path, fabric):
    model = tiny_model("bert").double()
    loader, _, _ = build_dataloaders(fabric, token_datasets(), settings_for(tmp_path))
    (micro_batch,) = next(iter(loader)).micro_batches
    with torch.no_grad():
        logits = model(**micro_batch.inputs).logits
    expected = 0
    for row, label in zip(logits.log_softmax(-1).tolist(), micro_batch.inputs["labels"].tolist(), strict=True):
        expected += (0.5, 2.5)[label] * -(0.8 * row[label] + 0.2 * sum(row) / 2) / len(logits)
    assert accumulated(tmp_path, model, token_datasets(), **BOTH)[1].loss == pytest.approx(expected, rel=1e-12)


def test_balanced_weights_are_those_of_scikit_learn(tmp_path, fabric):
    datasets = token_datasets(classes=3)
    labels = np.array(datasets.splits["train"]["labels"][:])
    train, validation, test = build_dataloaders(fabric, datasets, settings_for(tmp_path, class_weights="balanced"))
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert train.dataset.objective.weights == pytest.approx(expected)
    shown = ", ".join(f"{number} {weight:.3g}" for number, weight in enumerate(expected))
    assert train.dataset.notices == [f"Class weights: {shown}"]
    seen = torch.cat([part.inputs["weights"] for batch in train for part in batch.micro_batches])
    assert sorted(seen.tolist()) == pytest.approx(sorted(expected[labels].tolist()), rel=1e-6)
    for loader in (validation, test):
        assert not loader.dataset.notices
        assert all("weights" not in part.inputs and part.objective is None for part in loader)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"class_weights": "balance"}, r"--class_weights balance: expected balanced, or one number above 0 for each"),
        ({"class_weights": "1,inf"}, r"--class_weights 1,inf: expected balanced"),
        ({"label_smoothing": 0.1, "task": "instruction-tuning"}, r"--label_smoothing 0\.1: only for --task text-class"),
    ],
)
def test_values_without_effect_or_meaning_are_refused(tmp_path, values, message):
    with pytest.raises(UserError, match=message) as error:
        check_values(settings_for(tmp_path, **values))
    assert "\n" not in str(error.value)


def test_another_number_of_weights_than_of_classes_is_refused(tmp_path, fabric):
    with pytest.raises(UserError, match=r"--class_weights 1,2: 2 numbers for 3 classes; give one for each: 0, 1, 2"):
        build_dataloaders(fabric, token_datasets(classes=3), settings_for(tmp_path, class_weights="1,2"))
