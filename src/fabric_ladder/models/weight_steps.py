"""Optimizer steps of one weight at a time: within the backward pass, and on the host."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class WeightSteps(Optimizer):
    """Mixed into an optimizer of one parameter group: each weight is stepped by itself.

    Within `stepping`, a weight is stepped as soon as the backward pass has its gradient; otherwise when `step` is
    called. `plan_steps` says whether on the device or on the host.

    The host keeps a copy of the weights and the optimizer's state. Gradients are copied there and stepped weights back,
    on CUDA through pinned memory and by a stream for each direction; a thread computes the steps, and the device goes
    on with the backward pass. It waits for the gradient before the one that is being sent, so that it holds no more.
    """

    def plan_steps(self, offloads: bool, frees: bool, in_backward: bool) -> None:
        """Say how weights are to be stepped; called once, before the first backward pass.

        Args:
            offloads: Step on the host.
            frees: Free each gradient at once, so that no two need exist; outside `stepping` it is lost.
            in_backward: Step in the backward pass inside `stepping`.
        """
        self.offloads, self._frees, self._in_backward, self._active = offloads, frees, in_backward, False
        self._finite: list[Tensor] = []
        self._host: dict[nn.Parameter, Tensor] = {}
        self._versions: dict[nn.Parameter, int] = {}  # of the weights that the host has copies of
        self._worker = ThreadPoolExecutor(1) if offloads else None
        self._pending: list[Future] = []
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # to the host, and back
        self._sending: tuple[Tensor, torch.cuda.Event] | None = None
        if in_backward:
            for parameter in self.param_groups[0]["params"]:
                parameter.gradient_hook = parameter.register_post_accumulate_grad_hook(self._take_gradient)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Step in the backward pass of this block, if so planned; all steps are done at its end."""
        self._active = self._in_backward
        try:
            yield
        finally:
            self._active = False
            self._finish()

    @torch.no_grad()
    def step(self, closure: Callable | None = None) -> None:
        """Step the weights that have a gradient."""
        if not self.offloads:
            return super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                self._send(parameter)
        return self._finish()

    def take_finite(self) -> list[Tensor]:
        """Return whether the gradients were finite that are stepped with and gone, booleans on the device, once."""
        finite, self._finite = self._finite, []
        return finite

    @torch.no_grad()
    def _take_gradient(self, parameter: nn.Parameter) -> None:
        if self._active:
            self._finite.append(parameter.grad.norm(torch.inf).isfinite())
            if self.offloads:
                self._send(parameter)
            else:
                self._step_one(parameter)
                parameter.grad = None
        elif self._frees:
            parameter.grad = None

    def _step_one(self, parameter: nn.Parameter) -> None:
        (group,) = self.param_groups
        self.param_groups = [group | {"params": [parameter]}]  # an optimizer looks at all that it has
        try:
            super().step()
        finally:
            self.param_groups = [group]

    def _send(self, parameter: nn.Parameter) -> None:
        """Copy a gradient to the host and free it; the weight is stepped there when it has come."""
        if self._versions.get(parameter) != parameter._version:  # the first step, or a checkpoint was read since
            host = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
            self._host[parameter] = self._host.get(parameter, host).copy_(parameter)
        gradient, parameter.grad, arrived = parameter.grad, None, None
        if parameter.is_cuda:
            computing = torch.cuda.current_stream(parameter.device)
            self._streams = self._streams or (torch.cuda.Stream(parameter.device), torch.cuda.Stream(parameter.device))
            self._streams[0].wait_stream(computing)
            with torch.cuda.stream(self._streams[0]):
                sent = gradient.to("cpu", non_blocking=True)  # into pinned memory
                arrived = self._streams[0].record_event()
            self._let_go(computing)
            self._sending = gradient, arrived
        else:
            sent = gradient.cpu()
        self._pending.append(self._worker.submit(self._step_on_host, parameter, sent, arrived))

    def _let_go(self, computing: torch.cuda.Stream) -> None:
        """Free the gradient that was sent last, once it is copied; `record_stream` would free it too late."""
        if self._sending:
            computing.wait_event(self._sending[1])
            self._sending = None

    @torch.no_grad()
    def _step_on_host(self, parameter: nn.Parameter, gradient: Tensor, arrived: torch.cuda.Event | None) -> None:
        if arrived:
            arrived.synchronize()
        weight, parameter.data = parameter.data, self._host[parameter]  # so the state is the parameter's own
        parameter.grad = gradient
        try:
            self._step_one(parameter)
        finally:
            parameter.grad, parameter.data = None, weight
        self._versions[parameter] = parameter._version
        with torch.cuda.stream(self._streams[1]) if arrived else nullcontext():
            weight.copy_(self._host[parameter], non_blocking=True)

    def _finish(self) -> None:
        """Wait for the steps on the host; the device waits for the weights that come back."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        if self._streams:
            computing = torch.cuda.current_stream(self._streams[1].device)
            computing.wait_stream(self._streams[1])
            self._let_go(computing)


def forget_hooks(parameters: list[nn.Parameter]) -> None:
    """Take back what an optimizer before has hooked to these weights, as in a notebook whose cells run twice."""
    for parameter in parameters:
        if hook := parameter.__dict__.pop("gradient_hook", None):
            hook.remove()


@contextmanager
def stepping(optimizer: Optimizer | None) -> Iterator[None]:
    """Let an optimizer, set up by Fabric, step in the backward pass of this block, if it is made for that."""
    inner = getattr(optimizer, "optimizer", None)
    with inner.stepping() if isinstance(inner, WeightSteps) else nullcontext():
        yield
