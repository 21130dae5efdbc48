"""The gradient of one effective batch: added up over its micro-batches, and looked at before it is used."""

from collections.abc import Callable
from functools import cache

import torch
from lightning import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from fabric_ladder.batching import MicroBatch
from fabric_ladder.errors import UserError, shape_told
from fabric_ladder.masks import mask_known
from fabric_ladder.metrics import Meter, Step, count_correct, in_words
from fabric_ladder.resume import Keeper


def accumulate_gradients(
    fabric: Fabric,
    model: nn.Module,
    micro_batches: list[MicroBatch],
    meter: Meter,
    step: Step,
    stop: Callable[[], bool] = bool,
) -> bool:
    """Add up the gradient of the mean loss per item of one effective batch.

    The weights of the micro-batches make the sum independent of the cut. Ranks average their gradients once, in the
    last backward pass; the forward passes before it must be told so too. Where gradients are sharded, they are averaged
    in each, so that no rank ever holds all of them.

    Returns:
        Whether all were added: after a micro-batch `stop` may ask to stop.
    """
    waits = not isinstance(fabric.strategy, ModelParallelStrategy)  # FSDP2 would keep whole gradients until the last
    for number, micro_batch in enumerate(micro_batches, start=1):
        waiting = fabric.no_backward_sync(model, enabled=waits and number < len(micro_batches))
        with waiting, shape_told(micro_batch.inputs):
            loss, correct = run_model(fabric, model, micro_batch)
            fabric.backward(loss * micro_batch.weight)
        meter.add(loss, correct, micro_batch.items, step)
        del loss  # and with it the graph, whose nodes would lie scattered among the next micro-batch's activations
        if number < len(micro_batches) and stop():
            return False
    return True


def run_model(fabric: Fabric, model: nn.Module, micro_batch: MicroBatch) -> tuple[Tensor, Tensor]:
    """Return a micro-batch's mean loss per item, and its right predictions, both on the device."""
    inputs = _to_device(fabric, micro_batch.inputs)
    with mask_known(micro_batch.masked):
        outputs = model(**inputs)
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


def is_usable(keeper: Keeper, step: Step) -> bool:
    """Say whether the optimizer may step with the gradient of the effective batch that was just added up.

    By `on_nan` `stop` it always may: what is not finite is noted on the device and stops the run at the next printed
    line. By `skip` all ranks wait for their devices, agree, and forget the losses of a batch that is not finite.

    Raises:
        UserError: More than `nan_limit` batches would be left out.
    """
    settings, place = keeper.settings, keeper.place
    broken = find_broken_gradient(keeper.fabric, keeper.optimizer)
    if settings.on_nan == "stop":
        keeper.meter.add_gradient(broken, step)
        return True
    losses = keeper.meter.losses_of(step)
    broken_loss = ~torch.stack(losses).isfinite().all() if losses else torch.zeros_like(broken)
    flags = torch.stack([broken_loss, broken]).float()
    in_loss, in_gradient = keeper.fabric.all_reduce(flags, reduce_op="max").tolist()
    if not in_loss and not in_gradient:
        return True
    text = f"the {'loss' if in_loss else 'gradient'} is not finite at {in_words(step)}"
    if place.skipped == settings.nan_limit:
        raise UserError(
            f"{text}: the run stops, since --nan_limit {settings.nan_limit} batches are left out already; try a lower "
            "--learning_rate, --max_grad_norm 1 or another --precision"
        )
    keeper.meter.drop(step)
    place.skipped += 1
    keeper.run.record["results"]["skipped_batches"] = place.skipped
    keeper.run.print(f"Skipped: {text}")
    return False


def find_broken_gradient(fabric: Fabric, optimizer: Optimizer) -> Tensor:
    """Return a boolean on the device: whether a gradient, or this rank's shard of one, is NaN or infinite.

    It is always False where others look after that: under `16-mixed`, whose scaler looks for infinities by making some,
    and under DeepSpeed. The largest magnitude is looked at, which cannot overflow as a sum of squares can.
    """
    nothing = torch.zeros((), dtype=torch.bool, device=fabric.device)
    if getattr(fabric.strategy.precision, "scaler", None) or isinstance(fabric.strategy, DeepSpeedStrategy):
        return nothing
    kinds: dict[tuple, list[Tensor]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            gradient = gradient.to_local() if isinstance(gradient, DTensor) else gradient
            if gradient is not None and gradient.numel():  # small weights are no more than some ranks'
                kinds.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    sizes = [torch.stack(torch._foreach_norm(gradients, torch.inf)) for gradients in kinds.values()]
    finite = [size.isfinite().all().to(fabric.device, non_blocking=True) for size in sizes]
    return ~torch.stack(finite).all() if finite else nothing
