"""Kahan summation: what rounding takes from the steps of 16-bit weights is kept, and added to later ones."""

from collections.abc import Callable

import torch
from torch.optim import Optimizer


class Kahan(Optimizer):
    """Mixed into Adam, AdamW or SGD of one parameter group, which then step on what earlier steps left over.

    A bfloat16 weight has 8 bits: of a step below a 512th of it, rounding leaves nothing. Here the optimizer adds its
    step to a `compensation`, of the weight's shape and dtype and 0 at first; that is added to the weight, and what the
    weight did not take stays (Kahan, 1965, Further remarks on reducing truncation errors; for the training in bfloat16:
    Zamirai et al., 2020, Revisiting BFloat16 Training, section 4.2).

    The optimizer may not look at the weights, as Adafactor does; AdamW's decay is taken from them here. While it steps,
    the compensation takes the place of the weight's data, which a DTensor's does not give up: no shards.
    """

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Step the weights that have a gradient."""
        (group,) = self.param_groups
        decay, stepped = group["weight_decay"], []
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
