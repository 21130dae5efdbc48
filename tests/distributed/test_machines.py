"""Several machines: torchrun, Slurm's environment variables, and the files for clouds."""

import os
import re
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic, sleep

import psutil
import pytest
import yaml
from support.devices import ONE_THREAD, SIZES, read, same
from support.helpers import ROOT, SRC, finished, free_port, run_script

from fabric_ladder import Settings, UserError
from fabric_ladder.distributed.launch import check_launcher, command_line, find_launcher, options_of_fabric_run
from fabric_ladder.techniques.advice import less_memory

BIN = os.path.dirname(sys.executable)
CLOUD = ROOT / "configs" / "cloud"


def slurm(rank):
    tasks = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"}
    tasks |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    node = {"SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_ID": "2951", "SLURM_JOB_NAME": "ladder"}
    return tasks | node


@pytest.mark.slow
def test_sruns_ranks_are_read_from_slurm(run, tmp_path):
    def start(rank):
        (tmp_path / str(rank)).mkdir()
        return run_script(SRC / "9_ddp.py", *SIZES, cwd=tmp_path / str(rank), **ONE_THREAD, **slurm(rank))

    with ThreadPoolExecutor(2) as pool:
        first, _ = map(finished, pool.map(start, (0, 1)))
    assert "batch 16 = 2 x 2 x 4" in first
    same(run("2_grad_accum", 1)[0], tmp_path / "0" / "runs" / "9_ddp" / "1")


@pytest.mark.parametrize(
    ("name", "arguments", "environment", "message"),
    [
        ("9_ddp", ("--devices", 4), slurm(0), "--devices 4 --num_nodes 1, but srun started 2 processes on each of 1"),
        ("9_ddp", (), {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "use --nodes and --ntasks-per-node instead"),
        ("2_grad_accum", (), {"LOCAL_RANK": "x"}, "LOCAL_RANK is 'x' and must be a number: unset LOCAL_RANK"),
        ("9_ddp", ("--num_nodes", 2), {}, "--num_nodes 2: start the script on every machine with torchrun or srun"),
        ("9_ddp", ("--devices", 32), {}, "--batch_size 16 is below the number of devices, 32"),
    ],
)
def test_impossible_counts_are_refused_in_one_line(tmp_path, name, arguments, environment, message):
    process = run_script(SRC / f"{name}.py", *arguments, cwd=tmp_path, **environment)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith("error: ")
    assert message in process.stderr
    assert not list(tmp_path.iterdir())


def test_counts_are_read_from_the_variables_of_torchrun_and_fabric_run(monkeypatch):
    started = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "LT_CLI_USED": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert find_launcher() == ("fabric run", 2, 2)
    monkeypatch.setenv("LT_PRECISION", "bf16-true")
    monkeypatch.setattr(sys, "argv", ["src/9_ddp.py"])
    assert options_of_fabric_run() == ["--precision=bf16-true"]
    assert sys.argv == ["src/9_ddp.py", "--precision=bf16-true"], "commands are printed from here"
    monkeypatch.setenv("LT_STRATEGY", "ddp")
    with pytest.raises(UserError, match="fabric run --strategy=ddp: leave it out; the script sets the strategy"):
        options_of_fabric_run()
    monkeypatch.delenv("LT_CLI_USED")
    settings = Settings(name="9_ddp", strategy="ddp", devices=3)
    with pytest.raises(UserError, match="--devices 3 --num_nodes 1, but torchrun started 2 processes on each of 2"):
        check_launcher(settings)


SLURM = {"SLURM_NTASKS": "4", "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_JOB_NAME": "ladder"}
DEEPSPEED = {"LOCAL_SIZE": "2", "LOCAL_RANK": "0", "CROSS_SIZE": "1"}  # with RANK, WORLD_SIZE, MASTER_ADDR and more
ELASTIC = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environment", "start"),
    [
        (SLURM, "srun --nodes=2 --ntasks-per-node=2 python src/9_ddp.py"),
        (ELASTIC, "torchrun --nnodes=2 --nproc-per-node=2 src/9_ddp.py"),
        (DEEPSPEED, "deepspeed --num_nodes=1 --num_gpus=2 src/9_ddp.py"),
    ],
)
def test_the_command_that_resumes_names_the_launcher(monkeypatch, environment, start):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "argv", ["src/9_ddp.py", "--seed", "5"])
    assert command_line(Path("src/9_ddp.py"), ["--resume", "auto"]) == f"{start} --resume auto"
    advice = less_memory(Settings(name="9_ddp", micro_batch_size=8, devices=2, num_nodes=2, accelerator="cpu"))
    assert f"{start} --seed 5 --micro_batch_size 4 (the same effective batch" in advice


@pytest.mark.slow
def test_a_restarted_machine_rejoins_the_resumed_run(run, tmp_path):
    """The second of two torchruns is killed with its rank and then started again."""
    environment = os.environ | ONE_THREAD | {"PATH": f"{BIN}:{os.environ['PATH']}", "HOST": "127.0.0.1"}
    environment |= {"PORT": str(free_port()), "ADDRESS": "127.0.0.1", "GPUS": "1", "NODES": "1:2"}
    rung = [str(SRC / "9_ddp.py"), *SIZES, "--epochs", "20", "--save_every", "2"]
    command = ["bash", str(CLOUD / "torchrun_elastic.sh"), *rung]
    logs = [tmp_path / f"{name}.txt" for name in ("first", "second", "again")]

    def begin(log):
        with open(log, "w") as file:
            return subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=file, stderr=subprocess.STDOUT)

    def has_store():
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", int(environment["PORT"]))) == 0

    processes = [begin(logs[0])]
    try:
        wait_until(has_store, processes)  # otherwise the second torchrun might keep the list of machines
        processes.append(begin(logs[1]))
        home = tmp_path / "runs" / "9_ddp" / "1"
        wait_until(lambda: [*home.glob("checkpoints/step-*")], processes)
        kill(processes[1])
        wait_until(lambda: "has died" in logs[0].read_text() or "onnection" in logs[0].read_text(), processes[:1])
        processes[1] = begin(logs[2])
        for process in processes:
            assert process.wait(timeout=240) == 0, "".join(log.read_text()[-1500:] for log in logs)
    finally:
        for process in processes:
            kill(process)
    printed = "".join(log.read_text() for log in logs)
    steps = [int(step) for step in re.findall(r"^Resumed from .*/step-(\d+)", printed, re.M)]
    assert steps == sorted(set(steps))
    assert len(steps) in (1, 2), "it continues with one machine, then with both"
    assert [path.name for path in home.parent.iterdir()] == ["1"], "a single run from beginning to end"
    alone = read(run("9_ddp", 2, "--epochs", "20")[0])
    losses, rates, results = read(home)
    assert losses == pytest.approx(alone[0], abs=1e-4)
    assert rates == alone[1]
    assert results["samples_hash"] == alone[2]["samples_hash"]
    assert results["test_accuracy"] == alone[2]["test_accuracy"]


def kill(process):
    """Kill a process and its children. The children have their own sessions."""
    if process.poll() is None:
        for each in [*psutil.Process(process.pid).children(recursive=True), process]:
            each.kill()
        process.wait()


def wait_until(found, processes, seconds=180):
    end = monotonic() + seconds
    while not found():
        assert monotonic() < end, "timeout"
        assert not [process for process in processes if process.poll() is not None], "a process ended early"
        sleep(0.1)


def test_kubeflow_can_read_the_trainjob():
    """Kubeflow's own classes read the file. They drop unknown keys."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs requirements-dev.txt")
    job = yaml.safe_load((CLOUD / "trainjob.yaml").read_text())
    job["spec"]["trainer"]["resourcesPerNode"]["limits"]["nvidia.com/gpu"] = "8"  # the class stores a string
    assert models.TrainerV1alpha1TrainJob.from_dict(job).to_dict() == job
    with pytest.raises(ValueError, match="runtimeRef"):
        models.TrainerV1alpha1TrainJob.from_dict(job | {"spec": {}})


@pytest.mark.parametrize("name", ["skypilot.yaml", "trainjob.yaml"])
def test_the_commands_in_the_files_for_clouds_start_a_rung(tmp_path, name):
    """A fake `torchrun` prints its arguments."""
    job = yaml.safe_load((CLOUD / name).read_text())
    script = job["run"] if "run" in job else job["spec"]["trainer"]["args"][0]
    script = script.replace("cd /workspace", f"cd {ROOT}").replace("source .venv/bin/activate", "")
    fake = tmp_path / "torchrun"
    fake.write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **job.get("envs", {})}
    environment |= {"SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    environment |= {"SKYPILOT_NUM_GPUS_PER_NODE": "8", "SKYPILOT_TASK_ID": "7", "PET_MASTER_ADDR": "10.0.0.1"}
    environment |= {"PET_MASTER_PORT": "29500", "PET_NNODES": "2", "PET_NPROC_PER_NODE": "8"}
    process = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr
    given = process.stdout.splitlines()
    assert {"--nnodes=2", "--nproc-per-node=8", "--max-restarts=3", "--rdzv-endpoint=10.0.0.1:29500"} <= set(given)
    rung = next(number for number, word in enumerate(given) if word.startswith("src/"))
    assert (ROOT / given[rung]).is_file()
    assert given[rung + 1 : rung + 5] == ["--save_every", "200", "--resume", "auto"]
    assert given[-2:] == ["--runs_dir", "/runs"]
    if name == "skypilot.yaml":
        assert "--local-addr=10.0.0.2" in given
