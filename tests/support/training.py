"""Train in this process, with a poisoned token too, and run rungs with little memory."""

import json

import numpy as np
import torch
from lightning import Fabric

from fabric_ladder import Run, build_dataloaders, build_optimizer, evaluate, train
from fabric_ladder.runs.process import prepare_process
from support.devices import column, run_ranks
from support.helpers import ROOT, SMALL, settings_for, tiny_model, token_datasets

SCRIPT = ROOT / "tests" / "support" / "spoilt_script.py"
SIZES = [*SMALL, "--eval_batch_tokens", "100", "--threads", "1", "--precision", "32-true"]


def limited(cwd, rooms, rung, *arguments):
    """Run a rank of the rung for each number of MB of free memory (0: no limit); return the finished processes."""
    cwd.mkdir(exist_ok=True)
    return run_ranks(SCRIPT, len(rooms), ",".join(map(str, rooms)), rung, *SIZES, *arguments, cwd=cwd)


def read(cwd, rung):
    folder = cwd / "runs" / rung / "1"
    return column(folder, "loss"), json.loads((folder / "run.json").read_text())


def run_training(tmp_path, model=None, datasets=None, precision="32-true", prepare=None, plugin=None, **values):
    """Train in this process; return the run and the trained model. The plugin takes the place of the precision."""
    fabric = Fabric(accelerator="cpu", devices=1, **({"plugins": [plugin]} if plugin else {"precision": precision}))
    fabric.launch()
    settings = settings_for(tmp_path, precision=precision, **({"learning_rate": 1e-2} | values))
    prepare_process(settings)
    run = Run(fabric, settings)
    datasets = datasets or token_datasets()
    loaders = build_dataloaders(fabric, datasets, settings)
    model = model or tiny_model()
    optimizer = build_optimizer(settings, model)
    if prepare:
        prepare(model, optimizer)
    model, optimizer = fabric.setup(model, optimizer)
    training = train(run, model, optimizer, *loaders[:2])
    evaluate(training, loaders[2])
    return run, model


def losses(run):
    return column(run.folder, "loss")


def poison(training):
    """Make the embedding of a token infinite. Only one sample has this token; return its row."""
    rows = training.train_loader.dataset.split["input_ids"][:]
    tokens = np.concatenate([np.unique(row) for row in rows])
    token = int(np.flatnonzero(np.bincount(tokens) == 1)[0])
    weight = next(each for name, each in training.model.named_parameters() if name.endswith("word_embeddings.weight"))
    with torch.no_grad():
        weight[token] = torch.inf
    return next(number for number, row in enumerate(rows) if token in row)
