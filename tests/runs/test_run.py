"""The printed lines of a run, its record, the result that `evaluate` returns, and the settings of the process."""

import os
import threading

import pytest
import torch
from lightning import Fabric
from support.helpers import settings_for, token_datasets
from support.training import losses, run_training

from fabric_ladder import Run, UserError
from fabric_ladder.runs.metrics import Score
from fabric_ladder.runs.record import RunRecord
from fabric_ladder.techniques.advice import explain


@pytest.mark.parametrize(
    ("samples", "given", "most", "lines"),
    [(40, None, 4800, 3), (400, None, 4800, 10), (400, None, 16, 25), (400, 100, 4800, 4), (400, 4800, 4800, 1)],
)
def test_the_number_of_printed_losses(tmp_path, monkeypatch, samples, given, most, lines):
    """A run prints a loss every tenth of an epoch or every `LOG_EVERY` samples, and after the last batch of 16."""
    monkeypatch.setattr("fabric_ladder.runs.run.LOG_EVERY", most)
    run, _ = run_training(tmp_path, datasets=token_datasets(train=samples), log_every=given)
    assert len(losses(run)) == lines


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


def test_a_file_that_cannot_be_read_is_not_reported_as_a_folder_that_cannot_be_written(tmp_path, fabric):
    record = RunRecord(fabric, settings_for(tmp_path))
    with pytest.raises(UserError) as caught:
        record.on_rank_zero((tmp_path / "missing.json").read_text)
    assert str(caught.value) == f"cannot use {tmp_path / 'missing.json'} (No such file or directory)"
