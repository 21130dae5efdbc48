"""Regression: numbers from columns, the loss, the printed lines, Pearson's correlation, and what tools show of them."""

import json
import re

import numpy as np
import pytest
import torch
from scipy.stats import pearsonr
from support.data_files import BLOOM, SPLITS, load_in, write_rows
from support.helpers import MODELS, ROOT, finished, run_script
from support.objectives import labelled, labelling
from support.resuming import run_here
from support.training import run_training

from fabric_ladder import UserError
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


@pytest.mark.parametrize(
    ("rows", "name", "message"),
    [
        ([*texts(), {"text": "a", "label": "3,5"}], "rows.jsonl", r'line 41: label is "3,5", not a number'),
        ([*texts(), {"text": "a", "label": float("inf")}], "rows.jsonl", r"line 41: label is Infinity, not a number"),
        ([*texts(), {"text": "a", "label": [1.0]}], "rows.jsonl", r"line 41: label is \[1\.0\], not a number"),
        ([*texts(), {"text": "a", "label": None}], "rows.csv", r"row 41: no label"),
        ([{"text": str(index), "label": 2} for index in range(20)], "rows.csv", r"all training .* the same label, 2: "),
    ],
)
def test_bad_rows_are_named(tmp_path, rows, name, message):
    with pytest.raises(UserError, match=message) as error:
        load(tmp_path, rows, name)
    assert "\n" not in str(error.value)


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
    figures = zip("ab", numbers.mean(0), numbers.var(0), strict=True)
    described = (f"{name} has mean {mean:.4g} and variance {spread:.4g}" for name, mean, spread in figures)
    notice = (
        f"Numbers to predict: {'; '.join(described)}. An MSE above the variance is worse than always guessing the mean"
    )
    assert notice in lines
    assert "accuracy" not in {*results, *results["epochs"][0]}


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


def test_predictions_that_are_equal_or_differ_by_rounding_errors_have_no_correlation():
    kind = Regression(["a", "b"])
    counts = kind.start_counts(torch.device("cpu"))
    true = torch.arange(9.0)[:, None].expand(9, 2)
    kind.count(counts, 0.3 + torch.tensor([[1e-7, 1e-3]]) * true.flip(0), true)
    assert kind.describe(counts.compute()).results["columns"]["pearson"] == [None, pytest.approx(-1)]
    kind = Regression(["a"])
    counts = kind.start_counts(torch.device("cpu"))
    kind.count(counts, torch.full((9, 1), 0.3), torch.arange(9.0)[:, None] + 1e6)
    assert kind.describe(counts.compute()).lines == ["Test Pearson nan"]
    kind.count(counts, torch.tensor([[5.0]]), torch.tensor([[1e6 + 20]]))
    expected = pearsonr([0.3] * 9 + [5.0], [*(np.arange(9.0) + 1e6), 1e6 + 20])[0]
    assert kind.describe(counts.compute()).results["test_pearson"] == pytest.approx(expected, rel=1e-6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the folder of two finished runs, the second of them resumed."""
    folder = tmp_path_factory.mktemp("runs")
    write_rows(texts(120), folder / "texts.jsonl")
    options = ["--model", str(MODELS / "bloom-quickstart.json"), "--dataset", "texts.jsonl", *NUMBERS_OPTION]
    for more, at in (
        (["--save", "consolidated"], None),
        (["--seed", 7], "| Samples"),
        (["--seed", 7, "--resume", "auto"], None),
        (["--seed", 7], None),
    ):
        status, _ = run_here("2_grad_accum", folder, *options, *more, at=at)
        assert (status == 0) == (at is None)
    return folder / "runs" / "2_grad_accum"


NUMBERS_OPTION = ["--problem_type", "regression", "--label_column", "label"]


def test_a_resumed_run_ends_with_the_same_figures(runs):
    resumed, whole = (json.loads((runs / name / "run.json").read_text())["results"] for name in "23")
    assert resumed["epochs"] == whole["epochs"]
    for name in ("test_mse", "test_pearson", "columns"):
        assert resumed[name] == whole[name]


def test_runs_are_compared_by_record_and_by_log(runs, tmp_path):
    folders = [runs / "1", runs / "2"]
    for page, sources in (("records.html", folders), ("logs.html", [folder / "log.txt" for folder in folders])):
        out = finished(run_script(ROOT / "scripts" / "compare_runs.py", *sources, "--html", page, cwd=tmp_path))
        assert "MSE" in out, out
        assert "Pearson" in out
        assert "acc." not in out
        assert "test MSE" in (tmp_path / page).read_text()


def test_the_model_card_has_the_error(runs, tmp_path):
    finished(run_script(ROOT / "scripts" / "export_model.py", runs / "1", "--output", "out", cwd=tmp_path))
    results = json.loads((runs / "1" / "run.json").read_text())["results"]
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"Test MSE {results['test_mse']:.4f}, Pearson's correlation {results['test_pearson']:.4f}." in card
