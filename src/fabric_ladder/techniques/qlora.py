"""QLoRA: adapters on a model of 4-bit weights, by bitsandbytes, which is imported where it is used."""

import importlib.util
import os
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from transformers import BitsAndBytesConfig, PretrainedConfig
from transformers.quantizers.base import get_keys_to_not_convert

from fabric_ladder.errors import UserError, first_line
from fabric_ladder.models.dtypes import half_precision
from fabric_ladder.models.layers import fused_layers, head_names, meta_model
from fabric_ladder.models.probe import facts_of, layers_named
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.lora import LoRA
from fabric_ladder.techniques.memory import Counts, Peak, bytes_of_weight, frozen_linear_layers
from fabric_ladder.techniques.technique import Technique

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8  # bytes per weight, with its constants: QLoRA, section 3
NF4 = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}


def quantization(settings: Settings, config: PretrainedConfig) -> dict:
    """Return `from_pretrained`'s options for 4-bit weights.

    NF4 with double quantization takes 4.127 bits per weight (Dettmers et al., 2023, QLoRA, section 3). Matrix
    multiplications run in 16 bits, or in 32 under `32-true`. Embeddings, norms, heads, a pooler, which may be new, and
    layers whose weights the model reads itself keep their own precision.

    Weights that FSDP will shard or that will be streamed are packed in CPU memory: a GPU might not hold all of them.
    They come to the GPU block by block.
    """
    model, facts = meta_model(settings, config), facts_of(settings)
    kept = fused_layers(model) + (layers_named(model, facts.read) if facts else [])
    if settings.task == "instruction-tuning":
        kept += get_keys_to_not_convert(model)  # of the logits
    else:
        ends = (*head_names(model), "pooler")  # PEFT copies all modules whose names end so, also an image part's
        kept += [name for name, _ in model.named_modules() if name.endswith(ends)]
    options = BitsAndBytesConfig(
        **NF4, llm_int8_skip_modules=kept, bnb_4bit_compute_dtype=half_precision(settings) or torch.float32
    )
    on_gpu = settings.accelerator == "cuda" and not _packs_on_host(settings)
    device = torch.cuda.current_device() if on_gpu else "cpu"
    return {"quantization_config": options, "device_map": {"": device}}


def _packs_on_host(settings: Settings) -> bool:
    return settings.shards_weights or settings.stream_layers


class QLoRA(Technique):
    """Keep the frozen weights in 4 bits."""

    refused_on_mps = "4-bit weights of bitsandbytes: use src/13_lora.py"
    explained_errors = (
        (
            "only Tensors of floating point dtype can require gradients",  # pytorch#177844
            "this PyTorch cannot shard weights of 4 bits: pip install torch==2.13.0, or use src/9_ddp.py",
        ),
    )

    def check(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        if not self.is_used(settings):
            return
        given = f"--quantization {settings.quantization}"
        if not settings.lora:
            raise UserError(f"{given}: 4-bit weights cannot be trained; add --lora true")
        if settings.owns_optimizer:
            raise UserError(f"{given}: not tried with DeepSpeed; use src/10_fsdp.py, which shards 4-bit weights")
        if importlib.util.find_spec("bitsandbytes") is None:
            raise UserError("4-bit weights need bitsandbytes: pip install bitsandbytes==0.50.2, or run src/13_lora.py")
        _try_bitsandbytes(settings.accelerator)

    def packages(self, settings: Settings) -> tuple[str, ...]:
        return ("bitsandbytes",)

    def loading_options(self, settings: Settings, config: PretrainedConfig) -> dict:
        return quantization(settings, config)

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        """Let layers whose weights FSDP shards save their weights with the constants to unpack them."""
        if settings.shards_weights:
            for module in model.modules():
                if getattr(module, "quant_state", None) is not None:
                    module.register_state_dict_pre_hook(_give_constants)
        return model

    def loaded_bytes(self, loaded: int, counts: Counts, settings: Settings) -> int:
        """Return the bytes of weights that are packed in CPU memory; otherwise they are read to the device."""
        packed = loaded - round(counts.linear * (loaded / counts.all - NF4_BYTES))
        return packed if _packs_on_host(settings) else 0

    def rehearsed(self, settings: Settings) -> Settings:
        return replace(settings, quantization="no")

    def rehearse_model(self, model: nn.Module, settings: Settings) -> None:
        """Let the frozen layers make the tensors of 4-bit layers; weights that FSDP shards are packed here too."""
        for layer in frozen_linear_layers(model):
            layer.__class__ = Rehearsed4bit
            layer.product_dtype = half_precision(settings) or torch.float32
            layer.unpacked_dtype = LoRA().loading_options(settings, model.config).get("dtype", torch.float32)
            if settings.shards_weights:
                layer.pack()

    def add_memory(self, peak: Peak, counts: Counts, settings: Settings) -> Peak:
        """Pack the frozen linear layers into 4 bits, unless the rehearsal has done so."""
        if settings.shards_weights:
            return peak
        width = bytes_of_weight(settings, frozen_linear=True)
        return peak._replace(parameters=peak.parameters - round(counts.linear * (width - NF4_BYTES)))


def _give_constants(layer: nn.Module, *_) -> None:
    """Give a shard the constants of its whole weight, which bitsandbytes looks for on the weight."""
    layer.weight.quant_state = layer.quant_state


class Rehearsed4bit(nn.Linear):
    """A frozen layer that makes tensors of the same sizes as bitsandbytes' `Linear4bit`, without values.

    `Linear4bit` returns the type of its input. After a norm under autocast its results have 32 bits; those of
    `nn.Linear` have 16. It keeps no input for the backward pass. The forward pass unpacks the weight into the type of
    the product. The backward pass unpacks it into the type that it was loaded with, and converts it (bitsandbytes 0.50,
    `MatMul4Bit`).

    Attributes:
        product_dtype: The type of the product.
        unpacked_dtype: The type that the weight was loaded with.
    """

    product_dtype: torch.dtype
    unpacked_dtype: torch.dtype

    def pack(self) -> None:
        """Pack two weights into each byte, as FSDP shards them. Every rank keeps the constants of all weights."""
        weights = self.weight.numel()
        constants = round(weights * (NF4_BYTES - 1 / 2))
        self.register_buffer("constants", self.weight.new_empty(constants, dtype=torch.uint8), persistent=False)
        packed = self.weight.new_empty(-(-weights // 2), 1, dtype=torch.uint8)
        self.weight = nn.Parameter(packed, requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return a tensor (..., out_features) in the type of the inputs (..., in_features)."""
        return _Rehearsed4bit.apply(inputs.to(self.product_dtype), self).to(inputs.dtype)


class _Rehearsed4bit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, inputs: Tensor, layer: Rehearsed4bit) -> Tensor:
        ctx.layer = layer
        unpacked = inputs.new_empty(layer.out_features, layer.in_features)
        return unpacked.new_empty(*inputs.shape[:-1], layer.out_features)

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor, None]:
        layer = ctx.layer
        unpacked = grad.new_empty(layer.out_features, layer.in_features, dtype=layer.unpacked_dtype).to(grad.dtype)
        return unpacked.new_empty(*grad.shape[:-1], layer.in_features), None


def _try_bitsandbytes(accelerator: str) -> None:
    """Quantize a small matrix, to see whether bitsandbytes has a kernel for this device."""
    device = accelerator
    if device == "cuda":  # this rank's GPU: on the first one the context of each rank would take memory
        device = f"cuda:{os.environ.get('LOCAL_RANK') or os.environ.get('SLURM_LOCALID') or 0}"
    try:
        from bitsandbytes.functional import quantize_4bit

        quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4", compress_statistics=True)
    except (ImportError, OSError, RuntimeError, NotImplementedError, AttributeError) as error:
        raise UserError(
            f"bitsandbytes cannot make 4-bit weights on {accelerator} here ({first_line(error, 160)}): run "
            "src/13_lora.py"
        ) from error
