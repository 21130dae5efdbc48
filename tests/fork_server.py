"""Start a script without importing torch, Lightning and transformers again: fork a process that has them already.

The imports take 4 to 7 seconds of a core, most runs in these tests half a second. Each fork is a process of its own,
with pipes, arguments, folder and environment of its own, which runs the script as `__main__` and ends as Python ends.
`run` answers None where a process forked so could differ from a fresh one; the caller then starts a fresh one.

Run as a script, this file is the server: it imports, says so, and forks for each request on the socket it was given.
"""

import contextlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import warnings
from pathlib import Path
from time import monotonic

ROOT = Path(__file__).resolve().parents[1]
# Read when a run needs them, not when a library is imported (DS_ACCELERATOR by DeepSpeed, which the server does not
# import; Fabric's PL_ and it are left in the environment by runs in the tests' process). All others are the server's.
HARMLESS = ("FABRIC_LADDER_", "WANDB_", "PYTEST_", "PL_GLOBAL_SEED", "PL_SEED_WORKERS", "DS_ACCELERATOR")
HARMLESS += ("TORCHINDUCTOR_CACHE_DIR",)  # what compiles is not forked
HARMLESS += ("SLURM_",)  # but for a rank: Lightning's import asks whether it is another than 0
SERVERS = 2  # at once, of half a GB each: a module that sets variables of other values needs one of its own
# torch.compile starts a pool of processes and threads of its own as it is imported, and is what tests of it are about;
# the doctor, and the export to single files and notebooks, import next to nothing; DeepSpeed compiles, too.
FRESH = ("3_torch_compile.py", "doctor.py", "export_notebook.py", "zero_script.py")
MODELS = ("bert", "bloom", "gpt2", "llama", "qwen3", "vit")
MOST = 1 << 20  # bytes of a request

_servers: dict[frozenset, "Server | None"] = {}  # None: asked for once; the last is the one used last
_lock = threading.Lock()


def run(script, arguments, cwd, environment, timeout) -> subprocess.CompletedProcess | None:
    """Run a script to its end in a forked process, or return None: start it yourself.

    Args:
        environment: All of it.

    Raises:
        subprocess.TimeoutExpired: The process and its children have been killed.
    """
    if not _can_be_forked(Path(script), arguments, environment):
        return None
    read = {name: value for name, value in environment.items() if not name.startswith(HARMLESS)}
    key = frozenset([*read.items(), ("SLURM_PROCID", environment.get("SLURM_PROCID", "0"))])
    with _lock:
        second = key in _servers  # for a single run, a server costs more than it saves
        server = _servers.pop(key, None)
        if second and server is None:
            started = [other for other, old in _servers.items() if old]
            for other in started[: len(started) - SERVERS + 1]:
                _servers.pop(other).stop()
            server = Server(environment)
        _servers[key] = server
    return server and server.run(script, arguments, cwd, environment, timeout)


def stop() -> None:
    """End all servers and what they have started."""
    while _servers:
        _, server = _servers.popitem()
        if server:
            server.stop()


def _can_be_forked(script: Path, arguments: list[str], environment: dict[str, str]) -> bool:
    if not hasattr(os, "pidfd_open") or os.environ.get("FABRIC_LADDER_FRESH_PROCESSES"):  # or not Linux
        return False
    if Path("/dev/nvidiactl").exists() and environment.get("CUDA_VISIBLE_DEVICES") != "":
        return False  # a fork cannot use a GPU whose driver an import has touched
    ours = script.resolve().parent in (
        ROOT / "src",
        ROOT / "scripts",
        ROOT / "tests",
    )  # others may bring modules of their own
    return ours and script.name not in FRESH and "--compile" not in arguments


class Server:
    """The process that forks, as the tests see it. It ends when this process ends, however that happens."""

    def __init__(self, environment: dict[str, str]):
        self._socket, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with there:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(there.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[there.fileno()],
                env=environment,
                start_new_session=True,  # Ctrl-C is for the tests
            )
        if not self._socket.recv(1):
            raise RuntimeError("the fork server could not import the libraries")

    def run(self, script, arguments, cwd, environment, timeout) -> subprocess.CompletedProcess:
        """Ask for a process, and read its pipes to their end."""
        command = [str(script), *arguments]
        request = json.dumps([command, os.fspath(cwd), environment]).encode()
        pipes = [os.pipe() for _ in range(3)]  # its stdout and stderr; its number and then its status
        socket.send_fds(self._socket, [request], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        found, deadline = {read: b"" for read, _ in pipes}, monotonic() + timeout
        stdout, stderr, answer = found
        try:
            with selectors.DefaultSelector() as reading:
                for read in found:
                    reading.register(read, selectors.EVENT_READ)
                while reading.get_map():
                    for key, _ in reading.select(deadline - monotonic()):
                        found[key.fd] += (read := os.read(key.fd, 1 << 16))
                        if not read:
                            reading.unregister(key.fd)
                    if monotonic() > deadline:
                        os.killpg(int(found[answer].split()[0]), signal.SIGKILL)
                        raise subprocess.TimeoutExpired(command, timeout, found[stdout], found[stderr])
        finally:
            for read in found:
                os.close(read)
        status = int(found[answer].split()[1])  # an IndexError: the server has died
        said = (found[read].decode().replace("\r\n", "\n").replace("\r", "\n") for read in (stdout, stderr))
        return subprocess.CompletedProcess(command, os.waitstatus_to_exitcode(status), *said)

    def stop(self) -> None:
        """End the process, which ends those that it has started."""
        self._socket.close()
        self._process.wait()


def serve(there: socket.socket) -> list[str]:
    """Fork for each request. In the server this never returns; in each fork it returns the script and its arguments."""
    printed = import_all()
    there.send(b"1")
    running: dict[int, tuple[int, int]] = {}  # process descriptors: the process's number, and where to say its status
    waiting = selectors.DefaultSelector()
    waiting.register(there, selectors.EVENT_READ)
    while True:
        for key, _ in waiting.select():
            if key.fileobj is there:
                request, pipes, _, _ = socket.recv_fds(there, MOST, 3)
                if not request:  # the tests have ended
                    for child, _ in running.values():
                        with contextlib.suppress(ProcessLookupError):
                            os.killpg(child, signal.SIGKILL)
                    os._exit(0)
                stdout, stderr, answer = pipes
                command, cwd, environment = json.loads(request)
                child = os.fork()
                if not child:
                    there.close()
                    waiting.close()
                    for descriptor, (_, other) in running.items():
                        os.close(descriptor)
                        os.close(other)
                    become(cwd, environment, {stdout: 1, stderr: 2}, printed)
                    for pipe in pipes:
                        os.close(pipe)
                    return command
                with contextlib.suppress(PermissionError, ProcessLookupError):  # done by the child, or it has ended
                    os.setpgid(child, child)
                os.write(answer, b"%d " % child)
                os.close(stdout)
                os.close(stderr)
                running[descriptor := os.pidfd_open(child)] = child, answer
                waiting.register(descriptor, selectors.EVENT_READ)
            else:
                waiting.unregister(key.fd)
                os.close(key.fd)
                child, answer = running.pop(key.fd)
                with contextlib.suppress(BrokenPipeError):  # nobody waits for it any longer
                    os.write(answer, b"%d" % os.waitpid(child, 0)[1])
                os.close(answer)


def import_all() -> dict[int, bytes]:
    """Import what the scripts import, and return what that printed on stdout and stderr."""
    import gc
    import importlib
    import pkgutil

    sys.path[0] = str(ROOT / "src")  # as in a rung
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        before = os.dup(1), os.dup(2)
        os.dup2(stdout.fileno(), 1)
        os.dup2(stderr.fileno(), 2)
        try:
            import fabric_ladder

            filters = warnings.filters[:]
            for package in (fabric_ladder, importlib.import_module("fabric_ladder.comparing")):
                for module in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
                    if module.name != "fabric_ladder.doctor":
                        importlib.import_module(module.name)
            for name in ("peft", *(f"transformers.models.{model}.modeling_{model}" for model in MODELS)):
                importlib.import_module(name)
            warnings.filters[:] = filters  # peft's libraries ignore some that a script without adapters would show
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            printed = {}
            for number, (file, old) in enumerate(zip((stdout, stderr), before, strict=True), start=1):
                file.seek(0)
                printed[number] = file.read()
                os.dup2(old, number)
                os.close(old)
    # Only the thread that forks is in the fork: a lock that another one holds would stay locked.
    assert threading.enumerate() == [threading.main_thread()]
    assert "deepspeed" not in sys.modules
    tasks = set(os.listdir("/proc/self/task")) - {str(os.getpid())}
    native = {Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in tasks}
    assert native <= {"jemalloc_bg_thd"}, native  # pyarrow's; jemalloc looks after its locks in a fork
    gc.collect()
    gc.freeze()  # the collector would write into, and so copy, all pages that are shared
    return printed


def become(cwd: str, environment: dict[str, str], streams: dict[int, int], printed: dict[int, bytes]) -> None:
    """Make this fork what a fresh process is after its imports."""
    import numpy as np
    import torch

    os.setpgid(0, 0)
    for pipe, number in streams.items():
        os.dup2(pipe, number)
        os.write(number, printed[number])
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    np.random.seed()  # or all forks have the server's; `random` sees to this by itself
    torch.default_generator.seed()


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as there:
        sys.argv = serve(there)
    sys.path[0] = str(Path(sys.argv[0]).resolve().parent)
    __import__("runpy").run_path(sys.argv[0], run_name="__main__")  # whatever it raises ends this process as usual
