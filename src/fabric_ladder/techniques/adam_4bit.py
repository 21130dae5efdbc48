"""Adam whose two moments take 4 bits each, in PyTorch's own operations.

Moments, tables and blocks are those of torchao's `Adam4bit` (Li et al., 2023, Memory Efficient Optimizers with 4-bit
States, arXiv:2309.01507). torchao compiles its step for each shape of a weight. It also clamps the second moment to
6e-14, so its steps shrink where gradients are below 1e-6.
"""

from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from itertools import chain
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from fabric_ladder.errors import UserError
from fabric_ladder.models.optimizer import decay_weights
from fabric_ladder.techniques.compile import MOST_GRAPHS, compiles

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
        compiled: Whether compiled code steps the parts, in a few kernels instead of about 27. None: on CUDA GPUs that
            have Triton. On a CPU compiling takes longer than it saves. TORCHDYNAMO_DISABLE=1 turns it off.
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
        self.compiled: bool | None = None
        self._tables: dict[torch.device, dict[str, tuple[Tensor, Tensor]]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Step the weights that have a gradient."""
        for group in self.param_groups:
            decay_weights(group)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step_weight(parameter, group)

    def _step_weight(self, parameter: nn.Parameter, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state |= _new_state(parameter)
        state["step"] += 1
        weight, gradient, step = parameter.view(-1), parameter.grad.reshape(-1), float(state["step"])
        first, second = (1 - beta**step for beta in group["betas"])
        beta, squared_beta = group["betas"]
        numbers = Numbers(group["lr"] / first, second**0.5, 1 - beta, 1 - squared_beta, group["eps"])
        compiled = compiles(weight.device) if self.compiled is None else self.compiled
        run_part = compiled_step() if compiled else step_part
        size, tables = len(weight), self._tables_on(weight.device)
        for start in range(0, size, PART_SIZE)[: self.parts]:
            end = min(start + PART_SIZE, size)
            moments = {name: _slice(state[name], start, end, size) for name in state if name.startswith("exp_avg")}
            parts = weight[start:end], gradient[start:end]
            if "exp_avg_scale" in moments:
                parts = [part.view(-1, BLOCK) for part in parts]
                moments |= {name: moments[name].view(-1, BLOCK // 2) for name in TABLES}
            run_part(*parts, moments, tables, numbers)

    def _tables_on(self, device: torch.device) -> dict[str, tuple[Tensor, Tensor]]:
        """Return for each moment the two shares of each byte value, and the bounds between shares."""
        if device not in self._tables:
            self._tables[device] = {}
            for name, values in TABLES.items():
                # the backward pass in another thread may set another default dtype
                shares = torch.tensor(values, device=device, dtype=torch.float32)
                pairs = torch.stack([shares.repeat_interleave(16), shares.repeat(16)], 1)
                self._tables[device][name] = pairs, (shares[1:] + shares[:-1]) / 2
        return self._tables[device]


class Numbers(NamedTuple):
    """The numbers of a step: floats for the eager step; 0-dimensional tensors for the compiled one.

    Compiled code would have floats as constants, and would be compiled again for each step.

    Attributes:
        rate: Learning rate over the correction of the first moment, which started at 0.
        root: Root of the correction of the second moment.
        new: Share of the gradient in the first moment.
        new_square: Share of the gradient's square in the second moment.
        eps: Added to the root of the second moment.
    """

    rate: float | Tensor
    root: float | Tensor
    new: float | Tensor
    new_square: float | Tensor
    eps: float | Tensor


@cache
def compiled_step() -> Callable:
    """Return `step_part` as compiled code for parts of all sizes."""
    torch._dynamo.config.recompile_limit = MOST_GRAPHS  # precisions, and sizes of 1, have graphs of their own
    compiled = torch.compile(step_part)

    def step(weight: Tensor, gradient: Tensor, moments: dict[str, Tensor], tables: dict, numbers: Numbers) -> None:
        for tensor in (weight, gradient, *moments.values()):
            torch._dynamo.maybe_mark_dynamic(tensor, 0)  # with dynamic=True the size of a block would vary too
        compiled(weight, gradient, moments, tables, _as_tensors(numbers))

    return step


@lru_cache(maxsize=1)
def _as_tensors(numbers: Numbers) -> Numbers:
    """Return the numbers as tensors in CPU memory; most weights of a step have the same numbers."""
    return Numbers(*torch.tensor(numbers, dtype=torch.float32).unbind())


def step_part(
    weight: Tensor,
    gradient: Tensor,
    moments: dict[str, Tensor],
    tables: dict[str, tuple[Tensor, Tensor]],
    numbers: Numbers,
) -> None:
    """Step a part of a weight.

    Args:
        weight: A row for each block; one dimension if the moments have 32 bits.
        gradient: In the same form.
        moments: The part's moments and scales, with a row for each block.
        tables: From `_tables_on`.
        numbers: Of this step.
    """
    gradient = gradient.float()
    moment = _read(moments, "exp_avg_sq", tables)
    moment.lerp_(gradient.square(), numbers.new_square)
    _write(moments, "exp_avg_sq", tables, moment)
    root = moment.sqrt().div_(numbers.root).add_(numbers.eps)
    moment = _read(moments, "exp_avg", tables)
    moment.lerp_(gradient, numbers.new)
    _write(moments, "exp_avg", tables, moment)
    step = torch.div(moment, root, out=root)
    if isinstance(numbers.rate, Tensor):
        weight.sub_(step * numbers.rate)
    else:
        weight.add_(step, alpha=-numbers.rate)


def _read(moments: dict[str, Tensor], name: str, tables: dict[str, tuple[Tensor, Tensor]]) -> Tensor:
    """Return a moment in 32 bits; it is the state itself if that has 32 bits."""
    if f"{name}_scale" not in moments:
        return moments[name]
    pairs, _ = tables[name]
    return pairs[moments[name].int()].view(-1, BLOCK).mul_(moments[f"{name}_scale"][:, None])


def _write(moments: dict[str, Tensor], name: str, tables: dict[str, tuple[Tensor, Tensor]], moment: Tensor) -> None:
    """Round a moment into its state, unless the state has 32 bits."""
    if f"{name}_scale" in moments:
        _, bounds = tables[name]
        scale = moment.abs().amax(1).clamp_(torch.finfo(torch.float32).tiny)  # all values may be 0
        codes = torch.bucketize(moment / scale[:, None], bounds, out_int32=True, right=True)
        moments[name].copy_(torch.add(codes[:, 1::2], codes[:, ::2], alpha=16))
        moments[f"{name}_scale"].copy_(scale)


def _slice(tensor: Tensor, start: int, end: int, size: int) -> Tensor:
    """Return the part of a state that belongs to a part of a weight of this size."""
    return tensor[start * len(tensor) // size : end * len(tensor) // size]


def _new_state(parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return the state before the first step: a scale of 0 makes every code 0."""
    size, zeros = parameter.numel(), parameter.new_zeros
    if size < LEAST or size % BLOCK:
        moments = {name: zeros(size, dtype=torch.float32) for name in TABLES}
    else:
        moments = {name: zeros(size // 2, dtype=torch.uint8) for name in TABLES}
        moments |= {f"{name}_scale": zeros(size // BLOCK, dtype=torch.float32) for name in TABLES}
    return {"step": torch.tensor(0.0, dtype=torch.float32), **moments}
