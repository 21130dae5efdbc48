"""A forked process equals a fresh one: state, streams, exit status, signals."""

import os
import subprocess
import sys

import pytest

from support import fork_server
from support.helpers import ROOT, SRC

ENVIRONMENT = dict(os.environ)

STATE = """
import json, logging, multiprocessing, os, random, signal, sys, threading, warnings
import numpy, torch, transformers
from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "main": [__name__, __file__, sys.modules["__main__"].__file__, str(__spec__)],
    "cwd": os.getcwd(), "environment": dict(os.environ), "hook": sys.excepthook is sys.__excepthook__,
    "warnings": sorted({str(one) for one in warnings.filters}), "threads": threading.active_count(),
    "signals": [str(signal.getsignal(number)) for number in (2, 13, 15, 17)],
    "starts": multiprocessing.get_start_method(), "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
    "loggers": {name: [logging.getLogger(name).level, len(logging.getLogger(name).handlers)]
                for name in ("", "transformers", "lightning", "lightning.fabric", "torch", "datasets", "py.warnings")},
    "torch": [torch.get_num_threads(), str(torch.get_default_dtype()), torch.is_grad_enabled()],
    "streams": [[one.fileno(), one.encoding, one.line_buffering] for one in (sys.stdin, sys.stdout, sys.stderr)],
    "descriptors": sorted(file for file in map(int, os.listdir("/proc/self/fd")) if file < 3),
}), flush=True)
print(random.random(), numpy.random.random(), torch.initial_seed(), file=sys.stderr)
"""
ENDS = {
    "as usual": "import atexit; atexit.register(print, 'at the end'); print('unflushed', end='')",
    "a bug": "print('before')\n1 / 0",
    "interrupted": "import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)",
    "a thread": "import threading, time; threading.Thread(target=lambda: time.sleep(0.2) or print('late')).start()",
}


def both(script, *arguments, cwd, environment):
    """Run a script in the server and in a new Python."""
    command = [str(script), *arguments]
    options = {"cwd": cwd, "env": environment, "stdin": subprocess.DEVNULL, "capture_output": True, "text": True}
    fresh = subprocess.run([sys.executable, *command], **options, check=False)
    return fork_server.fork(command, str(cwd), environment, 60), fresh


@pytest.mark.slow
def test_a_fork_has_the_state_of_a_fresh_process(tmp_path):
    """The forked process has more imports, and other random numbers if they are not seeded."""
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "state.py").write_text(STATE)
    environment = ENVIRONMENT | {"FABRIC_LADDER_CACHE": "elsewhere"}
    environment.pop("FABRIC_LADDER_DATA", None)
    arguments = ("--a", "b c", "ü")
    forked, fresh = both(tmp_path / "scripts" / "state.py", *arguments, cwd=tmp_path, environment=environment)
    again = fork_server.fork([str(tmp_path / "scripts" / "state.py"), *arguments], str(tmp_path), environment, 60)
    assert forked.stdout == fresh.stdout
    numbers = [process.stderr.splitlines()[-1].split() for process in (forked, fresh, again)]
    assert len({number for pair in numbers for number in pair}) == 9
    assert len(forked.stderr.splitlines()) == len(fresh.stderr.splitlines()) == 1, "imports print nothing"


@pytest.mark.parametrize("end", ENDS)
def test_a_fork_ends_as_a_fresh_process_ends(tmp_path, end):
    (tmp_path / "end.py").write_text(ENDS[end])
    forked, fresh = both(tmp_path / "end.py", cwd=tmp_path, environment=ENVIRONMENT)
    assert (forked.returncode, forked.stdout) == (fresh.returncode, fresh.stdout)
    assert forked.stderr.splitlines()[-1:] == fresh.stderr.splitlines()[-1:]  # a fork's traceback has more frames
    assert ("Traceback" in forked.stderr) == ("Traceback" in fresh.stderr)


def test_a_script_whose_fork_could_differ_is_started_fresh(tmp_path, monkeypatch):
    monkeypatch.delenv("FABRIC_LADDER_FRESH_PROCESSES", raising=False)

    def forked(script, *arguments, **environment):
        return fork_server.can_be_forked(script, arguments, ENVIRONMENT | {"CUDA_VISIBLE_DEVICES": ""} | environment)

    assert forked(SRC / "2_grad_accum.py", "--train_samples", "8", HF_HUB_OFFLINE="1") == (sys.platform == "linux")
    assert not forked(SRC / "2_grad_accum.py", SLURM_PROCID="1")
    assert not forked(SRC / "2_grad_accum.py", OMP_NUM_THREADS="7")
    assert not forked(SRC / "3_torch_compile.py")
    assert not forked(SRC / "2_grad_accum.py", "--compile", "true")
    assert not forked(ROOT / "scripts" / "doctor.py")
    assert not forked(ROOT / "tests" / "support" / "deepspeed_script.py")
    assert not forked(tmp_path / "2_grad_accum.py")


@pytest.mark.parametrize("time", [1, 2])
def test_a_test_leaves_no_variable_behind(time):
    """The second one would find it, and its scripts would be started fresh."""
    assert "LEFT_BEHIND" not in os.environ
    os.environ["LEFT_BEHIND"] = "1"
