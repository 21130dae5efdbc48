"""The output, table and messages of the script compare_runs.py."""

import csv
import io
import json
import sys
from pathlib import Path

import pytest
from support.helpers import run_script
from support.recorded_runs import BLOG, LOG, SCRIPT, compare, parse, record, script, write_run

from fabric_ladder import UserError
from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.comparing.table import to_csv, to_json, to_markdown


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
    names = {path.stem for path in outputs["png"].iterdir()}
    assert names == {"loss", "validation", "time", "memory", "accuracy"}
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
    assert "| 02\\_mixed-precision | unknown | 3.45 min (0.19 x) |" in printed


def test_json_and_csv_to_standard_output(tmp_path, monkeypatch):
    write_run(tmp_path, record(minutes=51.37))
    assert json.loads(script(monkeypatch, tmp_path, "--json", "-"))["rows"][0]["figures"]["minutes"]["mean"] == 51.37
    assert next(csv.DictReader(io.StringIO(script(monkeypatch, tmp_path, "--csv", "-"))))["minutes"] == "51.37"


@pytest.mark.parametrize("value", ["NaN", "Infinity", "[]", "{}", "null", '"x"', "[[1]]"])
@pytest.mark.parametrize("name", ["learning_rate", "seed", "batch_size", "lora"])
def test_a_setting_in_a_record_may_be_any_json(tmp_path, monkeypatch, name, value):
    run = write_run(tmp_path, record(seed=1))
    other = write_run(tmp_path, record(seed=2), 2)
    path = Path(other) / "run.json"
    content = json.loads(path.read_text())
    content["settings"][name] = "HERE"
    path.write_text(json.dumps(content).replace('"HERE"', value))
    page = ["--anyway", "--json", tmp_path / "out.json", "--html", tmp_path / "out.html"]
    script(monkeypatch, run, other, *page)
    json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)


def test_a_disk_is_not_looked_through_for_runs(tmp_path, monkeypatch):
    for number in range(30):
        (tmp_path / str(number)).mkdir()
    monkeypatch.setattr("fabric_ladder.comparing.sources.MOST_FOLDERS", 20)
    with pytest.raises(UserError, match="holds more than 20 folders; give the folder of the runs"):
        read_sources([str(tmp_path)])


def test_the_table_is_readable_in_80_columns(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    classes = {"names": ["a", "b"], "confusion": [[900, 10], [50, 40]], "macro_f1": 0.7712}
    for number, seed in enumerate((1, 2, 3), start=1):
        one = record("11_fsdp_cpu_offload", minutes=1234.5, accuracy=0.90 + 0.01 * seed, seed=seed)
        other = record(
            "6_lean_optimizer", accuracy=0.915, optimizer="sgd", learning_rate=0.01, schedule="cosine", seed=seed
        )
        for content in (one, other):
            content["results"] |= {"predicted_peak_bytes": 10**10, "tokens_per_second": 123456, "test_tokens": 5}
            content["results"] |= {"test_loss": 2.5, "classes": classes}
            write_run(tmp_path, content, number)
    printed = script(monkeypatch, tmp_path)
    assert max(map(len, printed.splitlines())) <= 80
    for text in ("mean of seeds 1, 2, 3", "1234.50", "123456", "12.18", "+0.50 ≈", "± 1.00", "optimizer adam;"):
        assert text in printed
    assert printed.count("77.12") == 2  # the classes are imbalanced
    assert "…" not in printed


def test_macro_f1_is_shown_where_accuracy_alone_may_mislead(tmp_path):
    cases = {
        "balanced": [[45, 5], [5, 45]],
        "unequal": [[90, 5], [5, 45]],
        "three": [[45, 5, 0], [5, 45, 0], [0, 0, 50]],
    }
    shown = {}
    for name, confusion in cases.items():
        content = record(name)
        content["results"]["classes"] = {
            "names": list("abc")[: len(confusion)],
            "confusion": confusion,
            "macro_f1": 0.9,
        }
        comparison = compare(read_sources([write_run(tmp_path, content)]))
        shown[name] = "macro_f1" in [column.key for column in comparison.columns]
    assert shown == {"balanced": False, "unequal": True, "three": True}
    content["results"]["classes"]["confusion"] = [[1, 2], [3]]
    (tmp_path / "three" / "1" / "run.json").write_text(json.dumps(content))
    with pytest.raises(UserError, match="its files cannot be read"):
        read_sources([str(tmp_path / "three")])
    [run] = parse(f"{LOG}Test macro-F1 87.65%\n")
    assert run.figures["macro_f1"] == 87.65


def test_differences_within_the_spread_of_the_seeds_are_marked(tmp_path):
    for number, seed in enumerate((1, 2, 3), start=1):
        write_run(tmp_path, record(seed=seed, accuracy=0.90 + 0.01 * seed), number)
        write_run(tmp_path, record("3_torch_compile", compile=True, seed=seed, accuracy=0.929), number)
        write_run(tmp_path, record("4_mixed_precision", precision="bf16-mixed", seed=seed, accuracy=0.94), number)
    comparison = compare(read_sources([str(tmp_path)]))
    text = to_markdown(comparison)
    assert "92.90 ± 0.00 % (+0.90 ≈)" in text
    assert "94.00 ± 0.00 % (+2.00)" in text
    assert "≈: the difference is within it" in text
    assert not any("One seed" in notice for notice in comparison.notices)
    rows = json.loads(to_json(comparison))["rows"]
    assert [row["figures"]["test_accuracy"]["within_spread"] for row in rows] == [True, True, False]
    lines = list(csv.DictReader(io.StringIO(to_csv(comparison))))
    assert [line["test_accuracy_within_spread"] for line in lines] == ["True", "True", "False"]
    single = compare(read_sources([str(tmp_path / name / "1") for name in ("2_grad_accum", "3_torch_compile")]))
    assert any("One seed cannot show" in notice for notice in single.notices)
    assert "≈" not in to_markdown(single)


def test_one_run_is_a_table_of_one(tmp_path, monkeypatch):
    printed = script(monkeypatch, write_run(tmp_path, record()))
    assert "2_grad_accum" in printed
    assert "ratio" not in printed


def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys):
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
    }
    for message, args in cases.items():
        with pytest.raises(UserError, match=message) as error:
            script(monkeypatch, *args)
        assert "\n" not in str(error.value)
    refused = {
        "exists; choose another": [run, "--markdown", tmp_path / "there.md"],
        "there is no folder": [run, "--html", tmp_path / "nowhere" / "page.html"],
        "--csv - and --json - both print": [run, "--csv", "-", "--json", "-"],
        "unrecognized arguments: --color": ["--color", run],
        "required: SOURCE": [],
    }
    for message, args in refused.items():
        with pytest.raises(SystemExit, match="2"):
            script(monkeypatch, *args)
        line = capsys.readouterr().err
        assert message in line
        assert (line[:7], line.count("\n")) == ("error: ", 1)
    assert (tmp_path / "there.md").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "2_grad_accum",
        "binary",
        "empty",
        "prose.txt",
        "there.md",
    ]
