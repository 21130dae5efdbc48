"""The train loop: gradients, steps, modes and losses, and settings that must not change them."""

import math
import random
import weakref

import numpy as np
import pytest
import torch
from lightning import Fabric
from support.helpers import free_port, relative_error, settings_for, tiny_model, token_datasets
from support.training import column, losses, run_training
from transformers import AutoModelForSequenceClassification

from fabric_ladder import build_dataloaders
from fabric_ladder.distributed.ddp import DDPInBuckets
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.training.gradients import accumulate_gradients, forget_gradients
from fabric_ladder.training.state import random_state, set_random_state

CUTS = [
    {"micro_batch_size": 16},
    {"micro_batch_size": 1},
    {"micro_batch_tokens": 64},
    {"micro_batch_size": 3, "pad_to_multiple_of": 8},
]


def loss_in_its_own_dtype(logits, labels, **_):
    """Use a 64-bit loss, because the library's loss for causal language models rounds the logits to 32-bit."""
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def gradients(tmp_path, dtype, kind, samples, values):
    """Return the gradients of the first effective batch, and its mean loss."""
    fabric = Fabric(accelerator="cpu", devices=1)  # with 64-true Fabric would round the loss to 32-bit
    datasets = token_datasets(train=samples, per_token=kind.endswith("-lm"))
    loader, _, _ = build_dataloaders(fabric, datasets, settings_for(tmp_path, **values))
    model = tiny_model(kind).to(dtype)
    if dtype == torch.float64 and kind == "gpt2-lm":
        model.loss_function = loss_in_its_own_dtype
    model = fabric.setup(model)
    model.train()
    meter = Meter(fabric)
    accumulate_gradients(fabric, model, next(iter(loader)).micro_batches, meter)
    meter.commit(("first", []))
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None], meter.collect().loss


# BLOOM's softmax and Llama's norms are always computed in 32-bit, so these models prove nothing in 64-bit
@pytest.mark.parametrize(
    ("dtype", "tolerance", "kind", "samples"),
    [
        (torch.float32, 1e-5, "bloom", 16),
        (torch.float32, 1e-5, "llama-lm", 5),
        (torch.float64, 1e-12, "bert", 5),
        (torch.float64, 1e-12, "gpt2-lm", 16),
    ],
)
def test_micro_batches_change_no_gradient(tmp_path, dtype, tolerance, kind, samples):
    expected, loss = gradients(tmp_path, dtype, kind, samples, CUTS[0])
    assert sum(gradient.abs().sum() for gradient in expected) > 0
    # a bias in front of a softmax has a gradient of zero, which no relative error can measure
    kept = [index for index, gradient in enumerate(expected) if gradient.norm() > 1e-6]
    for values in CUTS[1:]:
        got, its_loss = gradients(tmp_path, dtype, kind, samples, values)
        assert relative_error([expected[i] for i in kept], [got[i] for i in kept]) < tolerance, values
        assert its_loss == pytest.approx(loss, rel=tolerance)


def test_no_graph_is_kept_until_the_next_forward_pass(tmp_path):
    fabric = Fabric(accelerator="cpu", devices=1)
    loader, _, _ = build_dataloaders(fabric, token_datasets(), settings_for(tmp_path, micro_batch_size=4))
    model, graphs, alive = tiny_model(), [], []
    model.register_forward_pre_hook(lambda *_: alive.append([graph() is not None for graph in graphs]))
    model.register_forward_hook(lambda _, __, outputs: graphs.append(weakref.ref(outputs.loss)))
    accumulate_gradients(fabric, fabric.setup(model), next(iter(loader)).micro_batches, Meter(fabric))
    assert alive == [[False] * count for count in range(4)]


def test_ddp_holds_each_gradient_once(tmp_path, monkeypatch):
    """After every pass, gradients are parts of DDP's buckets, and there are fewer buckets than weights."""
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    fabric = Fabric(accelerator="cpu", devices=1, strategy=DDPInBuckets())
    fabric.launch()
    try:
        settings = settings_for(tmp_path, micro_batch_size=4)
        loader, _, _ = build_dataloaders(fabric, token_datasets(), settings)
        model = fabric.setup(tiny_model())
        optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters()))
        weights, seen = list(model.parameters()), []

        def look():
            seen.append({weight.grad.untyped_storage().data_ptr() for weight in weights})
            return False

        for batch in loader:
            accumulate_gradients(fabric, model, batch.micro_batches, Meter(fabric), look)
            look()
            optimizer.step()
            forget_gradients(fabric, optimizer)
            assert not any(weight.grad.any() for weight in weights)
        assert len(seen) == sum(len(batch.micro_batches) for batch in loader) >= 8
        assert max(map(len, seen)) < len(weights) / 4
        assert len({frozenset(buckets) for buckets in seen}) <= 2, "DDP makes new buckets once, after the first step"
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(("schedule", "warmup"), [("cosine", 0), ("linear", 2), ("constant", 4)])
def test_schedules_count_optimizer_steps_and_reach_their_end(tmp_path, schedule, warmup):
    """The schedules equal the library's. SGD's cosine schedule ends at 0."""
    rates, steps = [], 3 * math.ceil(40 / 16)

    def prepare(_, optimizer):
        optimizer.register_step_pre_hook(lambda *_: rates.append(optimizer.param_groups[0]["lr"]))

    run, _ = run_training(
        tmp_path, prepare=prepare, micro_batch_size=8, epochs=3, optimizer="sgd", learning_rate=0.1,
        schedule=schedule, warmup_steps=warmup,
    )  # fmt: skip
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
    expected = []
    after = {
        "cosine": lambda: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps - warmup),
        "linear": lambda: torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, steps - warmup),
        "constant": lambda: torch.optim.lr_scheduler.ConstantLR(optimizer, 1),
    }[schedule]()
    for _ in range(steps - warmup + 1):
        expected.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        after.step()
    assert rates == pytest.approx([0.1 * (step + 1) / (warmup + 1) for step in range(warmup)] + expected[:-1])
    assert len(rates) == steps
    assert column(run.folder, "learning_rate")[-1] == pytest.approx(0.1 if schedule == "constant" else 0, abs=1e-12)


def test_an_optimizer_of_other_parameters_raises_an_error(tmp_path):
    def prepare(model, optimizer):
        model.score.weight = torch.nn.Parameter(model.score.weight.detach().clone())

    with pytest.raises(ValueError, match=r"make it after fabric\.setup\(model\)"):
        run_training(tmp_path, prepare=prepare)


def test_printed_losses_are_undivided_means_per_item(tmp_path):
    """The first printed loss is the untrained model's loss on the same 16 samples, and no cut changes a later one."""
    datasets = token_datasets()
    fabric = Fabric(accelerator="cpu", devices=1)
    loader, _, _ = build_dataloaders(fabric, datasets, settings_for(tmp_path))
    (micro_batch,) = next(iter(loader)).micro_batches
    with torch.no_grad():
        expected = tiny_model()(**micro_batch.inputs).loss.item()
    each = losses(run_training(tmp_path, datasets=datasets)[0])
    assert each[0] == pytest.approx(expected, rel=1e-5)
    for values in CUTS[1:3]:
        assert losses(run_training(tmp_path, datasets=datasets, **values)[0]) == pytest.approx(each, rel=1e-4)


def test_the_mean_since_the_last_line_and_the_train_accuracy_weigh_every_sample_equally(tmp_path):
    runs = [run_training(tmp_path, log_every=every)[0] for every in (1, 32, 10_000)]
    each = losses(runs[0])
    assert losses(runs[2]) == [pytest.approx((16 * each[0] + 16 * each[1] + 8 * each[2]) / 40, rel=1e-6)]
    found = [run.record.values["results"]["epochs"][0]["train_accuracy"] for run in runs]
    assert found[0] == found[1] == found[2]


def test_restored_random_states_give_the_same_numbers():
    """The states are PyTorch's, NumPy's and Python's. A user's model or tokenizer may use any of them."""

    def draw():
        return torch.rand(3).tolist(), np.random.random(3).tolist(), [random.random() for _ in range(3)]

    state = random_state(torch.device("cpu"))
    first, second = draw(), draw()
    assert all(mine != other for mine, other in zip(first, second, strict=True))
    set_random_state(state, torch.device("cpu"))
    assert draw() == first


@pytest.mark.parametrize("tokens", [1, 100_000])
def test_validation_and_test_use_the_samples_of_their_splits(tmp_path, tokens):
    """The result is compared with the trained model on one sample at a time."""
    datasets = token_datasets()
    run, model = run_training(tmp_path, datasets=datasets, eval_batch_tokens=tokens)
    expected = {}
    for name in ("validation", "test"):
        rows = datasets.splits[name].select_columns(["input_ids", "labels"])
        each = [model(**{key: torch.tensor([value]) for key, value in row.items()}).loss.item() for row in rows]
        expected[name] = sum(each) / len(each)
    results = run.record.values["results"]
    assert results["epochs"][-1]["validation_loss"] == pytest.approx(expected["validation"], rel=1e-5)
    assert results["test_loss"] == pytest.approx(expected["test"], rel=1e-5)
    assert abs(expected["validation"] - expected["test"]) > 1e-3
    assert results["test_samples"] == 13
    seconds = sum(datasets.splits["validation"]["length"][:]) / results["evaluation_tokens_per_second"]
    assert 0 < seconds <= results["elapsed_seconds"] - results["training_seconds"]


def test_the_inner_module_switches_between_training_and_evaluation(tmp_path):
    """`from_pretrained` leaves the inner module in eval mode, while `training` of the wrapper is True."""
    tiny_model("bert", dropout=0.1).save_pretrained(tmp_path / "saved")
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "saved")
    assert not model.training
    modes = []
    model.bert.encoder.layer[0].register_forward_hook(lambda module, *_: modes.append(module.training))
    run_training(tmp_path, model, epochs=2)
    training, evaluating = [True] * 3, [False]
    assert modes == training + evaluating + training + evaluating + evaluating


def test_clipping_bounds_the_whole_effective_batch(tmp_path):
    norms = []

    def watch(model, optimizer):
        def record(*_):
            norms.append(torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in model.parameters()])).item())

        optimizer.register_step_pre_hook(record)

    run_training(tmp_path, prepare=watch, micro_batch_size=2)
    assert max(norms) > 1e-3
    norms.clear()
    run_training(tmp_path, prepare=watch, micro_batch_size=2, max_grad_norm=1e-3)
    assert norms == pytest.approx([1e-3] * 3, rel=1e-3)
