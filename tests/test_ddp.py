"""Several real processes (gloo, DDP) against one: the same losses step by step, the same accuracies."""

import csv
import json
import re

import pytest
from helpers import ROOT, finished, run_script

# 101 = 6 x 16 + 5 training samples: the last batch gives three ranks 2, 2 and 1; 33 test samples are odd for all
SCRIPT = ROOT / "tests" / "ddp_script.py"
SIZES = "--train_samples 101 --validation_samples 21 --test_samples 33 --log_every 1 --eval_batch_tokens 400".split()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    def run(processes, *more):
        cwd = tmp_path_factory.mktemp(f"ddp{processes}")
        stdout = finished(run_script(SCRIPT, processes, *SIZES, *more, cwd=cwd, OMP_NUM_THREADS="1"))
        folder = cwd / "runs" / "ddp_script" / "1"
        with open(folder / "metrics.csv", newline="") as file:
            losses = [float(row["loss"]) for row in csv.DictReader(file) if row["loss"]]
        return stdout, losses, json.loads((folder / "run.json").read_text())["results"]

    return run


@pytest.fixture(scope="module")
def alone(run):
    return run(1)


@pytest.mark.parametrize(("processes", "more"), [(2, ()), (3, ("--micro_batch_tokens", "300"))])
def test_more_processes_print_the_same_losses_and_accuracies(run, alone, processes, more):
    stdout, losses, results = run(processes, *more)
    assert len(losses) == 7
    assert losses == pytest.approx(alone[1], abs=1e-5)
    assert results["epochs"] == [pytest.approx(epoch, abs=1e-5) for epoch in alone[2]["epochs"]]
    assert results["test_accuracy"] == alone[2]["test_accuracy"]
    assert results["test_samples"] == 33
    assert stdout.count("Test accuracy") == 1, "rank 0 alone prints"


def test_evaluation_on_two_processes_does_not_depend_on_the_batch_size(run, alone):
    results = run(2, "--eval_batch_tokens", "1")[2]
    assert (results["test_samples"], results["test_accuracy"]) == (33, alone[2]["test_accuracy"])


def test_a_nan_on_several_processes_ends_them_all(tmp_path):
    process = run_script(SCRIPT, 2, *SIZES, "--learning_rate", "1e35", cwd=tmp_path, timeout=120, OMP_NUM_THREADS="1")
    assert process.returncode == 2
    said = re.findall(r"^error(?: on rank 1)?: the loss is", process.stderr, re.MULTILINE)
    assert said, "the first to fail says so; the launcher may end the other before it can"
    assert "Traceback" not in process.stderr
