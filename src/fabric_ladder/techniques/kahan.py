"""Kahan summation: keep the rounding error of 16-bit weights and add it to later steps."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique


class Kahan(Optimizer):
    """Mixin for Adam, AdamW, SGD or SinkGD.

    A bfloat16 weight has 8 significant bits, so a step below a 512th of the weight is rounded away. Here the optimizer
    adds its step to a `compensation` of the weight's shape and dtype, 0 at first. The compensation is added to the
    weight, and the rounding error stays in the compensation (Kahan, 1965, Further remarks on reducing truncation
    errors; for training in bfloat16: Zamirai et al., 2020, Revisiting BFloat16 Training, section 4.2).

    The optimizer must not read the weights, as Adafactor does. AdamW's weight decay is therefore computed here. During
    a step the compensation is the parameter's data in place of the weight, so that any optimizer adds its step to it. A
    DTensor does not allow this, so shards are refused.

    Operations on many weights are batched. Their temporary tensors take as much memory as the largest weight.

    Attributes:
        single: Compute weight by weight, with the same peak of memory. A rehearsal sets it, since batches of a few
            blocks are not those of all blocks.
    """

    single = False

    @torch.no_grad()
    def step(self) -> None:
        decays = [group["weight_decay"] for group in self.param_groups]
        stepped = [
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        weights = [parameter.data for parameter in stepped]
        before = [self.state[parameter].get("compensation") for parameter in stepped]
        compensations = [torch.zeros_like(w) if c is None else c for w, c in zip(weights, before, strict=True)]
        try:
            for parameter, compensation in zip(stepped, compensations, strict=True):
                self.state[parameter].pop("compensation", None)  # an optimizer makes its state where it finds none
                parameter.data = compensation
            for group in self.param_groups:
                self._decay(group, dict(zip(stepped, weights, strict=True)))
                group["weight_decay"] = 0
            super().step()
        finally:
            for group, decay in zip(self.param_groups, decays, strict=True):
                group["weight_decay"] = decay
            compensations = [parameter.data for parameter in stepped]
            for parameter, weight, compensation in zip(stepped, weights, compensations, strict=True):
                self.state[parameter]["compensation"], parameter.data = compensation, weight
            for start, end in self._parts(weights):
                _move(compensations[start:end], weights[start:end])

    @staticmethod
    def _decay(group: dict, weights: dict[nn.Parameter, Tensor]) -> None:
        """Add the weight decay to the compensations, which are the data of the parameters during a step."""
        decayed = [parameter for parameter in group["params"] if parameter in weights]
        if group["weight_decay"] and decayed:
            lost = -group["lr"] * group["weight_decay"]
            torch._foreach_add_([each.data for each in decayed], [weights[each] for each in decayed], alpha=lost)

    def _parts(self, weights: list[Tensor]) -> Iterator[tuple[int, int]]:
        """Yield the bounds of parts that take no more memory than the largest weight."""
        most = max((weight.nbytes for weight in weights), default=0) * (not self.single)
        start = size = 0
        for place, weight in enumerate(weights):
            if place > start and size + weight.nbytes > most:
                yield start, place
                start, size = place, 0
            size += weight.nbytes
        if weights:
            yield start, len(weights)


def _move(compensations: list[Tensor], weights: list[Tensor]) -> None:
    """Add compensations to weights of the same dtype, and keep the rounding errors in the compensations."""
    sums = torch._foreach_add(weights, compensations)
    torch._foreach_sub_(weights, sums)
    torch._foreach_add_(compensations, weights)
    torch._foreach_copy_(weights, sums)


class KahanSummation(Technique):
    """`Kahan`, mixed into the optimizer."""

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if settings.precision not in ("bf16-true", "16-true"):
            return f"under --precision {settings.precision} the weights lose nothing; leave it out, or use bf16-true"
        if settings.optimizer == "adafactor":
            return "Adafactor measures its steps by the weights, which it would not see; use --optimizer adam or sgd"
        return None

    def state_dtypes(self, settings: Settings) -> list[torch.dtype | None]:
        return [None]

    def change_optimizer(self, kind: type[Optimizer], settings: Settings, model: nn.Module) -> type[Optimizer]:
        return type(f"Kahan{kind.__name__}", (Kahan, kind), {})
