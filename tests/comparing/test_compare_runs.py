"""scripts/compare_runs.py: its outputs are there as a whole or not at all."""

import csv
import io
import json
import os
import sys

import pytest
from support.helpers import run_script
from support.recorded_runs import BLOG, SCRIPT, record, script, write_run

from fabric_ladder import UserError


def test_the_script_writes_all_outputs(tmp_path):
    write_run(tmp_path / "runs", record(minutes=51.37, accuracy=0.8737))
    write_run(tmp_path / "runs", record("3_torch_compile", minutes=43.33, accuracy=0.8791, compile=True))
    outputs = {option: tmp_path / f"out.{option}" for option in ("markdown", "csv", "json", "html", "png")}
    options = [str(text) for option, path in outputs.items() for text in (f"--{option}", path)]
    process = run_script(SCRIPT, tmp_path / "runs", *options, cwd=tmp_path)
    assert (process.returncode, process.stderr) == (0, "")
    for text in ("51.37", "43.33", "0.84 x", "87.91", "+0.54", "compile true", "8.00"):
        assert text in process.stdout
    assert "| 43.33 min (0.84 x) |" in outputs["markdown"].read_text()
    lines = list(csv.DictReader(outputs["csv"].open()))
    assert [(line["minutes"], line["minutes_ratio"]) for line in lines] == [
        ("51.37", "1"),
        ("43.33", "0.843488417364"),
    ]
    content = json.loads(outputs["json"].read_text())
    assert content["rows"][1]["figures"]["test_accuracy"] == {"mean": 87.91, "spread": None, "points": 0.54}
    assert len(content["rows"][0]["runs"][0]["losses"]) == 20
    names = {path.name for path in outputs["png"].iterdir()}
    assert names == set(
        "loss.png loss_log.png loss_minutes.png loss_log_minutes.png validation.png validation_minutes.png "
        "time.png memory.png accuracy.png".split()
    )
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in outputs["png"].iterdir())
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_the_script_refuses_in_one_line(tmp_path):
    first, second = write_run(tmp_path, record()), write_run(tmp_path, record("3_torch_compile", epochs=2))
    process = run_script(SCRIPT, first, second, cwd=tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.count("\n") == 1
    assert process.stderr.startswith("error: these runs differ in more than their technique: epochs 1 / 2;")


def test_standard_input_and_markdown_to_standard_output(monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((BLOG / "memory_series.txt").read_bytes())))
    printed = script(monkeypatch, "-", "--markdown", "-")
    assert printed.startswith("| rung | what changed | time |")
    assert "| 02\\_mixed-precision | not told | 3.45 min (0.19 x) |" in printed


def test_one_run_is_a_table_of_one(tmp_path, monkeypatch):
    printed = script(monkeypatch, write_run(tmp_path, record()))
    assert "2_grad_accum" in printed
    assert "ratio" not in printed


def test_bad_input_is_one_line(tmp_path, monkeypatch):
    run = write_run(tmp_path, record())
    (tmp_path / "prose.txt").write_text("Nothing of a log.\n")
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "empty").mkdir()
    (tmp_path / "there.md").write_text("mine")
    cases = {
        "there is no .*nowhere": ["nowhere"],
        "there is no log in": [tmp_path / "prose.txt"],
        "there is no log in .*binary": [tmp_path / "binary"],
        "holds no run": [tmp_path / "empty"],
        "exists: choose another": [run, "--markdown", tmp_path / "there.md"],
        "there is no folder": [run, "--html", tmp_path / "nowhere" / "page.html"],
        "both name": [run, "--csv", tmp_path / "x", "--json", tmp_path / "x"],
        "see --help": ["--color", run],
        "required: SOURCE": [],
    }
    for message, args in cases.items():
        with pytest.raises(UserError, match=message) as error:
            script(monkeypatch, *args)
        assert "\n" not in str(error.value)
    assert (tmp_path / "there.md").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "2_grad_accum",
        "binary",
        "empty",
        "prose.txt",
        "there.md",
    ]


def test_nothing_is_half_written(tmp_path, monkeypatch):
    run = write_run(tmp_path, record())
    rename, calls = os.rename, []

    def full_disk(source, target):
        calls.append(target)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", full_disk)
    with pytest.raises(UserError, match=r"cannot write .*page.html \(No space left on device\)"):
        script(monkeypatch, run, "--csv", tmp_path / "t.csv", "--html", tmp_path / "page.html")
    assert [path.name for path in tmp_path.iterdir()] == ["2_grad_accum"]
