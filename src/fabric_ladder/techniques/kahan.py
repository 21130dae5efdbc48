"""Kahan summation: keep the rounding error of 16-bit weights and add it to later steps."""

from collections.abc import Callable

import torch
from torch.optim import Optimizer

from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import ALONE_OR_CHECKPOINTED, NextRung, Technique


class Kahan(Optimizer):
    """Mixin for Adam, AdamW or SGD with one parameter group.

    A bfloat16 weight has 8 significant bits, so a step below a 512th of the weight is rounded away. Here the optimizer
    adds its step to a `compensation` of the weight's shape and dtype, 0 at first. The compensation is added to the
    weight, and the rounding error stays in the compensation (Kahan, 1965, Further remarks on reducing truncation
    errors; for training in bfloat16: Zamirai et al., 2020, Revisiting BFloat16 Training, section 4.2).

    The optimizer must not read the weights, as Adafactor does. AdamW's weight decay is therefore computed here. During
    a step the compensation replaces the weight's data, which a DTensor does not allow, so shards are refused.
    """

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Step the weights that have a gradient."""
        (group,) = self.param_groups
        decay = group["weight_decay"]
        stepped = []
        try:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    weight, remainder = parameter.data, self.state[parameter].pop("compensation", None)
                    stepped.append((parameter, weight))
                    parameter.data = torch.zeros_like(weight) if remainder is None else remainder
                    if decay:
                        parameter.data.add_(weight, alpha=-group["lr"] * decay)
            group["weight_decay"] = 0
            super().step(closure)
        finally:
            group["weight_decay"] = decay
            for parameter, weight in stepped:
                remainder, parameter.data = parameter.data, weight
                before = weight.clone()
                weight.add_(remainder)
                self.state[parameter]["compensation"] = remainder.add_(before.sub_(weight))


class KahanSummation(Technique):
    """`Kahan`, mixed into the optimizer."""

    setting = "kahan_summation"
    rung = "16_bf16_that_learns"
    plans = ALONE_OR_CHECKPOINTED
    next_rung = NextRung("18_low_bit_optimizer", "keeps Adam's moments in 8 bits", replaces=("optimizer",))

    def conflict(self, other: Technique) -> str | None:
        """Refuse shards, and weights that lose nothing by rounding."""
        if other.adapters:
            return "adapters are trained in 32-bit, which loses nothing; leave it out"
        if other.shards:
            return "not on sharded weights; leave it out, and use --precision bf16-mixed, whose weights lose nothing"
        return None

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        """Return why the technique cannot be used, and what to do."""
        if settings.precision not in ("bf16-true", "16-true"):
            return f"under --precision {settings.precision} the weights lose nothing; leave it out, or use bf16-true"
        if settings.optimizer == "adafactor":
            return "Adafactor measures its steps by the weights, which it would not see; use --optimizer adam or sgd"
        return None

    def state_dtypes(self, settings: Settings) -> list[torch.dtype | None]:
        """Return the compensation."""
        return [None]

    def relative_speed(self, settings: Settings) -> float:
        """Return the counted speed relative to plain 16-bit weights (benchmarks/roofline.py: BLOOM-560m on an H100)."""
        return 0.89

    def change_optimizer(self, kind: type[Optimizer], settings: Settings) -> type[Optimizer]:
        """Mix `Kahan` into the optimizer's class."""
        return type(f"Kahan{kind.__name__}", (Kahan, kind), {})
