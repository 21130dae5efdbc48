"""Stored runs, the search for a learning rate, and the tables made from them."""

import math
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from support.helpers import ROOT, SMALL, SRC

sys.path.insert(0, str(ROOT / "benchmarks"))
import common
import evidence
import evidence_tables
import forking
import rung_tables

from fabric_ladder.errors import UserError
from fabric_ladder.ladder import row_of

RUNG = SRC / "2_grad_accum.py"
FIRST = evidence.Wanted("small", RUNG, evidence.SEED)


@pytest.fixture
def small_set(monkeypatch, tmp_path):
    monkeypatch.setattr(evidence, "RUNS", tmp_path / "kept")
    monkeypatch.setattr(evidence, "WORK", tmp_path / "work")
    monkeypatch.setitem(evidence.SETS, "small", evidence.Set([str(option) for option in SMALL], "2", minilm=False))
    return tmp_path / "kept" / "small" / "2_grad_accum"


@pytest.mark.slow
def test_missing_runs_are_made_and_stored_without_folders_of_this_machine(small_set, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(common, "run_child", forking.run_forked)
    with ThreadPoolExecutor(2) as pool:  # the same run twice at the same time
        list(pool.map(evidence.make, [FIRST, FIRST], [0.001, 0.001]))
    assert capfd.readouterr().out.count("small: 2_grad_accum, learning rate 0.001, seed 123") == 1
    assert not list((tmp_path / "work").rglob("*.json"))  # the folder of the run in progress is gone
    kept = small_set / "0.001" / "123"
    assert sorted(path.name for path in kept.iterdir()) == ["log.txt", "metrics.csv", "run.json"]
    (record,) = evidence.kept("small", "2_grad_accum")[0.001].values()
    assert (record["status"], record["settings"]["seed"]) == ("finished", 123)
    assert record["command"].startswith("python src/2_grad_accum.py")
    for path in kept.iterdir():
        assert not any(folder in path.read_text() for folder in (str(ROOT), str(small_set.parents[2]), sys.prefix))
    evidence.make(FIRST, 0.001)
    assert capfd.readouterr().out == ""
    with pytest.raises(UserError, match="ended with status 2"):
        evidence.make(FIRST._replace(rate=1e30), 0.001)
    (line,) = (small_set / "1e+30" / "123" / evidence.DIVERGED).read_text().splitlines()
    assert "the run stops; try a lower --learning_rate" in line
    assert evidence.tried("small", "2_grad_accum") == {0.001: pytest.approx(0.69, abs=0.1), 1e30: math.inf}
    assert sorted(evidence_tables.rows_of("small")["2_grad_accum"]) == [0.001]


@pytest.mark.parametrize(
    ("own", "loss", "rates", "best"),
    [
        (0.001, lambda rate: 0.1 + abs(rate - 0.016) if rate < 0.05 else math.inf, 5, 0.016),
        (4e-6, lambda rate: rate, evidence.LIMIT, 4e-6 / evidence.STEP ** (evidence.LIMIT - 2)),
    ],
    ids=["both sides of the best", "up to its limit"],
)
def test_the_search_tries_rates(own, loss, rates, best):
    tried: dict[float, float] = {}
    while (rate := evidence.next_rate(tried, own)) is not None:
        tried[rate] = loss(rate)
    assert len(tried) == rates
    assert evidence.best_rate(tried) == pytest.approx(best)


def test_the_tables_of_the_documents_agree_with_the_runs(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["evidence_tables.py", "--check"])
    assert (evidence_tables.main(), capsys.readouterr().out) == (0, "")
    table = evidence_tables.differences()
    monkeypatch.setitem(evidence_tables.BLOCKS, "differences", lambda: [*table, "| another row |"])
    assert (evidence_tables.main(), capsys.readouterr().out.split()[0]) == (1, "docs/results.md")
    monkeypatch.setitem(evidence_tables.BLOCKS, "differences", lambda: table)
    monkeypatch.setattr(evidence_tables, "accuracies", lambda made=evidence_tables.accuracies: [*made(), "| a row |"])
    assert (evidence_tables.main(), capsys.readouterr().out.split()[0]) == (1, "docs/tables/accuracies.csv")


def test_a_page_keeps_the_rows_that_its_patterns_name():
    filled = common.fill("<!-- runs:a: 1_*; 13_* --><!-- /runs -->", "runs", lambda _: evidence_tables.ladder())
    assert [line[2:5] for line in filled.splitlines()[3:-1]] == ["1_b", "13_"]
    with pytest.raises(UserError, match="a pattern without a row"):
        common.fill("<!-- runs:a: 30_* --><!-- /runs -->", "runs", lambda _: evidence_tables.ladder())


def test_the_tables_of_all_rungs_agree_with_the_ladder(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["rung_tables.py", "--check"])
    assert (rung_tables.main(), capsys.readouterr().out) == (0, "")
    monkeypatch.setattr(rung_tables, "grouped", lambda: iter([("base", [row_of("1_batch_size_1")])]))
    assert (rung_tables.main(), capsys.readouterr().out.count("is stale")) == (1, 3)  # README, index, mkdocs.yml


def test_the_seeds_of_a_row_have_one_device():
    stored = evidence_tables.rows_of("imdb_2000")["2_grad_accum"][5e-5]
    assert evidence_tables.device(stored) == "H200"
    on_cpu = replace(stored.first, hardware={"device": "cpu", "processor": "CPU"})
    assert evidence_tables.device(replace(stored, runs=[on_cpu])) == "CPU"
    with pytest.raises(UserError, match="has seeds of several devices: CPU, H200"):
        evidence_tables.device(replace(stored, runs=[stored.first, on_cpu]))
