"""NaN or infinite losses and gradients are named, or skipped with `--on_nan skip`."""

import gc
import json
import re
import sys

import pytest
import torch
from support.helpers import settings_for, tiny_model, token_datasets
from support.resuming import assert_same, run_here
from support.training import losses, poison, read, run_training, two
from transformers import BloomForSequenceClassification

from fabric_ladder import UserError, parse_settings
from fabric_ladder.techniques.advice import explain
from fabric_ladder.training import loop

BAD = 63  # only one sample has this token


class FiniteLoss(BloomForSequenceClassification):
    """The loss of a batch with the token includes the root of zero, whose gradient is infinite."""

    def forward(self, input_ids, **inputs):
        outputs = super().forward(input_ids, **inputs)
        if (input_ids == BAD).any():
            outputs.loss = outputs.loss + (0 * self.score.weight.sum()).sqrt()
        return outputs


def data():
    """Return two epochs of three batches. Only row 20 has the token."""
    datasets = token_datasets()

    def change(row, number):
        ids = [token if token != BAD else 1 for token in row["input_ids"]]
        return {"input_ids": [BAD, *ids[1:]] if number == 20 else ids}

    datasets.splits["train"] = datasets.splits["train"].map(change, with_indices=True)
    for name in ("validation", "test"):
        datasets.splits[name] = datasets.splits[name].map(lambda row: change(row, -1))
    return datasets


def broken(kind):
    model = tiny_model()
    if kind == "loss":
        model.transformer.word_embeddings.weight.data[BAD] = torch.nan
    else:
        model.__class__ = FiniteLoss
    return model


def healthy_weights(model):
    return [weight[:BAD] if "word_embeddings.weight" in name else weight for name, weight in model.state_dict().items()]


@pytest.mark.parametrize(
    ("kind", "log_every", "clip"), [("loss", 1, None), ("loss", 1000, 1.0), ("gradient", 1000, None)]
)
def test_the_first_step_with_a_bad_number_is_named_with_its_samples(tmp_path, kind, log_every, clip):
    """The step is found even though the weights and all later losses are already NaN."""
    name = {"loss": "loss is nan", "gradient": "gradient is not finite"}[kind]
    with pytest.raises(UserError) as stop:
        run_training(tmp_path, broken(kind), data(), micro_batch_size=4, log_every=log_every, max_grad_norm=clip)
    found = re.match(
        rf"the {name} at epoch 1, batch \d \(training samples (.*)\): the run stops; .*--on_nan skip",
        explain(stop.value, settings_for(tmp_path)),
    )
    assert "20" in found[1].split(", ")


@pytest.mark.parametrize(("kind", "clip"), [("loss", None), ("gradient", 1.0)])
def test_skip_leaves_the_batch_out_and_the_weights_finite(tmp_path, capsys, kind, clip):
    how = {"micro_batch_size": 4, "epochs": 2, "on_nan": "skip", "max_grad_norm": clip, "schedule": "linear"}
    run, model = run_training(tmp_path, broken(kind), data(), **how)
    assert all(weight.isfinite().all() for weight in healthy_weights(model))
    text = capsys.readouterr().out
    named = re.findall(
        rf"^Skipped: the {kind} is not finite at epoch (\d), batch \d \(training samples (.*)\)$", text, re.M
    )
    assert [epoch for epoch, _ in named] == ["1", "2"]
    assert all("20" in samples.split(", ") for _, samples in named)
    record = json.loads((run.folder / "run.json").read_text())
    assert record["results"]["skipped_batches"] == 2
    assert len(losses(run)) == 4, "two batches of each epoch"
    assert all(loss < 2 for loss in losses(run))


def test_an_exploding_run_is_stopped_after_the_limit(tmp_path, capsys):
    how = {"optimizer": "sgd", "learning_rate": 1e30, "batch_size": 2, "on_nan": "skip"}
    with pytest.raises(UserError, match=r"is not finite at epoch \d, batch \d+ .*stops, since 10 batches were skipped"):
        run_training(tmp_path, **how)
    assert capsys.readouterr().out.count("Skipped: ") == 10


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_healthy_runs_are_the_same_bit_by_bit(tmp_path, precision):
    runs = [run_training(tmp_path, micro_batch_size=4, precision=precision, on_nan=how) for how in ("stop", "skip")]
    assert losses(runs[0][0]) == losses(runs[1][0])
    for one, other in zip(runs[0][1].parameters(), runs[1][1].parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_gradient_whose_norm_overflows_is_not_called_infinite(tmp_path):
    """The squares of the gradient overflow in 32 bits."""

    def enlarge(model, _):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 1e25)

    run, _ = run_training(tmp_path, prepare=enlarge, learning_rate=1e-4)
    assert len(losses(run)) == 3


def test_a_resumed_run_skips_and_counts_as_if_it_had_never_stopped(tmp_path, dropout_model, monkeypatch):
    monkeypatch.setattr(loop, "try_longest", lambda training, _: poison(training))
    more = ["--model", dropout_model, "--save_every", 100, "--on_nan", "skip"]
    (tmp_path / "whole").mkdir()
    status, text = run_here("2_grad_accum", tmp_path / "whole", *more)
    assert (status, text.count("Skipped: the loss")) == (0, 2)
    for place in ("0001/0002 | Train acc", None):
        run_here("2_grad_accum", tmp_path, *more, "--resume", "auto", at=place)
    home, whole = (folder / "runs" / "2_grad_accum" / "1" for folder in (tmp_path, tmp_path / "whole"))
    assert_same(home, whole)
    assert json.loads((home / "run.json").read_text())["results"]["skipped_batches"] == 2


def test_no_checkpoint_is_written_after_a_bad_number(tmp_path, dropout_model, monkeypatch):
    """The weights are NaN long before the next printed line. The run can resume from the earlier checkpoint."""
    monkeypatch.setattr(loop, "try_longest", lambda training, _: poison(training))
    more = ["--model", dropout_model, "--log_every", 1000, "--save_every", 1]
    with pytest.raises(UserError) as stop:
        run_here("2_grad_accum", tmp_path, *more)
    first = str(stop.value)
    del stop  # the error's traceback keeps the run, and the run locks its folder
    gc.collect()
    home = tmp_path / "runs" / "2_grad_accum" / "1"
    bad = int(re.match(r"the loss is nan at epoch 1, batch (\d) \(training samples", first)[1])
    assert [path.name for path in (home / "checkpoints").iterdir()] == [f"step-{bad - 1:09d}"]
    status, text = run_here("2_grad_accum", tmp_path, *more, "--on_nan", "skip", "--resume", "auto")
    assert (status, text.count("Skipped: the loss is not finite")) == (0, 2), "one in each epoch"


@pytest.mark.slow
def test_all_ranks_skip_a_batch_that_is_bad_on_one_rank(tmp_path):
    """One rank has the bad sample and finds the loss. The other rank skips too, because the ranks agree."""
    results = two(tmp_path, (0, 0), "9_ddp", "--on_nan", "skip", condition="poison")
    assert [status for *_, status in results] == [0, 0], results[0][1][-2000:]
    stdout = results[0][0]
    sample = re.search(r"^Poisoned (\d+)$", stdout, re.M)[1]
    (samples,) = re.findall(
        r"^Skipped: the loss is not finite at epoch 1, batch \d \(training samples (.*)\)$", stdout, re.M
    )
    assert sample in samples.split(", ")
    figures, record = read(tmp_path, "9_ddp")
    assert len(figures) == 5, "of six batches"
    assert record["results"]["skipped_batches"] == 1


@pytest.mark.slow
def test_sharded_ranks_skip_and_stop_together(tmp_path):
    """With FSDP2, a learning rate makes the weights and all later values overflow."""
    explode = ["--optimizer", "sgd", "--learning_rate", "1e30", "--on_nan", "skip", "--batch_size", "4"]
    first, second = two(tmp_path, (0, 0), "10_fsdp", *explode)
    assert first[0].count("Skipped: the ") == 10
    for _, stderr, _ in (first, second):
        assert "the run stops, since 10 batches were skipped already" in stderr
    assert first[2] == second[2] == 2


def test_deepspeed_cannot_skip(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(UserError, match="--on_nan skip: DeepSpeed cannot undo a gradient"):
        parse_settings(["--on_nan", "skip"], strategy="deepspeed", devices="auto", batch_size=16, deepspeed="zero2")
