"""Child processes forked from one that has imported the libraries: a rung starts in a second instead of ten."""

import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path
from threading import Event, Lock, Thread

import common

# not peft: it imports bitsandbytes, which starts CUDA, and then no fork can use the GPU
PRELOADED = ["__main__", "accelerate", "datasets", "lightning", "torchmetrics", "transformers"]
FORKS = multiprocessing.get_context("forkserver")
POLLING = Lock()  # a start asks for the status of all children, which only one thread can read
INTERRUPTED = Event()


def start_forks() -> None:
    """Let `common.run_child` fork; the forking process never touches the GPU."""
    os.environ.update(common.child_environment(None), PYTORCH_NVML_BASED_CUDA_CHECK="1")
    FORKS.set_forkserver_preload(PRELOADED)
    common.run_child = run_forked


def run_together(run: Callable, tasks: Iterable, together: int) -> None:
    """Call `run` with each task, `together` at a time. An interrupt ends the children and drops the waiting tasks."""
    with ThreadPoolExecutor(together) as pool:
        try:
            list(pool.map(run, tasks))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            with POLLING:
                INTERRUPTED.set()
                for child in FORKS.active_children():
                    _kill(child.pid)
            raise


def run_forked(command: list[str], threads: int | None = None, limit: float | None = None) -> str:
    """Run a script like `common.run_child`, in a fork of a process that has imported the libraries."""
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, name) for name in ("stdout", "stderr")]
        process = FORKS.Process(target=_run_script, args=(command, outputs))
        with POLLING:
            if INTERRUPTED.is_set():
                raise KeyboardInterrupt
            process.start()
        try:
            wait([process.sentinel], limit)
        finally:
            with POLLING:
                late = process.is_alive()
                _kill(process.pid)
                process.join()
        stdout, stderr = (path.read_text(errors="replace") if path.exists() else "" for path in outputs)
    if late:
        raise subprocess.TimeoutExpired(command, limit)
    common.check_status(command, process.exitcode, stderr)
    return stdout


def _kill(child: int) -> None:
    for kill in (os.killpg, os.kill):  # with its children; it has no group immediately after its start
        with suppress(ProcessLookupError):
            kill(child, signal.SIGKILL)


def _end_with_command() -> None:
    """Kill this process and its children when the command that started it ends."""
    multiprocessing.parent_process().join()
    os.killpg(0, signal.SIGKILL)


def _run_script(command: list[str], outputs: list[Path]) -> None:
    os.setsid()
    Thread(target=_end_with_command, daemon=True).start()
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
