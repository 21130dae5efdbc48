"""Run a rung with little memory from the start of training.

Arguments: the MB of free memory of each rank (0: no limit), the rung, and the rung's arguments.
"""

import ctypes
import os
import resource
import runpy
import sys
from importlib import import_module
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))
from fabric_ladder.training import fitting, loop
from support.helpers import SRC

PAGE = resource.getpagesize()
taken = []
M_ARENA_MAX, M_MMAP_THRESHOLD = -8, -3  # of mallopt


def little_room(room):
    import_module("torch._dynamo")  # the first optimizer step would do the same
    # the memory of the process then goes up and down with its tensors, so the limit has the same effect each time
    libc = ctypes.CDLL(None)
    assert libc.mallopt(M_ARENA_MAX, 1)
    assert libc.mallopt(M_MMAP_THRESHOLD, 2**16)
    allow(0)
    size = 2**26
    while size >= 2**16:  # take what the process has freed before
        try:
            taken.append(torch.empty(size, dtype=torch.uint8))
        except RuntimeError:
            size //= 2
    allow(room * 2**20)


def allow(more):
    """Let the process grow by this number of bytes."""
    held = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (held + more, resource.RLIM_INFINITY))


def spoil(training, prediction):
    if room:
        little_room(room)
    real(training, prediction)
    if training.run.settings.ranks > 1:  # otherwise the stacks of gloo's threads and DDP's new buckets would count
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    room = int(sys.argv[1].split(",")[int(os.environ.get("LOCAL_RANK", "0"))])
    rung = SRC / f"{sys.argv[2]}.py"
    sys.argv = [str(rung), *sys.argv[3:]]
    fitting.HARD_LIMITS = ("cuda", "cpu")
    real, loop.try_longest = loop.try_longest, spoil
    try:
        runpy.run_path(str(rung), run_name="__main__")
    except Exception as error:  # handled here, where `sys.argv` is the rung's
        sys.excepthook(type(error), error, error.__traceback__)
        sys.exit(1)
