"""Two ranks print and count the same as one process, for every kind of labels."""

import json

import pytest
from support.data_files import write_rows
from support.devices import run_ranks
from support.helpers import MODELS, SRC, finished

OPTIONS = {
    "class weights": "--label_column topic --class_weights balanced --label_smoothing 0.1",
    "several labels": "--problem_type multi_label_classification --label_column labels",
    "words": "--task token-classification",
}
FIGURES = "epochs test_loss test_accuracy classes entities test_words".split()


@pytest.mark.slow
@pytest.mark.parametrize("kind", OPTIONS)
def test_two_ranks_give_the_figures_of_one(tmp_path, kind):
    rows = [
        {"text": f"text {index} " * (1 + index % 4), "topic": "abca"[index % 4],
         "labels": [["a"], ["a", "b"], []][index % 3],
         "tokens": ["Ann"] * (1 + index % 3) + [f"{index}"], "ner_tags": ["B-PER"] + ["I-PER"] * (index % 3) + ["O"]}
        for index in range(90)
    ]  # fmt: skip
    write_rows(rows, tmp_path / "rows.jsonl")
    options = ["--model", str(MODELS / "bloom-quickstart.json"), "--dataset", "rows.jsonl", "--learning_rate", "0.003"]
    options += ["--precision", "32-true", "--micro_batch_size", "2", "--batch_size", "16", *OPTIONS[kind].split()]
    found = []
    for ranks, rung in enumerate(("2_grad_accum", "9_ddp"), start=1):
        for process in run_ranks(SRC / f"{rung}.py", ranks, *options, cwd=tmp_path):
            finished(process)
        results = json.loads((tmp_path / "runs" / rung / "1" / "run.json").read_text())["results"]
        found.append({name: results[name] for name in FIGURES if name in results})
    assert len(found[0]) >= 3
    assert flat(found[1]) == pytest.approx(flat(found[0]), abs=1e-4)


def flat(figures):
    """Return all numbers in nested lists and dictionaries; None becomes -1."""
    if isinstance(figures, dict):
        return [each for name in sorted(figures) for each in flat(figures[name])]
    if isinstance(figures, list):
        return [each for part in figures for each in flat(part)]
    return [] if isinstance(figures, str) else [-1 if figures is None else figures]
