"""The loop never waits for the device between two printed lines."""

from types import SimpleNamespace

import pytest
import torch
from lightning import Fabric
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.strategies import SingleDeviceStrategy
from lightning.fabric.wrappers import _FabricOptimizer
from support.helpers import settings_for, tiny_model, token_datasets
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_ladder import Run, build_dataloaders, build_optimizer, train
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.techniques.fused_attention import fuse_attention
from fabric_ladder.techniques.packing import support_packing
from fabric_ladder.training.loop import _evaluate

CASES = {
    "packed": ("llama-lm", {"task": "instruction-tuning", "packing": True, "max_length": 64}),
    "packed, mixed precision": ("bert", {"packing": True, "max_length": 64, "precision": "bf16-mixed"}),
    "clipped": ("bloom", {"max_grad_norm": 1.0}),
    "sgd by tokens": ("bert", {"optimizer": "sgd", "micro_batch_tokens": 64, "micro_batch_size": None}),
    "recomputed": ("llama", {"activation_checkpointing": True}),
}


class Valueless(CPUAccelerator):
    """The device `meta`."""

    def setup_device(self, device):
        """Set up nothing."""


def valueless(precision):
    strategy = SingleDeviceStrategy(device=torch.device("meta"), accelerator=Valueless())
    return Fabric(strategy=strategy, precision=precision)


def test_no_batch_of_the_evaluation_reads_a_value_from_the_device(tmp_path):
    fabric, settings = valueless("32-true"), settings_for(tmp_path, eval_batch_tokens=64)
    test_loader = build_dataloaders(fabric, token_datasets(), settings)[2]
    confusion, batches = torch.zeros((2, 2), dtype=torch.int64, device="meta"), []
    stop_request = SimpleNamespace(requested=lambda: batches.append(1))
    training = SimpleNamespace(fabric=fabric, model=fabric.setup(tiny_model()), stop_request=stop_request)
    with pytest.raises((RuntimeError, NotImplementedError)) as stopped:
        _evaluate(training, test_loader, "the test", confusion)
    assert any(entry.name == Meter.collect.__name__ for entry in stopped.traceback), stopped.value
    assert len(batches) == len(test_loader) > 1


class NoFloat64(TorchDispatchMode):
    """Behaves like the GPU of Apple silicon, whose tensors have at most 32 bits."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type == "meta":
                assert tensor.dtype != torch.float64, function
        return result


def test_a_device_without_float64_gets_no_float64_tensor(tmp_path, monkeypatch):
    for module in ("fabric_ladder.environment", "fabric_ladder.runs.metrics"):
        monkeypatch.setattr(f"{module}.NO_FLOAT64", ("meta",))
    with NoFloat64():
        test_no_step_reads_a_value_from_the_device(tmp_path, "clipped")


@pytest.mark.parametrize("name", CASES)
def test_no_step_reads_a_value_from_the_device(tmp_path, name):
    """A run on the device `meta`, whose tensors have no values, must fail only at the first printed line."""
    kind, values = CASES[name]
    seen, samples, stopped = until_a_value_is_read(tmp_path, kind, values)
    assert any(entry.name == Meter.collect.__name__ for entry in stopped.traceback), stopped.value
    assert seen == samples == 8


def test_adafactor_reads_values_only_in_its_step(tmp_path):
    """This is a fault of PyTorch. Its fix ends this test and the note in docs/techniques/6_lean_optimizer.md."""
    seen, _, stopped = until_a_value_is_read(tmp_path, "llama", {"optimizer": "adafactor"})
    assert "_adafactor.py" in {entry.path.name for entry in stopped.traceback}
    assert seen == 0


def until_a_value_is_read(tmp_path, kind, values):
    """Return the samples of finished optimizer steps, the samples of the epoch, and the error."""
    settings = settings_for(tmp_path, **({"micro_batch_size": 2, "batch_size": 6, "log_every": 10_000} | values))
    fabric = valueless(settings.precision)
    run = Run(fabric, settings)
    datasets = token_datasets(train=8, per_token=kind.endswith("-lm"))
    loaders = build_dataloaders(fabric, datasets, settings)
    model = tiny_model(kind)
    fuse_attention(model)
    if settings.packing:
        support_packing(model, settings.max_length)
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    model = fabric.setup(model)
    optimizer = build_optimizer(settings, model)
    if "fused" in optimizer.defaults:
        optimizer.param_groups[0]["fused"] = None  # this kernel reads no value, but the device does not have it
    optimizer = _FabricOptimizer(optimizer, fabric.strategy)  # `setup_optimizers` refuses tensors on the device `meta`
    with pytest.raises((RuntimeError, NotImplementedError)) as stopped:
        train(run, model, optimizer, *loaders[:2])
    return run.throughput.samples, len(loaders[0].dataset), stopped
