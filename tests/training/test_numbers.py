"""NaN or infinite losses and gradients are named."""

import gc
import re

import pytest
import torch
from support.helpers import settings_for, tiny_model, token_datasets
from support.resuming import run_rung_2
from support.training import losses, poison, run_training
from transformers import BloomForSequenceClassification

from fabric_ladder import UserError
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


@pytest.mark.parametrize(
    ("kind", "log_every", "clip"), [("loss", 1, None), ("loss", 1000, 1.0), ("gradient", 1000, None)]
)
def test_the_first_step_with_a_bad_number_is_named_with_its_samples(tmp_path, kind, log_every, clip):
    """The step is found even though the weights and all later losses are already NaN."""
    name = {"loss": "loss is nan", "gradient": "gradient is not finite"}[kind]
    with pytest.raises(UserError) as stop:
        run_training(tmp_path, broken(kind), data(), micro_batch_size=4, log_every=log_every, max_grad_norm=clip)
    found = re.match(
        rf"the {name} at epoch 1, batch \d \(training samples (.*)\): the run stops; try a lower --learning_rate",
        explain(stop.value, settings_for(tmp_path)),
    )
    assert "20" in found[1].split(", ")


def test_a_gradient_whose_norm_overflows_is_not_called_infinite(tmp_path):
    """The squares of the gradient overflow in 32 bits."""

    def enlarge(model, _):
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient * 1e25)

    run, _ = run_training(tmp_path, prepare=enlarge, learning_rate=1e-4)
    assert len(losses(run)) == 3


def test_no_checkpoint_is_written_after_a_bad_number(tmp_path, monkeypatch):
    """The weights are NaN long before the next printed line. The run can resume from the earlier checkpoint."""
    monkeypatch.setattr(loop, "try_longest", lambda training, _: poison(training))
    with pytest.raises(UserError) as stop:
        run_rung_2(tmp_path, "--log_every", 1000, "--save_every", 1)
    first = str(stop.value)
    del stop  # the error's traceback keeps the run, and the run locks its folder
    gc.collect()
    home = tmp_path / "runs" / "2_grad_accum" / "1"
    bad = int(re.match(r"the loss is nan at epoch 1, batch (\d) \(training samples", first)[1])
    assert [path.name for path in (home / "checkpoints").iterdir()] == [f"step-{bad - 1:09d}"]
