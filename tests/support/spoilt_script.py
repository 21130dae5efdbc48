"""Run a rung with little memory from the start of training.

Arguments: the MB of free memory (0: no limit), the rung, and the rung's arguments.
"""

import resource
import runpy
import sys
from importlib import import_module
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
from fabric_ladder.training import fitting, loop
from support.helpers import SRC

PAGE = resource.getpagesize()


def little_room(room):
    import_module("torch._dynamo")  # the first optimizer step would do the same
    held = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (held + room * 2**20, resource.RLIM_INFINITY))


def spoil(training, prediction):
    if room:
        little_room(room)
    real(training, prediction)
    if training.run.settings.ranks > 1:  # otherwise the stacks of gloo's threads and DDP's new buckets would count
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    room, rung = int(sys.argv[1]), SRC / f"{sys.argv[2]}.py"
    sys.argv = [str(rung), *sys.argv[3:]]
    fitting.HARD_LIMITS = ("cuda", "cpu")
    real, loop.try_longest = loop.try_longest, spoil
    runpy.run_path(str(rung), run_name="__main__")
