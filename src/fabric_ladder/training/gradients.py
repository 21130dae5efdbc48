"""The gradient of one effective batch: accumulated over its micro-batches, and checked before it is used."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch
from lightning import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.distributed.ddp import DDPInBuckets
from fabric_ladder.models.embeddings import adding_rows
from fabric_ladder.models.masks import declare_padding
from fabric_ladder.models.weight_steps import WeightSteps, stepping
from fabric_ladder.runs.metrics import Meter, count_correct, count_pairs


@contextmanager
def name_shape(inputs: dict[str, Tensor], phase: str = "training") -> Iterator[None]:
    """Give an error in this block the phase and the shape of its batch, for `explain`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        error.batch = phase, tuple(next(iter(inputs.values())).shape)
        raise


def accumulate_gradients(
    fabric: Fabric,
    model: nn.Module,
    micro_batches: list[MicroBatch],
    meter: Meter,
    stop: Callable[[], bool] = bool,
    optimizer: Optimizer | None = None,
) -> bool:
    """Accumulate the gradient of the mean loss per item of one effective batch.

    The weights of the micro-batches make the sum independent of how the effective batch is cut. Ranks average their
    gradients once, in the last backward pass, which the forward passes before it must know too. Where gradients are
    sharded, they are averaged in each pass, so that no rank ever holds all of them.

    Args:
        fabric: Of the run.
        model: Set up by Fabric.
        micro_batches: This rank's share of the effective batch.
        meter: Gets losses and right predictions, pending until the step is committed.
        stop: Asked after each micro-batch but the last whether to stop.
        optimizer: Steps in the last backward pass, if it is made for that; None: only the gradient is wanted.

    Returns:
        Whether all micro-batches were accumulated.
    """
    once = not isinstance(fabric.strategy, ModelParallelStrategy)  # FSDP2 would keep whole gradients until the last
    stepped = isinstance(getattr(optimizer, "optimizer", None), WeightSteps)
    hooked = stepped or not isinstance(fabric.strategy, SingleDeviceStrategy)
    for number, micro_batch in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        unsynchronized = fabric.no_backward_sync(model, enabled=once and not last)
        with (
            unsynchronized,
            name_shape(micro_batch.inputs),
            stepping(optimizer if last else None),
            adding_rows(hooked),
        ):
            loss, correct = run_model(fabric, model, micro_batch)
            fabric.backward(loss * micro_batch.weight)
        meter.add(loss, correct, micro_batch.items)
        del loss  # and with it the graph, whose nodes would lie scattered among the next micro-batch's activations
        if not last and stop():
            return False
    return True


def run_model(
    fabric: Fabric, model: nn.Module, micro_batch: MicroBatch, confusion: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return a micro-batch's mean loss per item, and its right predictions, both on the device.

    `confusion`, if given, gets its samples by their classes, see `count_pairs`.
    """
    inputs = _to_device(fabric, micro_batch.inputs)
    with declare_padding(micro_batch.masked):
        outputs = model(**inputs)
    if confusion is not None and micro_batch.items:
        count_pairs(confusion, outputs, inputs["labels"])
    return outputs.loss, count_correct(outputs, inputs["labels"])


def _to_device(fabric: Fabric, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Move a micro-batch's inputs to the device without waiting for it.

    On CUDA they are copied, from pinned memory, on a stream of their own: not behind the micro-batches before them,
    which the device has yet to compute, but while it computes them.
    """
    if fabric.device.type != "cuda":
        return fabric.to_device(inputs)
    computing, copying = torch.cuda.current_stream(fabric.device), _copying_stream(fabric.device)
    with torch.cuda.stream(copying):
        inputs = fabric.to_device(inputs)
    computing.wait_stream(copying)
    for tensor in inputs.values():
        tensor.record_stream(computing)  # or its memory could be given away when Python, far ahead, lets it go
    return inputs


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def forget_gradients(fabric: Fabric, optimizer: Optimizer) -> None:
    """Free the gradients; under DDP, where they are parts of buckets that stay (`DDPInBuckets`), set them to 0."""
    optimizer.zero_grad(set_to_none=not isinstance(fabric.strategy, DDPInBuckets))


def find_broken_gradient(fabric: Fabric, optimizer: Optimizer) -> Tensor:
    """Return a boolean on the device: whether a gradient, or this rank's shard of one, is NaN or infinite.

    Always False under `16-mixed`, whose scaler finds infinities by making some, and under DeepSpeed: both skip such
    steps themselves. The largest magnitude is tested, which cannot overflow as a sum of squares can.
    """
    nothing = torch.zeros((), dtype=torch.bool, device=fabric.device)
    if getattr(fabric.strategy.precision, "scaler", None) or isinstance(fabric.strategy, DeepSpeedStrategy):
        return nothing
    by_type: dict[tuple, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if gradient is not None and gradient.numel():  # a rank may hold nothing of a small weight
                by_type.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    largest = [torch.stack(torch._foreach_norm(gradients, torch.inf)) for gradients in by_type.values()]
    finite = [size.isfinite().all().to(fabric.device, non_blocking=True) for size in largest]
    finite += optimizer.optimizer.take_finite() if isinstance(optimizer.optimizer, WeightSteps) else []
    return ~torch.stack(finite).all() if finite else nothing
