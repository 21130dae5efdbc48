"""The printed lines of a run, the result that `evaluate` returns, and the settings of the whole process."""

import os
import threading

import pytest
import torch
from lightning import Fabric
from support.helpers import settings_for, token_datasets
from support.training import losses, run_training

from fabric_ladder import Run
from fabric_ladder.runs.metrics import Score
from fabric_ladder.techniques.advice import explain


@pytest.mark.parametrize(
    ("samples", "given", "lines"),
    [(40, None, 3), (400, None, 10), (400, 100, 4), (400, 4800, 1)],
)
def test_a_short_run_prints_a_curve_too(tmp_path, samples, given, lines):
    """A loss for every tenth of an epoch, if it has ten effective batches of 16; always the last one."""
    run, _ = run_training(tmp_path, datasets=token_datasets(train=samples), log_every=given)
    assert len(losses(run)) == lines


def test_a_long_run_prints_more_than_ten_losses(tmp_path, monkeypatch):
    monkeypatch.setattr("fabric_ladder.runs.run.LOG_EVERY", 16)
    run, _ = run_training(tmp_path, datasets=token_datasets(train=400), log_every=None)
    assert len(losses(run)) == 25


def process_settings():
    return (
        dict(os.environ),
        threading.enumerate(),
        torch.get_num_threads(),
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    )


def test_a_run_changes_no_setting_of_the_process(tmp_path, monkeypatch):
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    fabric = Fabric(accelerator="cpu", devices=1)
    before = process_settings()
    Run(fabric, settings_for(tmp_path, threads=7, matmul_precision="medium", deterministic=True))
    assert process_settings() == before


def test_the_result_of_evaluate_reads_well_in_a_notebook():
    assert repr(Score(6.0, 3, 4)) == "Score(loss=1.5000, accuracy=75.00%, items=4)"
    assert repr(Score()) == "Score(loss=nan, accuracy=nan%, items=0)"


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
