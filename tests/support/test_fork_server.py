"""A forked process equals a fresh one: state, streams, exit status, signals."""

import os
import subprocess
import sys

import pytest

from support import fork_server
from support.helpers import ROOT, SRC

ENVIRONMENT = dict(os.environ)

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
    assert not forked(tmp_path / "2_grad_accum.py")
