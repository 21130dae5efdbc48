"""Kernels of attention: which ones a GPU gets, and that a run on it says, records and sets them."""

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

GPUS = {"T4": (7, 5), "A100": (8, 0), "L4": (8, 9), "H100": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}
CUDNN = 92000  # of PyTorch 2.13's wheels
ALL = ("cuDNN", "flash", "memory-efficient", "math")
IMAGES = {"task": "image-classification", "dataset": "images", "model": "vit"}


@pytest.fixture(autouse=True)
def cudnn_as_before():
    torch.backends.cuda.enable_cudnn_sdp(True)
    yield
    torch.backends.cuda.enable_cudnn_sdp(True)


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true", "16-mixed"])
@pytest.mark.parametrize("fixed", [True, False])
def test_cudnn_is_for_rows_of_one_length_on_hopper_and_its_big_successor(precision, fixed):
    for name in ("A100", "L4", "H100", "B200", "RTX 5090"):
        expected = ALL if fixed and name in ("H100", "B200") else ALL[1:]
        assert attention_kernels(precision, GPUS[name], CUDNN, fixed) == expected, name


@pytest.mark.parametrize(
    ("precision", "kernels"),
    [("16-mixed", ALL[2:]), ("32-true", ALL[2:]), ("bf16-true", ALL[3:]), ("64-true", ALL[3:])],
)
def test_a_t4_has_no_flash_kernel_and_for_bfloat16_none(precision, kernels):
    assert attention_kernels(precision, GPUS["T4"], CUDNN, fixed=True) == kernels


@pytest.mark.parametrize("name", ["A100", "H100"])
def test_only_16_bits_have_kernels_of_flash_and_cudnn(name):
    assert attention_kernels("32-true", GPUS[name], CUDNN, fixed=True) == ALL[2:]
    assert attention_kernels("64-true", GPUS[name], CUDNN, fixed=True) == ALL[3:]


@pytest.mark.parametrize("options", [{"cudnn": 91500}, {"cudnn": None}, {"cudnn": CUDNN, "deterministic": True}])
def test_cudnn_is_left_out_where_pytorch_would_not_take_it(options):
    assert attention_kernels("bf16-mixed", GPUS["H100"], fixed=True, **options) == ALL[1:]


def test_the_process_is_set_both_ways():
    use_kernels(ALL[1:])
    assert not torch.backends.cuda.cudnn_sdp_enabled()
    use_kernels(ALL)
    assert torch.backends.cuda.cudnn_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled(), "what no other kernel takes is not refused"


class Pretended(CPUAccelerator):
    """A GPU that is asked for nothing but its name."""

    def setup_device(self, device):
        """Nothing is to be set up."""


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
def test_a_run_on_a_gpu_says_records_and_takes_its_kernels(tmp_path, monkeypatch, capsys, values, kernels):
    run = start_on_h100(tmp_path, monkeypatch, **values)
    torch.use_deterministic_algorithms(False)
    assert f"Attention kernels, the first that can: {', '.join(kernels)}\n" in capsys.readouterr().out
    assert json.loads(json.dumps(run.record.values))["attention_kernels"] == list(kernels)
    assert torch.backends.cuda.cudnn_sdp_enabled() == ("cuDNN" in kernels)


def test_neither_a_cpu_nor_eager_attention_says_anything_of_kernels(tmp_path, monkeypatch, capsys):
    run, _ = run_training(tmp_path)
    assert "attention_kernels" not in run.record.values
    start_on_h100(tmp_path, monkeypatch, attention="eager")
    assert "Attention kernels" not in capsys.readouterr().out
    assert torch.backends.cuda.cudnn_sdp_enabled()
