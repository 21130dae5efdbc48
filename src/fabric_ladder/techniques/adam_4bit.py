"""Adam whose two moments take 4 bits each, in PyTorch's own operations.

Moments, tables and blocks are those of torchao's `Adam4bit` (Li et al., 2023, Memory Efficient Optimizers with 4-bit
States, arXiv:2309.01507). torchao compiles its step for each shape of a weight. It also clamps the second moment to
6e-14, so its steps shrink where gradients are below 1e-6.
"""

from collections.abc import Callable, Iterable
from itertools import chain

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric_ladder.errors import UserError

BLOCK = 128  # values that share a scale
LEAST = 4096  # a tensor with fewer values has its moments in 32 bits
PART_SIZE = 2**22  # values of a weight that are stepped together, a multiple of the block; it bounds temporary tensors
POSITIVE = (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875)  # of the dynamic exponent type in 4 bits
TABLES = {  # the 16 shares of a block's largest magnitude, ascending
    "exp_avg": (*(-share for share in reversed(POSITIVE)), 0.0, *POSITIVE, 1.0),
    "exp_avg_sq": tuple(number / 16 for number in range(1, 17)),  # without 0: Adam divides by it
}


class Adam4bit(Optimizer):
    """Adam, with each moment's share of its block's largest magnitude rounded to the nearest of 16.

    A byte of `exp_avg` or `exp_avg_sq` holds two shares. `exp_avg_scale` and `exp_avg_sq_scale` hold the 32-bit
    magnitudes. A tensor that is small, or does not divide into blocks, has its moments in 32 bits. Steps are computed
    in 32 bits and rounded once, when they are added to a weight.

    Args:
        parameters: Each contiguous in memory.
        lr: Learning rate.
        betas: The share of each moment that a step keeps.
        eps: Added to the root of the second moment.

    Raises:
        UserError: A parameter is not contiguous.

    Attributes:
        parts: Number of parts that are stepped of each weight; None: all. A rehearsal steps only the first, which
            needs as much memory as any other.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0})
        for parameter in chain.from_iterable(group["params"] for group in self.param_groups):
            if not parameter.is_contiguous():
                shape = " x ".join(map(str, parameter.shape))
                raise UserError(f"--optimizer adam-4bit: a weight of {shape} is not contiguous; use adam-8bit")
        self.parts: int | None = None
        self._tables: dict[torch.device, dict[str, tuple[Tensor, Tensor]]] = {}

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Step the weights that have a gradient; return the loss of the closure."""
        loss = None
        if closure:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_weight(parameter, group)
        return loss

    def _step_weight(self, parameter: nn.Parameter, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state |= _new_state(parameter)
        state["step"] += 1
        weight, gradient, step = parameter.view(-1), parameter.grad.reshape(-1), float(state["step"])
        first, second = (1 - beta**step for beta in group["betas"])
        for start in range(0, len(weight), PART_SIZE)[: self.parts]:
            end = min(start + PART_SIZE, len(weight))
            part = gradient[start:end].float()
            weight[start:end].add_(self._update(state, start, end, part, group, second), alpha=-group["lr"] / first)

    def _update(self, state: dict, start: int, end: int, gradient: Tensor, group: dict, correction: float) -> Tensor:
        """Update a part of both moments, and return the first over the root of the second.

        Args:
            state: The parameter's state.
            start, end: Bounds of the part.
            gradient: The part's gradient, in 32 bits.
            group: The parameter's group.
            correction: Divisor of the second moment, which started at 0.
        """
        moment = self._read(state, "exp_avg_sq", start, end)
        moment.lerp_(gradient.square(), 1 - group["betas"][1])
        self._write(state, "exp_avg_sq", start, end, moment)
        root = moment.sqrt().div_(correction**0.5).add_(group["eps"])
        moment = self._read(state, "exp_avg", start, end)
        moment.lerp_(gradient, 1 - group["betas"][0])
        self._write(state, "exp_avg", start, end, moment)
        return torch.div(moment, root, out=root)

    def _read(self, state: dict, name: str, start: int, end: int) -> Tensor:
        """Return a part of a moment in 32 bits; it is the state itself if that has 32 bits."""
        if f"{name}_scale" not in state:
            return state[name][start:end]
        pairs, _ = self._tables_on(state[name].device)[name]
        values = pairs[state[name][start // 2 : end // 2].int()].view(-1, BLOCK)
        return values.mul_(state[f"{name}_scale"][start // BLOCK : end // BLOCK, None]).view(-1)

    def _write(self, state: dict, name: str, start: int, end: int, moment: Tensor) -> None:
        """Round a part of a moment into its state, unless the state has 32 bits."""
        if f"{name}_scale" in state:
            _, bounds = self._tables_on(moment.device)[name]
            blocks = moment.view(-1, BLOCK)
            scale = blocks.abs().amax(1).clamp_(torch.finfo(torch.float32).tiny)  # all values may be 0
            codes = torch.bucketize(blocks / scale[:, None], bounds, out_int32=True, right=True).view(-1, 2)
            state[name][start // 2 : end // 2] = torch.add(codes[:, 1], codes[:, 0], alpha=16)
            state[f"{name}_scale"][start // BLOCK : end // BLOCK] = scale

    def _tables_on(self, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        """Return for each moment the two shares of each byte value, and the bounds between shares."""
        if device not in self._tables:
            self._tables[device] = {}
            for name, values in TABLES.items():
                shares = torch.tensor(values, device=device)
                pairs = torch.stack([shares.repeat_interleave(16), shares.repeat(16)], 1)
                self._tables[device][name] = pairs, (shares[1:] + shares[:-1]) / 2
        return self._tables[device]


def _new_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state before the first step: a scale of 0 makes every code 0."""
    size, zeros = parameter.numel(), parameter.new_zeros
    if size < LEAST or size % BLOCK:
        moments = {name: zeros(size, dtype=torch.float32) for name in TABLES}
    else:
        moments = {name: zeros(size // 2, dtype=torch.uint8) for name in TABLES}
        moments |= {f"{name}_scale": zeros(size // BLOCK, dtype=torch.float32) for name in TABLES}
    return {"step": torch.tensor(0.0), **moments}
