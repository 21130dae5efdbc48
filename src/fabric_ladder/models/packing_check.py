"""Whether a model can pack: tried with a small twin of it, in 64-bit, before any work."""

import math

import torch
import transformers
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import PretrainedConfig

from fabric_ladder.errors import UserError, first_line
from fabric_ladder.models.bloom import fuse_attention
from fabric_ladder.models.configs import MODELS, load_config
from fabric_ladder.models.packing import support_packing
from fabric_ladder.settings import Settings

VOCABULARY = 64  # of the twin, as its layers' inner size
SAMPLES = 5, 3, 4  # tokens of the samples that are tried
ROWS = (0, 1, 2), (2, 1, 0)  # how they share rows; two, since some kernels look for packed samples in a single row only
TOLERANCE = 1e-6  # a larger relative difference of gradients is no rounding; some layers compute in 32-bit


def check_packing(settings: Settings) -> None:
    """Refuse, before any work, a model whose gradients are not the same packed and one sample at a time.

    Raises:
        UserError: `packing` with images or eager attention, or with an architecture in which packed samples see each
            other or are taken for others, or with which it cannot be tried.
    """
    if not settings.packing:
        if settings.pack_rows:
            raise UserError(f"--pack_rows {settings.pack_rows} is for packed rows: add --packing true")
        return
    if settings.task == "image-classification":
        raise UserError("--packing true: images have one size, and no padding to be saved; use --packing false")
    if settings.attention == "eager":
        raise UserError("--packing true needs --attention fused: eager attention would need a mask of tokens x tokens")
    config = load_config(settings.model)
    name = f"{settings.model} ({config.model_type})"
    try:
        difference = packing_error(config, settings.task, settings.max_length)
    except UserError:
        raise
    except Exception as error:  # whatever a library's or a config's author thought of
        raise UserError(
            f"--packing true: whether packed samples stay apart in {name} could not be tried "
            f"({type(error).__name__}: {first_line(error, 160)}); leave it out"
        ) from error
    if difference > TOLERANCE:
        raise UserError(f"--packing true: packed samples would see each other in {name}; leave it out")


def packing_error(config: PretrainedConfig, task: str, longest: int) -> float:
    """Return the relative difference between a twin's gradients of samples alone and packed; the config is changed.

    Raises:
        UserError: Layers see fewer tokens at once than rows have.
        Exception: Of any class: the twin cannot be made or run.
    """
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return _compare(_twin(config, task, longest), task == "instruction-tuning")
    finally:
        transformers.logging.set_verbosity(verbosity)


def _twin(config: PretrainedConfig, task: str, longest: int) -> nn.Module:
    """Return a model with random weights and with few layers, heads and tokens, so that it is made quickly."""
    config.return_dict = True
    if task != "instruction-tuning":
        config.num_labels = 2  # a config may ask for a regression
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
        if getattr(inner, "pooler_hidden_size", None):
            inner.pooler_hidden_size = inner.hidden_size
    model = MODELS[task].from_config(config, dtype=torch.float64).eval()
    with torch.no_grad():
        for weight in model.parameters():  # where training starts, near 0, a layer can hide what leaks through it
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            else:
                weight.add_(torch.randn_like(weight) / 8)
    fuse_attention(model)
    support_packing(model, longest)
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


def _compare(model: nn.Module, of_tokens: bool) -> float:
    """Return the relative difference between the gradients of samples alone and packed."""
    ids = [torch.randint(1, VOCABULARY, (length,)) for length in SAMPLES]
    order = [index for row in ROWS for index in row]
    labels = [ids[index] if of_tokens else torch.tensor([place % 2]) for place, index in enumerate(order)]
    for index, label in zip(order, labels, strict=True):
        _loss(model(input_ids=ids[index][None]).logits, label[None] if of_tokens else label).backward()
    expected = _take_gradients(model)
    packed = {
        "input_ids": torch.stack([torch.cat([ids[index] for index in row]) for row in ROWS]),
        "position_ids": torch.stack([torch.cat([torch.arange(SAMPLES[index]) for index in row]) for row in ROWS]),
    }
    ends = torch.tensor([SAMPLES[index] for index in order]).cumsum(0)
    if of_tokens:
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
