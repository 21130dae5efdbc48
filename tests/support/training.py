"""Train in this process, with a poisoned token too, and run rungs with little memory."""

import csv
import json
import os
import subprocess
import sys

import numpy as np
import torch
from lightning import Fabric

from fabric_ladder import Run, build_dataloaders, build_optimizer, evaluate, train
from fabric_ladder.runs.process import prepare_process
from support.helpers import ROOT, SMALL, free_port, settings_for, tiny_model, token_datasets

SCRIPT = ROOT / "tests" / "support" / "spoilt_script.py"
SIZES = [*SMALL, "--eval_batch_tokens", "100", "--threads", "1", "--precision", "32-true"]
# the memory of the process then goes up and down with its tensors, so a limit has the same effect each time
PLAIN = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1", "OMP_NUM_THREADS": "1"}


def start(cwd, room, rung, *arguments, **environment):
    cwd.mkdir(exist_ok=True)
    command = [sys.executable, str(SCRIPT), str(room), rung, *SIZES, *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, cwd=cwd, env=os.environ | PLAIN | environment, **pipes)


def alone(*args, **options):
    process = start(*args, **options)
    return (*process.communicate(timeout=200), process.returncode)


def two(cwd, rooms, rung, *arguments):
    """Run two ranks with different memory limits."""
    common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "NODE_RANK": "0"}
    ranks = [
        start(cwd, room, rung, "--devices", 2, *arguments, LOCAL_RANK=str(rank), **common)
        for rank, room in enumerate(rooms)
    ]
    return [(*process.communicate(timeout=200), process.returncode) for process in ranks]


def column(folder, name):
    """Return a column of a run's metrics.csv, in full precision, for the rows with a loss."""
    with open(folder / "metrics.csv", newline="") as file:
        return [float(row[name]) for row in csv.DictReader(file) if row["loss"]]


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
