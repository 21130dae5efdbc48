"""Write the folders of runs, and compare them as the script does."""

import contextlib
import dataclasses
import io
import json
import runpy
import sys
from pathlib import Path

from fabric_ladder.comparing import table
from fabric_ladder.comparing.logs import LogParser
from fabric_ladder.options import script_defaults
from support.helpers import ROOT, RUNGS, settings_for

SCRIPT = ROOT / "scripts" / "compare_runs.py"
BLOG = ROOT / "tests" / "support" / "fixtures" / "blog"
STORED = ROOT / "benchmarks" / "results" / "runs" / "quickstart" / "2_grad_accum" / "0.001" / "123" / "log.txt"
LOG = STORED.read_text(encoding="utf-8")
OWN = {rung.stem: script_defaults(rung.stem) for rung in RUNGS}
HARDWARE = {"device": "cuda", "processor": "AMD EPYC", "cores": 16, "threads": 8, "gpu": "NVIDIA A100"}


def record(name="2_grad_accum", accuracy=0.9, minutes=2.0, memory=8e9, **settings):
    """Return the content of a run.json as `Run` writes it."""
    values = {**dataclasses.asdict(settings_for(Path("/x"))), "micro_batch_size": 1, "accelerator": "cuda"}
    values |= {"name": name, "model": "bigscience/bloom-560m", "seed": 123} | settings
    values.pop("notices")
    return {
        "format": 1,
        "status": "finished",
        "settings": values,
        "versions": {"Python": "3.11.7", "torch": "2.13.0", "transformers": "5.23.0"},
        "hardware": dict(HARDWARE),
        "ranks": 1,
        "data": {"fingerprint": "abc", "train_samples": 100},
        "results": {
            "epochs": [{"train_accuracy": 0.7, "validation_accuracy": 0.8, "validation_loss": 0.5}],
            "parameters": 559_214_592,
            "trainable_parameters": 559_214_592,
            "elapsed_seconds": minutes * 60,
            "samples_per_second": 11.4,
            "tokens_per_second": 3502.0,
            "padding": 0.01,
            "peak_memory_bytes": int(memory),
            "peak_host_memory_bytes": 10**9,
            "test_accuracy": accuracy,
            "test_loss": 0.25,
            "test_samples": 1000,
        },
    }


def write_run(root, content, number=1, epochs=1):
    """Write the folder of a run of 100 training samples; a printed loss for every five, and accuracies."""
    folder = root / content["settings"]["name"] / str(number)
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(content))
    rows = ["epoch,learning_rate,loss,samples,seconds,step,train_accuracy,validation_accuracy"]
    for epoch in range(epochs):
        for seen in range(100 * epoch + 5, 100 * epoch + 101, 5):
            loss = 0.7 / (1 + seen / 100) + 0.05 * (seen % 3)
            rows.append(f"{epoch + 1},{5e-5},{loss},{seen},{6 * seen},{seen},,")
        seen = 100 * (epoch + 1)
        rows.append(f"{epoch + 1},,,{seen},{6 * seen + 30},{seen},{0.6 + 0.1 * epoch},{0.7 + 0.1 * epoch}")
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    return str(folder)


def compare(found):
    """Compare as the script does."""
    return table.compare(found, OWN)


def script(monkeypatch, *args):
    """Run the script in this process; return what it printed."""
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), *map(str, args)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return printed.getvalue()


def parse(text, name="log"):
    return LogParser("log", name).parse(text)
