"""Rung 12 itself on CPU processes, which `test_zero.py` runs; takes the rung's arguments.

DeepSpeed can do without GPUs (its gloo backend); what is replaced here is Fabric's insistence on them.
"""

import dataclasses
import importlib
import os

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from helpers import SRC
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies import deepspeed as fabric_deepspeed

from fabric_ladder import checkpoint, loop, zero


class OnCPU(zero.ZeroStrategy):
    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    @property
    def root_device(self):
        return torch.device("cpu", self.local_rank)


def zero_strategy(settings):
    return real(dataclasses.replace(settings, accelerator="cuda"))


def save_both(fabric, how, *rest):
    """Save in both forms: each run takes half a minute."""
    checkpoint.save(fabric, "consolidated", *rest)
    return checkpoint.save(fabric, how, *rest)


if __name__ == "__main__":
    if os.environ.get("SAVE_BOTH"):
        loop.save = save_both
    real, zero.zero_strategy, zero.ZeroStrategy = zero.zero_strategy, zero_strategy, OnCPU
    fabric_deepspeed._validate_device_index_selection = lambda devices: None
    # a faster reduction for CPUs, which would have to be compiled
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    exec((SRC / "12_deepspeed_zero.py").read_text())
