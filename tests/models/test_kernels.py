"""The attention kernels of each GPU, and a run that prints, records and sets them."""

import json
from types import SimpleNamespace

import pytest
import torch
from lightning import Fabric
from lightning.fabric.accelerators import CPUAccelerator
from lightning.fabric.strategies import SingleDeviceStrategy
from support.helpers import settings_for
from support.training import run_training

from fabric_ladder import Run
from fabric_ladder.models.kernels import attention_kernels, use_kernels
from fabric_ladder.runs.process import prepare_process

GPUS = {"T4": (7, 5), "A100": (8, 0), "L4": (8, 9), "H100": (9, 0), "B200": (10, 0), "RTX_5090": (12, 0)}
CUDNN = 92000  # the version in PyTorch 2.13's wheels
ALL = ("cuDNN", "flash", "memory-efficient", "math")
IMAGES = {"task": "image-classification", "dataset": "images", "model": "vit"}


@pytest.fixture(autouse=True)
def all_kernels():
    use_kernels(ALL)
    yield
    use_kernels(ALL)


@pytest.mark.parametrize(
    ("gpus", "precisions", "options", "kernels"),
    [
        ("H100 B200", "bf16-mixed bf16-true 16-mixed", {}, ALL),
        ("A100 L4 RTX_5090", "bf16-mixed bf16-true 16-mixed", {}, ALL[1:]),
        ("A100 L4 H100 B200 RTX_5090", "bf16-mixed 16-mixed", {"fixed": False}, ALL[1:]),
        ("H100", "bf16-mixed", {"deterministic": True}, ALL[1:]),
        ("H100", "bf16-mixed", {"cudnn": 91500}, ALL[1:]),
        ("T4 A100 H100", "32-true", {}, ALL[2:]),
        ("T4", "16-mixed", {}, ALL[2:]),
        ("T4", "bf16-true", {}, ALL[3:]),
        ("T4 A100 H100", "64-true", {}, ALL[3:]),
    ],
)
def test_each_gpu_has_its_kernels(gpus, precisions, options, kernels):
    for gpu in gpus.split():
        for precision in precisions.split():
            found = attention_kernels(precision, GPUS[gpu], **{"cudnn": CUDNN, "fixed": True} | options)
            assert found == kernels, (gpu, precision)


class Pretended(CPUAccelerator):
    """A fake GPU that has only a name."""

    def setup_device(self, device):
        """Set up nothing."""


def start_on_h100(tmp_path, monkeypatch, **values):
    facts = SimpleNamespace(name="NVIDIA H100", total_memory=80_000_000_000, major=9, minor=0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: CUDNN)
    fabric = Fabric(strategy=SingleDeviceStrategy(device=torch.device("cuda"), accelerator=Pretended()))
    settings = settings_for(tmp_path, accelerator="cuda", precision="bf16-mixed", **values)
    prepare_process(settings)
    return Run(fabric, settings)


@pytest.mark.parametrize(
    ("values", "kernels"), [({}, ALL[1:]), (IMAGES, ALL), (IMAGES | {"deterministic": True}, ALL[1:])]
)
def test_a_run_on_a_gpu_prints_records_and_sets_its_kernels(tmp_path, monkeypatch, capsys, values, kernels):
    run = start_on_h100(tmp_path, monkeypatch, **values)
    torch.use_deterministic_algorithms(False)
    assert f"Attention kernels, the first that can: {', '.join(kernels)}\n" in capsys.readouterr().out
    assert json.loads(json.dumps(run.record.values))["attention_kernels"] == list(kernels)
    assert torch.backends.cuda.cudnn_sdp_enabled() == ("cuDNN" in kernels)


def test_a_cpu_and_eager_attention_print_no_kernels(tmp_path, monkeypatch, capsys):
    run, _ = run_training(tmp_path)
    assert "attention_kernels" not in run.record.values
    start_on_h100(tmp_path, monkeypatch, attention="eager")
    assert "Attention kernels" not in capsys.readouterr().out
    assert torch.backends.cuda.cudnn_sdp_enabled()
