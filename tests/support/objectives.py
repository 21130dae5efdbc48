"""Random tokens with every kind of labels, and the gradient of an effective batch under every cut of it."""

import copy

import torch
from lightning import Fabric

from fabric_ladder import build_dataloaders
from fabric_ladder.data.splits import IGNORED
from fabric_ladder.models.configs import MODELS
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.techniques.fused_attention import fuse_attention
from fabric_ladder.techniques.packing import support_packing
from fabric_ladder.training.gradients import accumulate_gradients
from support.helpers import settings_for, tiny_model, token_datasets

LABELS = {  # settings and names of classes
    "words": ({"task": "token-classification"}, ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]),
    "several": ({"problem_type": "multi_label_classification"}, ["a", "b", "c"]),
    "numbers": ({"problem_type": "regression"}, ["a", "b"]),
}
WHOLE = {"micro_batch_size": 16}
CUTS = [
    {"micro_batch_size": 1},
    {"micro_batch_size": 3, "pad_to_multiple_of": 8},
    {"micro_batch_tokens": 64},
    {"packing": True, "micro_batch_size": 2},
    {"packing": True, "micro_batch_tokens": 200, "pad_to_multiple_of": 8},
]


def labelled(kind, **sizes):
    """Return random tokens whose labels depend on them; about two thirds are the first tokens of words."""
    datasets, names = token_datasets(**sizes), LABELS[kind][1]
    for split, part in datasets.splits.items():
        rows = part["input_ids"][:]
        if kind == "words":
            labels = [[IGNORED if token % 3 == 0 else token % len(names) for token in row] for row in rows]
            labels = [row if max(row) >= 0 else [0, *row[1:]] for row in labels]
            part = part.add_column("items", [sum(label >= 0 for label in row) for row in labels])
        elif kind == "several":
            labels = [[int(sum(row) >> bit & 1) for bit in range(len(names))] for row in rows]
        else:
            labels = [[(sum(row) % (11 + column)) / 4 - 1 for column in range(len(names))] for row in rows]
        datasets.splits[split] = part.remove_columns("labels").add_column("labels", labels)
    datasets.class_names = list(names)
    return datasets


def labelling(kind, architecture="bloom"):
    """Make a tiny model for this kind of labels."""
    model = tiny_model(architecture, classes=len(LABELS[kind][1]))
    if kind != "words":
        return model
    model.config.classifier_dropout = 0.0  # the head of Llama has dropout by default
    torch.manual_seed(0)
    return MODELS["token-classification"].from_config(model.config)


def packable(model):
    """Let a tiny model take packed batches."""
    fuse_attention(model)
    support_packing(model, 80)
    return model


def accumulated(tmp_path, model, datasets, /, **values):
    """Return the gradient of the first effective batch as one vector, and its score."""
    fabric = Fabric(accelerator="cpu", devices=1)
    loader, _, _ = build_dataloaders(fabric, datasets, settings_for(tmp_path, **({"max_length": 80} | values)))
    model = fabric.setup(copy.deepcopy(model))
    model.train()
    meter = Meter(fabric)
    accumulate_gradients(fabric, model, next(iter(loader)).micro_batches, meter)
    meter.commit(("first", []))
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    return torch.cat(gradients), meter.collect()


def assert_exact(tmp_path, model, datasets, tolerance, /, cuts=CUTS, **values):
    """Assert that no cut changes gradient, loss and right predictions; return the score."""
    expected, score = accumulated(tmp_path, model, datasets, **WHOLE, **values)
    assert expected.norm() > 0
    for cut in cuts:
        got, its_score = accumulated(tmp_path, model, datasets, **cut, **values)
        assert (got - expected).norm() < tolerance * expected.norm(), cut
        assert abs(its_score.loss - score.loss) < tolerance * score.loss, cut
        assert (its_score.correct, its_score.items) == (score.correct, score.items), cut
    return score
