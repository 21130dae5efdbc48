"""The confusion matrix is counted on the device and kept in run.json. Macro-F1 is printed where it matters."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import confusion_matrix, f1_score, precision_score, recall_score
from support.helpers import settings_for, tiny_model, token_datasets
from support.recorded_runs import LOG, parse
from support.training import run_training

from fabric_ladder import build_dataloaders
from fabric_ladder.data.class_weights import ClassWeights
from fabric_ladder.data.label_kind import class_lines
from fabric_ladder.data.multi_label import MultiLabel
from fabric_ladder.data.regression import Regression
from fabric_ladder.data.word_labels import WordLabels
from fabric_ladder.runs.intervals import wilson_interval
from fabric_ladder.runs.metrics import describe_classes


def predictions(model, datasets):
    """Predict the test split one sample at a time."""
    model.eval()
    with torch.no_grad():
        return [
            model(input_ids=torch.tensor([row])).logits.argmax().item()
            for row in datasets.splits["test"]["input_ids"][:]
        ]


def set_labels(datasets, labels):
    datasets.splits["train"] = datasets.splits["train"].remove_columns("labels").add_column("labels", labels)


@pytest.mark.parametrize(
    ("classes", "true", "predicted"),
    [
        (4, [0, 1, 3], [0, 1, 2]),
        (2, [1], [1]),
        (30, range(30), range(29)),
    ],
)
def test_the_figures_equal_scikit_learns(classes, true, predicted):
    rng = np.random.default_rng(0)
    true, predicted = rng.choice(true, 200), rng.choice(predicted, 200)
    confusion = confusion_matrix(true, predicted, labels=range(classes)).tolist()
    got = describe_classes([*map(str, range(classes))], confusion)
    assert got["macro_f1"] == pytest.approx(f1_score(true, predicted, average="macro"), rel=1e-12)
    for name, score in (("recall", recall_score), ("precision", precision_score)):
        each = score(true, predicted, average=None, labels=range(classes), zero_division=np.nan).tolist()
        found = [math.nan if share is None else share for share in got[name]]
        assert found == pytest.approx(each, rel=1e-12, nan_ok=True)
    assert got["confusion"] == confusion


LOGITS = {
    "several labels": (MultiLabel(["a", "b"]), (3, 2), (("labels", (3, 2), torch.float32),)),
    "numbers": (Regression(["a", "b"]), (3, 2), (("labels", (3, 2), torch.float32),)),
    "a number": (Regression(["a"]), (1, 1), (("labels", (1, 1), torch.float32),)),
    "words": (WordLabels(["B-a", "I-a", "B-b", "O"]), (2, 5, 4),
              (("labels", (7,), torch.int64), ("words", (7,), torch.int64), ("begins", (7,), torch.bool))),
    "class weights": (ClassWeights(SimpleNamespace(label_smoothing=0.0, class_weights=None), None, []), (3, 2),
                      (("labels", (3,), torch.int64),)),
}  # fmt: skip


@pytest.mark.parametrize("kind", LOGITS)
def test_counting_reads_no_value_from_the_device(kind):
    kind, shape, labels = LOGITS[kind]
    labels = {name: torch.empty(size, dtype=dtype, device="meta") for name, size, dtype in labels}
    logits = torch.empty(shape, dtype=torch.bfloat16, device="meta")
    assert kind.correct(logits, **labels).shape == ()
    if hasattr(kind, "start_counts"):
        counts = kind.start_counts(torch.device("meta"))
        for _ in range(3):
            kind.count(counts, logits, **labels)


def test_run_json_has_the_confusion_matrix(tmp_path, capsys):
    datasets = token_datasets(test=30, classes=3)
    run, model = run_training(tmp_path, tiny_model(classes=3), datasets, eval_batch_tokens=1)
    results = json.loads((run.folder / "run.json").read_text())["results"]
    expected = confusion_matrix(datasets.splits["test"]["labels"][:], predictions(model, datasets), labels=range(3))
    assert results["classes"]["confusion"] == expected.tolist()
    assert results["test_accuracy"] == pytest.approx(np.trace(expected) / 30)
    lines = capsys.readouterr().out.splitlines()
    low, high = wilson_interval(results["test_accuracy"], 30)
    assert lines[-7:-4] == [
        f"Test accuracy {results['test_accuracy'] * 100:.2f}%",
        f"Test samples 30, 95 % interval {low * 100:.2f}% to {high * 100:.2f}%",
        f"Test macro-F1 {results['classes']['macro_f1'] * 100:.2f}%",
    ]
    assert lines[-4].split() == ["class", "\\", "predicted", "0", "1", "2", "precision", "recall", "f1", "support"]
    for name, row, line in zip("012", expected, lines[-3:], strict=True):
        assert line.split()[:4] == [f"'{name}'", *map(str, row)]
        assert line.split()[-1] == str(row.sum())


@pytest.mark.parametrize("imbalanced", [False, True])
def test_imbalanced_classes_are_named_before_the_training(tmp_path, capsys, imbalanced):
    """Three quarters of the training samples have one label. With balanced classes no line is added."""
    datasets = token_datasets()
    if imbalanced:
        set_labels(datasets, [int(index % 4 == 0) for index in range(40)])
    run, _ = run_training(tmp_path, datasets=datasets)
    assert "classes" in json.loads((run.folder / "run.json").read_text())["results"]
    lines = capsys.readouterr().out.splitlines()
    notice = (
        "Imbalanced classes: 75.0% of the training samples are '0', one of 2 classes; an accuracy below that is worse "
        "than always guessing this class"
    )
    first = next(number for number, line in enumerate(lines) if line.startswith("Parameters: "))
    assert (lines[first - 1] == notice) == imbalanced
    assert lines[-4].startswith("Test macro-F1 " if imbalanced else "Test samples 13, 95 % interval ")


def test_more_than_twenty_classes_and_instructions_have_no_matrix(tmp_path, capsys):
    many = run_training(tmp_path, tiny_model(classes=21), token_datasets(classes=21))
    spoken = token_datasets(per_token=True)
    language = run_training(tmp_path, tiny_model("llama-lm"), spoken, task="instruction-tuning")
    for run, _ in (many, language):
        assert "classes" not in json.loads((run.folder / "run.json").read_text())["results"]
    assert "macro-F1" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("counts", "imbalanced"), [((60, 40), False), ((61, 39), True), ((51, 17, 16, 16), True), ((50, 18, 16, 16), False)]
)
def test_over_60_percent_or_twice_the_even_share_is_imbalanced(tmp_path, counts, imbalanced):
    datasets = token_datasets(train=100, classes=len(counts))
    labels = np.repeat(np.arange(len(counts)), counts)
    set_labels(datasets, labels)
    settings = settings_for(tmp_path)
    fabric = type("Alone", (), {"global_rank": 0, "world_size": 1})
    assert bool(build_dataloaders(fabric, datasets, settings)[0].dataset.imbalance) == imbalanced


@pytest.mark.parametrize(("classes", "columns", "lines"), [(10, 16, 11), (11, 5, 12), (21, 0, 0)])
def test_more_than_ten_classes_have_no_printed_matrix(classes, columns, lines):
    """The first class has the name of a heading, which the readers of logs must not take for one."""
    names = ["# a\nb", *map(str, range(1, classes))]
    found = class_lines(describe_classes(names, np.eye(classes, dtype=int).tolist()))
    assert len(found) == lines
    if lines:
        assert len(found[1].replace("'# a\\nb'", "a").split()) == columns - (classes == 10)
        assert parse("\n".join([LOG.rstrip(), *found]))[0].figures == parse(LOG)[0].figures
        assert len(parse("\n".join([LOG.rstrip(), *found]))) == 1
