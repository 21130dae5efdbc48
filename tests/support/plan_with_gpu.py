"""Run scripts/plan_memory.py as if this machine had two GPUs; the smaller GPU has 3 GB.

A process forked by a parent that has looked for GPUs could not train. Such a fork ends this script with status 77.
The last line is the number of other forks.
"""

import os
import runpy
import sys
from types import SimpleNamespace

import torch
import transformers.modeling_layers  # noqa: F401  # imports torchao, which looks for GPUs when it is imported

GPUS = [SimpleNamespace(name=name, total_memory=size * 10**9, major=8, minor=0) for name, size in
        (("Large", 8), ("Small", 3))]  # fmt: skip
seen, forks = [], []


def look_for_gpus(*_):
    """Stands for a call that initializes CUDA's driver."""
    found = [] if os.environ.get("CUDA_VISIBLE_DEVICES") == "" else GPUS
    seen.extend(found)
    return found


def before_fork():
    if seen:
        os._exit(77)
    forks.append(True)


if __name__ == "__main__":
    torch.cuda.is_available = lambda: bool(look_for_gpus())
    torch.cuda.device_count = lambda: len(look_for_gpus())
    torch.cuda.get_device_properties = lambda number: look_for_gpus()[number]
    os.register_at_fork(before=before_fork)
    os.cpu_count = lambda: 2
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
    print(len(forks))
