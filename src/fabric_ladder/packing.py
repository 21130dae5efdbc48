"""Packing: short samples share a row of a training batch without seeing each other.

A packed batch says where samples start by `position_ids`, which count from 0 in each, and has no attention mask. Most
of transformers' causal language models make of these a mask that keeps the samples apart; `keep_apart` does so for
BLOOM, and `check_packing` tries it for all.
"""

import math
from types import MethodType

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PretrainedConfig

from fabric_ladder.errors import UserError

VOCABULARY = 64  # of the twin, as its layers' inner size
SAMPLES = 5, 3, 4  # tokens of the samples that are tried
ROWS = (0, 1, 2), (2, 0, 1)  # how they share rows; two, since some kernels look for packed samples in a single row only
TOLERANCE = 1e-4  # a larger relative difference is no rounding in 32-bit


def keep_apart(model: nn.Module) -> None:
    """Let a causal language model take packed batches where its architecture needs help; others stay as they are.

    BLOOM knows no `position_ids`: its positions are ALiBi, which counts the tokens of a 2-D mask. Here they become a
    4-D mask, which BLOOM passes on as it is, and ALiBi counts what this shows to each token. The seams are forward
    pre-hooks and, on the instance, BLOOM's own method `build_alibi_tensor`; `copy.deepcopy`, `torch.compile`, PEFT and
    `fully_shard` keep both. With an attention mask, or without `position_ids`, the model computes what it did.

    Args:
        model: A model of transformers, before anything is wrapped around it.
    """
    inner = model.base_model
    if hasattr(inner, "build_alibi_tensor"):
        for module in (model, inner):  # the outer one would drop the positions; a loss may call the inner one alone
            module.register_forward_pre_hook(_mask_of_positions, with_kwargs=True)
        inner.build_alibi_tensor = MethodType(_alibi_of_mask, inner)  # bound to the copy by copy.deepcopy


def check_packing(settings) -> None:
    """Refuse, before any work, what cannot pack; whether samples stay apart is tried with a small twin of the model.

    Raises:
        UserError: `packing` with another task than `instruction-tuning`, or with an architecture in which packed
            samples see each other, or with which it cannot be tried.
    """
    from fabric_ladder.models import load_config  # which imports this module

    if not settings.packing:
        return
    if settings.task != "instruction-tuning":
        raise UserError(f"--packing true goes with --task instruction-tuning only, not with {settings.task}")
    config = load_config(settings.model)
    name = f"{settings.model} ({config.model_type})"
    try:
        difference = _difference(config)
    except Exception as error:  # whatever a library's or a config's author thought of
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:160]
        raise UserError(
            f"--packing true: whether packed samples stay apart in {name} could not be tried ({reason}); leave it out"
        ) from error
    if difference > TOLERANCE:
        raise UserError(f"--packing true: packed samples would see each other in {name}; leave it out")


def _mask_of_positions(module: nn.Module, args: tuple, kwargs: dict) -> tuple[tuple, dict] | None:
    """Put a block-diagonal causal mask, added to the scores, in the place of `position_ids`.

    Not by transformers' `create_causal_mask`, which waits for the device to see whether anything is packed.
    """
    if kwargs.get("position_ids") is None or kwargs.get("attention_mask") is not None:
        return None
    kwargs = dict(kwargs)
    positions = kwargs.pop("position_ids")
    sample = (positions == 0).cumsum(-1)
    place = torch.arange(positions.shape[1], device=positions.device)
    hidden = (sample[:, :, None] != sample[:, None, :]) | (place[:, None] < place)
    dtype = module.get_input_embeddings().weight.dtype
    mask = torch.zeros(hidden.shape, dtype=dtype, device=positions.device)
    kwargs["attention_mask"] = mask.masked_fill_(hidden, torch.finfo(dtype).min)[:, None]
    return args, kwargs


def _alibi_of_mask(self, attention_mask: Tensor, num_heads: int, dtype: torch.dtype) -> Tensor:
    """Return (rows * heads, 1, length), as BLOOM's method does, of a 4-D mask too: 0 at each sample's first token."""
    build = type(self).build_alibi_tensor
    if attention_mask.dim() == 2:
        return build(self, attention_mask, num_heads, dtype)
    positions = (attention_mask[:, 0] == 0).sum(-1) - 1  # a token sees those before it in its sample, and itself
    alibi = build(self, torch.ones_like(positions), num_heads, dtype)
    return alibi.gather(-1, positions[:, None].expand(-1, num_heads, -1).reshape(alibi.shape))


def _difference(config: PretrainedConfig) -> float:
    """Return the relative difference between a twin's logits of samples alone and packed; the config is changed.

    Raises:
        Exception: The twin cannot be made or run, of whatever kind that error is.
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
    """Return a model with random weights and with few layers, heads and tokens, so that it is made in no time."""
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
            weight.normal_(0, weight.shape[-1] ** -0.5) if weight.dim() > 1 else weight.add_(
                torch.randn_like(weight) / 8
            )
    keep_apart(model)
    return model


def _cut_layers(config: PretrainedConfig) -> None:
    """Keep the first layers, as many as it takes to have one of each kind."""
    depth = config.num_hidden_layers
    kinds = {name: getattr(config, name, None) for name in ("layer_types", "layers_block_type")}  # or properties
    lists = {name: value for name, value in (kinds | vars(config)).items() if isinstance(value, list | tuple)}
    lists = {name: value for name, value in lists.items() if len(value) == depth}
    layers = [repr(layer) for layer in zip(*lists.values(), strict=True)] or [""]
    count = max(layers.index(layer) for layer in set(layers)) + 1
    config.num_hidden_layers = count
    for name in lists.keys() & vars(config).keys():
        setattr(config, name, lists[name][:count])


@torch.no_grad()
def _compare(model: nn.Module) -> float:
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
