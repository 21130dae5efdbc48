"""Validations within an epoch, early stopping, and the weights of the best validation."""

import json
import math
import re

import pytest
import torch
from safetensors.torch import load_file
from support.helpers import finished
from support.resuming import assert_same, checkpoints, lines_of, rows_of, run_rung_2, tensors_of
from support.training import limited, read

from fabric_ladder import UserError
from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.training import fitting

EVERY_3 = ["--evaluate_every", 3, "--save_every", 100]
UNSTEADY = ["--learning_rate", 0.1]  # the loss goes up and down
HOME = ("runs", "2_grad_accum", "1")


def run(cwd, *arguments, **options):
    """Return the run's folder and its printed text."""
    cwd.mkdir(exist_ok=True)
    status, text = run_rung_2(cwd, *arguments, **options)
    assert status == 0, text
    return cwd.joinpath(*HOME), text


def record_of(home):
    return json.loads((home / "run.json").read_text())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Return the folder of an uninterrupted run with validations every three steps, of 16 in two epochs."""
    return run(tmp_path_factory.mktemp("whole"), *EVERY_3)[0]


def test_validations_within_an_epoch_change_no_bit_of_the_training(tmp_path, whole):
    plain, _ = run(tmp_path, "--save_every", 100)
    mine, theirs = tensors_of(checkpoints(whole)[-1]), tensors_of(checkpoints(plain)[-1])
    assert all(torch.equal(mine[name], theirs[name]) for name in theirs)
    assert [int(row["step"]) for row in rows_of(whole) if row["validation_loss"]] == [3, 6, 8, 9, 12, 15, 16]
    added = [line for line in lines_of(whole) if "Val loss" in line]
    assert [line for line in lines_of(whole) if line not in added] == lines_of(plain)
    assert [line[:57] for line in added] == [
        "Epoch: 0001/0002 | Batch 0003/0008 | Samples 00024/00060 ",
        "Epoch: 0001/0002 | Batch 0006/0008 | Samples 00048/00060 ",
        "Epoch: 0002/0002 | Batch 0001/0008 | Samples 00008/00060 ",
        "Epoch: 0002/0002 | Batch 0004/0008 | Samples 00032/00060 ",
        "Epoch: 0002/0002 | Batch 0007/0008 | Samples 00056/00060 ",
    ]


def test_a_run_stopped_at_a_validation_resumes_bit_by_bit(tmp_path, whole):
    options = [*EVERY_3, "--resume", "auto"]
    assert run_rung_2(tmp_path, *options, at="00024/00060 | Val loss")[0] == 143
    assert_same(run(tmp_path, *options)[0], whole)


def test_patience_stops_the_training_and_the_run_is_complete(tmp_path):
    more = ["--epochs", 3, "--evaluate_every", 3, "--patience", 2, "--save_every", 100, *UNSTEADY]
    home, text = run(tmp_path, *more)
    results = record_of(home)["results"]
    assert results["stopped_early"] is True
    assert "Stopped early: the validation loss was not better 2 times in a row\nTime elapsed" in text
    steps = [int(row["step"]) for row in rows_of(home) if row["validation_loss"]]
    losses = [float(row["validation_loss"]) for row in rows_of(home) if row["validation_loss"]]
    last = steps[-1]
    assert losses[-3] == min(losses)
    assert last < 24
    assert [int(row["step"]) for row in rows_of(home) if row["loss"]][-1] == last
    (test,) = [row for row in rows_of(home) if row["test_loss"]]
    assert (int(test["step"]), int(test["epoch"])) == (last, math.ceil(last / 8))
    assert results["epochs"][-1]["validation_loss"] == losses[-1]
    (read,) = read_sources([str(home)])
    assert (read.unfinished, read.figures["validation_accuracy"]) == (
        None,
        results["epochs"][-1]["validation_accuracy"] * 100,
    )
    assert [path.name for path in checkpoints(home)][-1] == f"step-{last:09d}-validated"
    status, text = run_rung_2(tmp_path, *more, "--resume", "auto")
    assert (status, "has finished already" in text) == (0, True)


@pytest.mark.slow
def test_a_run_stopped_in_the_test_after_an_early_stop_trains_no_further(tmp_path, monkeypatch):
    more = ["--epochs", 3, "--evaluate_every", 3, "--patience", 1, *UNSTEADY]
    status, text = run_rung_2(tmp_path, *more, "--resume", "auto", at="Memory used")
    assert status == 143
    with monkeypatch.context() as patch:
        patch.setattr(fitting, "HARD_LIMITS", ("cpu",))
        patch.setattr(fitting, "trial_pass", lambda *_: pytest.fail("it tries batches that are trained already"))
        home, text = run(tmp_path, *more, "--resume", "auto")
    assert "Loss:" not in text
    assert lines_of(home) == lines_of(run(tmp_path / "whole", *more)[0])


def test_the_best_weights_are_tested_and_saved(tmp_path):
    more = ["--evaluate_every", 3, "--best_metric", "accuracy", *UNSTEADY]
    kept, _ = run(tmp_path / "kept", *more, "--save_every", 3, "--keep", 99)
    home, text = run(tmp_path / "best", *more, "--best_weights", "true", "--save", "consolidated")
    rows = [row for row in rows_of(kept) if row["validation_loss"]]
    values = [float(row["validation_accuracy"]) for row in rows]
    best = values.index(max(values))
    assert best < len(rows) - 1, "otherwise the last weights are the best"
    checkpoint = record_of(kept)["best_checkpoint"]
    assert checkpoint == f"checkpoints/step-{int(rows[best]['step']):09d}-validated"
    found = record_of(home)["results"]["best_validation"]
    assert (found["value"], found["used"]) == (values[best], True)
    assert re.search(r"Best validation accuracy .*: its weights are tested and saved\nSaved ", text)
    weights, saved = tensors_of(kept / checkpoint), load_file(home / "model" / "model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(tensor, weights[f"model.{name}"]), name
    assert not (home / "checkpoints").exists(), "the checkpoint of the best weights is removed in the end"
    assert record_of(home)["results"]["test_loss"] != record_of(kept)["results"]["test_loss"]


@pytest.mark.slow
def test_best_weights_survive_a_stop(tmp_path):
    more = ["--evaluate_every", 3, "--best_weights", "true", "--resume", "auto", *UNSTEADY]
    for place in ("Batch 0006/0008 | Samples 00048/00060 | Val", "Memory used"):
        assert run_rung_2(tmp_path, *more, at=place)[0] == 143
    home, _ = run(tmp_path, *more)
    assert "its weights are tested\n" in (home / "log.txt").read_text()
    undisturbed, _ = run(tmp_path / "whole", *more)
    assert lines_of(home) == lines_of(undisturbed)
    losses = [record_of(each)["results"]["test_loss"] for each in (home, undisturbed)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--problem_type", "regression", "--best_metric", "accuracy"], "--best_metric accuracy: a regression has no"),
        (["--warmup_steps", 9], "--warmup_steps 9: the run has only 8 optimizer steps"),
        (["--evaluate_every", 9], "--evaluate_every 9: an epoch has only 8 optimizer steps"),
        (["--patience", 2], "--patience 2: the run has only 2 validations; add --evaluate_every N"),
    ],
)
def test_options_that_cannot_work_are_refused(tmp_path, options, message):
    more = ["--epochs", 1] if "--patience" not in options else []
    with pytest.raises(UserError, match=re.escape(message)):
        run_rung_2(tmp_path, *more, *options)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_ranks_stop_together_and_keep_the_best_weights(tmp_path):
    more = "--evaluate_every 2 --patience 2 --epochs 3 --best_weights true --learning_rate 0.03".split()
    for process in (*limited(tmp_path, (0, 0), "9_ddp", *more), *limited(tmp_path / "alone", (0,), "9_ddp", *more)):
        finished(process)
    (_, ranks), (_, single) = read(tmp_path, "9_ddp"), read(tmp_path / "alone", "9_ddp")
    assert ranks["results"]["test_loss"] == pytest.approx(single["results"]["test_loss"], rel=1e-3)
    assert ranks["results"].get("stopped_early") == single["results"].get("stopped_early") is True
    assert ranks["results"]["best_validation"]["place"] == single["results"]["best_validation"]["place"]
