"""Rung 12 on CPU processes: what `test_zero.py` runs. Arguments: number of processes, then settings.

DeepSpeed itself runs on CPUs (gloo); Fabric insists on GPUs, and numbers them. Everything else is the rung's own.
"""

import dataclasses
import importlib
import os
import sys

os.environ["DS_ACCELERATOR"] = "cpu"
import torch
from lightning import Fabric
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies import deepspeed as fabric_deepspeed

from fabric_ladder import Run, build_dataloaders, build_model, build_optimizer, evaluate, parse_settings, train, zero
from local_dataset_utilities import load_datasets


class OnCPU(zero.ZeroStrategy):
    def setup_environment(self):
        DDPStrategy.setup_environment(self)

    @property
    def root_device(self):
        return torch.device("cpu", self.local_rank)


fabric_deepspeed._validate_device_index_selection = lambda devices: None
# a faster reduction on CPUs, which would have to be compiled
importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
zero.ZeroStrategy = OnCPU

if __name__ == "__main__":
    ranks = int(sys.argv[1])
    settings = parse_settings(sys.argv[2:], batch_size=16, micro_batch_size=2, devices=ranks, deepspeed="zero2")
    strategy = zero.zero_strategy(dataclasses.replace(settings, accelerator="cuda"))
    fabric = Fabric(accelerator="cpu", devices=settings.devices, strategy=strategy, precision=settings.precision)
    run = Run(fabric, settings)
    datasets = load_datasets(settings)
    train_loader, val_loader, test_loader = build_dataloaders(fabric, datasets, settings)
    model = build_model(settings, datasets)
    model, optimizer = fabric.setup(model, build_optimizer(settings, model))
    train(run, model, optimizer, train_loader, val_loader)
    evaluate(run, model, test_loader)
