"""Optimizer steps of one weight at a time: inside the backward pass, and on the CPU."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import Optimizer

from fabric_ladder.models.optimizer import all_finite
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.checkpointing import host_memory
from fabric_ladder.techniques.memory import Counts, Peak, bytes_of_weight
from fabric_ladder.techniques.technique import Technique


class WeightSteps(Optimizer):
    """Mixin for an optimizer, which then updates each weight by itself.

    Inside `stepping`, a weight is updated as soon as the backward pass has its gradient. Otherwise `step` updates it.

    With offloading, CPU memory holds a copy of the weights and the optimizer's state. Gradients are copied there and
    updated weights back, on CUDA through pinned memory and with one stream for each direction. A thread computes the
    steps while the device continues the backward pass. Before the device sends a gradient it waits until the previous
    one has been copied, so that it never holds more than two.

    A weight of a streamed block is in CPU memory anyway. It is stepped there, and comes to the device with its block.
    All steps are done before the next pass. Waiting block by block would gain nothing: the first block is stepped last.

    Attributes:
        offloads: Step on the CPU.
        frees: Free each gradient immediately. Outside `stepping` it is freed without a step.
        in_backward: Step inside the backward pass, within `stepping`.
    """

    offloads: bool
    frees: bool
    in_backward: bool

    def __init__(self, groups: list[dict], **options) -> None:
        super().__init__(groups, **options)
        self._groups = {parameter: group for group in self.param_groups for parameter in group["params"]}
        self._active = False
        self._finite: list[Tensor] = []
        self._host: dict[nn.Parameter, Tensor] = {}
        self._versions: dict[nn.Parameter, int] = {}  # versions of the weights when the CPU copied them
        self._worker = ThreadPoolExecutor(1) if self.offloads else None
        self._pending: list[Future] = []
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None  # to CPU memory, and back
        self._sending: tuple[Tensor, torch.cuda.Event] | None = None
        if self.in_backward:
            for parameter in self._groups:
                parameter.gradient_hook = parameter.register_post_accumulate_grad_hook(self._take_gradient)

    @contextmanager
    def stepping(self) -> Iterator[None]:
        """Step inside the backward pass of this block, if so planned; all steps are done at its end."""
        self._active = self.in_backward
        try:
            yield
        finally:
            self._active = False
            self._finish()

    @torch.no_grad()
    def step(self) -> None:
        if not self.offloads:
            super().step()
            return
        for parameter in self._groups:
            if parameter.grad is not None:
                self._send(parameter)
        self._finish()

    def take_finite(self) -> list[Tensor]:
        """Return whether each gradient since the last call was finite, as booleans on the device."""
        finite, self._finite = self._finite, []
        return finite

    @torch.no_grad()
    def _take_gradient(self, parameter: nn.Parameter) -> None:
        if self._active:
            self._finite.append(all_finite([parameter.grad]))
            if self.offloads:
                self._send(parameter)
            else:
                self._step_one(parameter)
                parameter.grad = None
        elif self.frees:
            parameter.grad = None

    def _step_one(self, parameter: nn.Parameter) -> None:
        groups = self.param_groups
        self.param_groups = [self._groups[parameter] | {"params": [parameter]}]  # an optimizer steps all of them
        try:
            super().step()
        finally:
            self.param_groups = groups

    def _send(self, parameter: nn.Parameter) -> None:
        """Copy a gradient to CPU memory and free it; the worker then updates the weight."""
        host = self._on_host(parameter)
        gradient, parameter.grad, arrived = parameter.grad, None, None
        if parameter.is_cuda:
            computing = torch.cuda.current_stream(parameter.device)
            self._streams = self._streams or (torch.cuda.Stream(parameter.device), torch.cuda.Stream(parameter.device))
            self._streams[0].wait_stream(computing)
            with torch.cuda.stream(self._streams[0]):
                sent = gradient.to("cpu", non_blocking=True)  # into pinned memory
                arrived = self._streams[0].record_event()
            self._free_sent(computing)
            self._sending = gradient, arrived
        else:
            sent = gradient.cpu()
        self._pending.append(self._worker.submit(self._step_on_host, parameter, host, sent, arrived))

    def _on_host(self, parameter: nn.Parameter) -> Tensor:
        """Return the weight in CPU memory: that of a streamed block, or a copy."""
        if (streamed := getattr(parameter, "streamed_from", None)) is not None:
            return streamed
        if self._versions.get(parameter) != parameter._version:  # the first step, or a checkpoint was read since
            if parameter not in self._host:
                with host_memory():
                    self._host[parameter] = torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda)
            self._host[parameter].copy_(parameter)
        return self._host[parameter]

    def _free_sent(self, computing: torch.cuda.Stream) -> None:
        """Free the gradient that was sent last, once it is copied; `record_stream` would free it too late."""
        if self._sending:
            computing.wait_event(self._sending[1])
            self._sending = None

    @torch.no_grad()
    def _step_on_host(
        self, parameter: nn.Parameter, host: Tensor, gradient: Tensor, arrived: torch.cuda.Event | None
    ) -> None:
        if arrived:
            arrived.synchronize()
        weight, parameter.data = parameter.data, host  # so the state is the parameter's own
        parameter.grad = gradient
        try:
            self._step_one(parameter)
        finally:
            parameter.grad, parameter.data = None, weight
        if parameter not in self._host:
            increment_version(host)  # so `BlockStream` copies the block again
            return
        self._versions[parameter] = parameter._version
        with torch.cuda.stream(self._streams[1]) if arrived else nullcontext():
            weight.copy_(host, non_blocking=True)

    def _finish(self) -> None:
        """Wait for the steps on the CPU; the device waits for the updated weights."""
        pending, self._pending = self._pending, []
        for future in pending:
            future.result()
        if self._streams:
            computing = torch.cuda.current_stream(self._streams[1].device)
            computing.wait_stream(self._streams[1])
            self._free_sent(computing)


def forget_hooks(parameters: list[nn.Parameter]) -> None:
    """Remove the hooks of an earlier optimizer, e.g. when a notebook's cells run twice."""
    for parameter in parameters:
        if hook := parameter.__dict__.pop("gradient_hook", None):
            hook.remove()


class _StepsByWeight(Technique):
    """The parts that both techniques share; together they use one mixin."""

    def change_optimizer(self, kind: type[Optimizer], settings: Settings, model: nn.Module) -> type[Optimizer]:
        if issubclass(kind, WeightSteps):
            return kind
        chosen = {
            "offloads": settings.optimizer_offload,
            "frees": settings.step_in_backward,
            "in_backward": not settings.max_grad_norm,  # which needs all gradients before the first step
        }
        return type(kind.__name__, (WeightSteps, kind), chosen)

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if settings.ranks > 1:
            return "only on one device, since several average their gradients first; use --devices 1"
        if settings.precision == "16-mixed":
            return "not under 16-mixed, whose loss scale is checked over all gradients; use bf16-mixed or 32-true"
        return None


class StepInBackward(_StepsByWeight):
    """Update each weight inside the backward pass, and free its gradient immediately."""

    frees_gradients = True
    whole_batch = True

    def on_cuda(self, settings: Settings) -> dict[str, str]:
        """Return packing: samples of all lengths are in one pass, padded to the longest."""
        return {"packing": "a pass of the whole effective batch is mostly padding"} if settings.batch_size > 1 else {}

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if reason := super().reason_against(settings, capability):
            return reason
        if settings.max_grad_norm:
            return "--max_grad_norm needs all gradients together, but each is freed before the next; leave one out"
        size = settings.micro_batch_size or settings.batch_size
        several = settings.micro_batch_tokens or size < settings.batch_size
        if settings.batch_size > 1 and several:
            return (
                "the effective batch must be one micro-batch, or gradients would have to be kept and added up; leave "
                "out --micro_batch_size and --micro_batch_tokens, or lower --batch_size"
            )
        return None


class OptimizerOffload(_StepsByWeight):
    """Keep the optimizer's state in CPU memory, and step there."""

    refused_on_mps = "--optimizer_offload true, since Apple's GPUs share the CPU's memory: leave it out"
    state_on_device = False

    def rehearsed(self, settings: Settings) -> Settings:
        return replace(settings, optimizer="sgd", optimizer_offload=False, kahan_summation=False)

    def add_memory(self, peak: Peak, counts: Counts, settings: Settings) -> Peak:
        """Move the optimizer's state and a copy of the trained weights to CPU memory.

        CPU memory also holds the gradients in transfer, which are all gradients if the device is faster than the CPU.
        PyTorch rounds pinned tensors up to a power of two, which is left out.
        """
        from fabric_ladder.techniques import state_dtypes  # which imports this module

        width = 4 if settings.lora else bytes_of_weight(settings)
        state = sum(width if dtype is None else dtype.itemsize for dtype in state_dtypes(settings))
        return peak._replace(optimizer_state=0, host=peak.host + round(counts.trained * (state + 2 * width)))
