"""Several real processes (gloo) against one: the same losses step by step, whatever is shared out or sharded."""

import csv
import json
import os
import re
import signal
import subprocess
import sys
from time import monotonic, sleep

import psutil
import pytest
from helpers import MODELS, ROOT, SRC, finished, free_port, run_script
from transformers import AutoModelForSequenceClassification

# 101 = 6 x 16 + 5 training samples: the last batch gives three ranks 2, 2 and 1; 33 test samples are odd for all
SIZES = "--train_samples 101 --validation_samples 21 --test_samples 33 --log_every 1 --eval_batch_tokens 400".split()
SIZES += ["--micro_batch_size", "2", "--precision", "32-true"]
ONE_THREAD = {"OMP_NUM_THREADS": "1"}


def read(folder):
    """Losses and learning rates of all steps, and what run.json says."""
    with open(folder / "metrics.csv", newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["loss"]]
    losses, rates = ([float(row[name]) for row in rows] for name in ("loss", "learning_rate"))
    return losses, rates, json.loads((folder / "run.json").read_text())["results"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Run a rung once for each set of arguments; returns the folder of the run, and its stdout."""
    done = {}

    def run(name, devices, *more):
        key = (name, devices, *more)
        if key not in done:
            cwd = tmp_path_factory.mktemp(f"{name}-{devices}")
            arguments = [*SIZES, *(("--devices", devices) if devices > 1 else ()), *more]
            stdout = finished(run_script(SRC / f"{name}.py", *arguments, cwd=cwd, **ONE_THREAD))
            done[key] = cwd / "runs" / name / "1", stdout
        return done[key]

    return run


def same(first, second, abs=1e-5):
    """Assert that two runs printed the same losses and accuracies."""
    (losses, rates, results), (others, other_rates, other) = read(first), read(second)
    assert len(losses) == 7
    assert others == pytest.approx(losses, abs=abs)
    assert rates == other_rates
    assert other["epochs"] == [pytest.approx(epoch, abs=abs) for epoch in results["epochs"]]
    assert (other["test_samples"], other["test_accuracy"]) == (33, results["test_accuracy"])


@pytest.mark.parametrize(
    ("name", "devices", "more"),
    [
        ("9_ddp", 2, ()),
        ("9_ddp", 3, ("--micro_batch_tokens", "300")),
        ("10_fsdp", 2, ()),
        ("10_fsdp", 4, ()),
        ("10_fsdp", 2, ("--activation_checkpointing", "true")),
        ("11_fsdp_cpu_offload", 2, ()),
    ],
)
def test_more_processes_print_the_same_losses_and_accuracies(run, name, devices, more):
    folder, stdout = run(name, devices, *more)
    same(run("2_grad_accum", 1)[0], folder)
    assert stdout.count("Test accuracy") == 1, "rank 0 alone prints"
    assert f"batch 16 = {devices} x" in stdout or more[0] == "--micro_batch_tokens"
    assert f"cpu: {devices} x" in stdout


@pytest.mark.parametrize("name", ["9_ddp", "10_fsdp"])
def test_clipping_takes_the_norm_over_all_ranks(run, name):
    clip = ("--max_grad_norm", "0.05")
    same(run("2_grad_accum", 1, *clip)[0], run(name, 2, *clip)[0])
    assert read(run("2_grad_accum", 1, *clip)[0])[0] != pytest.approx(read(run("2_grad_accum", 1)[0])[0], abs=1e-5)


def test_one_device_is_enough_and_the_run_says_so(run):
    for name in ("9_ddp", "10_fsdp", "11_fsdp_cpu_offload"):
        folder, stdout = run(name, 1)
        same(run("2_grad_accum", 1)[0], folder)
        assert "One device: nothing to share it out to" in stdout


def test_offload_and_activation_checkpointing_change_no_bit(run):
    losses = read(run("10_fsdp", 2)[0])[0]
    assert read(run("11_fsdp_cpu_offload", 2)[0])[0] == losses
    assert read(run("10_fsdp", 2, "--activation_checkpointing", "true")[0])[0] == losses


def test_parameters_are_really_sharded(run):
    whole = read(run("9_ddp", 2)[0])[2]["parameter_bytes_of_a_rank"]
    assert whole == 4 * read(run("9_ddp", 2)[0])[2]["parameters"]
    for devices in (2, 4):
        share = read(run("10_fsdp", devices)[0])[2]["parameter_bytes_of_a_rank"]
        assert whole / devices <= share <= whole / devices * 1.02, "the rest of a division goes to the first ranks"


def test_evaluation_on_two_processes_does_not_depend_on_the_batch_size(run):
    results = read(run("9_ddp", 2, "--eval_batch_tokens", "1")[0])[2]
    assert results["test_accuracy"] == read(run("2_grad_accum", 1)[0])[2]["test_accuracy"]


def test_a_sharded_checkpoint_of_two_ranks_goes_on_with_one_two_and_four(run):
    saved, stdout = run("10_fsdp", 2, "--save", "sharded")
    assert f"Saved {os.path.join('runs', '10_fsdp', '1', 'checkpoint')}" in stdout
    checkpoint = ("--load", str(saved / "checkpoint"))
    folders = [run("10_fsdp", devices, *checkpoint)[0] for devices in (1, 2, 4)]
    folders.append(run("2_grad_accum", 1, *checkpoint)[0])
    for folder in folders[1:]:
        same(folders[0], folder)
    assert abs(read(folders[0])[0][0] - read(saved)[0][0]) > 1e-3, "it went on from what was learned"


def test_a_checkpoint_of_another_optimizer_is_one_line(run, tmp_path):
    saved, _ = run("10_fsdp", 2, "--save", "sharded")
    arguments = [*SIZES, "--load", saved / "checkpoint", "--model", MODELS / "llama-tiny.json"]
    process = run_script(SRC / "10_fsdp.py", *arguments, cwd=tmp_path, **ONE_THREAD)
    assert process.returncode == 2
    assert re.search(
        r"^error: --load \S+checkpoint: made with another model or optimizer", process.stderr, re.MULTILINE
    )
    assert "Traceback" not in process.stderr


def test_a_consolidated_model_is_read_by_transformers_and_by_any_rung(run):
    saved, _ = run("10_fsdp", 2, "--save", "consolidated")
    model = AutoModelForSequenceClassification.from_pretrained(saved / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == read(saved)[2]["parameters"]
    again = ("--from_scratch", "false", "--model", str(saved / "model"))
    same(run("10_fsdp", 1, *again)[0], run("10_fsdp", 4, *again)[0])
    first = read(run("10_fsdp", 1, "--load", str(run("10_fsdp", 2, "--save", "sharded")[0] / "checkpoint"))[0])[0][0]
    assert read(run("10_fsdp", 1, *again)[0])[0][0] == pytest.approx(first, abs=1e-6)


def test_a_sharded_checkpoint_is_exported_to_the_consolidated_model(run, tmp_path):
    """In one process, without the data; other ranks' shards are read from the disk."""
    plain, (whole, _) = tmp_path / "plain", run("10_fsdp", 2, "--save", "consolidated")
    source = run("10_fsdp", 2, "--save", "sharded")[0]
    stdout = finished(run_script(ROOT / "scripts" / "export_model.py", source, "--output", plain, cwd=tmp_path))
    assert stdout == f"Saved {plain}\n"
    for path in plain.iterdir():
        assert path.read_bytes() == (whole / "model" / path.name).read_bytes(), path.name
    assert {path.name for path in plain.iterdir()} == {path.name for path in (whole / "model").iterdir()}


def test_an_optimizer_made_before_sharding_is_refused(tmp_path):
    source = (SRC / "10_fsdp.py").read_text()
    joint = source.replace("    model = fabric.setup(model)\n", "    early = build_optimizer(settings, model)\n" * 1
                           + "    model = fabric.setup(model)\n")  # fmt: skip
    joint = joint.replace("fabric.setup_optimizers(build_optimizer(settings, model))", "fabric.setup_optimizers(early)")
    (tmp_path / "joint.py").write_text(joint)
    process = run_script(tmp_path / "joint.py", *SIZES, cwd=tmp_path, **ONE_THREAD)
    assert process.returncode != 0
    assert "make it after fabric.setup(model)" in process.stderr


def test_a_nan_on_several_processes_ends_them_all(tmp_path):
    arguments = [*SIZES, "--devices", 2, "--learning_rate", "1e35"]
    # fresh: a fork is so much in step with rank 1 that both write at once, and `print` writes a line in pieces
    process = run_script(SRC / "9_ddp.py", *arguments, cwd=tmp_path, timeout=120, **ONE_THREAD)
    assert process.returncode == 2
    said = re.findall(r"^error(?: on rank 1)?: the loss is", process.stderr, re.MULTILINE)
    assert said, "the first to fail says so; the launcher may end the other before it can"
    assert "Traceback" not in process.stderr


@pytest.mark.parametrize(("victim", "how"), [(0, "KILL"), (2, "KILL"), (1, "STOP")])
def test_a_rank_that_is_killed_or_hangs_ends_the_others_and_is_named(tmp_path, victim, how):
    command = [sys.executable, str(SRC / "10_fsdp.py"), *SIZES, "--devices", "3", "--epochs", "1000"]
    with open(tmp_path / "stderr", "w") as stderr:
        process = subprocess.Popen(
            command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=stderr, text=True, env=os.environ | ONE_THREAD
        )
        for line in process.stdout:
            if "Loss" in line:
                break
        launched = psutil.Process(process.pid).children()
        ranks = {int(child.environ()["LOCAL_RANK"]): child for child in launched if "LOCAL_RANK" in child.environ()}
        everyone = [psutil.Process(process.pid), *ranks.values()]
        assert sorted(ranks) == [1, 2]
        (ranks | {0: process})[victim].send_signal(signal.Signals[f"SIG{how}"])
        killed = monotonic()
        assert process.wait(timeout=60) != 0
        if how == "STOP" and ranks[victim].is_running():
            ranks[victim].kill()
        while any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in everyone):
            assert monotonic() - killed < 60
            sleep(0.2)
    text = (tmp_path / "stderr").read_text()
    named = rf"error: rank {victim} \(process {(ranks | {0: process})[victim].pid} on .*\) has died or hangs"
    by_launcher = rf"\[rank: {victim}\] Child process with PID \d+ terminated with code -9"
    assert re.search(f"{named}|{by_launcher}", text), text
    assert "Traceback" not in text


def test_launchers_start_the_same_script_and_give_the_same_losses(run, tmp_path):
    bin_folder = os.path.dirname(sys.executable)
    by_torch = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    by_fabric = ["fabric", "run", "--devices", "2", "--main-port", str(free_port())]  # or other tests have its default
    for number, launcher in enumerate((by_torch, by_fabric)):
        cwd = tmp_path / str(number)
        cwd.mkdir()
        command = [os.path.join(bin_folder, launcher[0]), *launcher[1:], str(SRC / "9_ddp.py"), *SIZES]
        environment = os.environ | ONE_THREAD | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
        process = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
        finished(process)
        same(run("9_ddp", 2)[0], cwd / "runs" / "9_ddp" / "1")
