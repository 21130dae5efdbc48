"""A memory budget: as many blocks keep their activations as have room, and not one bit of the training changes."""

import json
import re
import runpy
from operator import attrgetter

import pytest
import torch
from lightning import Fabric
from support.helpers import MODELS, SMALL, SRC, VOCABULARY, finished, run_script, tiny_model
from support.planning import case, measured_peak

from fabric_ladder.planning.predict import keep_most, predict_peak
from fabric_ladder.planning.run_memory import predict_memory
from fabric_ladder.techniques.memory import Peak

BLOCKS = 6
RUNG = SRC / "7_grad_checkpointing.py"


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """Return the config of a BLOOM whose activations need more memory than its weights."""
    path = tmp_path_factory.mktemp("model") / "deep.json"
    config = json.loads((MODELS / "bloom-quickstart.json").read_text(encoding="utf-8"))
    path.write_text(json.dumps(config | {"n_layer": BLOCKS}), encoding="utf-8")
    return str(path)


def checkpointed(tmp_path, deep, kept):
    values = {"activation_checkpointing": True, "memory_budget": "1GB", "kept_blocks": kept}
    return case(tmp_path, "bloom", model=deep, micro_batch_size=4, **values)[:2]


def test_the_prediction_agrees_with_real_tensors_and_grows_from_all_blocks_recomputed_to_none(tmp_path, deep):
    peaks = [predict_peak(*checkpointed(tmp_path, deep, kept)) for kept in range(BLOCKS + 1)]
    totals = [peak.total for peak in peaks]
    assert totals == sorted(totals)
    for values, total in (({"activation_checkpointing": True}, totals[0]), ({}, totals[-1])):
        assert predict_peak(*case(tmp_path, "bloom", model=deep, micro_batch_size=4, **values)[:2]).total == total
    for kept in (2, 4):
        assert totals[kept] == pytest.approx(measured_peak(*checkpointed(tmp_path, deep, kept)), rel=0.01)


@pytest.mark.parametrize("bend", [0, 3, 20])
def test_the_most_blocks_are_kept_that_have_room_and_few_numbers_are_tried(bend):
    """The peak is flat while another moment is the peak, and then grows by 10 bytes with each block."""
    sizes = [100 + 10 * max(0, kept - bend) for kept in range(25)]
    for budget in (*range(90, 380, 7), None):
        tried = []

        def peak_of(kept, tried=tried):
            tried.append(kept)
            return Peak(0, 0, 0, sizes[kept], 0, 0, 0, "training")

        kept, found = keep_most(peak_of(0), peak_of, 24, attrgetter("total"), budget)
        fitting = [kept for kept, size in enumerate(sizes) if budget is None or size <= budget]
        assert kept == (fitting[-1] if fitting else 0)
        assert found.total == sizes[kept]
        assert len(tried) <= 10


def losses(output):
    return [line for line in output.splitlines() if "Loss" in line or "acc" in line.lower()]


@pytest.fixture
def run(tmp_path, deep):
    """Return a function that runs the rung, and returns what it prints and its predicted peak in bytes."""

    def start(*options):
        own = ("--model", deep, "--from_scratch", "true", "--precision", "32-true", "--micro_batch_size", "4")
        more = ("--micro_batch_tokens", "null", "--predict_memory", "true", "--runs_dir", "runs")
        output = finished(run_script(RUNG, *SMALL, *own, *more, *options, cwd=tmp_path))
        newest = max((tmp_path / "runs").glob("*/*/run.json"), key=lambda path: path.stat().st_mtime_ns)
        return output, json.loads(newest.read_text(encoding="utf-8"))["results"].get("predicted_peak_bytes")

    return start


@pytest.mark.slow
def test_a_run_within_a_budget_prints_the_losses_of_one_that_recomputes_nothing(run):
    _, least = run()
    expected, most = run("--activation_checkpointing", "false")
    assert most > least
    middle = (least + most) // 2
    for budget, recomputed in ((middle, range(1, BLOCKS)), (least - 1, [BLOCKS])):
        output, peak = run("--memory_budget", f"{budget / 1e9:.9f}GB")
        found = int(re.search(rf"recomputing (\d) of {BLOCKS} blocks", output)[1])
        assert found in recomputed
        assert ("still more than --memory_budget" in output) == (found == BLOCKS)
        assert peak <= max(budget, least)
        assert losses(output) == losses(expected)


def test_a_program_asks_for_the_memory_of_a_run_within_a_budget(deep):
    def expected(**more):
        return predict_memory(deep, "7_grad_checkpointing", length=512, micro_batch_size=8, gpu="T4", **more).expected

    least, most = expected(), expected(activation_checkpointing=False)
    budget = (least + most) // 2
    assert least < expected(memory_budget=f"{budget / 1e9:.9f}GB") <= budget


def test_a_size_that_is_none_is_refused(tmp_path):
    process = run_script(RUNG, "--memory_budget", "half", cwd=tmp_path)
    assert process.returncode == 2
    assert "--memory_budget half: give a size such as 16GB or 15.9GiB" in process.stderr


def test_a_trial_of_the_plain_script_changes_nothing_and_counts_gradients_and_adams_state(monkeypatch):
    """The allocator of a GPU is replaced: its peak is a number, and at last there is no memory."""
    has_room = runpy.run_path(str(SRC / "plain" / "28_memory_budget.py"))["has_room"]
    model, made = tiny_model(), []
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    review = {"input_ids": torch.randint(2, VOCABULARY, (1, 12)), "labels": torch.tensor([1])}
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda like: made.append(like.nbytes) or empty_like(like))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", made.clear)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 100)
    fabric = Fabric(accelerator="cpu", devices=1)
    for budget, room in ((float("inf"), True), (100, True), (99, False)):
        has_room.__globals__["BUDGET"] = budget
        assert has_room(fabric, fabric.setup(model), review) is room
        assert sum(made) == 2 * sum(weight.nbytes for weight in model.parameters())

    def exhausted(*_):
        assert all(weight.grad is not None for weight in model.score.parameters())
        raise torch.OutOfMemoryError

    monkeypatch.setattr(torch.cuda, "max_memory_allocated", exhausted)
    assert not has_room(fabric, fabric.setup(model), review)
    assert all(weight.grad is None for weight in model.parameters())
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
