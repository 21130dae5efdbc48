"""SinkGD: SGD on balanced gradients, without optimizer state.

Scetbon et al., 2025, Gradient Multi-Normalization for Stateless and Scalable LLM Training, arXiv:2502.06742,
algorithms 3 and 4.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric_ladder.models.optimizer import decay_weights
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique

ROUNDS = 5  # passes over rows and columns, as in the paper
PART_SIZE = 2**22  # numbers of a gradient that are in 32 bits at the same time; it bounds temporary tensors


class SinkGD(Optimizer):
    """Step each weight by its gradient, divided by one number for each row and one for each column.

    The numbers balance the gradient: rows and columns get a mean square of 1, several times by turns. So the numbers of
    a step have a mean square of `lr` squared, as in Adam's first step. A row of zeros, e.g. of a token that is not in
    the batch, stays 0 and does not count in the means.

    The paper balances the matrices of linear layers, and uses Adam for embeddings, heads and vectors. Here they are
    balanced too, because an embedding's moments would be the largest tensors of the optimizer. All that balancing
    leaves of a vector is the sign of its numbers.

    A step is computed in 32 bits, for a part of a weight at a time. It does not read the weight, except for its decay.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight_decay": 0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            decay_weights(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    _step_weight(parameter, group["lr"])


def _step_weight(weight: nn.Parameter, rate: float) -> None:
    if weight.ndim < 2:
        weight.add_(weight.grad.sign(), alpha=-rate)
        return
    gradient = weight.grad.flatten(1)
    size = max(1, PART_SIZE // gradient.shape[1])
    parts = gradient.split(size)
    rows, columns = _balance(parts)
    for target, part, factors in zip(weight.split(size), parts, rows, strict=True):
        step = _widen(part).mul_(factors[:, None]).mul_(columns)
        target.add_(step.view_as(target), alpha=-rate)


def _balance(parts: tuple[Tensor, ...]) -> tuple[list[Tensor], Tensor]:
    """Return the factors of the rows, for each part of a matrix, and those of the columns.

    Their squares balance the matrix of squares, as Sinkhorn and Knopp do (1967).
    """
    columns = torch.ones_like(parts[0][0], dtype=_wide(parts[0].dtype))
    for _ in range(ROUNDS):
        rows, sums, count = [], 0, 0
        for part in parts:
            squares = _widen(part).square_()
            rows.append(_inverse(squares @ columns))
            sums += rows[-1] @ squares
            count += rows[-1].count_nonzero()
        columns = _inverse(sums) * count
    return [factors.sqrt_() for factors in rows], columns.sqrt_()


def _widen(part: Tensor) -> Tensor:
    """Return a copy that has at least 32 bits."""
    return part.to(_wide(part.dtype), copy=True)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _inverse(sums: Tensor) -> Tensor:
    """Return the inverse of each sum of squares, and 0 for 0 or a number whose inverse would overflow."""
    return torch.where(sums < torch.finfo(sums.dtype).tiny, 0, 1 / sums)


class Stateless(Technique):
    """`SinkGD` in place of the optimizer."""

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if settings.max_grad_norm:
            return "its steps do not depend on the gradient's norm, so --max_grad_norm has no effect; leave it out"
        return None

    def change_optimizer(self, kind: type[Optimizer], settings: Settings, model: nn.Module) -> type[Optimizer]:
        return SinkGD
