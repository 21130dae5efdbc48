"""Start a script without importing torch, Lightning and transformers again: fork a process that has them already.

The imports take 4 to 7 seconds on one core. Most runs in these tests take half a second. Python's fork server
(`multiprocessing`) forks. Each fork has its own pipes, arguments, folder and environment. It runs the script as
`__main__` and ends as Python ends. `run` returns None if a fork could differ from a fresh process.
"""

import atexit
import gc
import multiprocessing
import os
import pkgutil
import runpy
import signal
import subprocess
import sys
import threading
from functools import cache
from multiprocessing import connection
from pathlib import Path
from time import monotonic

import datasets
import huggingface_hub
import numpy as np
import torch
from lightning.fabric.utilities.rank_zero import rank_zero_only

import fabric_ladder

ROOT = Path(__file__).resolve().parents[2]
# Variables that no import reads. All others must be equal in the server's environment. Runs in the tests' process leave
# Fabric's PL_ and DeepSpeed's DS_ACCELERATOR in the environment.
HARMLESS = ("FABRIC_LADDER_", "WANDB_", "PYTEST_", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "DS_ACCELERATOR")
HARMLESS += ("HF_HUB_OFFLINE", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
HARMLESS += ("HF_HOME", "CUDA_VISIBLE_DEVICES")  # the first is empty for all scripts; only CPUs are used
HARMLESS += ("TORCHINDUCTOR_CACHE_DIR",)  # scripts that compile are not forked
HARMLESS += ("KMP_", "_MLFLOW_")  # set by imports of scikit-learn and DeepSpeed in the tests' process
HARMLESS += ("SLURM_",)  # except the rank: Lightning compares it with 0 when it is imported
HARMLESS += ("LOCAL_RANK", "MASTER_", "WORLD_SIZE", "NODE_RANK")  # a fork is told its rank
# torch.compile starts processes and threads when it is imported, and DeepSpeed compiles. The doctor sets its own path.
FRESH = ("3_torch_compile.py", "doctor.py", "deepspeed_script.py")
FOLDERS = (ROOT / "src", ROOT / "scripts", ROOT / "tests" / "support")  # other folders may have their own modules
MODULES = [module.name for module in pkgutil.walk_packages(fabric_ladder.__path__, "fabric_ladder.")]
MODULES += [
    f"transformers.models.{name}.modeling_{name}" for name in ("bert", "bloom", "gpt2", "llama", "qwen3", "vit")
]
MODULES += ["peft", "deepspeed"]  # accelerate imports the second, for two seconds, when a model is saved

_forks = multiprocessing.get_context("forkserver")
_forks.set_forkserver_preload(MODULES)
_lock = threading.Lock()  # `start` and `join` read the status of all processes


def run(script, arguments, cwd, environment, timeout) -> subprocess.CompletedProcess | None:
    """Run a script to its end in a forked process, or return None if it must be started fresh.

    Args:
        environment: All variables of the process.

    Raises:
        subprocess.TimeoutExpired: The process and its children have been killed.
    """
    if not can_be_forked(Path(script), arguments, environment):
        return None
    return fork([str(script), *arguments], os.fspath(cwd), environment, timeout)


def can_be_forked(script: Path, arguments: list[str], environment: dict[str, str]) -> bool:
    """Return whether a fork that runs this script equals a fresh process."""
    if sys.platform != "linux" or os.environ.get("FABRIC_LADDER_FRESH_PROCESSES"):
        return False
    if Path("/dev/nvidiactl").exists() and environment.get("CUDA_VISIBLE_DEVICES") != "":
        return False  # a fork cannot use a GPU whose driver an import has touched
    if not Path(fabric_ladder.__file__).is_relative_to(ROOT):  # the installed package is not this one
        return False
    if _read_by_imports(environment) != _read_by_imports(_server_environment()):
        return False
    if not environment.get("LOCAL_RANK", "0").isdecimal():  # an import refuses it
        return False
    return script.resolve().parent in FOLDERS and script.name not in FRESH and "--compile" not in arguments


def _read_by_imports(environment: dict[str, str]) -> dict[str, str]:
    read = {name: value for name, value in environment.items() if not name.startswith(HARMLESS)}
    return read | {"SLURM_PROCID": environment.get("SLURM_PROCID", "0")}


@cache
def _server_environment() -> dict[str, str]:
    """Return the environment of the server, which is the tests' environment when the first script runs."""
    return dict(os.environ)


def fork(command: list[str], cwd: str, environment: dict[str, str], timeout: float) -> subprocess.CompletedProcess:
    """Run a script in a forked process, and read its pipes to their end."""
    readers, writers = zip(*(_forks.Pipe(duplex=False) for _ in range(2)), strict=True)
    path = [str(Path(command[0]).resolve().parent), *_fresh_path()]
    process = _forks.Process(target=_become_main, args=(command, cwd, environment, path, writers))
    with _lock:
        process.start()
    for writer in writers:
        writer.close()
    printed, deadline = dict.fromkeys(readers, b""), monotonic() + timeout
    open_ends = [*readers, process.sentinel]
    try:
        while open_ends:
            for end in connection.wait(open_ends, max(0, deadline - monotonic())):
                if read := end in printed and os.read(end.fileno(), 1 << 16):
                    printed[end] += read
                else:
                    open_ends.remove(end)
            if monotonic() > deadline:
                raise subprocess.TimeoutExpired(command, timeout, *printed.values())
    finally:
        if open_ends:
            os.killpg(process.pid, signal.SIGKILL)
        with _lock:
            process.join()
    lines = (text.decode().replace("\r\n", "\n").replace("\r", "\n") for text in printed.values())
    return subprocess.CompletedProcess(command, process.exitcode, *lines)


@cache
def _fresh_path() -> list[str]:
    """Return the `sys.path` of a fresh Python, without the script's folder."""
    ask = [sys.executable, "-c", "import sys; print(*sys.path[1:], sep='\\n')"]
    return subprocess.run(ask, capture_output=True, text=True, check=True).stdout.splitlines()


def _become_main(command: list[str], cwd: str, environment: dict[str, str], path: list[str], pipes: tuple) -> None:
    """Make this fork like a fresh process after its imports, run the script, and end as Python ends."""
    gc.freeze()  # the collector would write into all shared pages and thereby copy them
    os.setpgid(0, 0)
    for number, pipe in enumerate(pipes, start=1):
        os.dup2(pipe.fileno(), number)
        pipe.close()
    sys.stdin = os.fdopen(0, encoding="utf-8", closefd=False)
    multiprocessing.set_start_method(None, force=True)  # otherwise the server would also fork its children
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    rank_zero_only.rank = int(environment.get("LOCAL_RANK", 0))  # Lightning reads it when it is imported
    offline = environment.get("HF_HUB_OFFLINE", "").upper() in huggingface_hub.constants.ENV_VARS_TRUE_VALUES
    huggingface_hub.constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = offline
    np.random.seed()  # otherwise all forks draw the same numbers; `random` seeds itself again
    torch.default_generator.seed()
    sys.argv, sys.path[:] = command, path
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
        sys.exit(1)
    finally:
        threading._shutdown()
        atexit._run_exitfuncs()
