"""Rung 12 itself on CPU processes, which `test_deepspeed.py` runs; takes the rung's arguments.

DeepSpeed can do without GPUs (its gloo backend); what is replaced here is Fabric's insistence on them.
"""

import dataclasses
import importlib
import os
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
    """Save in both layouts: each run takes half a minute."""
    checkpoint.save(fabric, "consolidated", *rest)
    return checkpoint.save(fabric, layout, *rest)


if __name__ == "__main__":
    if os.environ.get("SAVE_BOTH"):
        loop.save = save_both
    sharding.check_deepspeed = check_deepspeed
    deepspeed.LadderDeepSpeedStrategy = OnCPU
    fabric_deepspeed._validate_device_index_selection = lambda devices: None
    # a faster reduction for CPUs, which would have to be compiled
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    exec((SRC / "12_deepspeed_zero.py").read_text())
