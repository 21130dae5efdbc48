"""Adam's moments in 4 bits: their values, their memory, and training with them."""

import sys

import pytest
import torch
from support.helpers import settings_for
from support.planning import case, measured_peak
from torch import nn

from fabric_ladder import build_optimizer
from fabric_ladder.planning.predict import predict_peak
from fabric_ladder.techniques import adam_4bit
from fabric_ladder.techniques.low_bit_optimizer import LowBitOptimizer

subclass_4bit = pytest.importorskip("torchao.optim.subclass_4bit", exc_type=ImportError)
torchao = pytest.importorskip("torchao.optim", exc_type=ImportError)
SHAPES = [(65, 128), (31, 128), (4097,), (1,)]  # the others have moments in 32 bits


def steps_of(tmp_path, weights, gradients, **values):
    """Return weights after steps with given gradients, and their optimizer."""
    model = nn.ParameterList([nn.Parameter(weight.clone()) for weight in weights])
    settings = settings_for(tmp_path, **({"optimizer": "adam-4bit", "learning_rate": 1e-3} | values))
    return take_steps(model, build_optimizer(settings, model), gradients)


def take_steps(weights, optimizer, gradients):
    for step in gradients:
        for weight, gradient in zip(weights, step, strict=True):
            weight.grad = gradient.to(weight.dtype)
        optimizer.step()
    return [weight.detach() for weight in weights], optimizer


def random_steps(dtype=torch.float32, steps=5):
    torch.manual_seed(1)
    scales = [10 ** (-4 * torch.rand(shape)) for shape in SHAPES]  # different sizes within a block
    gradients = [[torch.randn(each.shape) * each for each in scales] for _ in range(steps)]
    return [torch.randn(shape).to(dtype) for shape in SHAPES], gradients


def test_steps_by_parts_equal_torchaos_bit_by_bit(tmp_path, monkeypatch):
    levels = {"exp_avg": subclass_4bit.get_qmap_signed(), "exp_avg_sq": subclass_4bit.get_qmap_unsigned()}
    assert {name: pytest.approx(table) for name, table in adam_4bit.TABLES.items()} == levels
    monkeypatch.setattr(adam_4bit, "TABLES", levels)  # theirs are rounded in their last bits
    monkeypatch.setattr(adam_4bit, "PART_SIZE", 2048)
    weights, gradients = random_steps()
    ours, optimizer = steps_of(tmp_path, weights, gradients, weight_decay=0.1)
    theirs = [nn.Parameter(weight.clone()) for weight in weights]
    groups = [{"params": [weight], "weight_decay": 0.1 * (weight.ndim > 1)} for weight in theirs]
    with torch.compiler.set_stance("force_eager"):
        theirs, reference = take_steps(theirs, torchao.AdamW4bit(groups, lr=1e-3), gradients)
    assert all(map(torch.equal, ours, theirs))
    state, wanted = (next(iter(each.state.values())) for each in (optimizer, reference))
    assert state["exp_avg"].equal(wanted["exp_avg"].codes)
    assert state["exp_avg_sq_scale"].equal(wanted["exp_avg_sq"].scale * adam_4bit.LARGER**2)


@pytest.mark.parametrize("size", [1e-2, 1e-7])
def test_small_gradients_take_the_steps_of_adam(tmp_path, size):
    """torchao's own steps shrink with gradients below 1e-6."""
    weights, gradients = [torch.zeros(64, 128)], [[torch.full((64, 128), size)]] * 30
    (ours,), _ = steps_of(tmp_path, weights, gradients)
    (adam,), _ = steps_of(tmp_path, weights, gradients, optimizer="adam")
    torch.testing.assert_close(ours, adam, rtol=1e-4, atol=0)


def test_small_and_odd_tensors_are_stepped_in_32_bit(tmp_path):
    weights, gradients = random_steps(torch.bfloat16)
    ours, optimizer = steps_of(tmp_path, weights, gradients)
    states = list(optimizer.state.values())
    assert [state["exp_avg"].dtype for state in states] == [torch.uint8, *[torch.float32] * 3]
    wanted, _ = steps_of(tmp_path, [weight.float() for weight in weights], gradients, optimizer="adam")
    for one, other in zip(ours[1:], wanted[1:], strict=True):  # five roundings of weights up to 4
        torch.testing.assert_close(one.float(), other, rtol=0, atol=4e-2)


@pytest.mark.filterwarnings("ignore:Module is None")  # a warning of the other tracker
@pytest.mark.parametrize(
    "ways",
    [
        {"precision": "bf16-true", "kahan_summation": True, "train_blocks": "last:1"},
        pytest.param({"precision": "bf16-true", "kahan_summation": True}, marks=pytest.mark.slow),
        pytest.param({"lora": True, "lora_dropout": 0.0}, marks=pytest.mark.slow),
    ],
)
def test_the_prediction_agrees_with_real_tensors(tmp_path, monkeypatch, ways):
    monkeypatch.setattr(adam_4bit, "PART_SIZE", 8192)
    settings, training, _ = case(tmp_path, "vit", optimizer="adam-4bit", **ways)
    assert predict_peak(settings, training).total == pytest.approx(measured_peak(settings, training), rel=0.01)


@pytest.mark.parametrize(
    ("precision", "reason"),
    [("32-true", "it needs torchao: pip install torchao=="), ("64-true", "torchao steps in 32 bits")],
)
def test_it_is_refused_without_torchao_and_in_64_bit(tmp_path, monkeypatch, precision, reason):
    settings = settings_for(tmp_path, optimizer="adam-4bit", precision=precision)
    if precision == "32-true":
        assert LowBitOptimizer().reason_against(settings, None) is None
        monkeypatch.setitem(sys.modules, "torchao.optim", None)
    assert LowBitOptimizer().reason_against(settings, None).startswith(reason)


@pytest.fixture
def compiling(monkeypatch):
    """Compile the steps on this CPU, as on a CUDA GPU."""
    torch._dynamo.reset()
    adam_4bit.torchao_step.cache_clear()
    monkeypatch.setattr(adam_4bit, "compiles", lambda _: True)


@pytest.mark.slow
def test_compiled_steps_are_those_of_the_eager_code_up_to_rounding(tmp_path, compiling, monkeypatch):
    """In ten steps at most one code in a thousand is another one: it then lies on the border between two levels."""
    weights, gradients = random_steps(torch.bfloat16, steps=10)
    compiled, optimizer = steps_of(tmp_path, weights, gradients)
    monkeypatch.setattr(adam_4bit, "compiles", lambda _: False)
    eager, reference = steps_of(tmp_path, weights, gradients)
    for one, other in zip(compiled, eager, strict=True):
        assert torch.isclose(one.float(), other.float(), rtol=2**-8, atol=1e-6).float().mean() > 0.999
    state, wanted = (next(iter(each.state.values())) for each in (optimizer, reference))
    assert (state["exp_avg"] == wanted["exp_avg"]).float().mean() > 0.999
