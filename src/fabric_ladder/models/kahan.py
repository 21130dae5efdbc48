"""Kahan summation: what rounding takes from the steps of 16-bit weights is kept, and added to later ones."""

from collections.abc import Callable

import torch
from torch.optim import Optimizer


class Kahan(Optimizer):
    """Mixed into Adam, AdamW or SGD, which then step on what earlier steps have left over, not on the weights.

    A bfloat16 weight has 8 bits: of a step below a 512th of it, rounding leaves nothing. Here the optimizer adds its
    step to a `compensation`, of the weight's shape and dtype and 0 at first; that is added to the weight, and what the
    weight did not take stays (Kahan, 1965, Further remarks on reducing truncation errors; for the training in bfloat16:
    Zamirai et al., 2020, Revisiting BFloat16 Training, section 4.2).

    The optimizer may not look at the weights, as Adafactor does; AdamW's decay is taken from them here.
    """

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Step the weights that have a gradient."""
        decays = [group["weight_decay"] for group in self.param_groups]
        stepped = [
            (parameter, parameter.data, group["lr"] * group["weight_decay"])
            for group in self.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        for parameter, weight, decay in stepped:
            parameter.data = self.state[parameter].pop("compensation", torch.zeros_like(weight))
            if decay:
                parameter.data.add_(weight, alpha=-decay)
        for group in self.param_groups:
            group["weight_decay"] = 0
        super().step(closure)
        for group, decay in zip(self.param_groups, decays, strict=True):
            group["weight_decay"] = decay
        for parameter, weight, _ in stepped:
            remainder, parameter.data = parameter.data, weight
            before = weight.clone()
            weight.add_(remainder)
            self.state[parameter]["compensation"] = remainder.add_(before.sub_(weight))
