"""What the ladder's train loop costs beyond a bare PyTorch loop that does the same forward and backward passes."""

import contextlib
import copy
import io
from time import perf_counter

import common  # noqa: F401 - first of all: it makes the project importable without an installation
import torch
from lightning import Fabric
from torch import nn
from torch.optim import Optimizer

from fabric_ladder import Run, build_dataloaders, build_model, parse_settings, train
from fabric_ladder.data.loaders import EffectiveBatch
from local_dataset_utilities import load_datasets


class Prepared:
    """Stands in for a loader: yields effective batches that have been made beforehand."""

    def __init__(self, loader):
        self.batches, self.dataset, self.sampler = list(loader), loader.dataset, loader.sampler

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self):
        return iter(self.batches)


def bare_loop(model: nn.Module, optimizer: Optimizer, batches: list[EffectiveBatch]) -> None:
    """Train for one epoch, and nothing else: no Fabric, no accuracy, no printed line, no file."""
    model.train()
    for batch in batches:
        for micro_batch in batch.micro_batches:
            (model(**micro_batch.inputs).loss * micro_batch.weight).backward()
        optimizer.step()
        optimizer.zero_grad()


def measure_loop(options: list[str], pairs: int) -> dict[str, list[dict]]:
    """Time both loops in turns, in this process, after a warm-up of each.

    The ladder's time is that of the whole call of `train`, opening the run's folder and writing its files included,
    less its validation. Every other pair has the ladder first, so that a drift of the machine hits both alike.
    """
    settings = parse_settings(options)
    fabric = Fabric(accelerator=settings.accelerator, devices=1, precision=settings.precision)
    fabric.launch()
    fabric.seed_everything(settings.seed, verbose=False)
    datasets = load_datasets(settings)
    loaders = build_dataloaders(fabric, datasets, settings)
    train_loader, val_loader = Prepared(loaders[0]), Prepared(loaders[1])
    bare = build_model(settings, datasets)
    weights = copy.deepcopy(bare.state_dict())
    ours = copy.deepcopy(bare)

    def time_bare() -> dict:
        bare.load_state_dict(weights)
        optimizer = torch.optim.Adam(bare.parameters(), lr=settings.learning_rate)
        start = perf_counter()
        bare_loop(bare, optimizer, train_loader.batches)
        return {"seconds": perf_counter() - start}

    def time_ladder() -> dict:
        ours.load_state_dict(weights)
        model, optimizer = fabric.setup(ours, torch.optim.Adam(ours.parameters(), lr=settings.learning_rate))
        with contextlib.redirect_stdout(io.StringIO()):
            run = Run(fabric, settings)
            start = perf_counter()
            train(run, model, optimizer, train_loader, val_loader)
            seconds = perf_counter() - start
        results = run.record.values["results"]
        return {"seconds": seconds - (results["elapsed_seconds"] - results["training_seconds"])}

    figures = {"bare": [], "ladder": []}
    for pair in range(-1, pairs):
        turns = [("bare", time_bare), ("ladder", time_ladder)]
        for name, measure in turns if pair % 2 == 0 else reversed(turns):
            figure = measure()
            if pair >= 0:
                figures[name].append(figure)
    for mine, its in zip(ours.parameters(), bare.parameters(), strict=True):
        if not torch.equal(mine, its):
            raise RuntimeError("the loops trained different weights")
    return figures
