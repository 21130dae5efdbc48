"""Both sides of each benchmark do the same work, and the figures computed from the runs are correct."""

import os
import sys
from unittest import mock

import pytest
import torch
from accelerate.state import AcceleratorState
from support.helpers import MODELS, ROOT, settings_for, token_datasets

from fabric_ladder import UserError, parse_settings

sys.path.append(str(ROOT / "benchmarks"))
import against_peers
import common
import forking
import padding
import peers

TINY = ["--dataset", "synthetic", "--model", str(MODELS / "bloom-quickstart.json"), "--from_scratch", "true"]
TINY += ["--train_samples", "48", "--validation_samples", "16", "--test_samples", "32", "--max_length", "64"]
TINY += ["--accelerator", "cpu", "--batch_size", "16", "--micro_batch_tokens", "256", "--log_every", "16"]
SWITCHED = ["micro_batch_4", "group_by_length", "no_nan_filter", "evaluate_4"]


@pytest.fixture(scope="module")
def figures():
    """Measure the ladder in its own process, and the peers in this process."""
    runs = {side: (side, []) for side in peers.SIDES} | {"trainer_best": ("trainer", SWITCHED)}
    threads = torch.get_num_threads()
    torch.set_float32_matmul_precision("medium")  # every side must set its own value instead of this value
    with mock.patch.dict(os.environ), mock.patch.object(common, "run_child", forking.run_forked):
        sides = {name: peers.measure(parse_settings(TINY), side, switches) for name, (side, switches) in runs.items()}
        AcceleratorState._reset_state(reset_partial_state=True)
        ladder = common.run_rung("2_grad_accum", TINY, threads)
    assert torch.get_float32_matmul_precision() == "highest"
    return sides | {"ladder": ladder}


def test_a_run_of_other_code_is_refused():
    common.check_commit({"commit": common.code_commit()})
    with pytest.raises(UserError, match=r"the run is of commit abcdef0, and this command of .*; remove it"):
        common.check_commit({"commit": "abcdef0"}, "; remove it")


def test_all_sides_train_the_same_texts_and_weights_in_as_many_steps(figures):
    runs = {side: [run] for side, run in figures.items()}
    for name in ("parameters", "tokens", "updates", "threads", "precision", "matmul_precision"):
        assert all(name in run for run in figures.values())
        assert name not in ("precision", "matmul_precision") or len({run[name] for run in figures.values()}) == 1
    against_peers.check_alike(runs)
    assert figures["ladder"]["updates"] == 3
    assert figures["bare"]["padding"] == pytest.approx(figures["ladder"]["padding"])
    assert figures["trainer_best"]["padding"] < figures["trainer"]["padding"]
    assert figures["bare"]["test_loss"] == pytest.approx(figures["ladder"]["test_loss"], rel=1e-6)
    assert figures["bare"]["test_accuracy"] == figures["ladder"]["test_accuracy"]


def test_sides_that_differ_are_refused(figures):
    for name in ("tokens", "updates", "weights", "test_loss"):
        side = "bare" if name in figures["bare"] else "ladder"
        other = figures[side] | {name: figures[side][name] * 1.01 + 1}
        with pytest.raises(RuntimeError, match=name):
            against_peers.check_alike({name: [run] for name, run in figures.items()} | {side: [other, figures[side]]})


def test_tokens_and_passes_of_a_cut_are_counted(tmp_path):
    datasets = token_datasets()  # 40 texts of 3 to 29 tokens
    lengths = datasets.splits["train"]["length"]
    whole = padding.count(settings_for(tmp_path, batch_size=40), {}, datasets)
    assert whole == {"computed per token": 40 * max(lengths) / sum(lengths), "passes a batch": 1.0, "shapes": 1}
    packed = settings_for(tmp_path, batch_size=40, max_length=64, packing=True, micro_batch_size=2)
    counted = padding.count(packed, {}, datasets)
    assert counted["passes a batch"] >= sum(lengths) / 128
    assert counted["computed per token"] < whole["computed per token"]
