"""Several gloo processes print the same losses as one process at every step, with DDP and with FSDP."""

import contextlib
import json
import multiprocessing
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.rank_zero import rank_zero_only
from support.devices import ONE_THREAD, SIZES, read, run_ranks, same
from support.helpers import MODELS, ROOT, SRC, finished, free_port, run_script
from support.resuming import Does, start_fork
from transformers import AutoModelForSequenceClassification

from fabric_ladder.checkpoints.export import find_result, load_result
from fabric_ladder.distributed import watch

# several tests share each run below
CLIP = ("--max_grad_norm", "0.05")
IN_4_BITS = ("--lora", "true", "--lora_dropout", "0", "--quantization", "nf4")
BY_TOKENS = ("9_ddp", 3, "--micro_batch_size", "null", "--micro_batch_tokens", "300")
DDP = ("9_ddp", 2, "--eval_batch_tokens", "1", "--save_every", "100")
FSDP = ("10_fsdp", 2, *CLIP, "--save", "sharded")
OFFLOAD = ("11_fsdp_cpu_offload", 2, *CLIP, "--activation_checkpointing", "true", "--save", "consolidated")
QLORA = ("10_fsdp", 2, *IN_4_BITS, "--save", "sharded")


@pytest.mark.parametrize(
    ("alone", "several"),
    [
        pytest.param((), DDP, id="ddp"),
        pytest.param(CLIP, FSDP, id="fsdp"),
        pytest.param(CLIP, OFFLOAD, id="fsdp-offload"),
        pytest.param((), BY_TOKENS, id="ddp-3", marks=pytest.mark.slow),
    ],
)
def test_more_processes_print_the_same_losses_and_accuracies(run, alone, several):
    folder, stdout = run(*several)
    single = run("2_grad_accum", 1, *alone)[0]
    same(single, folder)
    if alone == CLIP:
        assert read(single)[0] != pytest.approx(read(run("2_grad_accum", 1)[0])[0], abs=1e-5), "clipping has an effect"
    assert stdout.count("Test accuracy") == 1, "only rank 0 prints"
    assert f"batch 16 = {several[1]} x" in stdout or "--micro_batch_tokens" in several
    assert f"cpu: {several[1]} x" in stdout


def test_a_run_on_one_device_works_and_prints_a_notice(run):
    folder, stdout = run("9_ddp", 1)
    same(run("2_grad_accum", 1)[0], folder)
    assert "Running on one device. Use --devices N" in stdout


def test_each_rank_has_its_own_dropout_masks(run):
    (made,) = (run(*DDP)[0] / "checkpoints").glob("step-*")
    states = [torch.load(made / f"rank-{rank}.pt", weights_only=True)["random"]["torch"] for rank in (0, 1)]
    draws = [torch.Generator().set_state(state) for state in states]
    assert draws[0].initial_seed() != draws[1].initial_seed()
    masks = [torch.rand(1000, generator=generator) > 0.1 for generator in draws]
    assert 100 < (masks[0] != masks[1]).sum() < 300


@pytest.mark.slow
def test_ranks_exchange_the_used_rows_of_a_table_and_get_ddps_gradient_bit_by_bit(tmp_path):
    script = ROOT / "tests" / "support" / "exchanged_rows.py"
    lines = finished(run_ranks(script, 2, cwd=tmp_path)[0]).splitlines()
    found = {tuple(line.split()[:3]): int(line.split()[3]) for line in lines if line[0].isdigit()}
    assert list(found) == [("1000", "True", "False"), ("100", "True", "False"), ("1000", "True", "True")]
    rows = 6 * 12 + 1  # the most different ids of a rank
    assert found["1000", "True", "False"] <= 1 + rows * (1 + 8)
    assert found["100", "True", "False"] == 1 + 100 * 8  # many rows are used, so all are averaged


def test_offload_and_activation_checkpointing_change_no_bit(run):
    assert read(run(*OFFLOAD)[0])[0] == read(run(*FSDP)[0])[0]


def test_parameters_are_sharded(run):
    results = read(run(*DDP)[0])[2]
    whole, share = results["parameter_bytes_of_a_rank"], read(run(*FSDP)[0])[2]["parameter_bytes_of_a_rank"]
    assert whole == 4 * results["parameters"]
    assert whole / 2 <= share <= whole / 2 * 1.02, "the first rank gets the remainder of the division"


@pytest.mark.slow
def test_4_bit_weights_are_sharded_or_whole_on_each_rank(run):
    """The saved base has the constants that unpack its weights, and DDP continues from FSDP's checkpoint."""
    sharded, alone = run(*QLORA)[0], run("2_grad_accum", 1, *IN_4_BITS)[0]
    same(alone, sharded)
    halves, whole = read(sharded)[2], read(alone)[2]
    assert halves["dtypes"] == whole["dtypes"] == ["torch.float32", "torch.uint8"]
    assert halves["parameters"] == whole["parameters"]
    assert halves["parameter_bytes_of_a_rank"] == pytest.approx(whole["parameter_bytes_of_a_rank"] / 2, rel=0.02)
    more = (*IN_4_BITS, "--load", str(sharded / "checkpoint"), "--save", "consolidated")
    one, two = (run(*rung, *more)[0] for rung in (("2_grad_accum", 1), ("9_ddp", 2)))
    same(one, two)
    assert abs(read(one)[0][0] - read(sharded)[0][0]) > 1e-3, "the run starts from the trained adapters"
    bases = [(folder / "base" / "model.safetensors").read_bytes() for folder in (one, two, sharded)]
    assert bases[0] == bases[1] == bases[2]
    model = load_result(find_result(sharded))
    ids = torch.arange(24).view(2, 12)
    trained = model(ids).logits
    with model.disable_adapter():
        assert not torch.allclose(model(ids).logits, trained, atol=1e-3)


def test_checkpoints_of_two_ranks_are_read_by_one_and_by_transformers(run):
    sharded, stdout = run(*FSDP)
    assert f"Saved {os.path.join('runs', '10_fsdp', '1', 'checkpoint')}" in stdout
    whole, _ = run(*OFFLOAD)
    model = AutoModelForSequenceClassification.from_pretrained(whole / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) == read(whole)[2]["parameters"]
    first = read(run("2_grad_accum", 1, "--load", str(sharded / "checkpoint"))[0])[0][0]
    assert abs(first - read(sharded)[0][0]) > 1e-3, "the run starts from the trained weights"
    again = ("--from_scratch", "false", "--model", str(whole / "model"))
    assert read(run("10_fsdp", 1, *again)[0])[0][0] == pytest.approx(first, abs=1e-6)


@pytest.mark.slow
def test_checkpoints_of_two_ranks_resume_on_one_and_four(run):
    sharded = ("--load", str(run(*FSDP)[0] / "checkpoint"))
    single = run("2_grad_accum", 1, *sharded)[0]
    for rung in (("10_fsdp", 1), ("10_fsdp", 4), ("9_ddp", 4)):
        same(single, run(*rung, *sharded)[0])
    whole = ("--from_scratch", "false", "--model", str(run(*OFFLOAD)[0] / "model"))
    same(run("10_fsdp", 1, *whole)[0], run("2_grad_accum", 1, *whole)[0])


@pytest.mark.parametrize("fault", ["another model", "no shard of rank 1"])
def test_a_checkpoint_that_does_not_fit_is_refused_in_one_line(run, tmp_path, fault):
    checkpoint = shutil.copytree(run(*FSDP)[0] / "checkpoint", tmp_path / "checkpoint")
    more = ["--model", MODELS / "llama-tiny.json"] if fault == "another model" else []
    if not more:
        next(checkpoint.glob(f"shard-0000{int(fault[-1]) + 1}-*")).unlink()
    process = run_script(SRC / "10_fsdp.py", *SIZES, "--load", checkpoint, *more, cwd=tmp_path, **ONE_THREAD)
    assert process.returncode == 2
    line = r"^error: --load \S+checkpoint: made with another model or optimizer, or damaged \("
    assert re.search(line, process.stderr, re.MULTILINE)
    assert "Traceback" not in process.stderr


def test_a_sharded_checkpoint_is_exported_to_the_consolidated_model(run, tmp_path):
    """The export runs in one process without the data, and reads the other ranks' shards from the disk."""
    plain, whole = tmp_path / "plain", run(*OFFLOAD)[0] / "model"
    source = run(*FSDP)[0]
    stdout = finished(run_script(ROOT / "scripts" / "export_model.py", source, "--output", plain, cwd=tmp_path))
    assert stdout == f"Saved {plain}\n"
    (plain / "README.md").unlink()  # the model card
    for path in plain.iterdir():
        assert path.read_bytes() == (whole / path.name).read_bytes(), path.name
    assert {path.name for path in plain.iterdir()} == {path.name for path in whole.iterdir()}


def end_one(ranks, victim, signal_name, folder):
    """Send a signal to a rank; the other ranks must end by themselves and name it on stderr."""
    os.kill(ranks[victim].pid, signal.Signals[f"SIG{signal_name}"])
    try:
        for rank, process in enumerate(ranks):
            if rank != victim:
                process.join(60)
                assert process.exitcode, "it has not ended, or without an error"
                text = (folder / f"stderr-{rank}").read_text()
                named = rf"error: rank {victim} \(process {ranks[victim].pid} on .*\) has died or hangs"
                assert re.search(named, text), text
                assert "Traceback" not in text
    finally:
        for process in ranks:
            process.kill()
            process.join()


def become_rank(folder, rank, port):
    """Make a fork of the tests' process one of two ranks; a launcher would end it when another rank dies."""
    sys.stderr = open(folder / f"stderr-{rank}", "w", buffering=1)  # noqa: SIM115
    os.dup2(sys.stderr.fileno(), 2)
    rank_zero_only.rank = rank  # Lightning reads it when it is imported
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": 2, "NODE_RANK": 0, "LOCAL_RANK": rank}
    os.environ |= {name: str(value) for name, value in variables.items()}


def wait_for_ever(folder, rank, count, port, met):
    become_rank(folder, rank, port)
    watch.PATIENCE = 5.0
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=count)
    ranks = watch.RankWatch()
    ranks.meet()
    met.wait()
    if rank == 1:
        time.sleep(600)  # the other ranks' collective waits for this rank
    try:
        dist.barrier()
    except RuntimeError as error:
        if not watch.lost_contact(error):
            raise
        ranks.join()  # the watch ends this process


@pytest.mark.parametrize(
    ("victim", "signal_name", "count"), [(0, "KILL", 2), pytest.param(1, "STOP", 3, marks=pytest.mark.slow)]
)
def test_the_watch_ends_a_rank_and_names_the_rank_that_is_killed_or_hangs(tmp_path, victim, signal_name, count):
    """The main thread waits in a collective that never ends."""
    port, met = free_port(), multiprocessing.Barrier(count + 1, timeout=60)
    ranks = [start_fork(wait_for_ever, tmp_path, rank, count, port, met) for rank in range(count)]
    met.wait()
    end_one(ranks, victim, signal_name, tmp_path)


def train_rank(folder, rank, port, trains):
    become_rank(folder, rank, port)
    os.chdir(folder)
    script = str(SRC / "10_fsdp.py")
    sys.argv = [script, *SIZES, "--devices", "2", "--epochs", "1000", "--save_every", "1000"]
    try:
        with contextlib.redirect_stdout(Does("Loss", trains.set)):
            runpy.run_path(script, run_name="__main__")
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)


@pytest.mark.slow
def test_a_dead_rank_ends_the_others_within_a_minute(tmp_path):
    """The run ends within a minute, in the middle of training, and names the command that resumes."""
    port, trains = free_port(), multiprocessing.Event()
    ranks = [start_fork(train_rank, tmp_path, rank, port, trains) for rank in range(2)]
    assert trains.wait(60)
    end_one(ranks, 1, "KILL", tmp_path)
    line = (tmp_path / "stderr-0").read_text()
    assert re.search(r"stops on all ranks; go on with: .*10_fsdp.py .*--save_every 1000 --resume auto\n", line), line
    assert json.loads((tmp_path / "runs" / "10_fsdp" / "1" / "run.json").read_text())["status"] == "stopped"


@pytest.mark.slow
def test_launchers_start_the_same_script_and_give_the_same_losses(run, tmp_path):
    bin_folder = os.path.dirname(sys.executable)
    by_torch = ["torchrun", "--standalone", "--nproc-per-node", "2"]
    by_fabric = ["fabric", "run", "--devices", "2", "--main-port", str(free_port())]  # the default port may be in use
    for number, launcher in enumerate((by_torch, by_fabric)):
        cwd = tmp_path / str(number)
        cwd.mkdir()
        command = [os.path.join(bin_folder, launcher[0]), *launcher[1:], str(SRC / "9_ddp.py"), *SIZES]
        environment = os.environ | ONE_THREAD | {"PATH": f"{bin_folder}:{os.environ['PATH']}"}
        process = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=200)
        finished(process)
        same(run("2_grad_accum", 1)[0], cwd / "runs" / "9_ddp" / "1")
        record = json.loads((cwd / "runs" / "9_ddp" / "1" / "run.json").read_text())
        words = [*launcher, str(SRC / "9_ddp.py"), *SIZES]
        if launcher == by_fabric:  # Fabric's launcher reads --precision at any position
            words = [*words[:-2], "--precision=32-true"]
        assert shlex.split(record["command"]) == words
