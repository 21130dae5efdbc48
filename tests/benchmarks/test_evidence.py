"""Stored runs, the search for a learning rate, and the tables made from them."""

import csv
import io
import json
import math
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import asdict

import pytest
from support.helpers import ROOT, SMALL, SRC, finished, run_script, settings_for

sys.path.insert(0, str(ROOT / "benchmarks"))
import common
import evidence
import evidence_tables

from fabric_ladder.errors import UserError
from fabric_ladder.planning.candidates import accuracy_costs

RUNG = SRC / "2_grad_accum.py"


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    home = tmp_path_factory.mktemp("evidence")
    finished(run_script(RUNG, *SMALL, cwd=home))
    return home / "runs" / "2_grad_accum" / "1"


@pytest.fixture
def small_set(monkeypatch, tmp_path):
    monkeypatch.setattr(evidence, "RUNS", tmp_path / "kept")
    monkeypatch.setitem(evidence.SETS, "small", evidence.Set([str(option) for option in SMALL], "2", minilm=False))
    return tmp_path / "kept" / "small"


def keep(name, folder):
    """Store a run of rung 2 in a set."""
    settings = asdict(evidence.resolved(evidence.Wanted(name, RUNG, 123)))
    return evidence.keep(folder, name, "2_grad_accum", settings)


def test_a_run_is_kept_without_this_machine_s_folders(small_set, run_folder):
    keep("small", run_folder)
    (record,) = evidence.kept("small", "2_grad_accum")[0.001].values()
    assert (
        record["results"]["test_accuracy"]
        == json.loads((run_folder / "run.json").read_text())["results"]["test_accuracy"]
    )
    kept = small_set / "2_grad_accum" / "0.001" / "123"
    assert sorted(path.name for path in kept.iterdir()) == ["log.txt", "metrics.csv", "run.json"]
    assert record["command"].startswith("python src/2_grad_accum.py")
    assert (record["settings"]["dataset"], record["data"]["train_samples"]) == ("synthetic", 96)
    for path in kept.iterdir():
        text = path.read_text()
        assert not any(folder in text for folder in (str(ROOT), str(run_folder.parents[2]), sys.prefix))


def test_folders_of_this_machine_leave_json_as_it_is(tmp_path):
    text = json.dumps({"command": f"python src/2_grad_accum.py --runs_dir {tempfile.gettempdir()}/runs", "seed": 1})
    assert json.loads(common.impersonal(text)) == {
        "command": "python src/2_grad_accum.py --runs_dir $SCRATCH",
        "seed": 1,
    }


def test_another_run_is_refused_with_what_is_other(small_set, run_folder, tmp_path):
    with pytest.raises(UserError, match=r"has other settings than quickstart: .*train_samples 96 instead of None"):
        keep("quickstart", run_folder)
    broken = tmp_path / "broken"
    broken.mkdir()
    record = json.loads((run_folder / "run.json").read_text()) | {"status": "stopped"}
    (broken / "run.json").write_text(json.dumps(record))
    with pytest.raises(UserError, match="the run is not finished"):
        keep("small", broken)
    assert not small_set.exists()


def test_what_is_kept_is_not_run_again_and_what_is_not_is(small_set, run_folder, monkeypatch, tmp_path, capfd):
    monkeypatch.setattr(evidence, "WORK", tmp_path / "work")
    keep("small", run_folder)
    evidence.make(evidence.Wanted("small", RUNG, 123))
    assert not (tmp_path / "work").exists()
    evidence.make(evidence.Wanted("small", RUNG, 123, 0.004))
    assert sorted(evidence.kept("small", "2_grad_accum")) == [0.001, 0.004]
    assert "small: 2_grad_accum, learning rate 0.004, seed 123" in capfd.readouterr().out


def test_the_search_tries_both_sides_and_goes_on_beyond_the_best():
    """The search tries these learning rates. The loss is lowest at 0.016, two steps above the rung's own rate."""
    tried: dict[float, float] = {}
    while (rate := evidence.next_rate(tried, 0.001)) is not None:
        tried[rate] = 0.1 + abs(rate - 0.016) if rate < 0.05 else math.inf
    assert sorted(tried) == pytest.approx([0.00025, 0.001, 0.004, 0.016, 0.064])
    assert evidence.best_rate(tried) == pytest.approx(0.016)


def test_the_search_ends_where_all_is_downhill():
    tried = {rate: rate for rate in (4e-6 * 0.25**step for step in range(-1, 5))}
    assert evidence.next_rate(tried, 4e-6) is None
    assert evidence.best_rate(tried) == min(tried)


def test_a_rate_that_diverges_counts_and_is_not_run_again(small_set, run_folder, monkeypatch, tmp_path):
    monkeypatch.setattr(evidence, "WORK", tmp_path / "work")
    keep("small", run_folder)
    with pytest.raises(UserError, match="ended with status 2"):
        evidence.make(evidence.Wanted("small", RUNG, 123, 1e30))
    (line,) = (small_set / "2_grad_accum" / "1e+30" / "123" / evidence.DIVERGED).read_text().splitlines()
    assert "the run stops; try a lower --learning_rate" in line
    losses = evidence.tried("small", "2_grad_accum")
    assert losses == {0.001: pytest.approx(0.69, abs=0.1), 1e30: math.inf}
    assert sorted(evidence_tables.rows_of("small")["2_grad_accum"]) == [0.001]


def test_stars_are_four_classes(monkeypatch, tmp_path):
    with tarfile.open(tmp_path / "aclImdb_v1.tar.gz", "w:gz") as archive:
        for name, text in (
            ("train/neg/0_1", "a"),
            ("train/neg/1_4", "b, c"),
            ("test/pos/0_7", "d"),
            ("test/pos/1_10", "e"),
        ):
            member = tarfile.TarInfo(f"aclImdb/{name}.txt")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    monkeypatch.setenv("FABRIC_LADDER_DATA", str(tmp_path))
    monkeypatch.setattr(common, "ROOT", tmp_path)
    for _ in range(2):
        evidence.write_stars()
    with open(tmp_path / evidence.STARS, encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))
    classes = [["a", "1 or 2 stars"], ["b, c", "3 or 4 stars"], ["d", "7 or 8 stars"], ["e", "9 or 10 stars"]]
    assert rows == [["text", "label"], *classes]


def test_the_documents_say_what_the_runs_say():
    command = [sys.executable, str(ROOT / "benchmarks" / "evidence_tables.py"), "--check"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_table_that_was_changed_by_hand_is_found():
    page = ROOT / "docs" / "results.md"
    text = page.read_text(encoding="utf-8")
    table = "\n".join(evidence_tables.same_rate())
    assert table in text
    assert evidence_tables.filled(page, text.replace(table, table.replace("2_grad_accum", "3_grad_accum"))) == text


def test_a_search_that_is_not_done_is_said(small_set, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evidence.py", "best", "small"])
    assert evidence.main() == 1
    assert capsys.readouterr().err == "left out: 2_grad_accum: search its learning rate first\n"


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("search small --seeds 3", "search takes no --seeds: it uses the first one"),
        ("run small --seeds 0", "--seeds 0: must be at least 1"),
    ],
)
def test_a_useless_option_is_refused(small_set, monkeypatch, words, line):
    monkeypatch.setattr(sys, "argv", ["evidence.py", *words.split()])
    with pytest.raises(UserError, match=re.escape(line)):
        evidence.main()


def test_a_run_without_its_log_is_not_half_kept(small_set, run_folder, tmp_path):
    broken = tmp_path / "broken"
    shutil.copytree(run_folder, broken)
    (broken / "log.txt").unlink()
    with pytest.raises(UserError, match="log"):
        keep("small", broken)
    assert not small_set.exists()


def points(better, worse):
    """Return the difference in mean test accuracy, in points, between two rows (set, rung, learning rate)."""
    means = [evidence_tables.rows_of(set)[rung][rate].mean("test_accuracy") for set, rung, rate in (better, worse)]
    return means[0] - means[1]


HALVED, WHOLE = "imdb_2000_halved", "imdb_2000"
SIXTEEN, FIVE = ("16_bf16_that_learns", 5e-5), ("5_low_precision", 5e-5)
TWO = (WHOLE, "2_grad_accum", 5e-5)
COSTS = {  # the pairs of rows whose differences must bracket the planner's numbers
    "lora": ({"lora": True}, [(TWO, (WHOLE, "13_lora", rate)) for rate in (2e-4, 8e-4)]),
    "bf16": ({"precision": "bf16-true"}, [((set, *SIXTEEN), (set, *FIVE)) for set in (HALVED, WHOLE)]),
    "sgd": ({"optimizer": "sgd"}, [((WHOLE, *FIVE), (WHOLE, "6_lean_optimizer", rate)) for rate in (0.01, 0.16)]),
}


@pytest.mark.parametrize(("settings", "pairs"), COSTS.values(), ids=COSTS)
def test_what_the_planner_says_of_accuracy_is_what_the_runs_say(tmp_path, settings, pairs):
    (said,) = accuracy_costs(settings_for(tmp_path, **settings))
    numbers = re.findall(r"(?:^|; )([\d.]+)", said)
    assert numbers == [
        f"{points(*pair):.{len(number.partition('.')[2])}f}" for number, pair in zip(numbers, pairs, strict=True)
    ]
