"""One command runs the whole ladder. Some rungs are skipped or fail, and finished runs are not repeated."""

import json
import os
import re
import signal
import subprocess
import sys
from time import monotonic, sleep

import pytest
import torch
from support.export import run_here
from support.helpers import ROOT, SMALL, finished, run_script, tiny_model
from support.recorded_runs import compare

from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.errors import UserError

SCRIPT = ROOT / "scripts" / "run_ladder.py"
FEW = [*SMALL, "--micro_batch_size", "4", "--batch_size", "8"]


def runs_of(folder):
    """Return rungs and seeds of the finished runs, oldest first."""
    records = sorted(folder.glob("*/*/run.json"), key=lambda path: path.stat().st_mtime)
    found = [json.loads(path.read_text()) for path in records]
    return [(run["settings"]["name"], run["settings"]["seed"]) for run in found if run["status"] == "finished"]


@pytest.mark.slow
def test_the_ladder_names_skipped_rungs_continues_after_a_failure_and_compares(tmp_path):
    (tmp_path / "ladder").mkdir()
    (tmp_path / "ladder" / "4_mixed_precision").write_text("in the way of a folder")
    arguments = ["--rungs", "2,4,5_low_precision,12", "--runs_dir", "ladder", "--html", "report.html", *FEW]
    process = run_script(SCRIPT, *arguments, cwd=tmp_path)
    assert process.returncode == 1, process.stderr
    lines = process.stdout.splitlines()
    assert lines.index("2_grad_accum can run here") < lines.index("[1/3] 2_grad_accum, seed 123")
    assert any(line.startswith("Left out: 12_deepspeed_zero: 12_deepspeed_zero needs a CUDA GPU") for line in lines)
    assert "[2/3] 4_mixed_precision, seed 123: failed; the others continue" in lines
    assert any(line.startswith("Failed: 4_mixed_precision, seed 123: cannot write --runs_dir ladder") for line in lines)
    assert runs_of(tmp_path / "ladder") == [("2_grad_accum", 123), ("5_low_precision", 123)]
    table = process.stdout.split("Failed: ")[-1]
    assert re.search(r"^ 2_grad_accum .*\n reference ", table, re.MULTILINE)
    assert re.search(r"^ 5_low_precision .*\n precision bf16-true ", table, re.MULTILINE)
    assert max(map(len, table.splitlines()[1:])) <= 80
    assert "5_low_precision" in (tmp_path / "report.html").read_text(encoding="utf-8")
    again = finished(run_script(SCRIPT, "--rungs", "2,5", "--runs_dir", "ladder", *FEW, cwd=tmp_path))
    assert "[2/2] 5_low_precision, seed 123: finished before, in ladder/5_low_precision/1\n" in again
    assert len(runs_of(tmp_path / "ladder")) == 2


@pytest.mark.slow
def test_a_ladder_that_was_killed_repeats_no_finished_run(tmp_path, monkeypatch):
    """Kill the ladder in the second of two runs, start it again, and once more when both are finished."""
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = ["--rungs", "2", "--seeds", "2", "--runs_dir=~/ladder", *FEW]
    command = [sys.executable, str(SCRIPT), *arguments]
    process = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, start_new_session=True)
    deadline = monotonic() + 200
    while runs_of(tmp_path / "ladder") != [("2_grad_accum", 123)]:
        assert process.poll() is None
        assert monotonic() < deadline
        sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    stdout = finished(run_script(SCRIPT, *arguments, cwd=tmp_path))
    assert f"[1/2] 2_grad_accum, seed 123: finished before, in {tmp_path}/ladder/2_grad_accum/1\n" in stdout
    both = [("2_grad_accum", 123), ("2_grad_accum", 124)]
    assert runs_of(tmp_path / "ladder") == both
    assert "mean of seeds 123, 124" in stdout
    assert stdout.count("2_grad_accum can run here\n") == 1  # the seeds share a check
    assert finished(run_script(SCRIPT, *arguments, cwd=tmp_path)).count("finished before") == 2
    assert runs_of(tmp_path / "ladder") == both


@pytest.mark.slow
def test_a_run_on_a_file_or_a_model_that_has_changed_since_is_repeated_and_not_compared(tmp_path):
    rows = tmp_path / "data" / "rows.csv"
    rows.parent.mkdir()
    rows.write_text("text,label\n" + "".join(f"text {number},{number % 2}\n" for number in range(60)))
    model = tiny_model("bert")
    model.resize_token_embeddings(300)
    model.save_pretrained(tmp_path / "model")
    arguments = ["--rungs", "2", "--runs_dir", "ladder", "--dataset", "rows.csv", "--tokenizer", "trained", *FEW]
    arguments += ["--model", "model", "--max_length", "16"]
    for changes in (None, "nothing", "rows", "head"):
        if changes == "rows":
            rows.write_text(rows.read_text() + "one more,1\n")
        elif changes == "head":
            with torch.no_grad():
                model.classifier.weight[0, 0] += 1
            model.save_pretrained(tmp_path / "model")
            os.utime(tmp_path / "model" / "model.safetensors", (0, 0))  # as after `cp --archive`
        out = finished(run_script(SCRIPT, *arguments, cwd=tmp_path, FABRIC_LADDER_DATA="data"))
        assert ("finished before" in out) == (changes == "nothing")
    assert len(runs_of(tmp_path / "ladder")) == 3
    runs = read_sources([str(tmp_path / "ladder" / "2_grad_accum" / number) for number in "23"])
    assert re.fullmatch(r"content of model \w{20} / \w{20}", *compare(runs).differences)
    runs[0].contents = {}  # a record of an earlier version
    assert compare(runs).differences == []


@pytest.mark.slow
def test_a_search_tries_all_values_and_repeats_none(tmp_path):
    arguments = ["--rungs", "2", "--runs_dir", "search", *FEW]
    first = finished(run_script(SCRIPT, *arguments, "--search", "learning_rate=1e-4,1e-3", cwd=tmp_path))
    assert "[2/2] 2_grad_accum --learning_rate 1e-3, seed 123\n" in first
    last = first.splitlines()[-1]
    assert re.fullmatch(r"Best of 2_grad_accum: --learning_rate 1e-\d, by the validation loss 0\.\d+", last)
    more = ["--search", "learning_rate=1e-4,1e-3", "--search", "warmup_steps=0,2"]
    again = finished(run_script(SCRIPT, *arguments, *more, cwd=tmp_path))
    assert again.count("finished before") == 2
    assert len(runs_of(tmp_path / "search")) == 4
    assert "warmup_steps 0 / 2" not in again  # a searched setting may differ


def test_a_check_of_the_ladder_runs_nothing(tmp_path):
    stdout = finished(run_script(SCRIPT, "--rungs", "1,2", "--seeds", "2", "--check_only", "true", cwd=tmp_path))
    read = "synthetic: 5,500 rows · negative 2,761, positive 2,739 · train 4,000, validation 500, test 1,000\n"
    lines = [line for line in stdout.splitlines(True) if not line.startswith("No --config and no CUDA GPU")]
    assert "".join(lines) == f"{read}1_batch_size_1 can run here\n{read}2_grad_accum can run here\n"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--search", "learning_rate=fast,slow"], "--search: --learning_rate fast: expected a number"),
        (["--search", "learning_rate=1e-5"], "--search: learning_rate=1e-5: write a setting and its values"),
        (["--search", "epochs=1,2", "--epochs", "3"], "--search epochs: epochs is given twice"),
        (["--rungs", ""], "--rungs: name at least one rung"),
        (["--search", "logger=csv,wandb"], "--search: --logger changes no result"),
        (["--seeds", "0"], "--seeds: 0: must be at least 1"),
        (["--rungs", "1,2", "--batch_sise", "2"], "there is no setting 'batch_sise'; did you mean"),
        (["--config", "nope.yaml"], "no rung can run here: there is no config file nope.yaml"),
    ],
)
def test_bad_input_is_refused_in_one_line(tmp_path, monkeypatch, capsys, arguments, line):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UserError, SystemExit)) as error:
        run_here(monkeypatch, SCRIPT, *arguments)
    printed = capsys.readouterr()
    refused = str(error.value) if isinstance(error.value, UserError) else printed.err
    assert line in refused
    assert "\n" not in refused.rstrip()
    assert "Left out" not in printed.out
    assert not (tmp_path / "runs").exists()
