"""Embeddings' gradients, added by rows: the bits of PyTorch's own sum, and no tensor as large as the table."""

import pytest
import torch
from lightning import Fabric
from support.helpers import relative_error, settings_for, tiny_model, token_datasets
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_ladder import build_dataloaders
from fabric_ladder.models.embeddings import RowEmbedding, add_rows, adding_rows
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.training.gradients import accumulate_gradients

ROWS, WIDTH = 50, 8


class Made(TorchDispatchMode):
    """Notes the shapes of the tensors that operations make; views, and what is changed in place, are none."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        there = {leaf.untyped_storage().data_ptr() for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        made = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        self.shapes += [leaf.shape for leaf in made if leaf.untyped_storage().data_ptr() not in there]
        return result


def table(dtype=torch.float32, **options):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(ROWS, WIDTH, dtype=dtype, **options), nn.Tanh())


def passes(model, batches, adding, hooked=False):
    with adding_rows(adding, hooked):
        for ids in batches:
            output = model(ids)
            factors = torch.linspace(-1, 1, output.numel(), dtype=output.dtype)
            (output.flatten() * factors).sum().backward()
    return model[0].weight.grad


BATCHES = [torch.tensor(ids) for ids in ([[1, 2, 2], [3, 0, 0]], [[2, 2, 2], [2, 0, 49]], [[7, 2, 1], [9, 9, 7]])]


@pytest.mark.parametrize("hooked", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("options", [{}, {"padding_idx": 0}], ids=["", "padding"])
def test_the_sum_is_pytorchs_to_the_bit(dtype, options, hooked):
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
        assert max(shape.numel() for shape in made.shapes) == largest  # a number for each row, or the whole


def test_what_waits_for_a_gradient_is_told_of_it():
    model, told = table(), []
    add_rows(model)
    passes(model, BATCHES[:1], True)
    model[0].weight.register_post_accumulate_grad_hook(lambda weight: told.append(weight.grad.clone()))
    gradient = passes(model, BATCHES[1:2], True, hooked=True)
    assert len(told) == 1
    assert torch.equal(told[0], gradient)


def test_tables_smaller_than_the_batch_and_compiled_ones_are_left_to_pytorch():
    long = torch.arange(ROWS).repeat(2)[None]
    expected = passes(table(), [long, long], adding=False)
    model = table()
    add_rows(model)
    assert torch.equal(passes(model, [long, long], True), expected)
    expected = passes(table(), BATCHES, adding=False)
    model = table()
    add_rows(model)
    model.compile(backend="eager")
    assert torch.equal(passes(model, BATCHES, True), expected)


@pytest.mark.parametrize(
    ("kind", "tolerance"),
    [("bloom", 0), ("bert", 0), ("gpt2-lm", 1e-6)],  # the last one's head has the same table: three sums, in any order
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
    assert len(batch.micro_batches) == 16
    assert fewer <= whole - 15
    assert relative_error(expected, got) <= tolerance
