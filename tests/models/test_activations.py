"""GELU's tanh approximation by PyTorch's kernel, compared with transformers' own modules."""

import json

import pytest
import torch
from support.helpers import settings_for, tiny_model, token_datasets
from support.made import Kernels
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from transformers.activations import ACT2FN
from transformers.models.bloom.modeling_bloom import BloomGelu

from fabric_ladder import build_model
from fabric_ladder.models.activations import STEP_BY_STEP, fuse_gelu
from fabric_ladder.models.layers import linear_layers

NAMES = ("gelu_new", "gelu_fast", "bloom")


def both(name):
    theirs, ours = (nn.Sequential(BloomGelu() if name == "bloom" else ACT2FN[name]) for _ in range(2))
    fuse_gelu(ours)
    return theirs, ours


def values_and_gradients(activation, dtype):
    inputs = (torch.arange(-128, 129) / 16).to(dtype).requires_grad_()  # exact in every format
    outputs = activation(inputs)
    outputs.sum().backward()
    return outputs.detach(), inputs.grad


def kept(activation, inputs):
    """Return the bytes that the forward pass keeps for the backward pass."""
    sizes = {}
    with saved_tensors_hooks(lambda tensor: sizes.setdefault(tensor.data_ptr(), tensor), lambda tensor: tensor):
        activation(inputs)
    return sum(tensor.nbytes for tensor in sizes.values() if tensor.dim())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-9), (torch.bfloat16, 2e-2)])
def test_values_and_gradients_are_the_same(name, dtype, error):
    theirs, ours = (values_and_gradients(activation, dtype) for activation in both(name))
    torch.testing.assert_close(ours, theirs, rtol=error, atol=error)


@pytest.mark.parametrize("name", NAMES)
def test_each_pass_takes_one_kernel_and_keeps_only_the_input(name):
    theirs, ours = both(name)
    inputs, gradient = torch.ones(100, requires_grad=True), torch.ones(100)
    assert kept(ours, inputs) == inputs.nbytes
    assert kept(theirs, inputs) >= (1 if name == "bloom" else 4) * inputs.nbytes
    with Kernels() as kernels:
        torch.autograd.grad(ours(inputs), inputs, gradient)
    assert kernels.counts.total() == 2


@pytest.mark.parametrize(("kind", "key"), [("gpt2", "activation_function"), ("phi", "hidden_act")])
def test_a_built_model_has_no_gelu_of_single_steps(tmp_path, kind, key):
    path = tmp_path / "model.json"
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    path.write_text(json.dumps({"model_type": kind, "vocab_size": 64, key: "gelu_new", **sizes}))
    check_built(tmp_path, path)


def test_blooms_modules_and_weights_keep_their_names(tmp_path):
    path = tmp_path / "model.json"
    tiny_model().config.to_json_file(path)
    eager, fused = check_built(tmp_path, path)
    assert list(fused.state_dict()) == list(eager.state_dict())
    assert [name for name, _ in fused.named_modules()] == [name for name, _ in eager.named_modules()]
    assert linear_layers(fused) == linear_layers(eager)


def check_built(tmp_path, path):
    """Return the model with eager and with fused attention, whose GELU is transformers' own and PyTorch's kernel."""
    models = []
    for attention in ("eager", "fused"):
        settings = settings_for(tmp_path, model=str(path), from_scratch=True, attention=attention)
        models.append(build_model(settings, token_datasets()))
    counts = [
        sum(isinstance(module, kind) for module in model.modules())
        for model in models
        for kind in (STEP_BY_STEP, nn.GELU)
    ]
    layers = models[0].config.num_hidden_layers
    assert counts == [layers, 0, 0, layers]
    return models
