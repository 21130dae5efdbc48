"""Adam with 4-bit moments, by torchao, which is imported where it is used.

Li et al., 2023, Memory Efficient Optimizers with 4-bit States, arXiv:2309.01507.
"""

import warnings
from collections.abc import Callable, Iterable
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric_ladder.techniques.compile import MOST_GRAPHS, compiles

BLOCK = 128  # values that share a scale
LEAST = 4096  # a tensor with fewer values has its moments in 32 bits
PART_SIZE = 2**21  # values of a weight that are stepped together, a multiple of the block; it bounds temporary tensors
POSITIVE = (0.0055, 0.0325, 0.0775, 0.2125, 0.4375, 0.6625, 0.8875)  # of the dynamic exponent type in 4 bits
TABLES = {  # torchao's levels; its own functions compute them once for all, perhaps on the fake tensors of a rehearsal
    "exp_avg": (*(-share for share in reversed(POSITIVE)), 0.0, *POSITIVE, 1.0),
    "exp_avg_sq": tuple(number / 16 for number in range(1, 17)),
}
LARGER = 2.0**20  # torchao's scales are at least 1e-12, and Adam's steps do not change with the size of all gradients


class AdamByParts(Optimizer):
    """torchao's `AdamW4bit`, by parts of a weight.

    torchao's class unpacks whole weights, which takes 9 GB for BLOOM-560m's embedding where nothing is compiled, and
    safetensors cannot hold its state. Here the state is plain tensors: `exp_avg` and `exp_avg_sq` with two values a
    byte, and their scales. A tensor that is small, or does not divide into blocks, has its moments in 32 bits.

    Args:
        parameters: Each contiguous in memory.
        lr: Learning rate.
        betas: The share of each moment that a step keeps.
        eps: Added to the root of the second moment.

    Attributes:
        parts: Number of parts that are stepped of each weight; None: all. A rehearsal steps only the first, which
            needs as much memory as any other.
    """

    def __init__(
        self, parameters: Iterable[nn.Parameter], lr: float, betas: tuple = (0.9, 0.999), eps: float = 1e-8
    ) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.parts: int | None = None
        self._tables: dict[torch.device, dict[str, Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_weight(parameter, group)

    def _step_weight(self, parameter: nn.Parameter, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state |= _new_state(parameter)
        state["step"] += 1
        weight, gradient, size = parameter.view(-1), parameter.grad.reshape(-1), parameter.numel()
        # the backward pass in another thread may set another default dtype
        rate = torch.tensor(group["lr"], dtype=torch.float32)
        numbers = *group["betas"], group["weight_decay"], group["eps"] * LARGER
        run_part = torchao_step(compiles(weight.device))
        for start in range(0, size, PART_SIZE)[: self.parts]:
            end = min(start + PART_SIZE, size)
            moments = (self._part(state, name, start, end, size) for name in ("exp_avg", "exp_avg_sq"))
            larger = gradient[start:end].float() * LARGER
            run_part(weight[start:end], larger, state["step"], *moments, None, rate, *numbers, True, False)

    def _part(self, state: dict[str, Tensor], name: str, start: int, end: int, size: int) -> Tensor:
        """Return the part of a moment that belongs to a part of a weight of this size."""
        moment = state[name]
        part = moment[start * len(moment) // size : end * len(moment) // size]
        if f"{name}_scale" not in state:
            return part
        from torchao.optim.subclass_4bit import OptimState4bit

        if moment.device not in self._tables:
            self._tables[moment.device] = {
                key: torch.tensor(table, dtype=torch.float32, device=moment.device) for key, table in TABLES.items()
            }
        scale, table = state[f"{name}_scale"][start // BLOCK : end // BLOCK], self._tables[moment.device][name]
        return OptimState4bit(part, scale, table, name == "exp_avg", (end - start,), torch.float32)


@cache
def torchao_step(compiled: bool) -> Callable[..., None]:
    """Return torchao's step of a weight, perhaps as compiled code, with a graph for each size."""
    from torchao.optim.adam import single_param_adam

    if not compiled:
        return single_param_adam
    warnings.filterwarnings("ignore", "OptimState4bit does not implement", UserWarning)
    torch._dynamo.config.recompile_limit = MOST_GRAPHS
    return torch.compile(single_param_adam, dynamic=False)


def _new_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state before the first step: a scale of 0 makes every value 0."""
    size, zeros = parameter.numel(), parameter.new_zeros
    if size < LEAST or size % BLOCK:
        moments = {name: zeros(size, dtype=torch.float32) for name in ("exp_avg", "exp_avg_sq")}
    else:
        moments = {name: zeros(size // 2, dtype=torch.uint8) for name in ("exp_avg", "exp_avg_sq")}
        moments |= {f"{name}_scale": zeros(size // BLOCK, dtype=torch.float32) for name in tuple(moments)}
    return {"step": torch.tensor(0.0, dtype=torch.float32), **moments}
