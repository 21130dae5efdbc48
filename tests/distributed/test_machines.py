"""Two machines: two network namespaces joined by a virtual cable, and Slurm's variables, set by hand."""

import os
import shutil
import subprocess
import sys

import pytest
from support.devices import ONE_THREAD, SIZES, same
from support.helpers import SRC, free_port, run_script

from fabric_ladder import Settings, UserError
from fabric_ladder.distributed.launch import check_launcher, find_launcher, options_of_fabric_run

TORCHRUN = os.path.join(os.path.dirname(sys.executable), "torchrun")


@pytest.fixture
def machines():
    """Names and addresses of two network namespaces that reach each other and nothing else."""
    ip = shutil.which("ip") or shutil.which("ip", path="/usr/sbin:/sbin")
    names = [f"ladder{number}-{os.getpid()}" for number in (1, 2)]

    def run(*arguments):
        subprocess.run([ip, *arguments], check=True, capture_output=True)

    if ip is None:
        pytest.skip("needs `ip` (iproute2) to make network namespaces")
    try:
        for name in names:
            run("netns", "add", name)
        run("link", "add", "cable1", "netns", names[0], "type", "veth", "peer", "name", "cable2", "netns", names[1])
        for number, name in enumerate(names, start=1):
            run("-n", name, "addr", "add", f"10.213.7.{number}/24", "dev", f"cable{number}")
            for device in ("lo", f"cable{number}"):
                run("-n", name, "link", "set", device, "up")
    except subprocess.CalledProcessError as error:
        pytest.skip(f"needs the right to make network namespaces ({error.stderr.decode().strip()})")
    else:
        yield [([ip, "netns", "exec", name], f"10.213.7.{number}") for number, name in enumerate(names, start=1)]
    finally:
        for name in names:
            subprocess.run([ip, "netns", "delete", name], capture_output=True, check=False)


def wait(processes):
    outputs = [process.communicate(timeout=240) for process in processes]
    for process, (_, stderr) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, stderr[-3000:]
    return [stdout for stdout, _ in outputs]


def start(command, cwd, **environment):
    cwd.mkdir()
    environment = os.environ | ONE_THREAD | environment
    return subprocess.Popen(
        command, cwd=cwd, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["9_ddp", "10_fsdp"])
def test_two_machines_give_the_losses_of_one(run, machines, tmp_path, name):
    processes, port = [], free_port()
    for number, (enter, address) in enumerate(machines):
        launcher = [TORCHRUN, "--nnodes=2", "--nproc-per-node=1", f"--node-rank={number}", f"--local-addr={address}"]
        launcher += ["--master-addr=10.213.7.1", f"--master-port={port}"]
        command = [*enter, *launcher, str(SRC / f"{name}.py"), *SIZES]
        processes.append(start(command, tmp_path / str(number), GLOO_SOCKET_IFNAME=f"cable{number + 1}"))
    stdout = wait(processes)
    assert "batch 16 = 2 x 4 x 2" in stdout[0]
    assert "Test accuracy" not in stdout[1], "rank 0 alone prints"
    same(run("2_grad_accum", 1)[0], tmp_path / "0" / "runs" / name / "1")


def slurm(rank, **more):
    tasks = {"SLURM_NTASKS": "2", "SLURM_NNODES": "1", "SLURM_NTASKS_PER_NODE": "2"}
    tasks |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)}
    node = {"SLURM_NODEID": "0", "SLURM_NODELIST": "127.0.0.1", "SLURM_JOB_ID": "2951", "SLURM_JOB_NAME": "ladder"}
    return tasks | node | more


@pytest.mark.slow
def test_srun_s_ranks_are_taken_from_slurm(run, tmp_path):
    command = [sys.executable, str(SRC / "9_ddp.py"), *SIZES]
    stdout = wait([start(command, tmp_path / str(rank), **slurm(rank)) for rank in (0, 1)])
    assert "batch 16 = 2 x 4 x 2" in stdout[0]
    same(run("2_grad_accum", 1)[0], tmp_path / "0" / "runs" / "9_ddp" / "1")


@pytest.mark.parametrize(
    ("name", "arguments", "environment", "says"),
    [
        ("9_ddp", ("--devices", 4), slurm(0), "--devices 4, but srun started 2 processes on each of 1 machines"),
        ("9_ddp", ("--num_nodes", 3), slurm(0), "--num_nodes 3, but srun started 2 processes on each of 1 machines"),
        ("2_grad_accum", (), slurm(0), "srun started 2 processes, but 2_grad_accum runs on one device"),
        ("9_ddp", (), {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}, "use --nodes and --ntasks-per-node instead"),
        ("9_ddp", ("--num_nodes", 2), {}, "--num_nodes 2: start the script on every machine by torchrun or srun"),
        ("9_ddp", ("--devices", 0), {}, "--devices 0: must be at least 1"),
        ("9_ddp", ("--devices", 32), {}, "--batch_size 16 is below the number of devices, 32"),
        ("2_grad_accum", ("--devices", 2), {}, "2_grad_accum runs on one"),
        ("10_fsdp", ("--precision", "64-true"), {}, "FSDP2 under Fabric cannot do it"),
        ("9_ddp", ("--offload", "true"), {}, "9_ddp has no use for it; run src/11_fsdp_cpu_offload.py"),
    ],
)
def test_counts_that_cannot_be_are_one_line(tmp_path, name, arguments, environment, says):
    process = run_script(SRC / f"{name}.py", *arguments, cwd=tmp_path, **environment)
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1].startswith("error: ")
    assert says in process.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_torchrun_s_count_against_the_settings(tmp_path):
    command = [TORCHRUN, "--standalone", "--nproc-per-node", "2", str(SRC / "9_ddp.py"), *SIZES, "--devices", "3"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert process.returncode != 0
    assert "--devices 3, but torchrun started 2 processes on each of 1 machines" in process.stderr


def test_what_the_launcher_says_is_taken_from_its_variables(monkeypatch):
    """As torchrun and `fabric run` set them; without their processes."""
    started = {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "2", "WORLD_SIZE": "4", "LT_CLI_USED": "1"}
    for name, value in started.items():
        monkeypatch.setenv(name, value)
    assert find_launcher() == ("fabric run", 2, 2)
    monkeypatch.setenv("LT_PRECISION", "bf16-true")
    assert options_of_fabric_run() == ["--precision=bf16-true"]
    monkeypatch.setenv("LT_STRATEGY", "ddp")
    with pytest.raises(UserError, match="fabric run --strategy=ddp: leave it out, the script sets the strategy"):
        options_of_fabric_run()
    monkeypatch.delenv("LT_CLI_USED")
    settings = Settings(name="9_ddp", devices=3)
    with pytest.raises(UserError, match="--devices 3, but torchrun started 2 processes on each of 2 machines"):
        check_launcher(settings, several=True)


@pytest.mark.slow
def test_fabric_run_s_strategy_is_refused(tmp_path):
    fabric = os.path.join(os.path.dirname(sys.executable), "fabric")
    command = [fabric, "run", "--main-port", str(free_port()), "--strategy", "ddp", str(SRC / "9_ddp.py"), *SIZES]
    environment = os.environ | {"PATH": f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"}
    process = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert process.returncode != 0
    assert "fabric run --strategy=ddp: leave it out, the script sets the strategy" in process.stderr
