"""Several labels per text: how they are written, the loss, the F1 scores, and rows that are refused."""

import datasets as hf
import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score, precision_recall_fscore_support
from support.data_files import BLOOM, SPLITS, load_in, write_rows
from support.helpers import settings_for

from fabric_ladder import UserError
from fabric_ladder.checks import check_values
from fabric_ladder.data.multi_label import MultiLabel

MULTI = {"problem_type": "multi_label_classification"}
SETS = [[], ["art"], ["art", "law"], ["law", "war"], ["war"]]


def texts(count=40):
    return [{"text": f"text number {index}", "label": SETS[index % 5]} for index in range(count)]


def load(folder, rows, name="rows.jsonl", **values):
    return load_in(folder, write_rows(rows, folder / name), model=BLOOM, **(MULTI | values))


def labels_by_text(datasets):
    """Return the names of each text's labels."""
    found = {}
    for split in SPLITS:
        for row in datasets.splits[split]:
            text = datasets.tokenizer.decode(row["input_ids"], clean_up_tokenization_spaces=False)
            found[text] = [name for name, flag in zip(datasets.class_names, row["labels"], strict=True) if flag]
    return found


FORMS = {
    "a list in Parquet": ("rows.parquet", lambda labels: {"label": labels}),
    "commas": ("rows.jsonl", lambda labels: {"label": ", ".join(labels)}),
    "bars": ("rows.csv", lambda labels: {"label": "|".join(labels)}),
    "columns": ("rows.csv", lambda labels: {name: int(name in labels) for name in ("art", "law", "war")}),
    "truth values": ("rows.parquet", lambda labels: {name: name in labels for name in ("art", "law", "war")}),
}


def test_labels_may_be_written_in_these_forms(tmp_path):
    expected = load(tmp_path, texts(), "lists.jsonl")
    assert expected.class_names == ["art", "law", "war"]
    assert labels_by_text(expected) == {row["text"]: row["label"] for row in texts()}
    for form, (name, write) in FORMS.items():
        rows = [{"text": row["text"]} | write(row["label"]) for row in texts()]
        column = {} if "label" in rows[0] else {"label_column": "art,law,war"}
        assert load(tmp_path, rows, name, **column).fingerprint == expected.fingerprint, form


def test_numbers_are_sorted_by_size_and_class_names_are_kept(tmp_path):
    rows = [{"text": str(index), "label": [index % 3 * 5, 100]} for index in range(40)]
    assert load(tmp_path, rows).class_names == ["0", "5", "10", "100"]
    features = hf.Features(
        {"text": hf.Value("string"), "label": hf.Sequence(hf.ClassLabel(names=["war", "art", "law"]))}
    )
    rows = [{"text": row["text"], "label": row["label"]} for row in texts()]
    hf.Dataset.from_list(rows, features).to_parquet(tmp_path / "named.parquet")
    datasets = load_in(tmp_path, tmp_path / "named.parquet", model=BLOOM, **MULTI)
    assert datasets.class_names == ["war", "art", "law"]
    assert {text: sorted(found) for text, found in labels_by_text(datasets).items()} == {
        row["text"]: row["label"] for row in texts()
    }


def test_labels_that_the_training_texts_lack_are_refused(tmp_path):
    write_rows([{"text": "x", "label": ["war", "new"]}], tmp_path / "test.jsonl")
    with pytest.raises(UserError, match=r"the test texts have labels that the training texts lack: \['new'\]"):
        load(tmp_path, texts(), test_file=str(tmp_path / "test.jsonl"))


@pytest.mark.parametrize("classes", [1, 4])
def test_the_figures_equal_scikit_learns(classes):
    """Of several classes the first has no samples, the last no predictions, and one in the middle neither."""
    rng = np.random.default_rng(0)
    logits, true = rng.normal(size=(200, classes)), rng.integers(2, size=(200, classes))
    if classes > 1:
        true[:, 0] = true[:, classes // 2] = 0
        logits[:, -1] = logits[:, classes // 2] = -1
    kind = MultiLabel([*map(str, range(classes))])
    counts = kind.start_counts(torch.device("cpu"))
    for part in np.array_split(range(200), 7):
        kind.count(counts, torch.tensor(logits[part]), torch.tensor(true[part], dtype=torch.float32))
    got = kind.describe(counts.compute()).results["classes"]
    found = np.array([got[name] for name in ("precision", "recall", "f1")], float).T  # None becomes NaN
    for number, (flags, chosen) in enumerate(zip(true.T, logits.T > 0, strict=True)):
        scores = precision_recall_fscore_support(flags, chosen, average="binary", zero_division=np.nan)[:3]
        assert found[number] == pytest.approx(scores, rel=1e-12, nan_ok=True)
    assert got["true"] == true.sum(0).tolist()
    assert got["macro_f1"] == pytest.approx(np.nanmean(found[:, 2]), rel=1e-12)
    assert got["micro_f1"] == pytest.approx(f1_score(true.ravel(), logits.ravel() > 0), rel=1e-12)


def test_other_tasks_and_reviews_with_one_class_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"--problem_type multi_.*: only for --task text-classification; leave it out"):
        check_values(settings_for(tmp_path, task="image-classification", **MULTI))
    with pytest.raises(UserError, match=r"--problem_type multi_label_classification: synthetic has one of two classes"):
        load_in(tmp_path, "synthetic", model=BLOOM, **MULTI)
