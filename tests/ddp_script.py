"""Rung 2 on several CPU processes: what `test_ddp.py` runs. Arguments: number of processes, then settings."""

import sys

import torch
from lightning import Fabric

from fabric_ladder import Run, build_dataloaders, build_model, evaluate, parse_settings, train
from local_dataset_utilities import load_datasets

if __name__ == "__main__":
    settings = parse_settings(sys.argv[2:], batch_size=16, micro_batch_size=2)
    fabric = Fabric(accelerator="cpu", devices=int(sys.argv[1]), strategy="ddp")
    fabric.launch()
    run = Run(fabric, settings)
    datasets = load_datasets(settings)
    train_loader, val_loader, test_loader = build_dataloaders(fabric, datasets, settings)
    model = build_model(settings, datasets)
    optimizer = torch.optim.Adam(model.parameters(), lr=settings.learning_rate)
    model, optimizer = fabric.setup(model, optimizer)
    train(run, model, optimizer, train_loader, val_loader)
    evaluate(run, model, test_loader)
