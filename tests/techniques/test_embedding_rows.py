"""Embedding gradients by rows equal PyTorch's sum bit by bit, and make no tensor as large as the table."""

from contextlib import nullcontext

import pytest
import torch
from lightning import Fabric
from support.helpers import VOCABULARY, relative_error, settings_for, tiny_model, token_datasets
from support.made import Made
from support.planning import build, case
from torch import nn
from torch._dynamo.testing import CompileCounter

from fabric_ladder import build_dataloaders
from fabric_ladder.planning.rehearsal import to_rehearse
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.techniques.embedding_rows import FEWEST, RowEmbedding, add_rows, adding_rows
from fabric_ladder.training.gradients import accumulate_gradients

ROWS, WIDTH = 50, 8


def table(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH, dtype=dtype, **options), nn.Tanh())


def passes(model, batches, adding, hooked=False):
    with adding_rows(hooked) if adding else nullcontext():
        for ids in batches:
            output = model(ids)
            factors = torch.linspace(-1, 1, output.numel(), dtype=output.dtype)
            (output.flatten() * factors).sum().backward()
    return model[0].weight.grad


BATCHES = [torch.tensor(ids) for ids in ([[1, 2, 2], [3, 0, 0]], [[2, 2, 2], [2, 0, 49]], [[7, 2, 1], [9, 9, 7]])]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize(("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {"padding_idx": 0})])
def test_the_sum_equals_pytorchs_bit_by_bit(dtype, options, hooked):
    expected = passes(table(dtype, **options), BATCHES, adding=False)
    model = table(dtype, **options)
    add_rows(model)
    assert type(model[0]) is RowEmbedding
    assert torch.equal(passes(model, BATCHES, True, hooked), expected)
    assert expected[0].any() != bool(options), "padding has no gradient"


@pytest.mark.parametrize("hooked", [False, True])
def test_a_second_micro_batch_makes_no_tensor_of_the_tables_size(hooked):
    model = table()
    add_rows(model)
    passes(model, BATCHES[:1], True)
    for adding, largest in ((True, ROWS), (False, ROWS * WIDTH)):
        with Made() as made:
            passes(model, BATCHES[1:2], adding, hooked)
        assert made.largest == largest  # a number for each row, or the whole table


def test_hooks_of_a_table_that_the_head_shares_fire_without_another_tensor_of_its_size():
    model = tiny_model("gpt2-lm")
    add_rows(model)
    table, fired, found = model.get_input_embeddings().weight, [], []
    table.register_post_accumulate_grad_hook(lambda weight: fired.append(weight.grad.clone()))
    ids = torch.tensor([[1, 2, 3, 2, 9]])
    for hooked in (False, True):
        table.grad = torch.ones_like(table)
        with adding_rows(hooked), Made() as made:
            model(input_ids=ids, labels=ids).loss.backward()
        found.append((table.grad, made.shapes.count(table.shape)))
    assert len(fired) == 2
    assert torch.equal(fired[1], found[0][0])
    assert found[0][1] == found[1][1], "tensors of the table's size"


@pytest.mark.parametrize(("tokens", "rows"), [(ROWS // FEWEST, True), (ROWS // FEWEST + 1, False)])
def test_long_batches_are_left_to_pytorch(tokens, rows):
    model, ids = table(), torch.arange(tokens)[None]
    add_rows(model)
    passes(model, [ids], True)
    with Made() as made:
        passes(model, [ids], True)
    assert ((ROWS, WIDTH) not in made.shapes) == rows


def test_compiled_tables_are_left_to_pytorch():
    model, compiled = table(), CompileCounter()
    add_rows(model)
    model.compile(backend=compiled)
    assert torch.equal(passes(model, BATCHES, True), passes(table(), BATCHES, adding=False))
    passes(model, BATCHES, adding=False)
    assert compiled.frame_count == 1, "one graph, with or without an earlier gradient"


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("bloom", 0), ("bert", 0), ("gpt2-lm", 1e-6)],  # GPT-2's head shares the table: three terms, in any order
)
def test_a_models_gradient_is_the_same(tmp_path, kind, tolerance):
    settings = settings_for(tmp_path, micro_batch_size=1)
    loader, _, _ = build_dataloaders(
        Fabric(accelerator="cpu", devices=1), token_datasets(per_token=kind.endswith("-lm")), settings
    )
    (batch, *_) = loader

    def gradients(by_rows):
        fabric, model = Fabric(accelerator="cpu", devices=1), tiny_model(kind)
        if by_rows:
            add_rows(model)
        with Made() as made:
            accumulate_gradients(fabric, fabric.setup(model), batch.micro_batches, Meter(fabric))
        table = model.get_input_embeddings().weight
        return [weight.grad for weight in model.parameters()], made.shapes.count(table.shape)

    (expected, whole), (got, fewer) = gradients(False), gradients(True)
    short = [each.inputs["input_ids"].numel() * FEWEST <= VOCABULARY for each in batch.micro_batches[1:]]
    assert fewer <= whole - sum(short) < whole
    assert relative_error(expected, got) <= tolerance


@pytest.mark.parametrize(
    ("values", "kind"), [({}, RowEmbedding), ({"strategy": "deepspeed", "deepspeed": "zero2"}, nn.Embedding)]
)
def test_deepspeeds_gradients_equal_autograds(tmp_path, values, kind):
    settings, *_ = case(tmp_path, "bloom", precision="bf16-mixed", devices=1, **values)
    for each in (settings, to_rehearse(settings)):
        assert type(build(each).get_input_embeddings()) is kind
