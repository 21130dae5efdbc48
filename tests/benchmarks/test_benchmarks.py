"""Both sides of each benchmark do the same work, and the figures computed from the runs are correct."""

import os
import platform
import subprocess
import sys

import pytest
import torch
from accelerate.state import AcceleratorState
from support.helpers import FREES_64_MIB, MODELS, ROOT, settings_for, token_datasets

from fabric_ladder import parse_settings

sys.path.append(str(ROOT / "benchmarks"))
import against_peers
import blog_recipe
import common
import memory_ladder
import padding
import peers
import printed

TINY = ["--dataset", "synthetic", "--model", str(MODELS / "bloom-quickstart.json"), "--from_scratch", "true"]
TINY += ["--train_samples", "48", "--validation_samples", "16", "--test_samples", "32", "--max_length", "64"]
TINY += ["--accelerator", "cpu", "--batch_size", "16", "--micro_batch_tokens", "256", "--log_every", "16"]
SWITCHED = ["micro_batch_4", "group_by_length", "no_nan_filter", "evaluate_4"]


@pytest.fixture(scope="module")
def figures(tmp_path_factory):
    """Measure the ladder in its own process, and the peers and the blog's recipe in this process."""
    texts = tmp_path_factory.mktemp("blog") / "texts"
    common.save_texts(parse_settings(TINY), texts)
    runs = {"trainer": ("trainer", []), "trainer_best": ("trainer", SWITCHED), "accelerate": ("accelerate", [])}
    runs["bare"] = ("bare", [])
    environment, threads = dict(os.environ), torch.get_num_threads()
    torch.set_float32_matmul_precision("medium")  # no side uses this value unless it forgets to set its own
    sides = {name: peers.measure(parse_settings(TINY), side, switches) for name, (side, switches) in runs.items()}
    sides["blog"] = blog_recipe.measure(parse_settings(TINY), texts)
    AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.clear()
    os.environ.update(environment)
    assert torch.get_float32_matmul_precision() == "highest"
    return sides | {"ladder": common.run_rung("2_grad_accum", TINY, threads)}


def test_all_sides_train_the_same_texts_and_weights_in_as_many_steps(figures):
    runs = {side: [run] for side, run in figures.items()}
    for name in ("parameters", "tokens", "updates", "threads", "precision", "matmul_precision"):
        assert all(name in run for run in figures.values())
        assert name not in ("precision", "matmul_precision") or len({run[name] for run in figures.values()}) == 1
    against_peers.check_alike(runs)
    assert figures["ladder"]["updates"] == 3
    assert figures["bare"]["padding"] == pytest.approx(figures["ladder"]["padding"])
    assert figures["trainer_best"]["padding"] < figures["trainer"]["padding"]


def test_the_bare_loop_ends_with_the_ladders_weights(figures):
    assert figures["bare"]["test_loss"] == pytest.approx(figures["ladder"]["test_loss"], rel=1e-6)
    assert figures["bare"]["test_accuracy"] == figures["ladder"]["test_accuracy"]


RUN = """
import os, runpy, sys
sys.argv = sys.argv[1:]
sys.path.insert(0, os.path.dirname(sys.argv[0]))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
@pytest.mark.parametrize(("side", "keeps"), [("trainer", False), ("bare", True)])
def test_only_the_limit_gets_the_ladders_own_way_with_memory(tmp_path, side, keeps):
    command = [*common.peer_command(side, TINY), "--out", str(tmp_path / "figures.json")]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    code = [sys.executable, "-c", RUN + FREES_64_MIB]
    done = subprocess.run([*code, *command], env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (float(done.stdout.split()[-1]) > 32) == keeps


@pytest.mark.parametrize("name", ["tokens", "updates", "weights", "test_loss"])
def test_sides_that_differ_are_refused(figures, name):
    side = "bare" if name in figures["bare"] else "ladder"
    other = figures[side] | {name: figures[side][name] * 1.01 + 1}
    with pytest.raises(RuntimeError, match=name):
        against_peers.check_alike({name: [run] for name, run in figures.items()} | {side: [other, figures[side]]})


def test_the_tokens_of_a_cut_are_counted_as_they_are_computed(tmp_path):
    datasets = token_datasets()  # 40 texts of 3 to 29 tokens
    lengths = datasets.splits["train"]["length"]
    whole = padding.count(settings_for(tmp_path, batch_size=40), datasets)
    assert whole == {"computed per token": 40 * max(lengths) / sum(lengths), "passes a batch": 1.0, "shapes": 1}
    fixed = settings_for(tmp_path, batch_size=40, max_length=64, packing=True, pack_rows=2)
    passes = (counted := padding.count(fixed, datasets))["passes a batch"]
    assert passes >= sum(lengths) / 128
    assert counted["computed per token"] == passes * 128 / sum(lengths)
    assert counted["shapes"] == 1


def test_what_stands_in_the_table_of_memory_is_named_as_the_planner_names_it(monkeypatch):
    monkeypatch.setitem(memory_ladder.NAMED, ("--lora", "true"), "adapters")
    for pair, words in memory_ladder.NAMED.items():
        assert memory_ladder.Entry("7", f"--micro_batch_size 2 {' '.join(pair)}").name == f"7 micro-batch 2 {words}"


def test_first_sentences_are_whole_and_enough():
    text = "Five words make a sentence. " * 20
    assert padding.first_sentences(text) == ("Five words make a sentence. " * 8).strip()
    assert len(padding.first_sentences("word " * 1000).split()) == padding.WORDS


def test_the_lines_of_a_script_are_kept_and_a_failure_leaves_nothing():
    figures = printed.run(["scripts/doctor.py", "--help"])
    assert figures["printed"][0].startswith("usage: doctor.py")
    assert 0 < figures["seconds"] < 60
    assert figures["peak_memory_bytes"] > 5e6
    with pytest.raises(SystemExit, match=r"doctor.py --jason ended with status 2"):
        printed.run(["scripts/doctor.py", "--jason"])
