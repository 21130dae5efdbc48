"""Packing: short samples share a row of a training batch without seeing each other.

A packed batch says where samples start by `position_ids`, which count from 0 in each, and has no attention mask. Most
of transformers' causal language models make of these a mask that keeps the samples apart; `support_packing` does so for
BLOOM, and `check_packing` tries it for all.
"""

import math

import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from fabric_ladder.errors import UserError, first_line
from fabric_ladder.models.bloom import support_packing
from fabric_ladder.models.configs import load_config
from fabric_ladder.settings import Settings

VOCABULARY = 64  # of the twin, as its layers' inner size
SAMPLES = 5, 3, 4  # tokens of the samples that are tried
ROWS = (0, 1, 2), (2, 0, 1)  # how they share rows; two, since some kernels look for packed samples in a single row only
TOLERANCE = 1e-4  # a larger relative difference is no rounding in 32-bit


def check_packing(settings: Settings) -> None:
    """Refuse, before any work, a model that cannot pack: whether samples stay apart is tried with a small twin of it.

    Raises:
        UserError: `packing` with another task than `instruction-tuning`, or with an architecture in which packed
            samples see each other, or with which it cannot be tried.
    """
    if not settings.packing:
        return
    if settings.task != "instruction-tuning":
        raise UserError(f"--packing true goes with --task instruction-tuning only, not with {settings.task}")
    config = load_config(settings.model)
    name = f"{settings.model} ({config.model_type})"
    try:
        difference = _difference(config)
    except Exception as error:  # whatever a library's or a config's author thought of
        raise UserError(
            f"--packing true: whether packed samples stay apart in {name} could not be tried "
            f"({type(error).__name__}: {first_line(error, 160)}); leave it out"
        ) from error
    if difference > TOLERANCE:
        raise UserError(f"--packing true: packed samples would see each other in {name}; leave it out")


def _difference(config: PretrainedConfig) -> float:
    """Return the relative difference between a twin's logits of samples alone and packed; the config is changed.

    Raises:
        Exception: Of any class: the twin cannot be made or run.
    """
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _compare(_twin(config))
    finally:
        transformers.logging.set_verbosity(verbosity)


def _twin(config: PretrainedConfig) -> nn.Module:
    """Return a model with random weights and with few layers, heads and tokens, so that it is made quickly."""
    inner = config.get_text_config(decoder=True)
    inner.vocab_size, inner.pad_token_id, inner.use_cache = VOCABULARY, 0, False
    # in a mixture of experts, and in Gemma's embedding for each layer, these make billions of weights
    for size in ("intermediate_size", "moe_intermediate_size", "vocab_size_per_layer_input"):
        if getattr(inner, size, None):
            setattr(inner, size, VOCABULARY)
    _cut_layers(inner)
    if heads := getattr(inner, "num_attention_heads", None):
        groups = getattr(inner, "num_key_value_heads", None)
        divisor = math.gcd(heads, groups or heads)
        while heads // divisor < 4 and divisor % 2 == 0:
            divisor //= 2
        inner.hidden_size //= divisor  # which leaves the size of a head as it is
        inner.num_attention_heads //= divisor
        if groups:
            inner.num_key_value_heads //= divisor
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for weight in model.parameters():  # where training starts, near 0, a layer can hide what leaks through it
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            else:
                weight.add_(torch.randn_like(weight) / 8)
    support_packing(model)
    return model


def _cut_layers(config: PretrainedConfig) -> None:
    """Keep the first layers, as many as it takes to have one of each type."""
    depth = config.num_hidden_layers
    types = {name: getattr(config, name, None) for name in ("layer_types", "layers_block_type")}  # or properties
    lists = {name: value for name, value in (types | vars(config)).items() if isinstance(value, list | tuple)}
    lists = {name: value for name, value in lists.items() if len(value) == depth}
    layers = [repr(layer) for layer in zip(*lists.values(), strict=True)] or [""]
    count = max(layers.index(layer) for layer in set(layers)) + 1
    config.num_hidden_layers = count
    for name in lists.keys() & vars(config).keys():
        setattr(config, name, lists[name][:count])


@torch.no_grad()
def _compare(model: nn.Module) -> float:
    """Return the relative difference between the model's logits of samples alone and packed."""
    ids = [torch.randint(1, VOCABULARY, (length,)) for length in SAMPLES]
    alone = [model(input_ids=sample[None]).logits[0] for sample in ids]
    expected = torch.stack([torch.cat([alone[index] for index in row]) for row in ROWS])
    together = torch.stack([torch.cat([ids[index] for index in row]) for row in ROWS])
    positions = torch.stack([torch.cat([torch.arange(SAMPLES[index]) for index in row]) for row in ROWS])
    packed = model(input_ids=together, position_ids=positions).logits
    difference = ((packed - expected).norm() / expected.norm()).item()
    if not math.isfinite(difference):
        raise ValueError("its logits are not finite")
    return difference
