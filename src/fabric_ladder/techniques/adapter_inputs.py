"""Adapters that keep the input of their layer for the backward pass, and not a 32-bit copy for each adapter.

PEFT converts a 16-bit input to 32 bits and applies dropout before it multiplies by an adapter's first matrix. Autograd
then keeps the result for every adapted layer: 4 bytes per element, and 1 byte for the dropout's mask on a GPU. But the
input is in memory already, and layers such as query, key and value have the same input. Here only the input and the
mask are kept, and the backward pass converts the input again. Outputs and gradients are the same bit by bit, with
dropout too (tested on a CPU). Under autocast PEFT's way remains.
"""

import torch
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import linear


def keep_16_bit_inputs(model: nn.Module) -> None:
    """Change the adapters of linear layers in place, except DoRA's, whose forward pass uses the converted input.

    Dropout moves into the first matrix, which can then save the input before dropout.

    Args:
        model: A PEFT model whose adapters have 32-bit weights.
    """
    for layer in model.modules():
        if isinstance(layer, LoraLayer) and not layer.lora_variant:
            for name, first in layer.lora_A.items():
                if type(first) is nn.Linear:
                    first.__class__ = _FirstMatrix
                    first.dropout = layer.lora_dropout[name]
                    layer.lora_dropout[name] = nn.Identity()
                    layer.cast_input_dtype_enabled = False  # PEFT does not convert the input to 32 bits


class _FirstMatrix(nn.Linear):
    """An adapter's first matrix, with dropout of its input. Attribute `dropout`: PEFT's module."""

    def forward(self, inputs: Tensor) -> Tensor:
        """Return (…, rank) for inputs (…, width)."""
        if inputs.dtype == self.weight.dtype or torch.is_autocast_enabled(inputs.device.type):
            return super().forward(self.dropout(inputs.to(self.weight.dtype)))
        dropout = self.dropout.p if self.training and isinstance(self.dropout, nn.Dropout) else 0.0
        return _Multiply.apply(inputs, self.weight, dropout)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, inputs: Tensor, weight: Tensor, dropout: float) -> Tensor:
        values, mask = inputs.to(weight.dtype), None
        if dropout:
            values, mask = torch.native_dropout(values, dropout, True)
        ctx.save_for_backward(inputs, weight, mask)
        ctx.scale = 1 / (1 - dropout)
        return linear(values, weight)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        inputs, weight, mask = ctx.saved_tensors
        of_inputs = of_weight = None
        if ctx.needs_input_grad[1]:
            values = inputs.to(weight.dtype)
            if mask is not None:
                values = values * mask * ctx.scale
            of_weight = gradient.flatten(0, -2).T @ values.flatten(0, -2)
        if ctx.needs_input_grad[0]:
            of_inputs = gradient @ weight
            if mask is not None:
                of_inputs = torch.ops.aten.native_dropout_backward(of_inputs, mask, ctx.scale)
            of_inputs = of_inputs.to(inputs.dtype)
        return of_inputs, of_weight, None
