"""Replayed passes change no bit; tapes of operations take the place of CUDA graphs on a CPU."""

import csv
import re

import numpy as np
import pytest
import torch
from lightning import Fabric
from support.helpers import SMALL, SRC, finished, run_script, tiny_model, token_datasets
from support.tape import TapeRecorder
from support.training import losses, run_training
from transformers import AutoConfig

from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.models.activations import fuse_gelu
from fabric_ladder.models.configs import MODELS as CLASSES
from fabric_ladder.models.probe import VOCABULARY, small_copy
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.checkpointing import RANDOM_ONLY_IN_DROPOUT
from fabric_ladder.techniques.embedding_rows import add_rows
from fabric_ladder.techniques.fused_attention import fuse_attention
from fabric_ladder.techniques.packing import TESTED, support_packing
from fabric_ladder.training import fitting, graphs
from fabric_ladder.training.gradients import accumulate_gradients, forget_gradients
from fabric_ladder.training.graphs import Graphs
from fabric_ladder.training.state import Training

TASK = "text-classification"
CLAIMED = sorted(
    {kind for kind in TESTED & RANDOM_ONLY_IN_DROPOUT if kind in CLASSES[TASK]._model_mapping._model_mapping}
)
DTYPES = {torch.float64: "64-true", torch.float32: "32-true", torch.bfloat16: "bf16-true"}
ROWS, WIDTH, DOCUMENTS = 2, 32, 8


@pytest.fixture
def taped(monkeypatch):
    """Record tapes on the CPU where a GPU records graphs; return the graphs of each training."""
    made = []

    class Watched(Graphs):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    monkeypatch.setattr(graphs, "CudaRecorder", TapeRecorder)
    monkeypatch.setattr(Settings, "replays", property(lambda settings: settings.cuda_graphs))
    monkeypatch.setattr("fabric_ladder.training.state.Graphs", Watched)
    return made


def changed(model, width):
    """Apply what `build_model` applies."""
    for change in (fuse_attention, fuse_gelu, add_rows):
        change(model)
    support_packing(model, width)
    return model


def packed(seed):
    """Return a micro-batch of random documents, with fillers."""
    rng = np.random.default_rng(seed)
    spans, positions, labels = [], torch.zeros(ROWS, WIDTH, dtype=torch.long), []
    for row in range(ROWS):
        start = 0
        while start < WIDTH - 4 and len(spans) < (row + 1) * 3:
            end = min(WIDTH, start + int(rng.integers(4, 14)))
            spans.append((row * WIDTH + start, row * WIDTH + end))
            positions[row, start:end] = torch.arange(end - start)
            labels.append(int(rng.integers(2)))
            start = end
        positions[row, start:] = torch.arange(WIDTH - start)
    missing, last = DOCUMENTS - len(spans), ROWS * WIDTH
    inputs = {
        "input_ids": torch.from_numpy(rng.integers(6, VOCABULARY, (ROWS, WIDTH))),
        "position_ids": positions,
        "spans": torch.tensor(spans + [(last - 1, last)] * missing),
        "labels": torch.tensor(labels + [-100] * missing),
    }
    return MicroBatch(inputs, len(labels), float(rng.random()), last, last)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", CLAIMED)
def test_a_replayed_pass_equals_an_eager_one_bit_by_bit_and_waits_for_nothing(taped, kind, dtype):
    """The recorder fails at an operation that waits. The gradients stay where they are."""
    config = AutoConfig.for_model(kind)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, precision=DTYPES[dtype])
    model = fabric.setup(changed(small_copy(config, TASK, torch.float32), WIDTH).train())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
    recorded, places, found = Graphs(torch.device("cpu")), [], {}
    for replays in (recorded, None):
        for seed in range(5):
            meter = Meter(fabric)
            accumulate_gradients(fabric, model, [packed(seed), packed(seed + 9)], meter, graphs=replays)
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            places.append([gradient.data_ptr() for gradient in gradients])
            found[replays is None, seed] = meter.pending_losses(), *(gradient.clone() for gradient in gradients)
            forget_gradients(fabric, optimizer, recorded)
    assert recorded.replayed == 9
    assert all(place == places[0] for place in places)
    for seed in range(5):
        assert all(map(torch.equal, found[False, seed], found[True, seed]))
    assert found[True, 0][1].dtype == dtype


CASES = {
    "32-true": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16 with Kahan summation": {"precision": "bf16-true", "kahan_summation": True},
    "64-true": {"precision": "64-true"},
    "AdamW, clipped": {"max_grad_norm": 1.0, "optimizer": "adamw", "schedule": "cosine"},
    "SinkGD": {"optimizer": "sinkgd"},
    "by tokens": {"micro_batch_size": None, "micro_batch_tokens": 128},
    "one shape": {"micro_batch_size": None, "pack_rows": 2},
    "not packed": {"packing": False},
    "class weights": {"class_weights": "balanced"},
}


@pytest.mark.parametrize("name", CASES)
def test_a_training_with_replayed_passes_equals_one_without(tmp_path, monkeypatch, taped, name):
    """Each has the trial of the heaviest batches, and documents padded to the same number."""
    monkeypatch.setattr(fitting, "HARD_LIMITS", ("cpu",))
    found = []
    for replays in (True, False):
        monkeypatch.setattr(Training, "graphs", None, raising=False)
        if not replays:
            monkeypatch.setattr("fabric_ladder.training.state.Graphs", lambda _: None)
        values = {"packing": True, "micro_batch_size": 2, "pad_to_multiple_of": 16} | CASES[name]
        run, model = run_training(tmp_path, changed(tiny_model(), 64), token_datasets(train=90), max_length=64, epochs=2,
                                  cuda_graphs=True, **values)  # fmt: skip
        found.append((losses(run), [weight.detach().clone() for weight in model.parameters()]))
    (first, weights), (second, others) = found
    assert first == second
    assert all(map(torch.equal, weights, others))
    assert taped[0].replayed > taped[0].passes / 2 > taped[0].recorded
    assert f"CUDA graphs: {taped[0].recorded} recorded" in (run.folder.parent / "1" / "log.txt").read_text()


def first_losses(cwd, rung):
    with open(cwd / "runs" / rung / "1" / "metrics.csv", newline="") as file:
        return [row["loss"] for row in csv.DictReader(file) if row["loss"]]


def test_the_rung_prints_the_losses_of_its_parent(tmp_path):
    """As on a laptop, without graphs; and with tapes in place of graphs."""
    options = (*SMALL, "--micro_batch_tokens", 128)
    taped_script = SRC.parent / "tests" / "support" / "taped_script.py"
    told = {}
    for name, command in {
        "15_packing": (SRC / "15_packing.py",),
        "27_cuda_graphs": (SRC / "27_cuda_graphs.py",),
        "taped": (taped_script, "27_cuda_graphs"),
    }.items():
        (tmp_path / name).mkdir()
        told[name] = finished(run_script(*command, *options, cwd=tmp_path / name))
    expected = first_losses(tmp_path / "15_packing", "15_packing")
    assert len(expected) == 6
    assert first_losses(tmp_path / "27_cuda_graphs", "27_cuda_graphs") == expected
    assert "--cuda_graphs on cpu: there are no CUDA graphs here" in told["27_cuda_graphs"]
    taped = first_losses(tmp_path / "taped", "27_cuda_graphs")
    # fillers give the head another number of rows, whose product may be rounded otherwise
    assert list(map(float, taped)) == pytest.approx(list(map(float, expected)), rel=1e-3)
    assert re.search(r"CUDA graphs: \d+ recorded in .*, [5-9]\d% of the passes replayed", told["taped"])
