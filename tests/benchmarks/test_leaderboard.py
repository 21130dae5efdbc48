"""The leaderboard: each broken rule of a run is named, and the page's tables are what the script writes."""

import json
import re
import sys

import pytest
from support.helpers import MODELS, ROOT, SMALL, finished, run_script
from support.recorded_runs import BLOG, parse

from fabric_ladder import UserError
from fabric_ladder.comparing.logs import LogParser

sys.path.append(str(ROOT / "benchmarks"))
import leaderboard
from leaderboard_rules import CATEGORIES, broken_rules

SCRIPT = ROOT / "benchmarks" / "leaderboard.py"
RUNG = ROOT / "src" / "2_grad_accum.py"


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """The folder of a real run of the quickstart, of few samples."""
    home = tmp_path_factory.mktemp("quickstart")
    finished(run_script(RUNG, *SMALL, cwd=home))
    return home / "runs" / "2_grad_accum" / "1"


def rules(lines):
    return {line.partition(":")[0] for line in lines}


def copy_of(folder, target, change=lambda record: None, log=None):
    """Copy a run's folder, with another record or log."""
    target.mkdir()
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    change(record)
    (target / "run.json").write_text(json.dumps(record), encoding="utf-8")
    (target / "log.txt").write_text(log or (folder / "log.txt").read_text(encoding="utf-8"), encoding="utf-8")
    return target


def checked(folder, category="minutes"):
    return list(broken_rules(leaderboard.read_entry(folder), CATEGORIES[category]))


# Runs


def test_the_quickstart_s_run_breaks_named_rules(quickstart):
    process = run_script(SCRIPT, "check", quickstart, cwd=ROOT, fresh=True)
    assert (process.returncode, process.stderr) == (1, "")
    lines = process.stdout.splitlines()
    assert rules(lines) == set("dataset,model,whole splits,metric,peak memory,log,hardware,commit,by".split(","))
    assert "dataset: must be imdb, and is 'synthetic'" in lines
    assert "whole splits: train_samples must not be set, and is 96" in lines
    assert "log: its last loss must be of sample 35,000, and is of 96" in lines


def test_a_run_on_a_few_real_reviews_breaks_all_but_the_data_s_name(tmp_path, archive):
    model = MODELS / "bloom-quickstart.json"
    options = [*SMALL, "--config", ROOT / "configs" / "imdb_bloom_560m.yaml", "--data_dir", archive.parent]
    options += ["--model", model, "--from_scratch", "true", "--max_length", "32", "--accelerator", "cpu"]
    finished(run_script(RUNG, *options, cwd=tmp_path))
    found = rules(checked(tmp_path / "runs" / "2_grad_accum" / "1"))
    assert "dataset" not in found
    assert {"model", "whole splits", "hardware"} <= found


def test_the_record_of_a_part_cannot_pass_for_the_whole(quickstart, tmp_path):
    """Each figure that is made to say so is contradicted by another."""

    def claim(record, samples=35_000):
        record["settings"] |= dict.fromkeys(("train_samples", "validation_samples", "test_samples"))
        record["data"]["train_samples"] = samples

    lines = checked(copy_of(quickstart, tmp_path / "settings", lambda record: claim(record, 96)))
    assert "whole splits: the training split has 35,000 samples, and the run's 96" in lines
    lines = checked(copy_of(quickstart, tmp_path / "counted", claim))
    assert "whole splits: an epoch is 35,000 samples, and samples/s times seconds give 96" in lines

    def claim_all(record):
        claim(record)
        record["results"] |= {"test_samples": 10_000, "samples_per_second": 35_000.0, "training_seconds": 1.0}

    lines = checked(copy_of(quickstart, tmp_path / "all", claim_all))
    assert "whole splits: the test split has 10,000 samples, and the confusion matrix 33" in lines
    assert "log: its last loss must be of sample 35,000, and is of 96" in lines


# Each rule. No machine of the tests can train the two models, so the record of the small run is written up to what a
# run on a GPU would leave, and each rule is broken alone.


def kept(record):
    """Write the record of a small run up to one that keeps the rules."""
    record["settings"] |= {"dataset": "imdb", "model": "bigscience/bloom-560m", "from_scratch": False}
    record["settings"] |= dict.fromkeys(("train_samples", "validation_samples", "test_samples"))
    record["hardware"] |= {"device": "cuda", "gpu": "NVIDIA A100"}
    record["data"]["train_samples"] = 35_000
    record["results"] |= {
        "parameters": 559_216_640, "trainable_parameters": 559_216_640, "test_samples": 10_000, "test_accuracy": 0.88,
        "elapsed_seconds": 1800.0, "training_seconds": 1750.0, "samples_per_second": 20.0,
        "peak_memory_bytes": 10_000_000_000, "peak_reserved_bytes": 11_000_000_000,
    }  # fmt: skip
    record["results"]["classes"] |= {"confusion": [[4400, 600], [600, 4400]]}


def kept_log(folder):
    """Write the log of a small run up likewise."""
    log = (folder / "log.txt").read_text(encoding="utf-8")
    for pattern, text in (
        (r"(\d{5})/00096", lambda found: f"{round(int(found[1]) / 96 * 35_000):05d}/35000"),
        (r"Time elapsed \S+", "Time elapsed 30.00"),
        (r"^Memory used: \S+", "Memory used: 10.00"),
        (r"Test accuracy \S+", "Test accuracy 88.00%"),
    ):
        log, count = re.subn(pattern, text, log, flags=re.M)
        assert count
    return log


@pytest.fixture
def entry(quickstart, tmp_path):
    """Make the folder of an entry that keeps the rules, but for a change of its record."""

    def make(name="good", change=lambda record: None, home=tmp_path):
        target = copy_of(quickstart, home / name, lambda record: (kept(record), change(record)), kept_log(quickstart))
        (target / "entry.json").write_text(json.dumps({"commit": "1a2b3c4", "by": "somebody"}))
        return target

    return make


def put(*path, value):
    def change(record):
        for key in path[:-1]:
            record = record[key]
        record[path[-1]] = value

    return change


def test_a_run_that_keeps_the_rules(entry):
    process = run_script(SCRIPT, "check", entry(), cwd=ROOT, fresh=True)
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.endswith("keeps the rules of minutes: 30.00 min, test accuracy 88.00 %, 11.00 GB\n")


@pytest.mark.parametrize(
    ("path", "value", "line"),
    [
        (("settings", "epochs"), 3, "one epoch: epochs must be 1, and is 3"),
        (("results", "epochs"), [{}, {}], "one epoch: the results must be of 1, and are of 2"),
        (("results", "skipped_batches"), 2, "one epoch: 2 effective batches were left out"),
        (("settings", "model"), "bloom-1b1", "model: must be bloom-560m, and is 'bloom-1b1'"),
        (("settings", "from_scratch"), True, "model: must start from the pretrained weights, and starts from random"),
        (("settings", "load"), "x", "model: must start from the pretrained weights, and starts from a checkpoint"),
        (("results", "parameters"), 10**8, "model: must have 559,216,640 parameters or more, and has 100,000,000"),
        (("settings", "dataset"), "reviews.csv", "dataset: must be imdb, and is 'reviews.csv'"),
        (("settings", "task"), "instruction-tuning", "task: must be text-classification, and is 'instruction-tuning'"),
        (("settings", "test_samples"), 5000, "whole splits: test_samples must not be set, and is 5000"),
        (("results", "test_samples"), 5000, "whole splits: the test split has 10,000 samples, and the run's 5,000"),
        (("results", "classes"), {}, "whole splits: run.json has no confusion matrix of the test"),
        (("results", "training_seconds"), 1700.0, "whole splits: an epoch is 35,000 samples, and samples/s times"),
        (("results", "elapsed_seconds"), 1790.0, "log: elapsed_seconds is 29.83 in run.json, and 30 in log.txt"),
        (("results", "elapsed_seconds"), None, "minutes: run.json has no elapsed_seconds"),
        (("results", "peak_reserved_bytes"), None, "peak memory: run.json has no peak_reserved_bytes, which a run on"),
        (("hardware",), {"device": "cpu"}, "hardware: must be a CUDA GPU that run.json names"),
        (("status",), "stopped", "finished: the run's status is 'stopped'"),
        (("log_lost",), True, "finished: the log ends before the run did, which could not write it"),
        (("resumed",), [{}], "finished: in one go, and this run was stopped and resumed"),
        (("format",), 2, "format: run.json has 2, this version reads 1"),
    ],
    ids=lambda value: None if not isinstance(value, tuple) else ".".join(value),
)
def test_each_broken_rule_is_one_line(entry, path, value, line):
    [found] = checked(entry(change=put(*path, value=value)))
    assert found.startswith(line)


def test_too_little_accuracy_a_wrong_one_and_none(entry):
    low = checked(entry("low", put("results", "test_accuracy", value=0.8699)))
    assert low[0].startswith("metric: the confusion matrix gives 88.00%, and test_accuracy is 86.99%")
    assert low[1:] == [
        "metric: the test accuracy must be at least 87%, and is 86.99%",
        "log: test_accuracy is 86.99 in run.json, and 88 in log.txt",
    ]
    assert checked(entry("none", put("results", "test_accuracy", value=float("nan")))) == [
        "metric: run.json has no test_accuracy between 0 and 1"
    ]


def test_all_weights_of_an_image_model_are_trained(entry):
    folder = entry(change=put("results", "trainable_parameters", value=10**6))
    assert checked(folder) == []
    line = "model: all parameters must be trained, and 1,000,000 of 559,216,640 are"
    assert line in checked(folder, "memory")


def test_an_entry_names_its_commit_and_whose_it_is(entry):
    folder = entry()
    (folder / "entry.json").write_text('{"commit": "the newest", "by": " "}')
    assert rules(checked(folder)) == {"commit", "by"}
    (folder / "entry.json").unlink()
    assert rules(checked(folder)) == {"commit", "by"}


def test_two_runs_in_a_log_are_not_one(entry):
    folder = entry()
    log = (folder / "log.txt").read_text(encoding="utf-8")
    (folder / "log.txt").write_text(log + log, encoding="utf-8")
    assert checked(folder) == ["log: log.txt must hold the lines of one finished run, and holds 2, finished or not"]


def test_bad_input_is_one_line(quickstart, tmp_path):
    (tmp_path / "empty").mkdir()
    cases = {"nowhere": "there is no folder", "empty": "cannot read .*run.json as JSON"}
    for number, content in enumerate(("[]", "{", "1")):
        folder = copy_of(quickstart, tmp_path / f"broken{number}")
        (folder / "run.json").write_text(content)
        cases[folder.name] = r"must hold one JSON object|cannot read .*run\.json as JSON"
    folder = copy_of(quickstart, tmp_path / "origin")
    (folder / "entry.json").write_text("[]")
    cases["origin"] = r"entry\.json must hold one JSON object"
    (copy_of(quickstart, tmp_path / "no_log") / "log.txt").unlink()
    cases["no_log"] = r"cannot read .*log\.txt as text"
    for name, message in cases.items():
        with pytest.raises(UserError, match=message) as error:
            leaderboard.read_entry(tmp_path / name)
        assert "\n" not in str(error.value)
    process = run_script(SCRIPT, "check", tmp_path / "nowhere", cwd=ROOT, fresh=True)
    assert (process.returncode, process.stdout, process.stderr.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("value", [None, 5, "x", [], {}, [1], {"a": 1}, [[1], [2]], True, float("inf")])
@pytest.mark.parametrize("path", "settings results data hardware results.epochs results.classes settings.model".split())
def test_a_record_may_hold_any_json(quickstart, path, value):
    record = json.loads((quickstart / "run.json").read_text(encoding="utf-8"))
    put(*path.split("."), value=value)(record)
    log = (quickstart / "log.txt").read_text(encoding="utf-8")
    for category in CATEGORIES.values():
        assert all("\n" not in line for line in broken_rules(leaderboard.Entry(record, log, {}), category))


# The page


def test_the_page_s_tables_are_what_the_script_writes():
    text = leaderboard.PAGE.read_text(encoding="utf-8")
    assert leaderboard.fill(text) == text
    assert [name for _, name, _ in leaderboard.pages.block("leaderboard").findall(text)] == list(CATEGORIES)


def test_entries_are_ranked_and_those_that_break_a_rule_are_refused(entry, tmp_path, monkeypatch):
    home = tmp_path / "leaderboard"
    (home / "minutes").mkdir(parents=True)
    published = (leaderboard.ENTRIES / "published.json").read_text(encoding="utf-8")
    (home / "published.json").write_text(published, encoding="utf-8")
    monkeypatch.setattr(leaderboard, "ENTRIES", home)
    monkeypatch.setattr(leaderboard.common, "ROOT", tmp_path)
    assert leaderboard.lines_of("minutes")[0] == "This project: no entry yet."
    entry("fast", home=home / "minutes")
    lines = leaderboard.lines_of("minutes")
    assert lines[2].startswith("| 1. `leaderboard/minutes/fast/` | 30.00 | 88.00 | 11.00 | NVIDIA A100 | 20")
    assert lines[2].endswith("| somebody, commit 1a2b3c4 |")
    assert [line.split()[1] for line in lines[3:]] == ["2.", "3.", "–"]
    assert "batch size 1 | 69.97 | 78.53" in lines[-1]
    entry("slow", put("settings", "epochs", value=2), home=home / "minutes")
    with pytest.raises(UserError, match=r"^leaderboard/minutes/slow breaks a rule: one epoch: epochs must be 1, and"):
        leaderboard.lines_of("minutes")


def test_published_figures_are_those_of_the_logs():
    rows = json.loads((leaderboard.ENTRIES / "published.json").read_text(encoding="utf-8"))
    names = ("batch_size_1", "gradient_accumulation", "compile")
    for row, name in zip(rows["minutes"], names, strict=True):
        [run] = parse((BLOG / f"{name}.txt").read_text(encoding="utf-8"))
        assert (row["minutes"], row["accuracy"]) == (run.figures["minutes"], run.figures["test_accuracy"])
    series = LogParser("series", "series").parse((BLOG / "memory_series.txt").read_text(encoding="utf-8"))
    found = {run.name.split("_")[0].split()[0]: run.figures for run in series if "minutes" in run.figures}
    told = {row["name"].split("_")[0].split(":")[0]: row for row in rows["memory"]}
    assert len(found.keys() & told.keys()) >= 7
    for name in found.keys() & told.keys():
        row = told[name]
        figures = tuple(found[name][key] for key in ("minutes", "test_accuracy", "memory"))
        assert (row["minutes"], row["accuracy"], row["memory"]) == figures, name
