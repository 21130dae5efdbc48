"""What a run says of its peak memory before it, and after it."""

import json

import pytest
from support.helpers import SMALL, SRC, finished, run_script, settings_for

from fabric_ladder.runs import prediction
from fabric_ladder.runs.prediction import PARTS, Prediction


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """The output, record and kept predictions of a run without a prediction, with one, and once more."""
    folder, found = tmp_path_factory.mktemp("runs"), []
    for number, options in enumerate(([], ["--predict_memory", "true"], ["--predict_memory", "true"])):
        options += [*SMALL, "--runs_dir", f"runs{number}"]
        process = run_script(SRC / "4_mixed_precision.py", *options, cwd=folder, FABRIC_LADDER_CACHE=folder / "cache")
        record = json.loads((folder / f"runs{number}" / "4_mixed_precision" / "1" / "run.json").read_text())
        kept = {path.name: path.stat().st_mtime_ns for path in (folder / "cache").glob("memory/*.json")}
        found.append((finished(process).splitlines(), record["results"], kept))
    return found


def test_a_cpu_predicts_only_when_asked(runs):
    lines, results, kept = runs[0]
    assert not [line for line in lines if "redicted" in line]
    assert "predicted_peak_bytes" not in results
    assert not kept


def test_a_prediction_leaves_no_trace_in_the_run(runs):
    plain, predicted, from_cache = (
        [line for line in lines if "Loss" in line or "acc" in line.lower()] for lines, _, _ in runs
    )
    assert len(plain) > 3
    assert plain == predicted == from_cache


def test_a_prediction_is_printed_recorded_and_kept(runs):
    (lines, results, kept), (later, again, still) = runs[1:]
    assert any(line.startswith("Predicted peak: 0.0") and line.endswith("of tensors on a GPU") for line in lines)
    assert any(line.startswith("Memory predicted: 0.0") for line in lines)
    assert len(kept) == 1
    assert still == kept, "predicted anew"
    assert [line for line in later if line.startswith("Predicted")] == [
        line for line in lines if line.startswith("Predicted")
    ]
    assert results["predicted"] == again["predicted"]
    assert results["predicted_peak_bytes"] == again["predicted_peak_bytes"] > 0
    parts = dict(results["predicted"])
    phase, host = parts.pop("phase"), parts.pop("host")
    assert sum(parts.values()) == results["predicted_peak_bytes"]
    assert (phase, host) == ("training", 0) or phase == "evaluation"


def test_what_cannot_be_predicted_does_not_stop_a_run(tmp_path):
    options = [*SMALL, "--micro_batch_tokens", "auto", "--predict_memory", "true"]
    out = finished(run_script(SRC / "2_grad_accum.py", *options, cwd=tmp_path))
    assert "Predicted peak: unknown (--micro_batch_tokens auto tries what fits)" in out
    assert "Memory predicted" not in out


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("PLANNER", "no_such_module", "the rehearsal ended without an answer"),
        ("TIMEOUT", 0.01, "not found within 0.01 seconds"),
        (None, None, "IndexError: list index out of range"),
    ],
)
def test_a_planner_that_fails_is_a_problem_and_no_error(monkeypatch, tmp_path, name, value, problem):
    if name:
        monkeypatch.setattr(prediction, name, value)
    found = prediction._ask_planner(("no settings", ([], []), None, 2, None, None))
    assert found["problem"].startswith(problem)
    said = Prediction(found)
    assert said.line(settings_for(tmp_path), {}) == f"Predicted peak: unknown ({found['problem']})"
    assert said.figures() == {}


def test_a_gpu_that_is_too_small_is_named_with_the_next_script(tmp_path):
    settings = settings_for(tmp_path, name="5_low_precision", batch_size=16, micro_batch_size=2)
    found = dict.fromkeys(PARTS, 0) | {"parameters": 3_000_000_000, "activations": 5_000_000_000}
    said = Prediction(found | {"total": 8_000_000_000, "needed": 8_970_000_000, "host": 0, "phase": "training"})
    line = said.line(settings, {"gpu": "a GPU", "gpu_memory": 8_000_000_000})
    assert "8.00 GB (weights 3.00, activations 5.00); 8.97 of 8.00 GB with CUDA's own, so it may not fit" in line
    assert "6_lean_optimizer" in line
    assert "may not fit" not in said.line(settings, {"gpu": "a GPU", "gpu_memory": 9_000_000_000})
    assert said.end_line(8_400_000_000, of_gpu=True) == "Memory predicted: 8.00 GB, measured +0.40 GB (+4.8%)"
