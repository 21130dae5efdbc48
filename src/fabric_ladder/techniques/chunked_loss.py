"""Chunked cross-entropy: the loss of a language model, with the logits of only a few tokens in memory at a time.

BLOOM has 250,880 logits per token. For 4 x 512 tokens they take 2 GB in 32 bits, and their gradient as much again. Here
a chunk of logits is computed, turned into its gradient in place, multiplied into the gradients of the hidden states and
the head, and freed (as in Liger Kernel: Hsu et al., 2024, arXiv:2410.10989). Tokens that are not trained, such as a
prompt's, get no logits.

PyTorch's own `linear_cross_entropy` (from 2.13 on) counts no right predictions, rounds the loss of 16-bit weights to 16
bits, and hides its tensors from the prediction of memory.
"""

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.nn.functional import cross_entropy, linear
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions, ModelOutput

from fabric_ladder.models.configs import load_config, part_config
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique


@dataclass
class ChunkedLossOutput(ModelOutput):
    """The result of a language model's forward pass with chunked cross-entropy.

    Attributes:
        loss: Mean over the trained tokens, a scalar.
        correct: Trained tokens that were predicted rightly, a scalar.
    """

    loss: Tensor | None = None
    correct: Tensor | None = None


def use_chunked_loss(model: nn.Module, chunk: int) -> None:
    """Let a causal language model compute its loss in chunks; its forward pass then returns a `ChunkedLossOutput`.

    The forward pass takes `labels` (samples, length) and `predicting`, the flat positions whose next token is trained.
    Some architectures compute more than a matrix multiplication between the last hidden states and the logits, such as
    a soft cap. They compute all logits themselves.

    Args:
        model: A model with the head of a language model.
        chunk: Tokens whose logits are in memory together.
    """
    model.forward = partial(_forward, model, chunk if _logits_are_product(model) else None)


def _forward(model: nn.Module, chunk: int | None, labels: Tensor, predicting: Tensor, **inputs) -> ChunkedLossOutput:
    inputs = {name: value for name, value in inputs.items() if value is not None}  # PEFT passes every argument
    targets = labels.flatten()[predicting + 1]
    if chunk is None:
        logits = type(model).forward(model, **inputs).logits.flatten(0, 1)[predicting].float()
        return ChunkedLossOutput(cross_entropy(logits, targets), (logits.argmax(-1) == targets).sum())
    hidden = model.base_model(**inputs)[0].flatten(0, 1)[predicting]
    head = model.get_output_embeddings()
    return ChunkedLossOutput(*chunked_loss(hidden, head.weight, getattr(head, "bias", None), targets, chunk))


@torch.compiler.disable  # the loop's length depends on the data, and each length would compile a graph
def chunked_loss(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int
) -> tuple[Tensor, Tensor]:
    """Return the mean cross entropy, and the number of right predictions.

    The same as `cross_entropy(linear(hidden, weight, bias).float(), targets)`, in `chunk / tokens` of its memory.

    Args:
        hidden: (tokens, width), the last hidden states of the tokens whose next token is trained.
        weight: The head's, (vocabulary, width).
        bias: The head's, (vocabulary,).
        targets: (tokens,), the next tokens.
        chunk: Tokens whose logits are in memory together.
    """
    total, correct = _ChunkedLoss.apply(hidden, weight, bias, targets, chunk, torch.is_grad_enabled())
    return total / len(targets), correct


class _ChunkedLoss(torch.autograd.Function):
    """The sum of the losses. The forward pass computes its gradient; a mean's would not fit into float16.

    In float16 the loss is scaled, because a gradient below 3e-8 is rounded to 0. The scale reaches the backward pass
    alone. So this pass computes the logits again, and scales their gradient before it is rounded.
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int,
        learning: bool,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        device, wanted = hidden.device.type, [learning and needed for needed in ctx.needs_input_grad[:3]]
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype
        scaled = dtype is torch.float16
        inputs = hidden, weight, bias, targets
        total, correct, grads = _sum_chunks(*inputs, chunk, dtype, [False] * 3 if scaled else wanted)
        ctx.again = (chunk, dtype, wanted) if scaled else None
        ctx.save_for_backward(*(inputs if scaled else grads))
        ctx.mark_non_differentiable(correct)
        return total, correct

    @staticmethod
    def backward(ctx: FunctionCtx, grad: Tensor, _: Tensor) -> tuple:
        grads = ctx.saved_tensors
        if ctx.again:
            scale = grad.abs().clamp(min=1)  # a smaller factor would round more to 0
            grads = _sum_chunks(*grads, *ctx.again, scale)[2]
            grad = grad / scale
        return *(None if each is None else each.mul_(grad) for each in grads), None, None, None


def _sum_chunks(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk: int, dtype: torch.dtype,
    wanted: list[bool], scale: Tensor | None = None,
) -> tuple[Tensor, Tensor, list[Tensor | None]]:  # fmt: skip
    """Return the sum of the losses, the right predictions, and the wanted gradients of the first three tensors.

    Matrices are multiplied in `dtype`. `scale` multiplies the gradient of the logits before it is rounded to `dtype`.
    """
    grads = [
        torch.zeros_like(tensor) if want else None for tensor, want in zip((hidden, weight, bias), wanted, strict=True)
    ]
    total = torch.zeros((), dtype=torch.promote_types(dtype, torch.float32), device=hidden.device)
    correct = torch.zeros((), dtype=torch.long, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        head, shift = weight.to(dtype), None if bias is None else bias.to(dtype)
        for start in range(0, len(targets), chunk):
            rows, expected = hidden[start : start + chunk].to(dtype), targets[start : start + chunk, None]
            scores = linear(rows, head, shift).to(total.dtype)
            highest, predicted = scores.max(-1, keepdim=True)
            correct += (predicted == expected).sum()
            scores -= highest
            right = scores.gather(-1, expected)
            norm = scores.exp_().sum(-1, keepdim=True)
            total += (norm.log() - right).sum()
            if any(wanted):
                error = scores.div_(norm).scatter_add_(-1, expected, torch.full_like(right, -1))
                error = (error if scale is None else error.mul_(scale)).to(dtype)
                if wanted[0]:
                    grads[0][start : start + chunk] = error @ head
                if wanted[1] and weight.dtype == dtype:
                    grads[1].addmm_(error.T, rows)
                elif wanted[1]:
                    grads[1] += error.T @ rows
                if wanted[2]:
                    grads[2] += error.sum(0)
    return total, correct, grads


def _logits_are_product(model: nn.Module) -> bool:
    """Return whether the head alone computes the logits: made-up hidden states pass an identity in place of the head.

    The model's weights are not used, so a model on the meta device gives the same answer.
    """
    head, decoder = model.get_output_embeddings(), model.base_model
    if not isinstance(head, nn.Linear) or decoder is model:
        return False
    hidden = torch.linspace(-100, 100, 2 * head.in_features, dtype=head.weight.dtype, device="cpu").view(1, 2, -1)
    decoder.forward = lambda *_, **__: BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=hidden)
    head.forward = lambda hidden: hidden
    try:
        with torch.no_grad():
            tokens = torch.zeros(1, 2, dtype=torch.long, device="cpu")
            return torch.equal(model(input_ids=tokens, use_cache=False).logits, hidden)
    except (AttributeError, RuntimeError):  # its outputs are of another kind, or it uses more of its weights
        return False
    finally:
        del decoder.forward, head.forward


class ChunkedLoss(Technique):
    """Chunked cross-entropy for every language model."""

    def is_used(self, settings: Settings) -> bool:
        return settings.task == "instruction-tuning"

    def notice(self, settings: Settings) -> str | None:
        """Return a line about the loss of a mixture of experts, which transformers would add."""
        config = part_config(load_config(settings.model), settings.task)
        factor = getattr(config, "router_aux_loss_coef", 0) if getattr(config, "output_router_logits", False) else 0
        return f"router_aux_loss_coef {factor:g} of the model's config has no effect here" if factor else None

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        use_chunked_loss(model, settings.loss_chunk)
        return model
