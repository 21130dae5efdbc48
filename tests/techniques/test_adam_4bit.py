"""Adam's moments in 4 bits: their values, their memory, and training with them."""

import pytest
import torch
from support.helpers import SRC, run_script, settings_for
from support.planning import build, case, measured_peak
from support.resuming import assert_same, checkpoints, run_here, tensors_of
from support.training import losses, run_training
from torch import nn

from fabric_ladder import UserError, build_optimizer
from fabric_ladder.planning.predict import predict_peak
from fabric_ladder.planning.tracker import PeakTracker
from fabric_ladder.techniques import adam_4bit

RUNG, FOUR_BITS = "18_low_bit_optimizer", ["--optimizer", "adam-4bit"]


def steps_of(tmp_path, weight, gradients, compiled=None, **values):
    """Return a weight after steps with given gradients, and its optimizer."""
    model = nn.ParameterList([nn.Parameter(weight.clone())])
    settings = settings_for(tmp_path, **({"optimizer": "adam-4bit", "learning_rate": 1e-3} | values))
    optimizer = build_optimizer(settings, model)
    optimizer.compiled = compiled
    for gradient in gradients:
        model[0].grad = gradient.to(weight.dtype)
        optimizer.step()
    return model[0].detach(), optimizer


def random_steps(*shape, steps=5):
    generator = torch.Generator().manual_seed(1)
    scales = 10 ** torch.rand(shape, generator=generator).mul_(-4)  # different sizes within a block
    return torch.randn(shape, generator=generator), [
        torch.randn(shape, generator=generator) * scales for _ in range(steps)
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_equals_torchaos(tmp_path, dtype):
    """torchao compiles its step; this test calls the function without compiling it."""
    adam = pytest.importorskip("torchao.optim.adam")
    from torchao.optim.subclass_4bit import OptimState4bit

    weight, gradients = random_steps(64, 128)
    weight = weight.to(dtype)
    ours, optimizer = steps_of(tmp_path, weight, gradients)
    theirs, step = weight.clone(), torch.tensor(0.0)
    moments = [OptimState4bit.zeros(weight.shape, signed, 128) for signed in (True, False)]
    for gradient in gradients:
        step += 1
        options = torch.tensor(1e-3), 0.9, 0.999, 0.0, 1e-8, False, False
        adam.single_param_adam(theirs, gradient.to(dtype), step, *moments, None, *options)
    torch.testing.assert_close(ours, theirs)
    (state,) = optimizer.state.values()
    for name, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        torch.testing.assert_close(state[f"{name}_scale"], moment.scale)
        assert (state[name] == moment.codes).float().mean() > 0.999  # a value may round up instead of down


@pytest.mark.parametrize("size", [1e-2, 1e-5, 1e-7])
def test_small_gradients_take_the_steps_of_adam(tmp_path, size):
    weight = torch.zeros(64, 128)
    gradients = [torch.full_like(weight, size)] * 30
    ours, _ = steps_of(tmp_path, weight, gradients)
    adam, _ = steps_of(tmp_path, weight, gradients, optimizer="adam")
    torch.testing.assert_close(ours, adam, rtol=1e-4, atol=0)


def test_a_weight_has_little_more_than_a_byte_of_state(tmp_path):
    weight, gradients = random_steps(64, 128)
    _, optimizer = steps_of(tmp_path, weight, gradients)
    (state,) = optimizer.state.values()
    assert sum(tensor.nbytes for tensor in state.values()) == 64 * 128 * (1 + 2 * 4 / 128) + 4  # the number of steps


@pytest.mark.parametrize("shape", [(31, 128), (4097,), (1,)], ids=["small", "odd", "single"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_small_and_odd_tensors_are_stepped_in_32_bit(tmp_path, shape, dtype):
    weight, gradients = random_steps(*shape)
    ours, optimizer = steps_of(tmp_path, weight.to(dtype), gradients)
    (state,) = optimizer.state.values()
    assert state["exp_avg"].dtype == state["exp_avg_sq"].dtype == torch.float32
    wanted, _ = steps_of(tmp_path, weight, gradients, optimizer="adam")
    rounding = {} if dtype == torch.float32 else {"rtol": 0, "atol": 5e-3}  # five steps of weights up to 4
    torch.testing.assert_close(ours.float(), wanted, **rounding)


def test_the_size_of_parts_changes_no_bit(tmp_path, monkeypatch):
    weight, gradients = random_steps(65, 128)
    whole, _ = steps_of(tmp_path, weight, gradients)
    monkeypatch.setattr(adam_4bit, "PART_SIZE", 2048)
    assert steps_of(tmp_path, weight, gradients)[0].equal(whole)


def test_weights_in_64_bit_lose_nothing(tmp_path):
    weight = torch.full((64, 128), 1.0, dtype=torch.float64)
    stepped, _ = steps_of(tmp_path, weight, [torch.ones(64, 128)], learning_rate=1e-12)
    torch.testing.assert_close(stepped - 1, torch.full_like(weight, -1e-12), rtol=1e-3, atol=0)


def test_values_with_a_gradient_of_0_stay(tmp_path):
    """Rows of tokens that do not occur keep their values, alone in a block or not."""
    weight, gradients = random_steps(128, 64)
    for gradient in gradients:
        gradient[5] = gradient[20:60] = 0
    stepped, _ = steps_of(tmp_path, weight, gradients)
    assert stepped[5].equal(weight[5])
    assert stepped[20:60].equal(weight[20:60])
    assert (stepped != weight).float().mean() > 0.6


def test_a_stopped_run_resumes_bit_by_bit(tmp_path, dropout_model):
    more = ["--model", dropout_model, "--save_every", 100, *FOUR_BITS]
    (tmp_path / "whole").mkdir()
    assert run_here(RUNG, tmp_path / "whole", *more)[0] == 0
    for place in ("Batch 0003/", "0002/0002 | Batch 0006/"):
        status, text = run_here(RUNG, tmp_path, *more, "--resume", "auto", at=place)
        assert (status, "Stopped by SIGTERM" in text) == (143, True)
    status, text = run_here(RUNG, tmp_path, *more, "--resume", "auto")
    assert (status, "Resumed from runs/" in text) == (0, True)
    (newest,) = checkpoints(tmp_path / "runs" / RUNG / "1")[-1:]
    assert any(tensor.dtype == torch.uint8 for tensor in tensors_of(newest).values())
    assert_same(tmp_path / "runs" / RUNG / "1", tmp_path / "whole" / "runs" / RUNG / "1")


CHECKPOINTED = {"precision": "bf16-mixed", "micro_batch_size": 1, "activation_checkpointing": True}


@pytest.mark.filterwarnings("ignore:Module is None")  # a warning of the other tracker
@pytest.mark.parametrize(
    ("family", "ways"),
    [
        ("bloom", {}),
        ("vit", {"precision": "bf16-true", "kahan_summation": True}),
        pytest.param("bloom-lm", {"step_in_backward": True}, marks=pytest.mark.slow),
        ("vit", {"lora": True, "lora_dropout": 0.0}),
        pytest.param("bloom", CHECKPOINTED, marks=pytest.mark.slow),
    ],
)
def test_the_prediction_agrees_with_real_tensors(tmp_path, monkeypatch, family, ways):
    monkeypatch.setattr(adam_4bit, "PART_SIZE", 4096)
    settings, training, _ = case(tmp_path, family, optimizer="adam-4bit", **ways)
    assert predict_peak(settings, training).total == pytest.approx(measured_peak(settings, training), rel=0.01)


def test_predicted_bytes_of_a_weight(tmp_path):
    settings, training, _ = case(tmp_path, "bloom", optimizer="adam-4bit", precision="bf16-true")
    sizes = [parameter.numel() for parameter in build(settings).parameters()]
    in_4_bits = sum(size for size in sizes if size >= 4096 and size % 128 == 0)
    assert in_4_bits > 0.9 * sum(sizes)
    peak = predict_peak(settings, training)
    assert peak.optimizer_state == 1.0625 * in_4_bits + 8 * (sum(sizes) - in_4_bits) + 4 * len(sizes)  # step counts
    on_host, _, _ = case(tmp_path, "bloom", optimizer="adam-4bit", precision="bf16-true", optimizer_offload=True)
    peak = predict_peak(on_host, training)
    assert peak.optimizer_state == 0
    assert peak.host == pytest.approx((1.0625 + 2 + 2) * sum(sizes) + 20 * max(sizes), abs=1)


def test_no_more_than_a_part_of_a_weight_is_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr(adam_4bit, "PART_SIZE", 2048)
    model = nn.Linear(128, 1024, bias=False)
    optimizer = build_optimizer(settings_for(tmp_path, optimizer="adam-4bit"), model)
    for _ in range(2):
        model.weight.grad = torch.ones(1024, 128)
        with (tracker := PeakTracker()), tracker.at("optimizer"):
            optimizer.step()
    held = 8 * 128 * 1024 + 1.0625 * 128 * 1024  # weight, gradient and state
    assert tracker.peak().total == pytest.approx(held + 20 * 2048, abs=4 * 2048)


def test_shards_are_refused_before_any_work(tmp_path):
    process = run_script(
        SRC / "11_fsdp_cpu_offload.py", *FOUR_BITS, "--accelerator", "cpu", "--devices", 1, cwd=tmp_path
    )
    assert process.returncode == 2
    line = "error: --optimizer adam-4bit cannot step on FSDP2's shards; use sgd, the leanest, adam or adamw"
    assert process.stderr.splitlines()[-1] == line


def test_a_weight_that_is_not_contiguous_is_refused_in_one_line():
    with pytest.raises(UserError, match="--optimizer adam-4bit: a weight of 3 x 2 is not contiguous; use adam-8bit"):
        adam_4bit.Adam4bit([nn.Parameter(torch.ones(2, 3).T)], lr=0.1)


@pytest.fixture
def compiling(monkeypatch):
    """Compile the steps on this CPU, as on a CUDA GPU."""
    torch._dynamo.reset()
    adam_4bit.compiled_step.cache_clear()
    monkeypatch.setattr(adam_4bit, "compiles", lambda _: True)
    graphs = []
    torch._dynamo.on_compile_end(graphs.append)
    yield graphs
    torch._dynamo.callback_handler.remove_end_callback(graphs.append)


def test_on_a_cpu_steps_are_not_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(adam_4bit, "compiled_step", None)
    weight, gradients = random_steps(64, 128)
    steps_of(tmp_path, weight, gradients)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 128), (31, 128), (1,)], ids=["blocks", "in 32 bits", "single"])
def test_compiled_steps_are_those_of_the_eager_code_up_to_rounding(tmp_path, compiling, monkeypatch, dtype, shape):
    """In ten steps at most one code in a thousand is another one: it then lies on the border between two levels."""
    weight, gradients = random_steps(*shape, steps=10)
    compiled, optimizer = steps_of(tmp_path, weight.to(dtype), gradients)
    assert len(compiling) == 1, "there is one graph for all steps"
    monkeypatch.setattr(adam_4bit, "compiles", lambda _: False)
    eager, reference = steps_of(tmp_path, weight.to(dtype), gradients)
    rounding = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-8, "atol": 1e-6}
    close = torch.isclose(compiled.float(), eager.float(), **rounding)
    (state,), (wanted,) = optimizer.state.values(), reference.state.values()
    assert close.float().mean() > 0.999
    for name in ("exp_avg", "exp_avg_sq"):
        if state[name].dtype == torch.uint8:
            assert (state[name] == wanted[name]).float().mean() > 0.999
            torch.testing.assert_close(state[f"{name}_scale"], wanted[f"{name}_scale"], rtol=1e-4, atol=0)
        else:
            torch.testing.assert_close(state[name], wanted[name], rtol=1e-5, atol=1e-8)


@pytest.mark.slow
def test_one_graph_serves_weights_of_all_sizes(tmp_path, compiling, monkeypatch):
    monkeypatch.setattr(adam_4bit, "PART_SIZE", 8192)
    shapes = [(64, 128), (65, 128), (129, 256), (31, 128), (16,), (4097,)]
    model = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
    optimizer = build_optimizer(settings_for(tmp_path, optimizer="adam-4bit"), model)
    for _ in range(3):
        for weight in model:
            weight.grad = torch.randn_like(weight)
        optimizer.step()
    assert len(compiling) <= 3, "moments in 4 bits, one last block of its own, and moments in 32 bits"


@pytest.mark.slow
@pytest.mark.parametrize("first", [True, False], ids=["compiled first", "eager first"])
def test_a_state_of_either_kind_goes_on_in_the_other(tmp_path, compiling, first):
    weight, gradients = random_steps(65, 128, steps=6)
    model = nn.ParameterList([nn.Parameter(weight.clone())])
    saved = {}
    for half, compiled in ((gradients[:3], first), (gradients[3:], not first)):
        optimizer = build_optimizer(settings_for(tmp_path, optimizer="adam-4bit", learning_rate=1e-3), model)
        optimizer.state |= saved
        optimizer.compiled = compiled
        for gradient in half:
            model[0].grad = gradient
            optimizer.step()
        saved = {model[0]: {name: tensor.clone() for name, tensor in optimizer.state[model[0]].items()}}
    eager, _ = steps_of(tmp_path, weight, gradients, compiled=False)
    assert torch.isclose(model[0], eager, rtol=1e-5, atol=1e-6).float().mean() > 0.999


@pytest.mark.slow
@pytest.mark.parametrize(
    "values", [{}, {"kahan_summation": True, "precision": "bf16-true"}, {"step_in_backward": True}]
)
def test_a_run_with_compiled_steps_has_the_losses_of_one_without(tmp_path, compiling, monkeypatch, values):
    monkeypatch.setattr(adam_4bit, "LEAST", 256)  # the model is tiny
    run, _ = run_training(tmp_path, optimizer="adam-4bit", epochs=2, **values)
    assert compiling
    assert run.record.values["results"]["compiled_graphs"] == len(compiling)
    monkeypatch.setattr(adam_4bit, "compiles", lambda _: False)
    plain, _ = run_training(tmp_path, optimizer="adam-4bit", epochs=2, **values)
    assert losses(run) == pytest.approx(losses(plain), abs=2e-3 if "precision" in values else 1e-4)
