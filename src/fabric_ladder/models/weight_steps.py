"""Optimizer steps of one weight at a time: within the backward pass, and on the host."""

from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn
from torch.optim import Optimizer


class WeightSteps(Optimizer):
    """Mixed into an optimizer of one parameter group: each weight is stepped by itself.

    Inside `stepping` that is as soon as the backward pass has the weight's gradient, elsewhere in `step`; and as
    `plan_steps` says on the device, or on the host. The host keeps a copy of the weights and the optimizer's state. A
    gradient is copied there and the stepped weight back, on CUDA by a stream of their own and through pinned memory,
    while a thread of its own computes the steps and the device goes on with the backward pass.
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
        self._worker = ThreadPoolExecutor(1) if offloads else None
        self._pending: list[Future] = []
        self._stream: torch.cuda.Stream | None = None
        if in_backward:
            for parameter in self.param_groups[0]["params"]:
                parameter.register_post_accumulate_grad_hook(self._take_gradient)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Step in the backward pass of this block, if so planned; all steps are done at its end."""
        self._active = self._in_backward
        try:
            yield
        finally:
            self._active = False
            self._finish()

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
        super().step()
        self.param_groups = [group]

    def _send(self, parameter: nn.Parameter) -> None:
        """Copy a gradient to the host and free it; the weight is stepped there when it has come."""
        if parameter not in self._host:  # only now: before, a checkpoint may be read into the weights
            pinned = parameter.is_cuda
            self._host[parameter] = torch.empty_like(parameter, device="cpu", pin_memory=pinned).copy_(parameter)
        gradient, parameter.grad, arrived = parameter.grad, None, None
        if parameter.is_cuda:
            self._stream = self._stream or torch.cuda.Stream(parameter.device)
            self._stream.wait_stream(torch.cuda.current_stream(parameter.device))
            with torch.cuda.stream(self._stream):
                sent = gradient.to("cpu", non_blocking=True)  # into pinned memory
                arrived = self._stream.record_event()
            gradient.record_stream(self._stream)  # its memory may be given away once it is copied
        else:
            sent = gradient.cpu()
        self._pending.append(self._worker.submit(self._step_on_host, parameter, sent, arrived))

    @torch.no_grad()
    def _step_on_host(self, parameter: nn.Parameter, gradient: Tensor, arrived: torch.cuda.Event | None) -> None:
        if arrived:
            arrived.synchronize()
        weight, parameter.data = parameter.data, self._host[parameter]  # so the state is the parameter's own
        parameter.grad = gradient
        self._step_one(parameter)
        parameter.grad, parameter.data = None, weight
        with torch.cuda.stream(self._stream) if arrived else nullcontext():
            weight.copy_(self._host[parameter], non_blocking=True)

    def _finish(self) -> None:
        """Wait for the steps on the host; the device waits for the weights that come back."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        if self._stream:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)


@contextmanager
def stepping(optimizer: Optimizer | None) -> Iterator[None]:
    """Let an optimizer, set up by Fabric, step in the backward pass of this block, if it is made for that."""
    inner = getattr(optimizer, "optimizer", None)
    with inner.stepping() if isinstance(inner, WeightSteps) else nullcontext():
        yield
