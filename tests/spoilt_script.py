"""A rung whose process is short of memory from the start of training on, or has a poisoned token.

Arguments: the MB that are left (0: all), the word `poison` or `healthy`, the rung, and its own arguments.
"""

import resource
import runpy
import sys
from importlib import import_module
from pathlib import Path

import numpy as np
import torch
from helpers import SRC

from fabric_ladder import fitting, loop

PAGE = resource.getpagesize()


def poison(keeper):
    """Make the embedding of a token infinite that stands in a single sample; return the sample's row."""
    rows = keeper.loader.dataset.split["input_ids"][:]
    tokens = np.concatenate([np.unique(row) for row in rows])
    token = int(np.flatnonzero(np.bincount(tokens) == 1)[0])
    weight = next(each for name, each in keeper.model.named_parameters() if name.endswith("word_embeddings.weight"))
    with torch.no_grad():
        weight[token] = torch.inf
    return next(number for number, row in enumerate(rows) if token in row)


def little_room(room):
    import_module("torch._dynamo")  # as the first optimizer step would
    held = int(Path("/proc/self/statm").read_text().split()[0]) * PAGE
    resource.setrlimit(resource.RLIMIT_AS, (held + room * 2**20, resource.RLIM_INFINITY))


def spoil(keeper):
    if room:
        little_room(room)
    if what == "poison":
        print("Poisoned", poison(keeper), flush=True)
    real(keeper)
    if keeper.settings.ranks > 1:  # the stacks of gloo's threads, and DDP's new buckets, would count too
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


if __name__ == "__main__":
    room, what, rung = int(sys.argv[1]), sys.argv[2], SRC / f"{sys.argv[3]}.py"
    sys.argv = [str(rung), *sys.argv[4:]]
    fitting.CLIFFS = ("cuda", "cpu")
    real, loop.try_longest = loop.try_longest, spoil
    runpy.run_path(str(rung), run_name="__main__")
