"""GELU's tanh approximation by PyTorch's kernel, compared with transformers' own modules."""

import json

import pytest
import torch
from support.helpers import settings_for, token_datasets
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.activations import ACT2FN

from fabric_ladder import build_model
from fabric_ladder.models.activations import STEP_BY_STEP, fuse_gelu

NAMES = ("gelu_new", "gelu_fast")


def both(name):
    theirs, ours = (nn.Sequential(ACT2FN[name]) for _ in range(2))
    fuse_gelu(ours)
    return theirs, ours


def kept(activation, inputs):
    """Return the bytes that the forward pass keeps for the backward pass."""
    sizes = {}
    with saved_tensors_hooks(lambda tensor: sizes.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor):
        activation(inputs)
    return sum(tensor.nbytes for tensor in sizes.values() if tensor.dim())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-9), (torch.float32, 2e-6), (torch.bfloat16, 2e-2)])
def test_values_and_gradients_are_the_same(name, dtype, error):
    results = []
    for activation in both(name):
        inputs = torch.linspace(-8, 8, 4001, dtype=dtype, requires_grad=True)
        outputs = activation(inputs)
        outputs.sum().backward()
        results.append((outputs, inputs.grad))
    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=error, atol=error)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_input_is_kept(name):
    theirs, ours = both(name)
    inputs = torch.ones(100, requires_grad=True)
    assert kept(ours, inputs) == inputs.nbytes
    assert kept(theirs, inputs) >= 4 * inputs.nbytes


@pytest.mark.parametrize(("kind", "key"), [("gpt2", "activation_function"), ("phi", "hidden_act")])
def test_a_built_model_has_no_gelu_of_single_steps(tmp_path, kind, key):
    path = tmp_path / "model.json"
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    path.write_text(json.dumps({"model_type": kind, "vocab_size": 64, key: "gelu_new", **sizes}))
    model = build_model(settings_for(tmp_path, model=str(path), from_scratch=True), token_datasets())
    assert not [module for module in model.modules() if isinstance(module, STEP_BY_STEP)]
    assert sum(isinstance(module, nn.GELU) for module in model.modules()) == model.config.num_hidden_layers
