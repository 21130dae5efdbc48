"""Regression: numbers from columns, the loss, the printed lines, Pearson's correlation, and what tools show of them."""

import json
import re

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr
from support.data_files import BLOOM, SPLITS, load_in, write_rows
from support.objectives import labelled, labelling
from support.training import run_training

from fabric_ladder.data.regression import Regression

NUMBERS = {"problem_type": "regression"}


def texts(count=40):
    return [{"text": f"text number {index}", "label": index / 7 - 2, "b": 10**6 + index % 9} for index in range(count)]


def load(folder, rows, name="rows.jsonl", **values):
    return load_in(folder, write_rows(rows, folder / name), model=BLOOM, **(NUMBERS | values))


@pytest.mark.parametrize("name", ["rows.csv", "rows.parquet"])
def test_numbers_come_from_one_or_several_columns(tmp_path, name):
    for column in ("label", "label,b"):
        datasets = load(tmp_path, texts(), name, label_column=column)
        assert datasets.class_names == column.split(",")
        found = sorted(tuple(row) for split in SPLITS for row in datasets.splits[split]["labels"][:])
        assert found == sorted(tuple(row[name] for name in column.split(",")) for row in texts())


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_run_prints_errors_and_the_correlation(tmp_path, capsys, precision):
    """The numbers are never rounded to 16 bits: their mean is the same in both precisions."""
    datasets = labelled("numbers", test=40)
    model = labelling("numbers").to(torch.bfloat16 if precision == "bf16-true" else torch.float32)
    run, model = run_training(tmp_path, model, datasets, precision=precision, epochs=2, **NUMBERS)
    results = json.loads((run.folder / "run.json").read_text())["results"]
    predicted = []
    model.eval()
    with torch.no_grad():
        for row in datasets.splits["test"]:
            ids = torch.tensor([row["input_ids"]])
            predicted.append(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0].tolist())
    predicted, true = np.array(predicted), np.array(datasets.splits["test"]["labels"][:])
    tolerance = 1e-5 if precision == "32-true" else 0.05
    expected = [pearsonr(predicted[:, column], true[:, column])[0] for column in (0, 1)]
    assert results["columns"]["names"] == ["a", "b"]
    assert results["columns"]["pearson"] == pytest.approx(expected, abs=tolerance)
    assert results["columns"]["mse"] == pytest.approx(((predicted - true) ** 2).mean(0), rel=tolerance)
    assert results["test_pearson"] == pytest.approx(np.mean(expected), abs=tolerance)
    assert results["test_mse"] == results["test_loss"] == pytest.approx(np.mean(results["columns"]["mse"]), rel=1e-6)
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [f"Test MSE {results['test_mse']:.4f}", f"Test Pearson {results['test_pearson']:.4f}"]
    assert any(re.fullmatch(r"Epoch: 0002/0002 \| Train MSE: \d\.\d{4} \| Val MSE: \d\.\d{4}", line) for line in lines)
    numbers = np.array(datasets.splits["train"]["labels"][:])
    described = (
        f"Numbers to predict: a has mean {numbers[:, 0].mean():.4g} and variance {numbers[:, 0].var():.4g}; b has"
    )
    assert [line for line in lines if line.startswith(described)]
    assert "accuracy" not in {*results, *results["epochs"][0]}


def test_predictions_that_are_equal_or_differ_by_rounding_errors_have_no_correlation():
    kind = Regression(["a", "b"])
    counts = kind.start_counts(torch.device("cpu"))
    true = torch.arange(9.0)[:, None].expand(9, 2)
    kind.count(counts, 0.3 + torch.tensor([[1e-7, 1e-3]]) * true.flip(0), true)
    assert kind.describe(counts.compute()).results["columns"]["pearson"] == [None, pytest.approx(-1)]


def test_the_figures_equal_scipys():
    """The last column has large numbers that differ little."""
    rng = np.random.default_rng(0)
    true = rng.normal(size=(200, 3)).astype(np.float32)
    predicted = (true + rng.normal(size=true.shape)).astype(np.float32)
    true[:, -1] += 1000
    kind = Regression(list("abc"))
    counts = kind.start_counts(torch.device("cpu"))
    for part in np.split(range(200), [1, 30, 31, 100]):
        kind.count(counts, torch.tensor(predicted[part]), torch.tensor(true[part]))
    got = kind.describe(counts.compute()).results
    predicted, true = predicted.astype(np.float64), true.astype(np.float64)
    expected = [pearsonr(*pair)[0] for pair in zip(predicted.T, true.T, strict=True)]
    assert got["columns"]["pearson"] == pytest.approx(expected, rel=1e-9)
    assert got["columns"]["mse"] == pytest.approx(((predicted - true) ** 2).mean(0).tolist(), rel=1e-9)
    assert got["test_pearson"] == pytest.approx(np.mean(expected), rel=1e-9)
