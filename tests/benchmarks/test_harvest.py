"""The harvest stores each entry, continues an earlier harvest, keeps to its time limit and fills the pages."""

import json
import subprocess
import sys
from time import monotonic

import numpy as np
import pytest
from support.helpers import MODELS, ROOT

from fabric_ladder import UserError
from fabric_ladder.planning.gpus import find_gpu

sys.path.append(str(ROOT / "benchmarks"))
import common
import forking
import harvest
from harvest import add_rates, command_entry, run_all

MACHINE = {
    "hardware": {"device": "cuda", "gpu": "NVIDIA H100", "processor": "CPU"}, "gpus": 1, "rehearsal": False,
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"}, "commit": "abcdef0", "date": "2026-11-22T12:00:00+0000",
}  # fmt: skip


@pytest.fixture
def entry(tmp_path, monkeypatch):
    """Make an entry that forks a script of a few lines; its last argument is the file for the figures."""
    monkeypatch.setattr(common, "run_child", forking.run_forked)

    def make(name, code="import json, sys; json.dump({'value': 1}, open(sys.argv[-1], 'w'))", seconds=1, alone=True):
        path = tmp_path / f"{name}.py"
        path.write_text(code)
        return command_entry(name, [str(path)], seconds, alone)

    return make


@pytest.fixture
def run(tmp_path):
    """Run entries and add them to earlier ones; return the exit status and the file's content."""

    def run(entries, earlier=None, **options):
        out = tmp_path / "harvest.json"
        status = run_all(entries, {"machine": MACHINE, "entries": earlier or {}, "left_out": {}}, out, **options)
        return status, json.loads(out.read_text(encoding="utf-8"))

    return run


def test_earlier_figures_stay_and_each_entry_is_stored_before_the_next(entry, run, tmp_path):
    earlier = {"first": {"figures": {"value": 7}}, "second": {"failed": "no memory"}, "fourth": {"figures": {}}}
    path = str(tmp_path / "harvest.json")
    copies = (
        f"import json, sys; json.dump({{'value': list(json.load(open({path!r}))['entries'])}}, open(sys.argv[-1], 'w'))"
    )
    status, content = run([entry("second", copies), entry("first"), entry("third")], earlier)
    assert status == 0
    values = {name: record["figures"].get("value") for name, record in content["entries"].items()}
    assert values == {"first": 7, "second": ["first", "second", "fourth", "third"], "third": 1, "fourth": None}
    assert {"date", "seconds", "figures"} <= content["entries"]["third"].keys()


@pytest.mark.slow
def test_no_preloaded_package_starts_cuda():
    modules = ["harvest" if name == "__main__" else name for name in forking.PRELOADED]
    code = f"import sys, {', '.join(modules)}; sys.exit('bitsandbytes' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT / "benchmarks").returncode == 0


def test_a_harvest_ends_after_the_given_minutes(entry, run):
    sleeps = "import time; time.sleep(600)"
    status, content = run([entry("long", seconds=100), entry("slow", sleeps)], end=monotonic() + 5)
    assert (status, content["entries"]) == (0, {})
    assert content["left_out"]["long"].startswith("needs about 100 s, and ")
    assert content["left_out"]["slow"] == "stopped at the end of the minutes"


def test_a_failed_entry_does_not_end_the_others(entry, run):
    entries = [
        entry("broken", "raise ValueError('broken')"),
        entry("refused", "import sys; print('error: --packing true is refused', file=sys.stderr); sys.exit(2)"),
        entry("memory", "import sys; print('error: out of memory (2 GB)', file=sys.stderr); sys.exit(2)"),
        entry("wrong", "import json, sys; json.dump({'passed': False}, open(sys.argv[-1], 'w'))"),
        entry("last"),
    ]
    status, content = run(entries)
    records = content["entries"]
    assert status == 1
    assert records["broken"]["failed"] == "broken.py ended with status 1: ValueError: broken"
    assert "out of memory" in records["memory"]["failed"]
    assert "figures" in records["last"]
    assert content["left_out"] == {"refused": "--packing true is refused"}


def test_figures_of_older_code_are_measured_again_on_request_and_kept_until_then(entry, run):
    earlier = {name: {"figures": {"value": 7}, "commit": commit} for name, commit in
               (("old", "0fedcba"), ("new", MACHINE["commit"]), ("late", "0fedcba"))}  # fmt: skip
    entries = [entry("old"), entry("new"), entry("late", seconds=1000)]
    _, content = run(entries, earlier, again=True, end=monotonic() + 60)
    records = content["entries"]
    assert {name: record["figures"]["value"] for name, record in records.items()} == {"old": 1, "new": 7, "late": 7}
    assert [record["commit"] for record in records.values()] == [MACHINE["commit"], MACHINE["commit"], "0fedcba"]
    assert content["left_out"] == {}
    _, content = run(entries, {"old": earlier["old"]})
    assert content["entries"]["old"] == earlier["old"]


def test_results_of_changed_code_are_not_stored_in_the_repository(monkeypatch, tmp_path):
    monkeypatch.setattr(common, "code_commit", lambda: "1a2b3c4-dirty")
    with pytest.raises(UserError, match=r"benchmarks/results/some.json keeps results of committed code only"):
        common.write_result(common.RESULTS / "some.json", "part", {})
    common.write_result(tmp_path / "some.json", "part", {})
    monkeypatch.setattr(common, "code_commit", lambda: "1a2b3c4")
    common.check_storable(common.RESULTS / "some.json")


# Figures


def test_the_mfu_counts_tokens_without_padding():
    lengths = np.full(2000, 100)
    figures = {"tokens": 200_000, "parameters": 559_000_000, "samples_per_second": 100.0}
    figures |= {"precision": "32-true", "matmul_precision": "high"}
    config = {"vocab_size": 250_880, "hidden_size": 1024, "n_layer": 24}
    found = add_rates(figures, config, lengths, find_gpu("H100"))
    flops = 6 * (559_000_000 - 250_880 * 1024) * 100 + 12 * 24 * 1024 * 100**2  # FLOPs for one review
    assert found["mfu"] == pytest.approx(100 * flops / 494.7e12)
    assert add_rates(figures, config, lengths, find_gpu("H100"), 2)["mfu"] == pytest.approx(found["mfu"] / 2)
    assert "mfu" not in add_rates(figures | {"trainable_parameters": 1_000}, config, lengths, find_gpu("H100"))
    with pytest.raises(RuntimeError, match="200000 tokens"):
        add_rates(figures, config, lengths[1:], None)


def test_a_gpu_measures_every_rung_after_the_most_important_entries(tmp_path):
    job = harvest.Job(
        "cuda", False, find_gpu("H100"), 2, ["--model", str(MODELS / "bloom-560m.json")], np.zeros(1), tmp_path
    )
    entries = harvest.entries_of(job)
    names = [entry.name for entry in entries]
    assert len(names) == len(set(names)) > 80
    rungs = [rung.stem for rung in harvest.RUNGS]
    assert all(any(name == rung or name.startswith(f"{rung}, ") for name in names) for rung in rungs)
    first = entries[: len(harvest.FIRST)]
    assert [entry.name for entry in first] == list(harvest.FIRST)
    assert sum(entry.seconds for entry in first) <= 480
    timed = [entry for entry in entries if entry.name in rungs or "calibration" in entry.name]
    assert all(entry.alone for entry in timed)


# The pages


def test_figures_fill_the_pages():
    blocks = harvest.tables(harvest.read_harvest(harvest.OUT))
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    assert all(f":{name} -->" in pages for name in blocks.keys() - set(harvest.AS_CSV))
    for path in (harvest.OUT, common.RESULTS / "gpu_h200.json"):
        assert harvest.fill_pages(path, check=True) == [], "python benchmarks/harvest.py --fill"


def test_pages_are_never_filled_from_a_rehearsal(tmp_path):
    path = tmp_path / "rehearsal.json"
    path.write_text(json.dumps({"machine": MACHINE | {"rehearsal": True}, "entries": {}, "left_out": {}}))
    with pytest.raises(UserError, match="measure on a GPU first"):
        harvest.fill_pages(path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_everything_can_be_rehearsed_on_a_cpu(tmp_path):
    out = tmp_path / "rehearsal.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "harvest.py"), "--rehearse", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = harvest.read_harvest(out)
    assert len(content["entries"]) >= 15
    assert harvest.VARLEN in content["entries"]
    content["machine"]["hardware"]["gpu"] = "none"
    blocks = harvest.tables(content)
    assert all(len(blocks[name]) > 2 for name in blocks.keys() - {"status", "summary", "verdict"})
