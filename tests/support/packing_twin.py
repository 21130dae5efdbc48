"""A small twin of a model in 64-bit, which shows whether packed documents see each other."""

import math

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig

from fabric_ladder.models.probe import VOCABULARY, small_copy
from fabric_ladder.techniques.fused_attention import fuse_attention
from fabric_ladder.techniques.packing import support_packing

SAMPLES = 5, 3, 4  # tokens of each sample
ROWS = ((0, 1, 2), (2, 1, 0))  # samples of each row; some kernels find packed samples only in a single row
TOLERANCE = 1e-6  # relative difference of gradients that rounding explains; some layers compute in 32-bit


def packing_error(
    config: PretrainedConfig, task: str, longest: int, documents: int | None = None, training: bool = False
) -> float:
    """Return the relative difference between a twin's gradients of separate and of packed samples; change the config.

    Raises:
        UserError: Layers attend to fewer tokens than rows have.
        Exception: The twin cannot be made or run. The class of the error depends on the model.
    """
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            twin = _twin(config, task, longest, documents)
            return _compare(twin.train(training), task == "instruction-tuning")
    finally:
        transformers.logging.set_verbosity(verbosity)


def _twin(config: PretrainedConfig, task: str, longest: int, documents: int | None) -> nn.Module:
    """Return a model with random weights and few layers, heads and tokens."""
    model = small_copy(config, task, torch.float64)
    fuse_attention(model)
    support_packing(model, longest, documents)
    return model


def _compare(model: nn.Module, per_token: bool) -> float:
    """Return the relative difference between the gradients of separate and of packed samples."""
    ids = [torch.randint(1, VOCABULARY, (length,)) for length in SAMPLES]
    order = [index for row in ROWS for index in row]
    labels = [ids[index] if per_token else torch.tensor([place % 2]) for place, index in enumerate(order)]
    for index, label in zip(order, labels, strict=True):
        _loss(model(input_ids=ids[index][None]).logits, label[None] if per_token else label).backward()
    expected = _take_gradients(model)
    packed = {
        "input_ids": torch.stack([torch.cat([ids[index] for index in row]) for row in ROWS]),
        "position_ids": torch.stack([torch.cat([torch.arange(SAMPLES[index]) for index in row]) for row in ROWS]),
    }
    ends = torch.tensor([SAMPLES[index] for index in order]).cumsum(0)
    if per_token:
        logits = model(**packed).logits.flatten(0, 1).split([SAMPLES[index] for index in order])
        losses = [_loss(part[None], label[None]) for part, label in zip(logits, labels, strict=True)]
    else:
        spans = torch.stack([torch.cat([ends.new_zeros(1), ends[:-1]]), ends], 1)
        losses = [_loss(model(**packed, spans=spans).logits, torch.cat(labels))]
    torch.stack(losses).sum().backward()
    difference = ((_take_gradients(model) - expected).norm() / expected.norm()).item()
    if not math.isfinite(difference):
        raise ValueError("its gradients are not finite")
    return difference


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the sum of the losses of classes, or of next tokens, (samples, length, vocabulary)."""
    if logits.dim() == 3:
        logits, labels = logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    return cross_entropy(logits, labels, reduction="sum")


def _take_gradients(model: nn.Module) -> Tensor:
    """Return the gradients of all weights in one tensor, and forget them."""
    gradients = [parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return torch.cat(gradients)
