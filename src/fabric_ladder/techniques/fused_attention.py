"""Fused attention, with kernels for BLOOM.

transformers has only eager attention for BLOOM, which keeps a matrix of tokens x tokens.

BLOOM adds a bias to each score, slope x position of the key (ALiBi: Press et al., 2022, arXiv:2108.12409). A constant
that is added to a softmax row changes nothing. A bias of the key is a dot product with more dimensions: a constant in
the query, the bias in the key. So attention is a plain causal `scaled_dot_product_attention`, with a flash kernel on
every device that has one. The new dimensions hold

- in the key the high, middle and low 8 bits of the bias, which no 16-bit format and no tensor core in TF32 rounds;
- in the query the high bits of its own bias, subtracted, so that the sums stay small where weights are large;
- for a padded key a bias that leaves it no weight. So there is no mask, and no wait for the mask's values;
- in packed rows, before all others, the digits that separate the documents (`masks.py: document_digits`), unless the
  kernel does (`varlen.py`). The bias counts over the whole row, which changes nothing within a document.

transformers' registry of masks (`AttentionMaskInterface`) lets the model compute the new dimensions once per forward
pass instead of a mask. The attention modules get another class.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionMaskInterface
from transformers.masking_utils import causal_mask_function, eager_mask
from transformers.models.bloom.modeling_bloom import BloomAttention, BloomModel, build_alibi_tensor, dropout_add

from fabric_ladder.models.activations import fuse_gelu
from fabric_ladder.models.attention import add_dimensions, power_of_two, use_own_attention
from fabric_ladder.models.configs import load_config
from fabric_ladder.models.kernels import MULTIPLE, computing_dtype
from fabric_ladder.models.masks import document_digits, document_ends
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique

NAME = "alibi_as_dimensions"
HIDDEN = -32768.0  # bias of a padded key, exact in every format; its exponential is 0


def fuse_attention(model: nn.Module) -> None:
    """Compute a model's attention by fused kernels: this module's for BLOOM, PyTorch's for other models.

    The kernel computes training, evaluation and the prompt of a generation, with every mask of two dimensions. Padding
    may be on either side. Eager attention computes an answer's later tokens, which see cached keys, and 4-D masks; a
    config with `output_attentions` keeps it. Dropout in attention has the same distribution with other random numbers.
    (On a CPU it needs the matrix, because flash kernels there have no dropout.)

    Args:
        model: A model of transformers, or a module with such a model.
    """
    use_own_attention(model)
    for module in model.modules():
        if isinstance(module, BloomModel) and not module.config.output_attentions:
            module.config._attn_implementation = NAME
            for block in module.h:
                block.self_attention.__class__ = FusedBloomAttention


class FusedBloomAttention(BloomAttention):
    """BLOOM's attention, with a fused kernel if it gets new dimensions instead of a mask."""

    def forward(
        self, hidden_states: Tensor, residual: Tensor, alibi: Tensor, attention_mask: Tensor | tuple, **options
    ) -> tuple[Tensor, Tensor | None]:
        """Return hidden states (rows, tokens, width).

        Args:
            hidden_states: (rows, tokens, width).
            residual: Added to the result.
            alibi: BLOOM's biases, for eager attention.
            attention_mask: The result of `_new_dimensions`.
            **options: The other options of `BloomAttention.forward`.
        """
        if isinstance(attention_mask, Tensor):
            return super().forward(hidden_states, residual, alibi, attention_mask, **options)
        heads = self.query_key_value(hidden_states).unflatten(-1, (self.num_heads, 3, self.head_dim))
        dimensions, ends = attention_mask
        new = dimensions[-int(heads.element_size() == 2)].expand(-1, len(heads), -1, -1, -1)
        if ends is not None:
            from fabric_ladder.models.varlen import attend_documents  # takes 0.3 s

            extended, scale = add_dimensions(*heads.unbind(3), *new.transpose(2, 3), self.inv_norm_factor)
            attended = attend_documents(*extended, ends, True, scale)[..., : self.head_dim].flatten(2)
            return dropout_add(self.dense(attended), residual, self.hidden_dropout, self.training), None
        query, key, value = (part.transpose(1, 2) for part in heads.unbind(3))
        if (cache := options.get("layer_past")) is not None:
            cache.update(key, value, self.layer_idx)  # it is empty, otherwise there is a 4-D mask
        (query, key, value), scale = add_dimensions(query, key, value, *new, self.inv_norm_factor)
        dropout = self.attention_dropout.p if self.training else 0.0
        attended = functional.scaled_dot_product_attention(
            query, key, value, dropout_p=dropout, is_causal=True, scale=scale
        )
        attended = attended[..., : self.head_dim].transpose(1, 2).flatten(2)
        return dropout_add(self.dense(attended), residual, self.hidden_dropout, self.training), None


def _new_dimensions(**options) -> Tensor | tuple[Tensor, Tensor | None]:
    """Return new dimensions (1 or 2, 2, rows, heads, tokens, new) and `document_ends`; a 4-D mask if they do not do.

    The first index is 0 for 32 bits and more, and 1 for 16 bits, where the kernel scales the bias too. If the scale is
    a power of two, both are the same. The second index is 0 for queries and 1 for keys. Without padding there is one
    row. No value has more than 8 bits, so it is exact in every floating-point format.

    Args:
        **options: The options of transformers' mask functions.
    """
    length, visible, device = options["kv_length"], options["attention_mask"], options["device"]
    if options["q_length"] != length or options["mask_function"] is not causal_mask_function:
        return eager_mask(**options)
    if visible is None:
        visible = torch.ones(1, length, dtype=torch.bool, device=device)
    heads = options["config"].n_head
    width = options["config"].hidden_size // heads
    unit = power_of_two(1 / math.sqrt(width))
    ratio = unit / math.sqrt(width)
    bias = build_alibi_tensor(visible, heads, torch.float32).view(-1, heads, length)
    bias = bias[None] if ratio == 1 else torch.stack([bias, bias / ratio])
    high, middle, low = _parts(bias)
    units = torch.full_like(high, unit)
    zeros = [torch.zeros_like(high)] * (-(4 + width) % MULTIPLE)  # otherwise each layer would have to add them
    key_part = torch.stack([high.masked_fill(~visible[:, None], HIDDEN), units, middle, low, *zeros], -1)
    query_part = torch.stack([units, -high, units, units, *zeros], -1)
    new = torch.stack([query_part, key_part], 1)
    if (digits := document_digits()) is not None:
        digits = torch.stack([digits[0], digits[1] * unit]).expand(len(new), -1, -1, heads, -1, -1)
        new = torch.cat([digits, new.expand(*digits.shape[:-1], -1)], -1)
    return new.to(computing_dtype(new.device.type, options["dtype"])), document_ends()


def _parts(values: Tensor) -> list[Tensor]:
    """Return three tensors of 8 significant bits each that add up to the 32-bit values."""
    parts = []
    for _ in range(3):
        parts.append((values.view(torch.int32) & -65536).view(torch.float32))  # a compiler may drop a cast
        values = values - parts[-1]
    return parts


AttentionMaskInterface.register(NAME, _new_dimensions)


class FusedAttention(Technique):
    """Compute attention by kernels that keep no matrix of tokens x tokens, and GELU by one; a part of every rung."""

    explained_errors = (
        (
            "no kernel found to launch",  # memory-efficient attention, below compute capability 8.0
            "PyTorch has no fused attention for heads of this width on this GPU: add --attention eager",
        ),
        (
            "only supports head dimension at most 256",
            "--attention varlen: the heads of this model are too wide for its kernels; use --attention fused",
        ),
    )

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if settings.attention != "varlen":
            return None
        if not settings.packing:
            return "it computes packed rows alone; add --packing true, or use --attention fused"
        if settings.accelerator == "mps" or (capability and capability < (8, 0)):
            return "its kernels need a CUDA GPU of compute capability 8.0 or above; use --attention fused"
        if capability and "16" not in settings.precision:
            return f"on a GPU it computes in 16 bits, and --precision is {settings.precision}; use --attention fused"
        values = load_config(settings.model).to_dict()
        if drawn := [name for name, value in values.items() if "att" in name and "drop" in name and value]:
            return (
                f"it has no dropout, and {settings.model} has some in attention ({drawn[0]} {values[drawn[0]]}); use "
                "--attention fused, or set it to 0 in a copy of its config.json"
            )
        return None

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        fuse_attention(model)
        fuse_gelu(model)
        return model
