"""Snapshots of GPU memory. No GPU has run this: PyTorch's profiler records a CPU's memory in the same format."""

import io
import pickle
import sys
from dataclasses import replace

import pytest
import torch
from support.helpers import SRC, run_script, settings_for
from support.training import losses, run_training
from torch.cuda import _memory_viz
from torch.profiler import ProfilerActivity, profile

from fabric_ladder import UserError
from fabric_ladder.runs import memory_history
from fabric_ladder.runs.memory_history import check_snapshot
from fabric_ladder.runs.progress_bar import ProgressBar


class Allocator:
    """Stands in for the two functions of the CUDA allocator; the snapshot is of real tensors on the CPU."""

    def __init__(self, monkeypatch):
        self.calls = []
        monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", self.record)
        monkeypatch.setattr(torch.cuda.memory, "_snapshot", self.snapshot)

    def record(self, enabled="all", **options):
        self.calls.append(enabled and options)

    def snapshot(self, **_):
        self.calls.append("snapshot")
        activities = [ProfilerActivity.CPU]
        with profile(activities=activities, profile_memory=True, with_stack=True, record_shapes=True) as profiler:
            self.kept = torch.ones(1000)
            torch.ones(1000) + self.kept
        return _memory_viz._profile_to_snapshot(profiler)


@pytest.fixture
def allocator(monkeypatch):
    return Allocator(monkeypatch)


BEGUN = {"stacks": "python", "max_entries": memory_history.MOST}


def test_a_snapshot_is_written_after_the_third_step_and_the_viewer_reads_it(tmp_path, allocator, capsys):
    file = tmp_path / "memory.pickle"
    plain, _ = run_training(tmp_path)
    assert allocator.calls == [], "only if it is asked for"
    run, _ = run_training(tmp_path, memory_snapshot=str(file))
    assert allocator.calls == [BEGUN, "snapshot", None], "recording stops with the snapshot"
    assert losses(run) == losses(plain)
    assert f"Wrote {file}; open it at pytorch.org/memory_viz" in capsys.readouterr().out
    snapshot = pickle.loads(file.read_bytes())
    assert any(event["action"] == "alloc" for trace in snapshot["device_traces"] for event in trace)
    assert "# free completed" in _memory_viz.trace(snapshot | {"segments": []})  # the profiler's lack some sums
    assert "add_local_files" in _memory_viz.trace_plot(snapshot)


def test_out_of_memory_writes_it_too(tmp_path, allocator):
    def out_of_memory(model, _):
        def fail(*_):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")

        model.register_forward_pre_hook(fail)

    with pytest.raises(torch.OutOfMemoryError):
        run_training(tmp_path, prepare=out_of_memory, memory_snapshot=str(tmp_path / "memory.pickle"))
    assert pickle.loads((tmp_path / "memory.pickle").read_bytes()).keys() == {"segments", "device_traces"}
    assert allocator.calls == [BEGUN, "snapshot", None]


def test_an_allocator_without_a_history_is_an_error(tmp_path, allocator, monkeypatch):
    def refuse(**_):
        raise RuntimeError("cudaMallocAsync does not yet support recordHistory\nmore")

    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", refuse)
    with pytest.raises(UserError, match=r"^--memory_snapshot a\.pickle: cudaMallocAsync [^\n]*; leave it out$"):
        run_training(tmp_path, memory_snapshot="a.pickle")


def test_without_cuda_it_is_refused_in_one_line(tmp_path):
    process = run_script(SRC / "2_grad_accum.py", "--memory_snapshot", "a.pickle", cwd=tmp_path)
    line = "error: --memory_snapshot a.pickle: PyTorch records memory on CUDA GPUs, not on cpu; leave it out"
    assert (process.returncode, process.stderr.splitlines()[-1]) == (2, line)
    with pytest.raises(UserError, match="not on mps; leave it out"):
        check_snapshot(replace(settings_for(tmp_path), memory_snapshot="a.pickle", accelerator="mps"))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_progress_bar_ends_with_the_memory_in_use(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stderr", Terminal())
    run_training(tmp_path)
    lines = sys.stderr.getvalue().split("\r")
    assert any(" 0/3 " in line and " GB in use]" in line for line in lines), lines
    drawn = Terminal()
    list(ProgressBar(range(3), device=torch.device("mps"), file=drawn))
    assert "GB" not in drawn.getvalue()
    list(ProgressBar(range(3), device=torch.device("cpu"), file=drawn, disable=True))
