"""Run rung 12 on CPU processes for `test_deepspeed.py`, with the rung's arguments.

DeepSpeed works without GPUs (by its gloo backend), but Fabric requires GPUs. This script replaces Fabric's check.
"""

import dataclasses
import importlib
import os
import resource
import sys
from pathlib import Path

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies import deepspeed as fabric_deepspeed

sys.path.append(str(Path(__file__).parents[1]))

from fabric_ladder.checkpoints import save as checkpoint
from fabric_ladder.distributed import deepspeed
from fabric_ladder.techniques import sharding
from fabric_ladder.training import loop
from support.helpers import SRC


class OnCPU(deepspeed.LadderDeepSpeedStrategy):
    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    @property
    def root_device(self):
        return torch.device("cpu", self.local_rank)


def check_deepspeed(settings):
    deepspeed.check_deepspeed(dataclasses.replace(settings, accelerator="cuda"))


def save_both(fabric, layout, *rest):
    """Save in both layouts, because a second run would take half a minute."""
    checkpoint.save(fabric, "consolidated", *rest)
    return checkpoint.save(fabric, layout, *rest)


if __name__ == "__main__":
    if os.environ.get("RANK_1_CANNOT_WRITE") and os.environ.get("LOCAL_RANK") == "1":
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))  # the size of a file
    if os.environ.get("SAVE_BOTH"):
        loop.save = save_both
    sharding.check_deepspeed = check_deepspeed
    deepspeed.LadderDeepSpeedStrategy = OnCPU
    fabric_deepspeed._validate_device_index_selection = lambda devices: None
    # DeepSpeed would have to compile its faster reduction for CPUs
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    exec((SRC / "12_deepspeed_zero.py").read_text())
