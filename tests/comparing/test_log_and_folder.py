"""The folder of a run and its own log give the same figures, settings and points, for every kind of task."""

import pytest
from support.data_files import write_rows
from support.helpers import MODELS, SRC, finished, run_script

from fabric_ladder.comparing.sources import read_sources

BEST = "--best_weights true --epochs 2 --learning_rate 0.02 "
KINDS = {
    "unequal classes": BEST + "--label_column rare",
    "the last weights": "--problem_type regression --label_column number --learning_rate 0.001",
    "several labels": BEST + "--problem_type multi_label_classification --label_column labels --best_metric accuracy",
    "words": BEST + "--task token-classification",
    "instructions": BEST + "--task instruction-tuning --best_metric accuracy",
}
ROWS = [
    {"text": f"text {index} " * (1 + index % 4), "number": index / 7,
     "rare": "yes" if index % 6 == 0 else "no", "labels": [["a"], ["a", "b"], []][index % 3],
     "tokens": ["Ann"] * (1 + index % 3) + [f"{index}"], "ner_tags": ["B-PER"] + ["I-PER"] * (index % 3) + ["O"],
     "instruction": f"Name {index}.", "input": "", "output": f"{index % 5} and {index % 3}"}
    for index in range(90)
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_they_give_the_same(tmp_path, kind):
    write_rows(ROWS, tmp_path / "rows.jsonl")
    options = f"--model {MODELS / 'bloom-quickstart.json'} --dataset rows.jsonl --max_length 64 {KINDS[kind]}"
    options += " --log_every 16 --evaluate_every 3"
    finished(run_script(SRC / "2_grad_accum.py", *options.split(), cwd=tmp_path))
    folder = tmp_path / "runs" / "2_grad_accum" / "1"
    [of_folder], [of_log] = read_sources([str(folder)]), read_sources([str(folder / "log.txt")])
    text = (folder / "log.txt").read_text()
    assert ("Best validation" in text) == (kind != "the last weights")
    assert of_log.figures.keys() == of_folder.figures.keys()
    for name, value in of_log.figures.items():
        digits = 4 if name.endswith(("mse", "loss", "pearson")) else 1
        assert value == pytest.approx(of_folder.figures[name], rel=5e-3, abs=0.6 * 10**-digits), name
    for of_one in (of_folder, of_log):
        of_one.settings["model"] = "a path, or its name"
    assert of_log.settings.items() <= of_folder.settings.items()
    for points in ("losses", "accuracies"):
        pairs = zip(getattr(of_log, points), getattr(of_folder, points), strict=True)
        assert all(one == pytest.approx(other, abs=6e-3) for one, other in pairs)
    assert len(of_log.losses) > 1
    assert of_log.versions.items() <= of_folder.versions.items()
    assert of_log.hardware.items() <= of_folder.hardware.items()
