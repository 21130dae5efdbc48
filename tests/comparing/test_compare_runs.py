"""The output, table and messages of the script compare_runs.py."""

import io
import json
import sys
from pathlib import Path

import pandas as pd
import pytest
from support.helpers import run_script
from support.recorded_runs import BLOG, HARDWARE, LOG, SCRIPT, compare, parse, record, script, write_run

from fabric_ladder import UserError
from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.comparing.table import markdown_table, to_markdown


def test_the_script_writes_all_outputs(tmp_path):
    write_run(tmp_path / "runs", record(minutes=51.37, accuracy=0.8737))
    write_run(tmp_path / "runs", record("3_torch_compile", minutes=43.33, accuracy=0.8791, compile=True))
    outputs = {option: tmp_path / f"out.{option}" for option in ("markdown", "html")}
    options = [str(text) for option, path in outputs.items() for text in (f"--{option}", path)]
    process = run_script(SCRIPT, tmp_path / "runs", *options, cwd=tmp_path)
    assert (process.returncode, process.stderr) == (0, "")
    for text in ("51.37", "43.33", "0.84 x", "87.91", "+0.54", "compile true", "8.00"):
        assert text in process.stdout
    assert "| 43.33 min (0.84 x) |" in outputs["markdown"].read_text()
    assert "<td>43.33 min (0.84 x)</td>" in outputs["html"].read_text()


def test_runs_with_other_differences_are_refused_in_one_line(tmp_path):
    first, second = write_run(tmp_path, record()), write_run(tmp_path, record("3_torch_compile", epochs=2))
    process = run_script(SCRIPT, first, second, cwd=tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.count("\n") == 1
    assert process.stderr.startswith("error: these runs differ in more than their technique: epochs 1 / 2;")


def test_a_log_is_read_from_standard_input(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO((BLOG / "memory_series.txt").read_bytes())))
    script(monkeypatch, "-", "--markdown", tmp_path / "out.md")
    written = (tmp_path / "out.md").read_text()
    assert written.startswith("| rung | what changed | time |")
    assert "| 02\\_mixed-precision | unknown | 3.45 min (0.19 x) |" in written
    assert "- Other scripts printed standard input." in written


def test_the_table_is_readable_in_80_columns(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    classes = {"names": ["a", "b"], "confusion": [[900, 10], [50, 40]], "macro_f1": 0.7712}
    sgd = {"optimizer": "sgd", "learning_rate": 0.01, "schedule": "cosine"}
    for seed in (1, 2, 3):
        one = record("11_fsdp_cpu_offload", minutes=1234.5, accuracy=0.90 + 0.01 * seed, seed=seed)
        other = record("6_lean_optimizer", accuracy=0.915, seed=seed, **sgd)
        for content in (one, other):
            content["results"] |= {"predicted_peak_bytes": 10**10, "tokens_per_second": 123456, "test_tokens": 5}
            content["results"] |= {"test_loss": 2.5, "classes": classes}
            write_run(tmp_path, content, seed)
    printed = script(monkeypatch, tmp_path)
    assert max(map(len, printed.splitlines())) <= 80
    for text in ("mean of seeds 1 to 3", "1234.50", "123456", "12.18", "+0.50 ≈", "± 1.00", "optimizer adam;"):
        assert text in printed
    assert printed.count("77.12") == 2  # the classes are imbalanced
    assert "…" not in printed


@pytest.mark.parametrize(("unequal", "shown"), [(0, False), (45, True)])
def test_macro_f1_is_shown_where_accuracy_alone_may_mislead(tmp_path, unequal, shown):
    content = record()
    classes = {"names": ["a", "b"], "confusion": [[45 + unequal, 5], [5, 45]], "macro_f1": 0.9}
    content["results"]["classes"] = classes
    comparison = compare(read_sources([write_run(tmp_path, content)]))
    assert ("macro_f1" in [column.key for column in comparison.columns]) == shown
    assert "87.65 %" in to_markdown(compare(parse(f"{LOG}Test macro-F1 87.65%\n")))


def test_differences_within_the_spread_of_the_seeds_are_marked(tmp_path):
    for seed in (1, 2, 3):
        write_run(tmp_path, record(seed=seed, accuracy=0.90 + 0.01 * seed), seed)
        write_run(tmp_path, record("3_torch_compile", compile=True, seed=seed, accuracy=0.929), seed)
        write_run(tmp_path, record("4_mixed_precision", precision="bf16-mixed", seed=seed, accuracy=0.94), seed)
    comparison = compare(read_sources([str(tmp_path)]))
    text = to_markdown(comparison)
    assert "92.90 ± 0.00 % (+0.90 ≈)" in text
    assert "94.00 ± 0.00 % (+2.00)" in text
    assert "≈: the difference is within it" in text
    single = compare(read_sources([str(tmp_path / name / "1") for name in ("2_grad_accum", "3_torch_compile")]))
    assert any("One seed cannot show" in notice for notice in single.notices)


def test_a_run_that_is_named_twice_is_compared_once(tmp_path):
    """The first run is the reference, so it may be named before a folder that holds it."""
    first, second = (write_run(tmp_path, record(name)) for name in ("4_mixed_precision", "3_torch_compile"))
    runs = read_sources([str(first), str(tmp_path), str(second)])
    assert [run.name for run in runs] == ["4_mixed_precision", "3_torch_compile"]


def test_broken_run_folders_are_named_and_left_out(tmp_path):
    write_run(tmp_path, record())
    cases = {
        "running": json.dumps(record() | {"status": "running"}),
        "newer": json.dumps(record() | {"format": 2}),
        "list": "[]",
        "no data": json.dumps({key: value for key, value in record().items() if key != "data"}),
        "text": json.dumps(record() | {"results": "none"}),
        "no epoch": json.dumps(record() | {"results": record()["results"] | {"epochs": []}}),
        "cut": '{"format": 1, "sta',
    }
    for name, content in cases.items():
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "run.json").write_text(content)
    comparison = compare(read_sources([str(tmp_path)]))
    assert [row.label for row in comparison.rows] == ["2_grad_accum"]
    left_out = [notice for notice in comparison.notices if notice.startswith("Left out:")]
    assert len(left_out) == len(cases)
    assert any("'running'" in notice for notice in left_out)
    with pytest.raises(UserError, match="no finished run"):
        read_sources([str(tmp_path / "running")])


def test_bad_input_is_refused_in_one_line(tmp_path, monkeypatch, capsys):
    run = write_run(tmp_path, record())
    (tmp_path / "binary").write_bytes(bytes(range(256)) * 10)
    (tmp_path / "empty").mkdir()
    (tmp_path / "exists.md").write_text("mine")
    for message, name in (("there is no .*nowhere", "nowhere"), ("found no log in .*binary", "binary"),
                          ("holds no run", "empty")):  # fmt: skip
        with pytest.raises(UserError, match=message):
            script(monkeypatch, tmp_path / name)
    for message, args in (("exists; choose another", [run, "--markdown", tmp_path / "exists.md"]),
                          ("there is no folder", [run, "--html", tmp_path / "nowhere" / "page.html"])):  # fmt: skip
        with pytest.raises(SystemExit, match="2"):
            script(monkeypatch, *args)
        line = capsys.readouterr().err
        assert message in line
        assert (line[:7], line.count("\n")) == ("error: ", 1)
    assert (tmp_path / "exists.md").read_text() == "mine"
    assert {path.name for path in tmp_path.iterdir()} == {Path(run).parent.name, "binary", "empty", "exists.md"}


@pytest.mark.parametrize(("metric", "value", "shown"), [("accuracy", 0.9, 90), ("loss", 0.1, None)])
def test_a_comparison_shows_the_validation_of_the_tested_weights_or_none(tmp_path, metric, value, shown):
    content = record()
    best = {"metric": metric, "value": value, "place": "epoch 1, batch 3", "used": True}
    content["results"]["best_validation"] = best
    (run,) = read_sources([write_run(tmp_path, content)])
    assert (run.unfinished, run.figures.get("validation_accuracy")) == (None, shown)
    best["used"] = False
    (run,) = read_sources([write_run(tmp_path, content, number=2)])
    assert run.figures["validation_accuracy"] == 80


def test_a_line_break_in_a_name_does_not_end_a_row_of_markdown():
    table = pd.DataFrame({"f1": ["1"]}, ["good\nfilm"])
    assert markdown_table(table, "class").splitlines()[2:] == ["| good film | 1 |"]


@pytest.mark.parametrize(
    ("begun", "more", "overlaps"),
    [
        ("10:01:59", {}, True),
        ("10:02:00", {}, False),
        ("10:01:59", {"hardware": HARDWARE | {"memory": 2}}, False),
        ("10:01:59", {"resumed": [record()]}, False),  # nobody knows for how long it was interrupted
    ],
)
def test_runs_that_shared_a_machine_are_named(tmp_path, begun, more, overlaps):
    """Each run takes two minutes."""
    for number, (time, values) in enumerate((("10:00:00", {}), (begun, more)), start=1):
        write_run(tmp_path, record(seed=number) | {"begun": f"2026-11-27T{time}+0000"} | values, number)
    notices = compare(read_sources([str(tmp_path)])).notices
    assert any(line.startswith("These runs overlapped in time on one machine: ") for line in notices) == overlaps
