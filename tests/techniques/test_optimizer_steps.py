"""Kahan summation, steps inside the backward pass, and steps in CPU memory."""

from contextlib import nullcontext

import pytest
import torch
from lightning import Fabric
from support.helpers import settings_for, tiny_model, token_datasets
from support.training import losses, run_training
from torch import nn

from fabric_ladder import UserError, build_dataloaders, build_optimizer
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.techniques import TECHNIQUES, adam_4bit, check_together, kahan
from fabric_ladder.techniques.kahan import Kahan
from fabric_ladder.techniques.weight_steps import WeightSteps
from fabric_ladder.training.gradients import accumulate_gradients

OPTIMIZERS = ["adam", "adamw", "sgd", "sinkgd", "adafactor", "adam-8bit", "adam-4bit"]
BF16 = {"precision": "bf16-true", "learning_rate": 1e-3, "epochs": 2}


def fit(tmp_path, dtype, optimizer, rate, **values):
    """Return a perceptron's mean squared error after some small steps, divided by its first error."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
    inputs = torch.randn(64, 64)
    targets = torch.sin(inputs[:, :8]).sum(1, keepdim=True) / 2
    model, inputs, targets = model.to(dtype), inputs.to(dtype), targets.to(dtype)
    settings = settings_for(tmp_path, learning_rate=rate, optimizer=optimizer, **values)
    optimizer, errors = build_optimizer(settings, model), []
    for _ in range(100):
        loss = ((model(inputs) - targets) ** 2).float().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        errors.append(loss.item())
    return errors[-1] / errors[0]


@pytest.mark.parametrize(("optimizer", "rate"), [("adam", 1e-4), ("adamw", 1e-4), ("sgd", 2e-3), ("adam-8bit", 1e-4)])
def test_kahan_summation_learns_where_bfloat16_does_not(tmp_path, optimizer, rate):
    whole = fit(tmp_path, torch.float32, optimizer.removesuffix("-8bit"), rate=rate)
    rounded = fit(tmp_path, torch.bfloat16, optimizer, rate=rate)
    assert whole < 0.7
    for bits in (True, "8-bit"):
        kept = fit(tmp_path, torch.bfloat16, optimizer, rate=rate, kahan_summation=bits)
        assert abs(kept - whole) < 0.1 * (rounded - whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_an_error_in_8_bits_is_as_small_as_its_two_bytes_can_be(tmp_path, dtype):
    """1,000 steps that 16 bits alone ignore: the sum is off by half of a unit in 8 bits for each step at most."""
    torch.manual_seed(0)
    start = torch.randn(300).to(dtype).sign() * torch.rand(300).to(dtype).clamp(0.1)
    step = start.double().abs() * torch.finfo(dtype).eps / 20
    model = nn.ParameterList([nn.Parameter(start.clone())])
    settings = settings_for(tmp_path, learning_rate=1.0, optimizer="sgd", kahan_summation="8-bit")
    optimizer = build_optimizer(settings, model)
    for number in range(1000):
        if number == 500:  # resume
            optimizer.load_state_dict(optimizer.state_dict())
        model[0].grad = -step.to(dtype)
        optimizer.step()
    assert optimizer.state[model[0]]["compensation"].dtype == torch.int8
    whole = start.double() + 1000 * step.to(dtype).double()
    unit = whole.abs().log2().ceil().exp2() * torch.finfo(dtype).eps / 4 / 127
    off = (model[0].double() - whole).abs()
    assert (off < 1000 * unit / 2 + 2 * 127 * unit).all()
    assert off.mean() < 0.1 * (start.double() - whole).abs().mean()


SIZES = ((40, 16), (7,), (16, 16), (3, 5), (33,), (20, 16))


def steps_with_kahan(tmp_path, dtype, optimizer, bits, steps=6):
    """Return weights and compensations after steps on random gradients; two weights lack gradients now and then."""
    torch.manual_seed(0)
    model = nn.ParameterList([nn.Parameter(torch.randn(size).to(dtype)) for size in SIZES])
    settings = settings_for(tmp_path, learning_rate=1e-3, optimizer=optimizer, kahan_summation=bits)
    stepper = build_optimizer(settings, model)
    for step in range(steps):
        if step == steps // 2:  # resume
            stepper, before = build_optimizer(settings, model), stepper
            stepper.load_state_dict(before.state_dict())
        for place, weight in enumerate(model):
            weight.grad = None if (place + step) % 4 == 1 and place < 2 else torch.randn(weight.shape).to(dtype)
        stepper.step()
    return [*model, *(state["compensation"] for state in stepper.state.values() if state)]


@pytest.mark.parametrize("bits", [True, "8-bit"], ids=["16", "8"])
@pytest.mark.parametrize("optimizer", ["adam", "adamw", "sgd", "adam-8bit"])
def test_kahan_summation_of_many_weights_changes_no_bit(tmp_path, monkeypatch, optimizer, bits):
    """AdamW has weight decay. Errors in 8 bits are converted slice by slice."""
    dtype = torch.float16 if optimizer == "sgd" else torch.bfloat16
    batched = steps_with_kahan(tmp_path, dtype, optimizer, bits)
    monkeypatch.setattr(Kahan, "single", True)
    monkeypatch.setattr(kahan, "SLICE", 30)
    expected = steps_with_kahan(tmp_path, dtype, optimizer, bits)
    assert any(tensor.any() for tensor in expected[len(SIZES) :])
    assert all(map(torch.equal, batched, expected))


def test_8_bit_adam_steps_like_bitsandbytes_without_waiting(tmp_path, monkeypatch):
    from bitsandbytes.optim import Adam8bit, optimizer

    waits = []
    monkeypatch.setattr(optimizer, "sync_gpu", waits.append)
    found = []
    for kind in (Adam8bit, None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 64))  # matrices in 8 bits, the rest in 32
        settings = settings_for(tmp_path, optimizer="adam-8bit", learning_rate=1e-3)
        stepper = build_optimizer(settings, model) if kind is None else kind(model.parameters(), lr=1e-3)
        for step in range(4):
            if step == 2:  # resume
                again = type(stepper)(model.parameters(), lr=1e-3)
                again.load_state_dict(stepper.state_dict())
                stepper = again
            stepper.zero_grad()
            model(torch.randn(8, 64)).square().sum().backward()
            model[2].bias.grad = None
            stepper.step()
        found.append([weight.detach() for weight in model.parameters()])
        assert len(waits) == 4 * 3  # bitsandbytes' own steps
    assert all(map(torch.equal, *found))


IN_BACKWARD, OFFLOADED = {"step_in_backward": True}, {"optimizer_offload": True, "micro_batch_size": 6}
BOTH = {"step_in_backward": True, "optimizer_offload": True}
CLIPPED = {"optimizer_offload": True, "max_grad_norm": 0.1}  # steps wait until all gradients exist
PLACES = [(place, optimizer) for place in (IN_BACKWARD, OFFLOADED) for optimizer in OPTIMIZERS]


@pytest.mark.parametrize(
    ("place", "optimizer", "kahan"),
    [
        *((*case, False) for case in PLACES),
        (BOTH, "adam", True),
        (BOTH, "sinkgd", True),
        (BOTH, "adam", "8-bit"),
        (CLIPPED, "adam", False),
    ],
)
def test_the_place_of_the_steps_changes_no_bit(tmp_path, monkeypatch, place, optimizer, kahan):
    monkeypatch.setattr(adam_4bit, "LEAST", 128)  # then most tensors of the small model are in 4 bits
    same = {name: value for name, value in place.items() if name in ("micro_batch_size", "max_grad_norm")}
    values = BF16 | same | {"kahan_summation": kahan, "optimizer": optimizer, "schedule": "cosine"}
    expected, model = run_training(tmp_path / "plain", tiny_model(dropout=0.1), **values)
    run, other = run_training(tmp_path / "other", tiny_model(dropout=0.1), **values | place)
    assert losses(run) == losses(expected)
    assert len(set(losses(run))) > 1
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.equal(two)


def steps_of_one_batch(tmp_path, **values):
    """Return model, optimizer and the largest number of gradients after one effective batch's backward pass."""
    fabric = Fabric(accelerator="cpu", devices=1)
    settings = settings_for(tmp_path, **values)
    loader, _, _ = build_dataloaders(fabric, token_datasets(), settings)
    model = fabric.setup(tiny_model())
    optimizer, most = fabric.setup_optimizers(build_optimizer(settings, model)), []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: most.append(sum(each.grad is not None for each in model.parameters()))
        )
    batch = next(iter(loader))
    accumulate_gradients(fabric, model, batch.micro_batches, Meter(fabric), optimizer=optimizer)
    return model, optimizer, max(most)


def test_no_two_gradients_exist_at_the_same_time(tmp_path):
    model, optimizer, most = steps_of_one_batch(tmp_path, step_in_backward=True)
    assert most == 0  # the counting hook runs after the hook that steps and frees
    assert all(optimizer.optimizer.state[parameter]["step"] == 1 for parameter in model.parameters())
    model, optimizer, most = steps_of_one_batch(tmp_path)
    assert most == sum(1 for _ in model.parameters())
    assert not optimizer.optimizer.state


def test_the_cpu_steps_before_the_backward_pass_is_over(tmp_path):
    model, optimizer, _ = steps_of_one_batch(tmp_path, optimizer_offload=True, micro_batch_size=8)
    assert all(optimizer.optimizer.state[parameter]["step"] == 1 for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_cpu_copies_weights_once_and_again_after_a_change(tmp_path):
    settings = settings_for(tmp_path, optimizer_offload=True, optimizer="sgd", learning_rate=1.0)
    optimizer = build_optimizer(settings, model := nn.Linear(2, 2, bias=False))

    def step():
        model.weight.grad = torch.ones_like(model.weight)
        optimizer.step()
        return model.weight.detach().clone()

    before = model.weight.detach().clone()
    assert step().equal(before - 1)
    optimizer._host[model.weight].add_(8)
    assert step().equal(before - 1 + 8 - 1), "the CPU's copy is stepped"
    with torch.no_grad():
        model.weight.zero_()  # reading a checkpoint does the same
    assert step().eq(-1).all()


def test_a_failed_step_leaves_weights_and_groups_as_they_were(tmp_path):
    settings = settings_for(tmp_path, kahan_summation=True, step_in_backward=True)
    optimizer = build_optimizer(settings, model := nn.Linear(2, 2).to(torch.bfloat16))
    before = model.weight.detach().clone()
    optimizer.param_groups[0]["betas"] = "none"
    with pytest.raises((TypeError, ValueError)), optimizer.stepping():
        model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    assert model.weight.equal(before)
    assert len(optimizer.param_groups[0]["params"]) == 2


@pytest.mark.parametrize("again", [{}, {"step_in_backward": True}], ids=["plain", "in backward"])
def test_a_second_optimizer_of_a_model_replaces_the_first(tmp_path, again):
    """A notebook's cells may run twice."""
    model = nn.Linear(2, 2)
    first = build_optimizer(settings_for(tmp_path, step_in_backward=True), model)
    second = build_optimizer(settings_for(tmp_path, **again), model)
    before = model.weight.detach().clone()
    with second.stepping() if again else first.stepping():
        model(torch.ones(1, 2)).sum().backward()
    second.step()
    assert not first.state
    assert not model.weight.equal(before)


def test_an_error_of_a_step_on_the_cpu_reaches_the_run(tmp_path):
    optimizer = build_optimizer(settings_for(tmp_path, optimizer_offload=True), model := nn.Linear(2, 2))
    assert isinstance(optimizer, WeightSteps)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.param_groups[0]["betas"] = "none"
    with pytest.raises((TypeError, ValueError)):
        optimizer.step()


def test_a_gradient_that_is_not_finite_is_found_after_it_was_freed(tmp_path):
    def prepare(model, _):
        next(model.parameters()).register_hook(lambda gradient: gradient * torch.nan)

    with pytest.raises(UserError, match=r"the gradient is not finite"):
        run_training(tmp_path, step_in_backward=True, prepare=prepare)


def check(settings):
    """Check the settings of the techniques that change the optimizer."""
    check_together(settings)
    for technique in TECHNIQUES:
        if technique.setting in ("kahan_summation", "step_in_backward", "optimizer_offload", "optimizer"):
            technique.check(settings, None)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step_in_backward": True, "max_grad_norm": 1.0}, "--max_grad_norm needs all gradients together"),
        ({"step_in_backward": True, "micro_batch_size": 1}, "must be one micro-batch"),
        ({"step_in_backward": True, "micro_batch_tokens": "auto"}, "must be one micro-batch"),
        ({"step_in_backward": True, "micro_batch_size": 1, "packing": True}, "must be one micro-batch"),
        ({"step_in_backward": True, "devices": 2}, "only on one device"),
        ({"optimizer_offload": True, "devices": 2}, "only on one device"),
        ({"optimizer_offload": True, "precision": "16-mixed"}, "not under 16-mixed"),
        ({"optimizer": "adam-8bit", "accelerator": "mps"}, "use --optimizer adafactor"),
    ],
)
def test_contradicting_settings_are_refused(tmp_path, values, message):
    with pytest.raises(UserError, match=message):
        check(settings_for(tmp_path, **values))


@pytest.mark.parametrize(
    ("optimizer", "more"),
    [*((optimizer, {}) for optimizer in OPTIMIZERS), ("adam-8bit", {"kahan_summation": True}),
     ("adam", {"step_in_backward": True}), ("sgd", {"optimizer_offload": True})],
)  # fmt: skip
def test_weight_decay_shrinks_matrices_alone_by_its_share_of_the_rate(tmp_path, optimizer, more):
    """A gradient of 0 leaves only the decay, in all optimizers as in AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    rate, steps = 1e-2, 3
    settings = settings_for(tmp_path, learning_rate=rate, optimizer=optimizer, weight_decay=0.1, **more)
    optimizer = build_optimizer(settings, model)
    for _ in range(steps):
        with optimizer.stepping() if isinstance(optimizer, WeightSteps) else nullcontext():
            (0 * sum(parameter.sum() for parameter in model.parameters())).backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        expected = before[name] * (1 - rate * 0.1) ** (steps if parameter.ndim > 1 else 0)
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("optimizer", ["adam", "adamw", "adam-8bit", "adam-4bit"])
def test_betas_eps_and_decay_reach_adam(tmp_path, optimizer):
    values = {"betas": "0.8,0.95", "eps": 1e-3, "weight_decay": 0.1}
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))  # few enough for moments of 32 bits
    twin = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    twin.load_state_dict(model.state_dict())
    mine = build_optimizer(settings_for(tmp_path, learning_rate=1e-2, optimizer=optimizer, **values), model)
    matrices, others = ([each for each in twin.parameters() if (each.ndim > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    theirs = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), eps=1e-3)
    for step in range(5):
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            one.grad = torch.sin(one.detach() * 10 + step)
            other.grad = one.grad.clone()
        mine.step()
        theirs.step()
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-5)
