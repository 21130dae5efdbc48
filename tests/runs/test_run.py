"""The printed lines of a run, its record, the result that `evaluate` returns, and the settings of the process."""

import json
import os
import subprocess
import sys
import threading

import pytest
import torch
from lightning import Fabric
from support.helpers import SMALL, SRC, settings_for, token_datasets
from support.training import losses, run_training

from fabric_ladder import Run, UserError
from fabric_ladder.runs.folder import short_name
from fabric_ladder.runs.record import RunRecord
from fabric_ladder.techniques.advice import explain


@pytest.mark.parametrize(
    ("samples", "given", "most", "lines"),
    [(40, None, 4800, 3), (400, None, 4800, 10), (400, None, 16, 25), (400, 100, 4800, 4)],
)
def test_the_number_of_printed_losses(tmp_path, monkeypatch, samples, given, most, lines):
    """A run prints a loss every tenth of an epoch or every `LOG_EVERY` samples, and after the last batch of 16."""
    monkeypatch.setattr("fabric_ladder.runs.run.LOG_EVERY", most)
    run, _ = run_training(tmp_path, datasets=token_datasets(train=samples), log_every=given)
    assert len(losses(run)) == lines


@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
@pytest.mark.parametrize("output", ["a full disk", "a closed pipe"])
def test_a_run_goes_on_without_standard_output(tmp_path, output):
    command = [sys.executable, SRC / "2_grad_accum.py", *SMALL, "--threads", "1"]
    options = {"cwd": tmp_path, "stderr": subprocess.PIPE, "text": True}
    if output == "a full disk":
        with open("/dev/full", "w") as full:
            process = subprocess.Popen(command, stdout=full, **options)
    else:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, **options)
        process.stdout.readline()
        process.stdout.close()
    errors = process.stderr.read()
    assert (process.wait(), "Traceback" in errors, errors.count("\n")) == (0, False, 1), errors
    reason = "No space left on device" if output == "a full disk" else "Broken pipe"
    assert errors.startswith(f"Cannot print any more ({reason}); the run goes on, and ")
    home = tmp_path / "runs" / "2_grad_accum" / "1"
    assert "\nTest accuracy " in (home / "log.txt").read_text()
    assert json.loads((home / "run.json").read_text())["status"] == "finished"


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


def test_a_model_in_a_folder_called_model_is_named_by_its_path(tmp_path):
    folder = tmp_path / "2_grad_accum" / "1" / "model"
    folder.mkdir(parents=True)
    assert short_name(str(folder)) == "2_grad_accum/1/model"
    assert short_name(str(folder.parent.parent)) == "2_grad_accum"
    assert short_name("/elsewhere/configs/bloom.json") == "bloom.json"
    assert short_name("bigscience/bloom-560m") == "bigscience/bloom-560m"
