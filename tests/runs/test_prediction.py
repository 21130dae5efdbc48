"""The predicted peak memory is printed before a run, compared after it, and cached."""

import json
import sys
from dataclasses import replace
from itertools import pairwise

import pytest
from lightning import Fabric
from support.helpers import MODELS, SMALL, SRC, finished, run_script, settings_for, token_datasets
from support.resuming import run_here

from fabric_ladder import build_dataloaders
from fabric_ladder.planning.overhead import assume
from fabric_ladder.planning.predict import _answer, largest_batches, predict_peak
from fabric_ladder.runs import prediction
from fabric_ladder.runs.prediction import Prediction, most_tokens
from fabric_ladder.techniques.memory import ON_DEVICE


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return the output, the results and the kept predictions of a run without a prediction and of two with it."""
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
    assert not [line for line in lines if "redicted " in line and "\\" not in line]
    assert "predicted_peak_bytes" not in results
    assert not kept


def test_a_prediction_changes_no_loss(runs):
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
    assert still == kept, "the second run predicts again"
    assert [line for line in later if line.startswith("Predicted")] == [
        line for line in lines if line.startswith("Predicted")
    ]
    assert results["predicted"] == again["predicted"]
    assert results["predicted_peak_bytes"] == again["predicted_peak_bytes"] > 0
    parts = dict(results["predicted"])
    phase, host = parts.pop("phase"), parts.pop("host")
    assert sum(parts.values()) == results["predicted_peak_bytes"]
    assert (phase, host) == ("training", 0) or phase == "evaluation"


def test_a_failed_prediction_does_not_stop_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(prediction, "TIMEOUT", 0.01)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setenv("FABRIC_LADDER_CACHE", str(tmp_path))
    status, out = run_here("2_grad_accum", tmp_path, "--predict_memory", "true")
    assert (status, "Predicted peak: unknown (not found within 0.01 seconds)" in out) == (0, True)
    assert "Memory predicted" not in out


def cuts_of(settings, *sizes, length=64):
    """Return a prediction's cuts for several sizes of micro-batches."""
    cuts = []
    for size in sizes:
        training, evaluations = largest_batches(replace(settings, micro_batch_size=size), length)
        cuts.append((size * length, [training], evaluations))
    return cuts


def test_the_largest_cut_that_fits_is_chosen(tmp_path):
    settings = settings_for(tmp_path, batch_size=16, eval_batch_tokens=64, model=str(MODELS / "bloom-quickstart.json"))
    cuts = cuts_of(settings, 16, 8, 1)
    totals = [predict_peak(settings, training[0], evaluations).total for _, training, evaluations in cuts]
    assert totals == sorted(totals, reverse=True)
    assumed = assume((8, 0)).expected
    exact = assumed.needed(predict_peak(settings, cuts[1][1][0], cuts[1][2])) - assumed.context  # it exists then
    for room, chosen in ((None, 0), (exact, 1), (exact - 1, 2), (0, 2)):
        found = _answer(settings, cuts, 2, "some GPU", (8, 0), room)
        assert (found["micro_batch_tokens"], found["total"]) == (cuts[chosen][0], totals[chosen])
    alone = _answer(settings, [(None, *cuts[0][1:])], 2, "some GPU", (8, 0), 0)
    assert "micro_batch_tokens" not in alone, "there is no other cut"


def test_auto_tries_cuts_from_the_largest_effective_batch_down_to_one_sample(tmp_path):
    settings = settings_for(tmp_path, batch_size=16, micro_batch_tokens="auto")
    fabric = Fabric(accelerator="cpu", devices=1)
    train_loader, val_loader, _ = build_dataloaders(fabric, token_datasets(), settings)
    cuts = prediction._cuts(settings, train_loader, val_loader)
    tokens = [each for each, *_ in cuts]
    assert tokens[0] == most_tokens(train_loader)
    assert all(larger // 2 == smaller for larger, smaller in pairwise(tokens[:-1]))
    assert tokens[-1] == 1
    largest = [max(part.padded for batch in training for part in batch) for _, training, _ in cuts]
    assert largest == sorted(largest, reverse=True)
    assert {len(part.inputs["labels"]) for batch in cuts[-1][1] for part in batch} == {1}
    assert all(size <= limit for limit, size in zip(tokens[:-1], largest[:-1], strict=True))


@pytest.mark.slow
def test_a_planner_that_fails_does_not_raise_an_error(tmp_path):
    started = prediction.start_planner(Fabric(accelerator="cpu"), settings_for(tmp_path, predict_memory=True))
    found = prediction._ask(started, ("no settings", [(None, [], [])], 2, None, None, None))
    assert found["problem"].startswith("AttributeError: 'str' object has no attribute")
    assert Prediction(found).line(settings_for(tmp_path), {}) == f"Predicted peak: unknown ({found['problem']})"
    assert Prediction(found).figures() == {}


@pytest.mark.slow
def test_a_planner_without_a_question_ends_with_its_run(tmp_path):
    started = prediction.start_planner(Fabric(accelerator="cpu"), settings_for(tmp_path, predict_memory=True))
    started.stdin.close()  # as at the end of the run's process
    assert json.loads(started.stdout.read()) == {"problem": "EOFError: Ran out of input"}
    assert started.wait() == 0
    started.stdout.close()
    assert prediction.start_planner(Fabric(accelerator="cpu"), settings_for(tmp_path)) is None


def key(tmp_path, **values):
    return prediction._key(settings_for(tmp_path, **values), {}, [], None, None)


def test_the_key_covers_the_content_of_a_named_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "own.json"
    path.write_text("{}")
    before = key(tmp_path, deepspeed="own.json")
    assert key(tmp_path, deepspeed="own.json") == before
    path.write_text('{"zero_optimization": {"stage": 3}}')
    assert key(tmp_path, deepspeed="own.json") != before


def test_the_key_covers_strategy_and_versions(tmp_path, monkeypatch):
    keys = {key(tmp_path), key(tmp_path), key(tmp_path, strategy="fsdp")}
    assert key(tmp_path, lora_targets="h.0.dense," * 99), "it may be longer than the name of a file"
    for package in ("peft", "torchao"):
        (tmp_path / f"{package}-9.9.dist-info").mkdir()
        (tmp_path / f"{package}-9.9.dist-info" / "METADATA").write_text(f"Name: {package}\nVersion: 9.9\n")
        monkeypatch.syspath_prepend(tmp_path)
        keys.add(key(tmp_path))
    assert len(keys) == 4


def test_a_gpu_that_is_too_small_is_named_with_the_next_script(tmp_path):
    settings = settings_for(tmp_path, name="5_low_precision", batch_size=16, micro_batch_size=2)
    found = dict.fromkeys(ON_DEVICE, 0) | {"parameters": 3_000_000_000, "activations": 5_000_000_000}
    large = Prediction(
        found
        | {"total": 8_000_000_000, "needed": 8_970_000_000, "workspace": 67_000_000, "host": 0, "phase": "training"}
    )
    line = large.line(settings, {"gpu": "a GPU", "gpu_memory": 8_000_000_000})
    assert "8.00 GB (weights 3.00, activations 5.00); 8.97 of 8.00 GB with CUDA's own, so it may not fit" in line
    assert "6_lean_optimizer" in line
    assert "may not fit" not in large.line(settings, {"gpu": "a GPU", "gpu_memory": 9_000_000_000})
    end = large.end_line(8_400_000_000, on_gpu=True)
    assert end == "Memory predicted: 8.07 GB with 0.07 for cuBLAS, measured +0.33 GB (+4.0%)"
    figures = large.figures()
    assert figures["predicted_peak_bytes"] == 8_067_000_000, "what PyTorch counts, as the line says"
    assert sum(figures["predicted"][part] for part in (*ON_DEVICE, "workspace")) == figures["predicted_peak_bytes"]


def test_a_limit_takes_the_place_of_the_gpus_memory(tmp_path):
    """`--gpu_memory_limit`: a prediction above it names the next rung, on a CPU too."""
    settings = settings_for(tmp_path, gpu_memory_limit="8GiB")
    large = Prediction(dict.fromkeys(ON_DEVICE, 0) | {"total": 9_000_000_000, "host": 0, "phase": "training"})
    for hardware in ({}, {"gpu": "a GPU", "gpu_memory": 80_000_000_000}):
        line = large.line(settings, hardware)
        assert "; 9.00 of 8.59 GB, so it may not fit. Next to try: " in line
        assert "may not fit" not in large.line(replace(settings, gpu_memory_limit="16GB"), hardware)


def test_a_limit_without_a_size_is_refused(tmp_path):
    process = run_script(SRC / "2_grad_accum.py", "--gpu_memory_limit", "much", cwd=tmp_path)
    assert (process.returncode, process.stderr) == (
        2, "error: --gpu_memory_limit much: give a size such as 16GB or 15.9GiB\n"
    )  # fmt: skip
