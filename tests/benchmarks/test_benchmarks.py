"""The sides of a duel do the same work, and what is made of their figures is right."""

import os
import sys

import numpy as np
import pytest
import torch
from accelerate.state import AcceleratorState
from support.helpers import MODELS, ROOT

from fabric_ladder import parse_settings

sys.path.append(str(ROOT / "benchmarks"))
import against_peers
import common
import gpu_duels
import gpu_ladder
import memory_plans
import peers

TINY = ["--dataset", "synthetic", "--model", str(MODELS / "bloom-quickstart.json"), "--from_scratch", "true"]
TINY += ["--train_samples", "48", "--validation_samples", "16", "--test_samples", "32", "--max_length", "64"]
TINY += ["--accelerator", "cpu", "--batch_size", "16", "--micro_batch_tokens", "256", "--log_every", "16"]
SWITCHED = ["micro_batch_4", "group_by_length", "no_nan_filter", "evaluate_4"]


@pytest.fixture(scope="module")
def figures():
    """Figures of the ladder, as a process of its own, and of the peers, in this one."""
    runs = {"trainer": ("trainer", []), "trainer_best": ("trainer", SWITCHED), "accelerate": ("accelerate", [])}
    runs["bare"] = ("bare", [])
    environment, threads = dict(os.environ), torch.get_num_threads()
    sides = {name: peers.measure(parse_settings(TINY), side, switches) for name, (side, switches) in runs.items()}
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(environment)
    return sides | {"ladder": common.run_rung("2_grad_accum", TINY, threads)}


def test_all_sides_train_the_same_texts_and_weights_in_as_many_steps(figures):
    runs = {side: [run] for side, run in figures.items()}
    for name in ("parameters", "tokens", "updates", "threads"):
        assert all(name in run for run in figures.values())
    against_peers.check_alike(runs)
    assert figures["ladder"]["updates"] == 3
    assert figures["bare"]["padding"] == pytest.approx(figures["ladder"]["padding"])
    assert figures["trainer_best"]["padding"] < figures["trainer"]["padding"]


def test_the_bare_loop_ends_with_the_ladders_weights(figures):
    assert figures["bare"]["test_loss"] == pytest.approx(figures["ladder"]["test_loss"], rel=1e-6)
    assert figures["bare"]["test_accuracy"] == figures["ladder"]["test_accuracy"]


@pytest.mark.parametrize("name", ["tokens", "updates", "weights", "test_loss"])
def test_sides_that_differ_are_refused(figures, name):
    side = "bare" if name in figures["bare"] else "ladder"
    other = figures[side] | {name: figures[side][name] * 1.01 + 1}
    with pytest.raises(RuntimeError, match=name):
        against_peers.check_alike({name: [run] for name, run in figures.items()} | {side: [other, figures[side]]})


def test_the_pages_of_plans_are_those_of_their_figures():
    results = memory_plans.common.read_results(memory_plans.OUT)
    assert memory_plans.PAGE.read_text(encoding="utf-8") == memory_plans.page(results)
    guide = memory_plans.GUIDE.read_text(encoding="utf-8")
    assert memory_plans.guide(results, guide) == guide
    assert memory_plans.PAGE.stat().st_size < 12_000


def test_an_epoch_is_extrapolated_from_the_second_half():
    lengths = np.full(2000, 100)
    run = {"tokens": 200_000, "parameters": 559_000_000, "peak_memory_bytes": 1, "samples_per_second": 100.0}
    run |= {"training_seconds": 20.0, "late_samples_per_second": 1000.0}
    config = {"vocab_size": 250_880, "hidden_size": 1024, "n_layer": 24}
    gpu_ladder.extrapolate(run, config, lengths, 1e15)
    assert run["epoch_seconds"] == 20 + 33_000 / 1000
    assert run["late_mfu"] == pytest.approx(10 * run["mfu"])
    with pytest.raises(RuntimeError, match="200000 tokens"):
        gpu_ladder.extrapolate(run, config, lengths[1:], 1e15)


def test_trainer_is_met_by_the_fastest_entry_that_needs_no_more_memory():
    def run(seconds, memory):
        return {"epoch_seconds": seconds, "peak_memory_bytes": memory, "late_mfu": 0.6}

    runs = {
        "blog-bf16-true": run(900.0, 5),
        "blog-32-true": run(5000.0, 9),
        "trainer-bf16-true-fast": run(80.0, 20),
        "trainer-bf16-true-compiled": run(60.0, 10),
        "2_grad_accum-4096_tokens": run(100.0, 4),
        "5_low_precision-4096_tokens": run(40.0, 8),
        "5_low_precision-65536_tokens": run(30.0, 30),
        "5_low_precision-65536_tokens-batch64": run(20.0, 30),
    }
    blog, trainer, mfu, epoch = (target[0] for target in gpu_duels.TARGETS)
    ratios = gpu_duels.compare(runs)
    assert (ratios[blog], ratios[trainer], ratios[mfu], ratios[epoch]) == (30.0, 1.5, 0.6, 30.0)
    assert ratios["epoch of blog-32-true / 2_grad_accum-4096_tokens"] == 50.0
    assert gpu_duels.compare(runs | {"trainer-bf16-true-fast": run(50.0, 7)})[trainer] == 0.0
