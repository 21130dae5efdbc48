"""Matrix multiplications in 8-bit floating point, by torchao, which is imported where it is used.

A linear layer has three matrix multiplications: output, gradient of the input, gradient of the weight. Both factors are
scaled by their largest magnitude and rounded to 8 bits, values to e4m3 and gradients to e5m2 (Micikevicius et al.,
2022, FP8 Formats for Deep Learning, arXiv:2209.05433). For the backward pass the layer saves its input and weight
unrounded.
"""

import importlib.util

import torch
from torch import Tensor, nn

from fabric_ladder.models.layers import linear_layers, meta_model
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique

MULTIPLE = 16  # the GPU's kernels need both sides of a weight to be a multiple of this
LEAST = (8, 9)  # lowest compute capability with such kernels: Ada, then Hopper and Blackwell


def float8_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of the model's body that 8-bit kernels support.

    Layers that compute the logits and the trained layers of adapters are left out.
    """
    adapted = hasattr(model, "get_base_model")  # by PEFT
    body = model.get_base_model() if adapted else model
    return [
        module
        for module in map(body.get_submodule, linear_layers(body))
        if type(module) is nn.Linear
        and not any(size % MULTIPLE for size in module.weight.shape)
        and not (adapted and module.weight.requires_grad)
    ]


def use_float8(model: nn.Module, accelerator: str) -> None:
    """Compute the model's linear layers in 8 bits, in place; the weights and their names do not change.

    A CPU has no 8-bit kernels: it multiplies the rounded factors in 32-bit. On the device `meta` nothing is computed,
    and a rehearsal holds the tensors that a GPU would.

    Args:
        model: Perhaps with adapters.
        accelerator: As in the settings, resolved.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    layers = float8_layers(model)
    emulate = accelerator == "cpu" and not layers[0].weight.is_meta
    # The weight's gradient is a sum over the tokens of the micro-batch, so their number is padded to 16 as well.
    config = Float8LinearConfig(emulate=emulate, pad_inner_dim=True)
    chosen = set(map(id, layers))
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, _: id(module) in chosen)
    if accelerator == "cpu":
        for module in model.modules():
            if type(module).__name__ == "Float8Linear":
                module.register_forward_pre_hook(_cast_inputs)


def _cast_inputs(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Cast to the CPU's mixed precision; `Float8Linear` casts only to the GPU's."""
    return tuple(arg.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else arg for arg in args)


class Float8(Technique):
    """Compute matrix multiplications of linear layers in 8-bit floating point."""

    refused_on_mps = "--float8 true, since Apple's GPUs have no 8-bit floating point: leave it out"

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if capability and capability < LEAST:
            return (
                "it needs a GPU of compute capability 8.9 (Ada, Hopper) or above, and this GPU has "
                f"{capability[0]}.{capability[1]}; run src/4_mixed_precision.py"
            )
        if settings.quantization != "no":
            return f"--quantization {settings.quantization} has weights of 4 bits; leave one of them out"
        if settings.owns_optimizer:
            return f"not with {settings.name}; use src/10_fsdp.py"
        if not settings.precision.startswith("bf16"):
            return f"not with --precision {settings.precision}; use bf16-mixed or bf16-true"
        if importlib.util.find_spec("torchao") is None:
            return "it needs torchao: pip install torchao==0.18.0"
        if not float8_layers(meta_model(settings)):
            return f"{settings.model} has no linear layer whose sides are multiples of {MULTIPLE}; leave it out"
        return None

    def on_cuda(self, settings: Settings) -> dict[str, str]:
        """Return the compiler, which fuses the passes that round the tensors."""
        return {"compile": "rounding to 8 bits is slow without it"}

    def notice(self, settings: Settings) -> str | None:
        if settings.accelerator != "cpu":
            return None if settings.compile else "--float8 without --compile true is slower than bfloat16"
        return "--float8 on a CPU: factors are rounded to 8 bits and multiplied in 32 bits, which is slower"

    def packages(self, settings: Settings) -> tuple[str, ...]:
        return ("torchao",)

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        use_float8(model, settings.accelerator)
        return model
