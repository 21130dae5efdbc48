"""Runs of rungs on several numbers of processes: their sizes, how to start them, and how to compare them."""

import csv
import json
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.helpers import free_port, run_script

# 57 = 3 x 16 + 9 training samples: the last batch gives two ranks 5 and 4, of which only 5 are two micro-batches;
# 33 test samples are odd for all
SIZES = "--train_samples 57 --validation_samples 21 --test_samples 33 --log_every 1 --eval_batch_tokens 400".split()
SIZES += ["--micro_batch_size", "4", "--precision", "32-true"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def run_ranks(script, ranks, *arguments, cwd, **environment):
    """Run a script on ranks that are started as torchrun starts them; return the finished processes."""
    if ranks == 1:
        return [run_script(script, *arguments, cwd=cwd, **ONE_THREAD, **environment)]
    environment |= ONE_THREAD | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    environment |= {"WORLD_SIZE": ranks, "NODE_RANK": 0}

    def start(rank):
        return run_script(script, *arguments, "--devices", ranks, cwd=cwd, **environment, LOCAL_RANK=rank)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(start, range(ranks)))


def column(folder, name):
    """Return a column of a run's metrics.csv, in full precision, for the rows with a loss."""
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row["loss"]]


def read(folder):
    """Return the losses and learning rates of all steps, and the results in run.json."""
    results = json.loads((folder / "run.json").read_text())["results"]
    return column(folder, "loss"), column(folder, "learning_rate"), results


def same(first, second, abs=1e-5):
    """Assert that two runs printed the same losses and accuracies."""
    (losses, rates, results), (others, other_rates, other) = read(first), read(second)
    assert len(losses) == 4
    assert others == pytest.approx(losses, abs=abs)
    assert rates == other_rates
    assert other["epochs"] == [pytest.approx(epoch, abs=abs) for epoch in results["epochs"]]
    assert other["classes"] == results["classes"]
    assert (other["test_samples"], other["test_accuracy"]) == (33, results["test_accuracy"])
