"""Facts about a model that only a forward pass shows. A small copy with random weights decides them.

The copy has the config's architecture on the CPU, with few layers, heads and tokens. So the weights of a run may be
sharded or in 4 bits, and a check of the settings needs none of them.
"""

import json
import math
import re
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.nn.functional import linear
from transformers import PretrainedConfig

from fabric_ladder.data.hub import load_config
from fabric_ladder.errors import UserError, refused
from fabric_ladder.models.configs import MODELS, attend_fully
from fabric_ladder.settings import Settings

SHORT, LONG = 11, 40  # tokens of the probed text (CANINE reads four together), and of the longest text in its batch
VOCABULARY = 64
MOST_TOKENS = 4096  # of a text that is tried
MOST_WEIGHTS = 5e7  # of a copy; a larger one would take seconds
TOLERANCE = 1e-4  # relative difference that rounding in 32 bits explains
# sizes beside the hidden size, and in a mixture of experts and Gemma's embedding for each layer billions of weights
SIZES = """intermediate_size moe_intermediate_size vocab_size_per_layer_input encoder_ffn_dim decoder_ffn_dim ffn_dim
    d_ff n_inner d_inner""".split()
LAYERS = "num_hidden_layers encoder_layers decoder_layers num_decoder_layers".split()
HEADS = "num_attention_heads num_key_value_heads encoder_attention_heads decoder_attention_heads".split()


class Facts(NamedTuple):
    """What a small copy shows.

    Attributes:
        sees_later: Whether logits depend on later tokens.
        padding: Largest change of a text's logits by a longer text in its batch, relative to the largest logit.
        reads_padding: Whether the head of a classifier reads the padding's hidden states.
        pooled: The token that the head of a classifier reads: `first`, `last` or `mean`; None: not known.
        read: Linear layers whose weights the model reads outside their forward pass; each name ends with one of these,
            with N for numbers.
        unused: Linear layers that do not compute a row for each token.
    """

    sees_later: bool
    padding: float
    reads_padding: bool
    pooled: str | None
    read: tuple[str, ...]
    unused: tuple[str, ...]


def check_probed(settings: Settings) -> None:
    """Refuse a model that cannot run, that sees later tokens it has to write, or whose head reads the padding.

    Raises:
        UserError: The model cannot be trained with these settings.
    """
    if settings.task == "image-classification":
        return
    config, step = load_config(settings.model), settings.pad_to_multiple_of
    most = min(MOST_TOKENS, settings.max_length)
    lengths = tuple({math.ceil(length / step) * step for length in (min(SHORT, most), max(1, most - 1), most)})
    values = json.dumps(config.to_dict(), default=str)
    problem = _measure(_pass, type(config), values, settings.task, settings.max_length, lengths)
    if problem is not None:
        text = f"{settings.model} ({config.model_type}) cannot process all texts of up to {max(lengths)} tokens"
        with refused(f"{text}: choose another --max_length or --model"):
            raise problem
    facts = facts_of(settings)
    if facts is None:
        return
    if facts.sees_later and settings.task == "instruction-tuning":
        raise UserError(
            f"{settings.model} sees later tokens: it would learn to copy them, and its answers would be nonsense; "
            "choose a causal language model (a BERT needs is_decoder in its config)"
        )
    if facts.reads_padding and _pads(settings):
        raise UserError(f"the head of {settings.model} reads the padding after a text; {_remedy(settings)}")


def padding_notice(settings: Settings) -> str | None:
    """Return a line if padding changes the results of the model or may do so, and the settings allow padding."""
    facts = facts_of(settings)
    if settings.task == "image-classification" or not _pads(settings):
        return None
    if facts is None:
        return f"Padding may change the results of {settings.model}, which was not tried; {_remedy(settings)}"
    if facts.padding <= TOLERANCE:
        config = load_config(settings.model).get_text_config()
        chosen = getattr(config, "index_topk", None) or math.inf  # rounding decides between keys of nearly equal scores
        line = f"Padding may change the results of {settings.model}, which attends to {chosen} tokens that it chooses"
        return f"{line}; {_remedy(settings)}" if chosen < settings.max_length else None
    return (
        f"Padding changes the results of {settings.model}: they depend on the texts beside each text; "
        f"{_remedy(settings)}"
    )


def facts_of(settings: Settings) -> Facts | None:
    """Return the facts about a model of texts; None: no copy can be made or run."""
    if settings.task == "image-classification":
        return None
    return probe(load_config(settings.model), settings.task, settings.max_length)


def probe(config: PretrainedConfig, task: str, longest: int) -> Facts | None:
    """Return the facts about models with this config, which stays as it is, for texts of up to `longest` tokens."""
    facts = _measure(_facts, type(config), json.dumps(config.to_dict(), default=str), task, longest)
    return facts if isinstance(facts, Facts) else None


def answers_alone(config: PretrainedConfig, longest: int) -> bool:
    """Return whether padding on the left may change a prompt's answer; `longest` tokens with the answer."""
    values = json.dumps(config.to_dict(), default=str)
    change = _measure(_left_padding, type(config), values, "instruction-tuning", longest)
    return not isinstance(change, float) or not change <= TOLERANCE


def layers_named(model: nn.Module, names: tuple[str, ...]) -> list[str]:
    """Return the names of the model's layers of which a small copy has found `names`."""
    ends = tuple(f".{name}" for name in names)
    return [name for name, _ in model.named_modules() if _numberless(f".{name}").endswith(ends)]


def _numberless(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "N", name)


def small_copy(
    config: PretrainedConfig, task: str, dtype: torch.dtype = torch.float32, narrow: bool = True
) -> nn.Module:
    """Return a model with random weights, few layers and tokens, and unless not `narrow` few heads; change the config.

    Raises:
        Exception: The copy cannot be made. The class of the error depends on the model.
    """
    config.return_dict = True
    if task != "instruction-tuning":
        config.num_labels = 2  # a config may be for a regression
    end = getattr(config, "eos_token_id", None)
    config.eos_token_id = end if isinstance(end, int) and 0 < end < VOCABULARY else 5  # 0 pads; some heads look for it
    inner = config if config.is_encoder_decoder else config.get_text_config()
    inner.vocab_size, inner.pad_token_id, inner.use_cache = VOCABULARY, 0, False
    for size in SIZES:
        if getattr(inner, size, None):
            setattr(inner, size, VOCABULARY)
    _cut_layers(inner)
    if narrow and (heads := getattr(inner, "num_attention_heads", None)):
        groups = getattr(inner, "num_key_value_heads", None) or 1
        divisor = math.gcd(heads, groups) if groups > 1 else heads
        inner.hidden_size //= divisor  # the size of a head stays
        counts = {name: getattr(inner, name, None) for name in HEADS}  # some are other names of others
        for name, count in counts.items():
            if count:
                setattr(inner, name, max(1, count // divisor))
        for name in ("pooler_hidden_size", "lru_width"):
            if getattr(inner, name, None):
                setattr(inner, name, inner.hidden_size)
    with torch.device("meta"):
        weights = sum(each.numel() for each in MODELS[task].from_config(config).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"the copy has {weights} weights")
    model = MODELS[task].from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for weight in model.parameters():  # weights near 0 would hide a leak
            if weight.dim() > 1:
                weight.normal_(0, weight.shape[-1] ** -0.5)
            else:
                weight.add_(torch.randn_like(weight) / 8)
    return model


def _cut_layers(config: PretrainedConfig) -> None:
    """Keep the first two layers, and all up to the last layer of a new type."""
    depth = getattr(config, "num_hidden_layers", None)
    types = {name: getattr(config, name, None) for name in ("layer_types", "layers_block_type")}  # or properties
    lists = {name: value for name, value in (types | vars(config)).items() if isinstance(value, list | tuple)}
    lists = {name: value for name, value in lists.items() if len(value) == depth}
    layers = [repr(layer) for layer in zip(*lists.values(), strict=True)] or [""]
    count = min(depth or 2, max(2, *(layers.index(layer) + 1 for layer in set(layers))))
    for name in LAYERS:
        if getattr(config, name, None):
            with suppress(NotImplementedError):  # Funnel sums the layers of its blocks
                setattr(config, name, count)
    for name in lists.keys() & vars(config).keys():
        setattr(config, name, lists[name][:count])


def _cut_lengths(config: PretrainedConfig, longest: int) -> None:
    """Reduce the lengths at which a model switches, as `LONG` stands for `longest` tokens."""
    name = "original_max_position_embeddings"
    for holder in (vars(config), getattr(config, "rope_parameters", None) or {}):
        if isinstance(holder.get(name), int):
            holder[name] = max(SHORT, holder[name] * LONG // max(longest, LONG))


@lru_cache(maxsize=8)
def _measure(measure: Callable, kind: type[PretrainedConfig], values: str, task: str, longest: int, *more):
    """Return what `measure` finds in a small copy, the error of its passes, or None: no copy can be made.

    A pass may fail only because of the copy's few heads, so a second copy has all heads.
    """
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity(transformers.logging.CRITICAL)
    try:
        for narrow in (True, False):
            config = kind.from_dict(json.loads(values))
            attend_fully(config)  # as `build_model` does
            if type(inner := config.get_text_config()) in MODELS[task]._model_mapping:
                config = inner
            model = None
            try:  # the caller may be making a model without values, or in another dtype
                with unset_fake_temporarily(), torch.device("cpu"), torch.random.fork_rng([]), torch.enable_grad():
                    torch.default_generator.manual_seed(0)  # only the CPU's, which alone is restored
                    _cut_lengths(config, longest)
                    model = small_copy(config, task, narrow=narrow)
                    return measure(model, *more)
            except Exception as error:  # a model may have any needs of its own
                if model is not None and not narrow:
                    return error.with_traceback(None)  # which holds the copy
    finally:
        transformers.logging.set_verbosity(verbosity)
    return None


def _pass(model: nn.Module, lengths: tuple[int, ...]) -> None:
    """Run texts of these lengths as in training."""
    with torch.no_grad():
        for length in lengths:
            texts = torch.full((1, length), 5)
            texts[:, -1] = model.config.eos_token_id
            model.train()(input_ids=texts, attention_mask=torch.ones_like(texts))


class _Watched(nn.Linear):
    """A layer with the attribute `read` if its weight was read outside of its forward pass."""

    @property
    def weight(self) -> nn.Parameter:
        self.read = True
        return self._parameters["weight"]

    def forward(self, inputs: Tensor) -> Tensor:
        return linear(inputs, self._parameters["weight"], self.bias)


def _watch(model: nn.Module) -> Callable[[], tuple[tuple[str, ...], tuple[str, ...]]]:
    """Return a function that returns `Facts.read` and `Facts.unused` after some passes."""
    layers = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    used, body = set(), f"{model.base_model_prefix}."

    def note(module: nn.Module, _, output: Tensor) -> None:
        if isinstance(output, Tensor) and output.shape[-1] == module.out_features:  # DeepSeek V4's groups have less
            used.add(_numberless(layers[module].removeprefix(body)))

    for module in layers:
        module.register_forward_hook(note)
        if type(module) is nn.Linear:
            module.__class__ = _Watched

    def found() -> tuple[tuple[str, ...], tuple[str, ...]]:
        names = {module: _numberless(name.removeprefix(body)) for module, name in layers.items()}
        read = {name for module, name in names.items() if hasattr(module, "read")}
        return tuple(sorted(read)), tuple(sorted({*names.values()} - used))

    return found


def _facts(model: nn.Module) -> Facts:
    """Run a text beside a longer text, alone, and with another last token."""
    model.config.num_hidden_layers += 0  # not judged if this fails: Funnel pools tokens, T5Gemma has two parts
    hidden, layers = [], _watch(model)
    model.base_model.register_forward_hook(lambda _, __, output: hidden.append(output[0]))
    texts = torch.randint(4, VOCABULARY, (2, LONG))
    texts[:, -1] = texts[0, SHORT - 1] = model.config.eos_token_id
    visible = torch.ones_like(texts)
    visible[0, SHORT:] = 0
    padded = model(input_ids=texts * visible, attention_mask=visible).logits
    alone, visible = texts[:1, :SHORT], visible[1:, :SHORT]
    logits = model(input_ids=alone, attention_mask=visible).logits
    largest = logits.abs().max()
    padding = ((padded[:1, :SHORT] - logits).abs().max() / largest).item()
    if logits.dim() == 3:
        alone[0, -1] = alone[0, -1] % (VOCABULARY - 5) + 4
        changed = model(input_ids=alone, attention_mask=visible).logits
        leak = (changed - logits)[:, :-1].abs().max() / largest
        return Facts(leak.item() > TOLERANCE, padding, False, None, *layers())
    beside, read = (
        torch.autograd.grad(each[0].sum(), states, allow_unused=True)[0]
        for each, states in zip((padded, logits), hidden, strict=True)
    )
    if read is None:
        return Facts(False, padding, False, None, *layers())
    places = read[0].any(-1).nonzero().flatten().tolist()
    pooled = "mean" if torch.allclose(read, read[:, :1].expand_as(read)) else None
    pooled = {(0,): "first", (SHORT - 1,): "last"}.get(tuple(places), pooled)
    return Facts(False, padding, bool(beside[0, SHORT:].any()), pooled, *layers())


def _left_padding(model: nn.Module) -> float:
    """Return the largest change of the logits of two generated tokens by padding on the left."""
    texts = torch.randint(4, VOCABULARY, (2, LONG - 2))
    visible = torch.ones_like(texts)
    visible[0, :-SHORT] = 0
    options = {"max_new_tokens": 2, "use_cache": True, "output_logits": True, "return_dict_in_generate": True}
    batch, alone = (
        model.generate(input_ids=ids, attention_mask=mask, do_sample=False, pad_token_id=0, **options).logits
        for ids, mask in ((texts * visible, visible), (texts[:1, -SHORT:], visible[1:, :SHORT]))
    )
    changes = [(one[0] - other[0]).abs().max() / other.abs().max() for one, other in zip(batch, alone, strict=False)]
    return max(changes).item()


def _pads(settings: Settings) -> bool:
    """Return whether batches may have padding."""
    alone = settings.micro_batch_size == 1 or settings.micro_batch_tokens == 1
    return not settings.packing and not (alone and settings.eval_batch_tokens == 1 == settings.pad_to_multiple_of)


def _remedy(settings: Settings) -> str:
    multiple = " --pad_to_multiple_of 1" if settings.pad_to_multiple_of != 1 else ""
    return f"--micro_batch_size 1 --eval_batch_tokens 1{multiple} avoids padding"
