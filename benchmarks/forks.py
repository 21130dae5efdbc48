"""Child processes forked from one that has imported the libraries: a rung starts in a second instead of ten."""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from threading import Lock

import common

# not peft: it imports bitsandbytes, which starts CUDA, and then no fork can use the GPU
PRELOADED = ["__main__", "accelerate", "datasets", "lightning", "torchmetrics", "transformers"]
FORKS = multiprocessing.get_context("forkserver")
POLLING = Lock()  # a start asks for the status of all children, which only one thread can read


def start_forks() -> None:
    """Let `common.run_child` fork; the forking process never touches the GPU."""
    os.environ.update(common.child_environment(None), PYTORCH_NVML_BASED_CUDA_CHECK="1")
    FORKS.set_forkserver_preload(PRELOADED)
    common.run_child = run_forked


def run_forked(command: list[str], threads: int | None = None, limit: float | None = None) -> str:
    """Run a script like `common.run_child`, in a fork of a process that has imported the libraries."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [f"{folder}/{name}" for name in ("stdout", "stderr")]
        process = FORKS.Process(target=_run_script, args=(command, outputs))
        with POLLING:
            process.start()
        wait([process.sentinel], limit)
        with POLLING:
            late = process.is_alive()
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its children
            process.kill()
            process.join()
        stdout, stderr = (Path(path).read_text(errors="replace") if Path(path).exists() else "" for path in outputs)
    if late:
        raise subprocess.TimeoutExpired(command, limit)
    common.check_status(command, process.exitcode, stderr)
    return stdout


def _run_script(command: list[str], outputs: list[str]) -> None:
    os.setsid()
    os.chdir(common.ROOT)
    for number, path in enumerate(outputs, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), number)
    sys.argv = command
    sys.path.insert(0, str(Path(command[0]).parent))
    try:
        runpy.run_path(command[0], run_name="__main__")
    except Exception:
        sys.excepthook(*sys.exc_info())  # a rung's own hook prints one line and raises SystemExit
        raise SystemExit(1) from None
