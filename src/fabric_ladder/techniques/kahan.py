"""Kahan summation: keep the rounding error of 16-bit weights and add it to later steps."""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique

STEPS = 127  # of an error in 8 bits, to each side
SLICE = 2**22  # weights whose errors are converted at once


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

    The error is at most half the distance between the weight and the next number. In 8 bits it is kept as a multiple of
    a 127th of that (FlashOptim, 2026, arXiv:2602.23349), and the optimizer steps for as many weights at once as take no
    more memory than the largest one.

    Attributes:
        in_8_bits: Keep the error in 8 bits between the steps.
        single: Compute weight by weight, with the same peak of memory. A rehearsal sets it, since batches of a few
            blocks are not those of all blocks.
    """

    in_8_bits = False
    single = False

    @torch.no_grad()
    def step(self) -> None:
        groups = [group["params"] for group in self.param_groups]
        stepped = [parameter for group in groups for parameter in group if parameter.grad is not None]
        if not self.in_8_bits:
            self._step(stepped)
            return
        try:
            for start, end in self._parts([parameter.data for parameter in stepped]):
                part = set(stepped[start:end])
                for group, parameters in zip(self.param_groups, groups, strict=True):
                    group["params"] = [parameter for parameter in parameters if parameter in part]
                self._step(stepped[start:end])
        finally:
            for group, parameters in zip(self.param_groups, groups, strict=True):
                group["params"] = parameters

    def _step(self, stepped: list[nn.Parameter]) -> None:
        """Step for these parameters, which are those of the groups that have a gradient."""
        decays = [group["weight_decay"] for group in self.param_groups]
        weights = [parameter.data for parameter in stepped]
        kept = [self.state[parameter].get("compensation") for parameter in stepped]
        kind = torch.int8 if self.in_8_bits else None
        kept = [  # PyTorch loads a checkpoint's errors in the weight's dtype
            torch.zeros_like(weight, dtype=kind) if error is None else error.to(kind or error.dtype)
            for weight, error in zip(weights, kept, strict=True)
        ]
        compensations = kept
        if self.in_8_bits:
            compensations = [torch.empty_like(weight) for weight in weights]
            for compensation, error, weight in _slices(compensations, kept, weights):
                compensation.copy_(error * _unit(weight))
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
            kept = kept if self.in_8_bits else compensations
            for parameter, weight, error in zip(stepped, weights, kept, strict=True):
                self.state[parameter]["compensation"], parameter.data = error, weight
            if self.in_8_bits:
                for compensation, error, weight in _slices(compensations, kept, weights):
                    _move([compensation], [weight])
                    error.copy_((compensation / _unit(weight)).round_().clamp_(-STEPS, STEPS))
            else:
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


def _slices(*tensors: list[Tensor]) -> Iterator[tuple[Tensor, ...]]:
    """Yield equal slices of tensors of the same shapes, so that temporary tensors stay small."""
    for whole in zip(*tensors, strict=True):
        rows = max(1, SLICE * len(torch.atleast_1d(whole[0])) // max(1, whole[0].numel()))
        yield from zip(*(torch.atleast_1d(tensor).split(rows) for tensor in whole), strict=True)


def _unit(weight: Tensor) -> Tensor:
    """Return the value of 1 in 8 bits for each weight, in 32 bits."""
    exponent = torch.frexp(weight.float()).exponent  # of a number between 0.5 and 1
    one = torch.finfo(weight.dtype).eps / 4 / STEPS
    return torch.ldexp(torch.full_like(exponent, one, dtype=torch.float32), exponent)


class KahanSummation(Technique):
    """`Kahan`, mixed into the optimizer."""

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if settings.precision not in ("bf16-true", "16-true"):
            return f"under --precision {settings.precision} the weights lose nothing; leave it out, or use bf16-true"
        if settings.optimizer == "adafactor":
            return "Adafactor measures its steps by the weights, which it would not see; use --optimizer adam or sgd"
        return None

    def state_dtypes(self, settings: Settings) -> list[torch.dtype | None]:
        return [torch.int8 if settings.kahan_summation == "8-bit" else None]

    def change_optimizer(self, kind: type[Optimizer], settings: Settings, model: nn.Module) -> type[Optimizer]:
        return type(f"Kahan{kind.__name__}", (Kahan, kind), {"in_8_bits": settings.kahan_summation == "8-bit"})
