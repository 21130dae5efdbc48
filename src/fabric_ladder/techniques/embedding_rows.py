"""Embedding tables' gradients, added up row by row over the micro-batches of an effective batch.

PyTorch makes an embedding's gradient as large as its table, though a micro-batch has tokens for few rows. It fills the
gradient with zeros, adds it to the sum of the micro-batches before, and frees it. BLOOM-560m's takes 1.03 GB in 32
bits, nearly half of all its gradients. Here only the rows of the micro-batch's tokens are added. The sum is the same to
the last bit, except where a language model's head has the same table: then the parts are added in another order.
"""

from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fabric_ladder.environment import within
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique

FEWEST = 4  # rows of a table per token of a batch; with fewer rows PyTorch is as fast and needs no more memory
_hooked: bool | None = None  # see `adding_rows`; None: outside of it


def add_rows(model: nn.Module) -> None:
    """Let the model's embedding tables add rows within `adding_rows`, in place, if they are plain tables."""
    others = [module for module in model.modules() if not isinstance(module, nn.Embedding)]
    used = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    for module in model.modules():
        if type(module) is nn.Embedding and not (module.max_norm or module.scale_grad_by_freq or module.sparse):
            module.__class__ = RowEmbedding
            module.shared = id(module.weight) in used


def adding_rows(hooked: bool) -> AbstractContextManager:
    """Add rows to the gradients that are there, in forward and backward pass of this block.

    Args:
        hooked: Whether hooks (DDP, `WeightSteps`) must fire when a gradient is complete. Then autograd gets a gradient
            of zeros, which takes the memory of a single number. The gradient of a head with the same table already
            makes the hooks fire; zeros would be added to it in a new tensor of the table's size.
    """
    return within(globals(), _hooked=hooked)


class RowEmbedding(nn.Embedding):
    """An embedding whose gradient is added to the one before by rows, if the batch has tokens for few of them.

    Attributes:
        shared: Whether a language model's head has the same table.
    """

    shared = False

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of the table, (…, width), for ids of any shape."""
        if torch.compiler.is_compiling() or _hooked is None or self.weight.grad is None:
            return super().forward(ids)
        if ids.numel() * FEWEST > self.num_embeddings:
            return super().forward(ids)
        ignored = hasattr(self.weight, "_ddp_ignored")  # by DDP's hooks: `DDPInBuckets` leaves tables out
        return _Lookup.apply(self.weight, ids, self.padding_idx, _hooked and not ignored and not self.shared)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, weight: Tensor, ids: Tensor, padding: int | None, hooked: bool) -> Tensor:
        ctx.weight, ctx.padding, ctx.hooked = weight, padding, hooked
        ctx.save_for_backward(ids)
        return nn.functional.embedding(ids, weight)

    @staticmethod
    def backward(ctx: FunctionCtx, gradient: Tensor) -> tuple[Tensor | None, ...]:
        ids, weight = ctx.saved_tensors[0].flatten(), ctx.weight
        gradient = gradient.reshape(len(ids), -1)
        # Tokens of one id add up at the place of one of them, as PyTorch adds them; the others' places get zeros. So
        # each row of the table gets one sum, in whatever order a GPU adds them.
        place = torch.empty(len(weight), dtype=torch.long, device=ids.device)
        place.scatter_(0, ids, torch.arange(len(ids), device=ids.device))
        sums = torch.ops.aten.embedding_dense_backward(gradient, place[ids], len(ids), -1, False)
        if ctx.padding is not None:
            sums.masked_fill_((ids == ctx.padding)[:, None], 0)
        weight.grad.index_add_(0, ids, sums)
        return gradient.new_zeros(()).expand_as(weight) if ctx.hooked else None, None, None, None


class EmbeddingRows(Technique):
    """Add the gradient of an embedding row by row; a part of every rung without an engine of its own."""

    def is_used(self, settings: Settings) -> bool:
        """Return whether gradients may be changed; an engine needs them as autograd makes them."""
        return not settings.owns_optimizer

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        add_rows(model)
        return model
