"""A harvest is written entry by entry, goes on where another ended, keeps to its minutes, and fills the pages."""

import gc
import json
import signal
import subprocess
import sys
import weakref
from argparse import Namespace
from contextlib import suppress

import numpy as np
import psutil
import pytest
import torch
from support.helpers import MODELS, ROOT

from fabric_ladder import UserError
from fabric_ladder.planning.gpus import find_gpu

sys.path.append(str(ROOT / "benchmarks"))
import gpu_figures
import lora_7b
from harvest import Harvest, key_of, run_all, stop_on_signals
from harvest_entries import Entry, Job, doubts, entries_of, fastest, peers, several_gpus
from mfu import extrapolate, peak_flops

MACHINE = {
    "hardware": {"device": "cuda", "gpu": "NVIDIA H100", "processor": "CPU"}, "gpus": 1, "rehearsal": False,
    "versions": {"torch": "2.13.0", "transformers": "5.23.0"}, "code": "1a2b3c", "commit": "abcdef0",
    "date": "2026-11-22T12:00:00+0000", "conditions": {"reviews": 2000, "dataset": "imdb"},
}  # fmt: skip
REHEARSED = Job("cpu", True, None, 1, True, None, None, None, {})
WRITES = "import json, sys; json.dump({'value': 1}, open(sys.argv[-1], 'w'))"


@pytest.fixture
def entry(tmp_path):
    """Make an entry of a few lines of Python, which get the file for their figures as the last argument."""

    def make(name, code=WRITES, **values):
        path = tmp_path / f"{name}.py"
        path.write_text(code)
        return Entry(name, [str(path)], **values)

    return make


def written(harvest):
    return json.loads(harvest.out.read_text(encoding="utf-8"))


def previous(**entries):
    return {"machine": MACHINE, "entries": entries, "left_out": {}}


def test_what_a_previous_file_has_is_taken_over(tmp_path, entry):
    before = previous(first={"figures": {"value": 7}}, second={"failed": "no memory"}, fourth={"figures": {}})
    harvest = Harvest(tmp_path / "new.json", MACHINE, [before])
    entries = [entry("second"), entry("first"), entry("third")]
    assert [each.name for each in harvest.to_do(entries)] == ["third", "second"]  # what failed comes last
    assert run_all(harvest, entries, REHEARSED) == 0
    assert {name: record.get("figures") for name, record in written(harvest)["entries"].items()} == {
        "first": {"value": 7}, "second": {"value": 1}, "third": {"value": 1}, "fourth": {},
    }  # fmt: skip


@pytest.mark.parametrize(
    "other",
    [
        {"hardware": MACHINE["hardware"] | {"gpu": "Tesla T4"}},
        {"versions": MACHINE["versions"] | {"torch": "2.11.0"}},
        {"code": "other"},
        {"rehearsal": True},
        {"gpus": 2},
    ],
    ids=lambda other: next(iter(other)),
)
def test_nothing_else_is_taken_over(tmp_path, other):
    harvest = Harvest(tmp_path / "new.json", MACHINE | other, [previous(first={"figures": {"value": 7}})])
    assert not harvest.entries
    assert key_of(MACHINE | {"date": "later", "commit": None}) == key_of(MACHINE)


def test_an_entry_that_does_not_fit_into_the_minutes_is_not_begun(tmp_path, entry):
    harvest = Harvest(tmp_path / "new.json", MACHINE, [], minutes=1)
    unknown = REHEARSED._replace(rehearse=False)  # a GPU that nobody knows may be slow
    assert run_all(harvest, [entry("long", seconds=100), entry("short", seconds=1)], unknown) == 0
    assert list(harvest.entries) == ["short"]
    assert written(harvest)["left_out"]["long"].startswith("needs about 415 s, and ")


def test_what_the_end_of_the_minutes_cuts_off_is_the_next_harvest_s_first(tmp_path, entry, monkeypatch):
    monkeypatch.setattr("harvest.START", 0.0)
    sleeps = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    harvest = Harvest(tmp_path / "new.json", MACHINE, [], minutes=1 / 60)
    run_all(harvest, [entry("slow", sleeps, seconds=0), entry("late", seconds=1)], REHEARSED._replace(rehearse=False))
    assert "at the end of the minutes" in written(harvest)["left_out"]["slow"]
    assert "were left" in written(harvest)["left_out"]["late"]
    assert not written(harvest)["entries"]


def test_each_entry_is_written_before_the_next_begins(tmp_path, entry):
    out = tmp_path / "new.json"
    reads = f"import json, sys; json.dump(json.load(open({str(out)!r}))['entries'], open(sys.argv[-1], 'w'))"
    harvest = Harvest(out, MACHINE, [])
    run_all(harvest, [entry("first"), entry("second", reads)], REHEARSED)
    assert written(harvest)["entries"]["second"]["figures"]["first"]["figures"] == {"value": 1}
    assert {"command", "date", "seconds"} <= written(harvest)["entries"]["first"].keys()


def test_failures_and_refusals_are_told_apart_and_the_rest_goes_on(tmp_path, entry):
    entries = [
        entry("half", f"{WRITES}; sys.exit('broken')"),
        entry("refused", "import sys; print('error: --packing true goes elsewhere', file=sys.stderr); sys.exit(2)"),
        entry("memory", "import sys; print('error: out of memory (2 GB)', file=sys.stderr); sys.exit(2)"),
        entry("alone", left_out="one GPU here"),
        entry("wrong", "import json, sys; json.dump({'passed': False}, open(sys.argv[-1], 'w'))"),
        Entry("depends", lambda figures: None),
        entry("last"),
    ]
    harvest = Harvest(tmp_path / "new.json", MACHINE, [])
    assert run_all(harvest, entries, REHEARSED) == 1
    records = written(harvest)["entries"]
    assert "broken" in records["half"]["failed"]
    assert records["half"]["partial"] == {"value": 1}
    assert "out of memory" in records["memory"]["failed"]
    assert "figures" in records["last"]
    assert harvest.left_out["refused"] == "--packing true goes elsewhere"
    assert harvest.left_out["alone"] == "one GPU here"
    assert harvest.left_out["depends"] == "what it goes by has not been measured"
    assert harvest.problems == ["half", "memory", "wrong"]


def test_sigterm_leaves_a_whole_file_and_no_process(tmp_path, entry):
    stops = "import os, signal, subprocess, sys; child = subprocess.Popen(['sleep', '600'], start_new_session=True); "
    stops += f"open({str(tmp_path / 'child')!r}, 'w').write(str(child.pid)); os.kill(os.getppid(), signal.SIGTERM); "
    stops += "child.wait()"
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    harvest = Harvest(tmp_path / "new.json", MACHINE, [])
    try:
        stop_on_signals()
        assert run_all(harvest, [entry("first"), entry("stops", stops), entry("third")], REHEARSED) == 143
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert list(written(harvest)["entries"]) == ["first"]
    assert written(harvest)["left_out"] == {"stops": "stopped", "third": "stopped before"}
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(int((tmp_path / "child").read_text())).status() == psutil.STATUS_ZOMBIE


# What is measured


def test_a_share_of_the_peak_is_of_the_precision_that_was_used():
    h100, t4 = find_gpu("H100"), find_gpu("T4")
    assert peak_flops(h100, "bf16-mixed", "high") == peak_flops(h100, "bf16-true", "highest") == 989.5e12
    assert peak_flops(h100, "32-true", "high") == 494.7e12
    assert peak_flops(h100, "32-true", "highest") == pytest.approx(66.9e12)
    assert peak_flops(h100, "32-true", "medium") == 989.5e12
    assert peak_flops(t4, "16-mixed", "high") == 65e12
    assert peak_flops(t4, "32-true", "high") == peak_flops(t4, "32-true", "medium") == 8.1e12  # there is no TF32


def test_an_epoch_is_extrapolated_from_the_end():
    lengths = np.full(2000, 100)
    run = {"tokens": 200_000, "parameters": 559_000_000, "samples_per_second": 100.0, "training_seconds": 20.0}
    run |= {"late_samples_per_second": 1000.0, "precision": "32-true", "matmul_precision": "high"}
    config = {"vocab_size": 250_880, "hidden_size": 1024, "n_layer": 24}
    found = extrapolate(run, config, lengths, find_gpu("H100"))
    assert found["epoch_seconds"] == 20 + 33_000 / 1000
    assert found["late_mfu"] == pytest.approx(10 * found["mfu"])
    plain = extrapolate(run | {"matmul_precision": "highest"}, config, lengths, find_gpu("H100"))
    assert plain["mfu"] == pytest.approx(found["mfu"] * 494.7 / 66.9)
    assert "mfu" not in extrapolate(run, config, lengths, None)
    with pytest.raises(RuntimeError, match="200000 tokens"):
        extrapolate(run, config, lengths[1:], None)


def test_the_fastest_is_a_rung_on_one_gpu_at_the_batch_of_all_others():
    figures = {"blog, 32-true": 1, "5_low_precision, batch 64, 16384 tokens": 2, "9_ddp, 8 GPUs": 2, "2_grad_accum": 4,
               "5_low_precision": 3, "gradients": None}  # fmt: skip
    runs = {name: {"epoch_seconds": value} if value else {"passed": True} for name, value in figures.items()}
    assert fastest(runs) == "5_low_precision"
    assert fastest({"gradients": {}}) is None


def test_entries_follow_the_machine(tmp_path):
    data = Namespace(options=["--dataset", "imdb"], texts=tmp_path, lengths=None)
    job = Job("cuda", False, find_gpu("T4"), 1, False, data, data, tmp_path, {})
    names = [each.name for each in entries_of(job)]
    assert len(names) == len(set(names)) > 50
    assert names[0] == "attention kernels"
    assert not [name for name in names if name.startswith(("blog", "Trainer")) and "bf16" in name]
    assert {each.left_out for each in several_gpus(job)} == {"one GPU here"}
    assert not any(each.left_out for each in several_gpus(job._replace(gpus=2)))
    assert job._replace(gpu=find_gpu("H100")).slowness == 1 < job.slowness < 989.5 / 65
    untouched = next(each for each in peers(job) if each.name == "blog, 32-true, no TF32")
    assert untouched.command[-2:] == ["--matmul_precision", "highest"]
    assert [each.name for each in doubts(job)][-1] == "rank"
    assert len([name for name in names if name.startswith("memory: bloom-560m, ")]) == 14
    assert len([name for name in names if name.startswith("memory: vit-large-16, ")]) == 8


@pytest.mark.slow
def test_a_model_is_gone_before_the_next_one_is_made(tmp_path, monkeypatch):
    args = Namespace(tokens=16, chunk=8, steps=1, checkpointing=False, accelerator="cpu")
    lora_7b.make_weights(str(MODELS / "bloom-quickstart.json"), tmp_path / "weights", torch.device("cpu"))
    made, build, alive = [], lora_7b.build_model, []

    def watched(*arguments):
        alive.append(sum(each() is not None for each in made))
        model = build(*arguments)
        made.append(weakref.ref(next(model.parameters())))  # adapters around a model are gone before it
        return model

    monkeypatch.setattr(lora_7b, "build_model", watched)
    monkeypatch.setattr(lora_7b, "SIZES", (1,))
    gc.disable()  # else it may come to it by chance
    try:
        records = list(lora_7b.measured(args, "13_lora", str(tmp_path / "weights")))
    finally:
        gc.enable()
    assert len(records) == 2
    assert alive == [0, 0]


# The pages


def test_the_pages_are_those_of_the_committed_harvests():
    harvests = gpu_figures.read(sorted(gpu_figures.GPU.glob("*.json")))
    blocks = set()
    for page in gpu_figures.PAGES:
        text = page.read_text(encoding="utf-8")
        assert gpu_figures.fill(text, harvests) == text, page
        blocks |= {name for _, name, _ in gpu_figures.BLOCK.findall(text)}
    assert blocks == {"status", *gpu_figures.BLOCKS}
    said = [
        page.name for page in gpu_figures.PAGES if "not measured on a gpu" in page.read_text(encoding="utf-8").lower()
    ]
    assert said == ([] if harvests else ["gpu.md"])


def test_a_harvest_fills_the_pages():
    run = {"precision": "bf16-true", "samples_per_second": 50.0, "tokens_per_second": 15_000.0, "epoch_seconds": 700.0,
           "peak_memory_bytes": 5_400_000_000, "late_mfu": 0.31}  # fmt: skip
    figures = {
        "5_low_precision": run,
        "blog, bf16-true": run | {"epoch_seconds": 7000.0},
        "gradients": {"passed": True},
        "memory: bloom-560m, 2_grad_accum": {
            "predicted_peak_bytes": 10_000_000_000,
            "peak_memory_bytes": 10_100_000_000,
        },
        "calibration": {"measured": {"context": 5e8, "workspace": 6e7, "fragmentation": 0.05}},
    }
    harvest = previous(**{name: {"figures": each} for name, each in figures.items()}, losses={"failed": "no memory"})
    harvest["left_out"] = {"rank": "one GPU here"}
    text = "".join(f"<!-- gpu:{name} -->\nold\n<!-- /gpu -->\n" for name in ("status", *gpu_figures.BLOCKS))
    page = gpu_figures.fill(text, [harvest])
    assert "old" not in page
    assert (
        "**NVIDIA H100**, 2026-11-22, torch 2.13.0, transformers 5.23.0, commit abcdef0, 2,000 reviews (imdb)" in page
    )
    assert "Not in it: losses (failed); rank (one GPU here)" in page
    assert "| blog, bf16-true | bf16-true | 50.0 |  | 15,000 | 31.0% |  | 7,000 | 5.40 | 10.0 x |" in page
    assert "| bloom-560m, 2_grad_accum | 10.00 | 10.10 | +1.0% |" in page
    assert "- gradients: passed" in page
    assert "Fastest: 5_low_precision, 15,000 tokens/s, MFU 31%, 5.40 GB." in page
    assert gpu_figures.fill(page, [harvest]) == page
    assert gpu_figures.fill(page, []).count("\n") == text.count("\n") - len(gpu_figures.BLOCKS)


def test_a_rehearsal_fills_no_page(tmp_path):
    path = tmp_path / "rehearsal.json"
    path.write_text(json.dumps(previous() | {"machine": MACHINE | {"rehearsal": True}}))
    with pytest.raises(UserError, match="say nothing of a GPU"):
        gpu_figures.read([path])
    path.write_text("[]")
    with pytest.raises(UserError, match="no file of a harvest"):
        gpu_figures.read([path])


# All of it


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_all_of_it_can_be_rehearsed_on_a_cpu(tmp_path):
    out = tmp_path / "rehearsal.json"
    command = [sys.executable, str(ROOT / "benchmarks" / "harvest.py"), "--rehearse", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    harvest = json.loads(out.read_text(encoding="utf-8"))
    assert harvest["machine"]["rehearsal"]
    assert len(harvest["entries"]) >= 20
    assert all(name.startswith(("12_", "calibration", "5_low_precision, packed")) for name in harvest["left_out"])
    text = "".join(f"<!-- gpu:{name} --><!-- /gpu -->\n" for name in gpu_figures.BLOCKS)
    harvest["machine"]["hardware"]["gpu"] = "none"
    for name in gpu_figures.BLOCKS.keys() - {"machine"}:
        assert len(block_of(gpu_figures.fill(text, [harvest]), name)) > 3, name
    again = subprocess.run(command, capture_output=True, text=True, check=False)
    assert again.returncode == 0
    assert json.loads(out.read_text(encoding="utf-8"))["entries"] == harvest["entries"]


def block_of(page, name):
    return page.split(f"<!-- gpu:{name} -->")[1].split("<!-- /gpu -->")[0].splitlines()
