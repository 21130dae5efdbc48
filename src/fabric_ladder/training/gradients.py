"""The gradient of one effective batch: accumulated over its micro-batches, and checked before it is used."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache

import torch
from lightning import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy, ModelParallelStrategy, SingleDeviceStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fabric_ladder.data.label_kind import Counts
from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.data.objective import count_right
from fabric_ladder.distributed.ddp import DDPInBuckets
from fabric_ladder.models.masks import declare_padding
from fabric_ladder.models.optimizer import all_finite
from fabric_ladder.runs.metrics import Meter, add_to_confusion
from fabric_ladder.techniques.embedding_rows import adding_rows
from fabric_ladder.training.graphs import Graphs


@contextmanager
def name_shape(inputs: dict[str, Tensor], phase: str = "training") -> Iterator[None]:
    """Add the phase and the shape of the batch to an error in this block; the advice names them."""
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
    graphs: Graphs | None = None,
) -> bool:
    """Accumulate the gradient of the mean loss per item of one effective batch.

    Each micro-batch is weighted by its items, so the sum does not depend on how the effective batch is cut. Ranks
    average their gradients once, in the last backward pass; `no_backward_sync` covers all passes before it. Where
    weights are sharded, gradients are averaged in each pass, so that no rank ever holds all of them.

    Args:
        fabric: For the strategy and the device.
        model: Set up by Fabric.
        micro_batches: This rank's share of the effective batch.
        meter: Gets losses and right predictions, pending until the step is committed.
        stop: Called after each micro-batch except the last; True stops there.
        optimizer: May step in the last backward pass (`step_in_backward`); None: only compute the gradient.
        graphs: Replay passes; None: all kernels are launched one by one.

    Returns:
        Whether all micro-batches were accumulated.
    """
    average_once = not isinstance(fabric.strategy, ModelParallelStrategy)  # FSDP2
    stepping = getattr(getattr(optimizer, "optimizer", None), "stepping", None)  # of an optimizer of `WeightSteps`
    hooked = not isinstance(fabric.strategy, SingleDeviceStrategy)

    def run_pass(micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
        loss, correct = run_model(fabric, model, micro_batch)
        fabric.backward(loss * micro_batch.weight)
        return loss.detach(), correct  # frees autograd's graph before the next micro-batch's activations are allocated

    for number, micro_batch in enumerate(micro_batches, start=1):
        last = number == len(micro_batches)
        unsynchronized = fabric.no_backward_sync(model, enabled=average_once and not last)
        with (
            unsynchronized,
            name_shape(micro_batch.inputs),
            stepping() if stepping and last else nullcontext(),
            adding_rows(hooked or (stepping is not None and last)),
        ):
            loss, correct = graphs.run(run_pass, micro_batch) if graphs else run_pass(micro_batch)
        meter.add(loss, correct, micro_batch.items)
        if not last and stop():
            return False
    if isinstance(fabric.strategy, DDPInBuckets):
        fabric.strategy.average_tables()
    return True


def run_model(
    fabric: Fabric, model: nn.Module, micro_batch: MicroBatch, counts: Tensor | Counts | None = None
) -> tuple[Tensor, Tensor]:
    """Return a micro-batch's mean loss per item and its number of right predictions, both on the device.

    `counts` gets its samples, see `add_to_confusion` and `LabelKind.count`.
    """
    inputs = _to_device(fabric, micro_batch.inputs)
    objective = micro_batch.objective
    labels = {name: inputs.pop(name) for name in objective.inputs if name in inputs} if objective else {}
    with declare_padding(micro_batch.masked):
        outputs = model(**inputs)
    if objective:
        logits = outputs.logits.detach()
        if counts is not None and micro_batch.items:
            objective.count(counts, logits, **labels)
        return objective.loss(outputs.logits, **labels), objective.correct(logits, **labels)
    if counts is not None and micro_batch.items:
        add_to_confusion(counts, outputs, inputs["labels"])
    if hasattr(outputs, "correct"):  # the chunked loss of a language model counts its own
        return outputs.loss, outputs.correct
    return outputs.loss, count_right(outputs.logits.detach(), inputs["labels"])


def _to_device(fabric: Fabric, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copy a micro-batch's inputs to the device without waiting for the copy.

    On CUDA a separate stream copies them from pinned memory, while the device still computes the micro-batches before.
    """
    if fabric.device.type != "cuda" or next(iter(inputs.values())).is_cuda:  # the inputs of a graph are there already
        return fabric.to_device(inputs)
    computing, copying = torch.cuda.current_stream(fabric.device), _copying_stream(fabric.device)
    with torch.cuda.stream(copying):
        inputs = fabric.to_device(inputs)
    computing.wait_stream(copying)
    for tensor in inputs.values():
        tensor.record_stream(computing)  # otherwise its memory could be reused while the device still needs it
    return inputs


@cache
def _copying_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def forget_gradients(fabric: Fabric, optimizer: Optimizer, graphs: Graphs | None = None) -> None:
    """Free the gradients, or set them to 0 where the strategy or graphs need them in their places."""
    optimizer.zero_grad(set_to_none=not (graphs or isinstance(fabric.strategy, DDPInBuckets)))


def find_broken_gradient(fabric: Fabric, optimizer: Optimizer) -> Tensor:
    """Return whether a gradient, or this rank's shard of it, is NaN or infinite: a boolean on the device.

    Always False if such steps are skipped elsewhere: by the scaler of `16-mixed`, or by the engine of a strategy.
    """
    nothing = torch.zeros((), dtype=torch.bool, device=fabric.device)
    if getattr(fabric.strategy.precision, "scaler", None) or isinstance(fabric.strategy, DeepSpeedStrategy):
        return nothing
    by_type: dict[tuple, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if gradient is not None and gradient.numel():  # a rank's shard of a small weight may be empty
                by_type.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    finite = [all_finite(gradients).to(fabric.device, non_blocking=True) for gradients in by_type.values()]
    if take_finite := getattr(optimizer.optimizer, "take_finite", None):  # gradients freed in the backward pass
        finite += take_finite()
    return ~torch.stack(finite).all() if finite else nothing
