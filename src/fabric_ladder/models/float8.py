"""Products of linear layers in 8-bit floating point, by torchao, which is imported where it is used.

Each of a layer's three products (output, gradient of the input, gradient of the weight) gets both factors rounded to 8
bits, scaled by their largest magnitude (Micikevicius et al., 2022, FP8 Formats for Deep Learning, arXiv:2209.05433):
values in e4m3, gradients in e5m2. For the backward pass the layer keeps its input and the weight itself as they came.
"""

import importlib.util

import torch
from torch import Tensor, nn

from fabric_ladder.errors import UserError
from fabric_ladder.models.configs import load_config
from fabric_ladder.models.lora import linear_layers, without_values
from fabric_ladder.settings import Settings

MULTIPLE = 16  # of both sides of a weight, for the GPU's kernels
LEAST = (8, 9)  # compute capability that has such kernels: Ada, then Hopper, Blackwell


def check_float8(settings: Settings, capability: tuple[int, int] | None) -> None:
    """Refuse, before any work, what 8-bit products do not go with.

    Args:
        settings: Resolved.
        capability: Compute capability of the GPU; None: a CPU, or Apple silicon.

    Raises:
        UserError: A device, precision or strategy that cannot do it, no torchao, or a model without such layers.
    """
    if not settings.float8:
        return
    if settings.accelerator == "mps":
        raise UserError("--float8 true: Apple's GPUs have no 8-bit floating point; leave it out, or --accelerator cpu")
    if capability and capability < LEAST:
        raise UserError(
            f"--float8 true needs a GPU of compute capability 8.9 (Ada, Hopper) or above, and this one has "
            f"{capability[0]}.{capability[1]}; run src/4_mixed_precision.py"
        )
    for what, found in {
        "--quantization nf4, whose weights have 4 bits": settings.quantization != "no",
        "DeepSpeed; use src/10_fsdp.py": settings.deepspeed,
        f"--precision {settings.precision}; use bf16-mixed or bf16-true": not settings.precision.startswith("bf16"),
    }.items():
        if found:
            raise UserError(f"--float8 true does not go with {what}")
    if importlib.util.find_spec("torchao") is None:
        raise UserError("--float8 true needs torchao: pip install torchao==0.18.0")
    if not float8_layers(without_values(settings, load_config(settings.model))):
        raise UserError(
            f"--float8 true: {settings.model} has no linear layer whose sides are multiples of {MULTIPLE}; leave it out"
        )


def float8_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers of a model's body that 8-bit kernels take; those that make its logits are left out."""
    modules = map(model.get_submodule, linear_layers(model))
    return [
        module for module in modules if type(module) is nn.Linear and not any(s % MULTIPLE for s in module.weight.shape)
    ]


def use_float8(model: nn.Module, layers: list[nn.Linear], accelerator: str) -> None:
    """Have layers compute in 8 bits, in place; their weights and the names of these stay as they are.

    A CPU has no such products: there the rounded factors are multiplied in 32-bit. On the device `meta` nothing is
    computed, and what is rehearsed holds what a GPU would.

    Args:
        model: That holds the layers, perhaps within adapters.
        layers: From `float8_layers`.
        accelerator: As in the settings, resolved.
    """
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    emulate = accelerator == "cpu" and not layers[0].weight.is_meta
    # The tokens of a micro-batch are summed over in the weight's gradient; pad them to a multiple of 16, too.
    config, chosen = Float8LinearConfig(emulate=emulate, pad_inner_dim=True), set(map(id, layers))
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, _: id(module) in chosen)
    if accelerator == "cpu":
        for module in model.modules():
            if type(module).__name__ == "Float8Linear":
                module.register_forward_pre_hook(_cast_inputs)


def _cast_inputs(_: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Cast to the CPU's mixed precision, as `Float8Linear` casts to the GPU's alone."""
    return tuple(arg.to(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else arg for arg in args)
