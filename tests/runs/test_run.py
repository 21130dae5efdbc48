"""What a run prints and sets: the distance between two losses, and algorithms that give equal bits."""

import pytest
import torch
from support.helpers import token_datasets
from support.training import losses, run_training

from fabric_ladder.advice import explain


@pytest.mark.parametrize(
    ("samples", "given", "lines"),
    [(40, None, 3), (400, None, 10), (400, 100, 4), (400, 4800, 1)],
)  # fmt: skip
def test_a_short_run_prints_a_curve_too(tmp_path, samples, given, lines):
    """A loss for every tenth of an epoch, as far as it has ten effective batches of 16; the last one always."""
    run, _ = run_training(tmp_path, datasets=token_datasets(train=samples), log_every=given)
    assert len(losses(run)) == lines


def test_a_long_run_prints_more_than_ten_losses(tmp_path, monkeypatch):
    monkeypatch.setattr("fabric_ladder.runs.run.LOG_EVERY", 16)
    run, _ = run_training(tmp_path, datasets=token_datasets(train=400), log_every=None)
    assert len(losses(run)) == 25


def test_deterministic_algorithms_are_for_the_run_that_asks_for_them(tmp_path):
    tensor, index = torch.zeros(4), torch.tensor([0, 0])
    run_training(tmp_path, deterministic=True)
    try:
        assert torch.are_deterministic_algorithms_enabled()
        with pytest.raises(RuntimeError) as refused:
            tensor.put_(index, torch.ones(2), accumulate=False)
        assert explain(refused.value).startswith("--deterministic true: put_")
    finally:
        run_training(tmp_path)
    assert not torch.are_deterministic_algorithms_enabled()
