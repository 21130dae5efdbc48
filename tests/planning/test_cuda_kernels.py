"""The tensors that operations keep for the backward pass on a CUDA GPU, compared with arithmetic."""

import json

import pytest
import torch
from support.helpers import MODELS
from support.planning import case
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F  # noqa: N812

from fabric_ladder.planning.cuda_kernels import CudaKernels
from fabric_ladder.planning.predict import predict_peak

ROWS, WIDTH, STACKED = 4, 8, 3
COUNT = ROWS * WIDTH
BERT = {"model_type": "bert", "vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "attention_probs_dropout_prob": 0.0}  # fmt: skip


def kept_bytes(function, model):
    """Return the bytes that a forward pass keeps for the backward pass, the model's weights excluded."""
    weights = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            kept[storage._cdata] = storage
        return tensor

    with CudaKernels(), saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return sum(storage.nbytes() for storage in kept.values())


def stack(dtype=torch.float32, **options):
    layers = [layer for _ in range(STACKED) for layer in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1, **options))]
    return nn.Sequential(*layers).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_keeps_a_mask_of_one_byte_per_element(dtype):
    model, inputs = stack(dtype), torch.ones(ROWS, WIDTH, dtype=dtype)
    assert kept_bytes(lambda: model(inputs), model) == STACKED * COUNT * (dtype.itemsize + 1)
    assert kept_bytes(lambda: model.eval()(inputs), model) == STACKED * COUNT * dtype.itemsize


def test_dropout_in_place_keeps_a_mask_of_its_inputs_type():
    """PyTorch, `Dropout.cpp: dropout_` has no fused kernel."""
    model, inputs = stack(torch.bfloat16, inplace=True), torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
    assert kept_bytes(lambda: model(inputs), model) == STACKED * COUNT * (2 + 2)


def test_the_dropout_of_a_model_adds_its_masks_to_the_prediction(tmp_path):
    peaks = []
    for dropout in (0.0, 0.1):
        path = tmp_path / "bert.json"
        path.write_text(json.dumps({**BERT, "hidden_dropout_prob": dropout}))
        peaks.append(predict_peak(*case(tmp_path, "bert", model=str(path), precision="bf16-mixed")[:2]))
    masks = 1 + 2 * BERT["num_hidden_layers"]  # the embeddings and two of each layer; the peak is before the classifier
    assert peaks[1].activations - peaks[0].activations == 8 * 96 * BERT["hidden_size"] * masks
    assert peaks[1].other == peaks[0].other


def test_the_dropout_of_adapters_adds_its_masks_to_the_prediction(tmp_path):
    """The backward pass recomputes the dropout of each adapter's input from its mask."""
    plain, dropping = (
        predict_peak(
            *case(tmp_path, "bloom", lora=True, lora_targets="attention", lora_dropout=dropout, precision="bf16-true")[
                :2
            ]
        )
        for dropout in (0.0, 0.1)
    )
    config = json.loads((MODELS / "bloom-quickstart.json").read_text())
    assert dropping.activations - plain.activations == 8 * 96 * config["hidden_size"] * config["n_layer"]


@pytest.mark.parametrize(
    "function",
    [lambda x: F.layer_norm(x, x.shape[1:]), lambda x: x.softmax(-1), lambda x: F.softmax(x, -1), torch.exp,
     lambda x: x**2, lambda x: torch.pow(x, 2), lambda x: x.sum(-1), lambda x: F.rms_norm(x, x.shape[1:])],
)  # fmt: skip
def test_autocast_computes_in_32_bits_what_it_does_on_a_gpu(function):
    """The list is PyTorch's documentation, "CUDA Ops that can autocast to float32"."""
    inputs = torch.ones(ROWS, WIDTH, dtype=torch.bfloat16)
    with CudaKernels():
        assert function(inputs).dtype == torch.bfloat16
        with torch.autocast("cpu", torch.bfloat16):
            assert function(inputs).dtype == torch.float32
            assert F.softmax(inputs, -1, dtype=torch.bfloat16).dtype == torch.bfloat16
            assert F.gelu(inputs).dtype == torch.bfloat16
