"""The one train loop and the one evaluation, under every rung."""

from collections.abc import Iterable
from time import perf_counter

import torch
from lightning import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy, ModelParallelStrategy
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric_ladder.batching import MicroBatch
from fabric_ladder.checkpoint import load, save
from fabric_ladder.errors import UserError
from fabric_ladder.metrics import Meter, Step, Totals, count_correct
from fabric_ladder.optimizers import set_learning_rate
from fabric_ladder.reporting import Run


def accumulate_gradients(
    fabric: Fabric,
    model: nn.Module,
    micro_batches: list[MicroBatch],
    meter: Meter,
    step: Step,
) -> None:
    """Add up the gradient of the mean loss per item of one effective batch.

    The weights of the micro-batches make the sum independent of the cut. Ranks average their gradients once, in the
    last backward pass; the forward passes before it must be told so too. Where gradients are sharded, they are averaged
    in each, so that no rank ever holds all of them.
    """
    waits = not isinstance(fabric.strategy, ModelParallelStrategy)  # FSDP2 would keep whole gradients until the last
    for number, micro_batch in enumerate(micro_batches, start=1):
        inputs = fabric.to_device(micro_batch.inputs)
        with fabric.no_backward_sync(model, enabled=waits and number < len(micro_batches)):
            outputs = model(**inputs)
            fabric.backward(outputs.loss * micro_batch.weight)
        meter.add(outputs.loss, count_correct(outputs, inputs["labels"]), micro_batch.items, step)


def train(run: Run, model: nn.Module, optimizer: Optimizer, train_loader: DataLoader, val_loader: DataLoader) -> None:
    """Fine-tune for `settings.epochs`, and print, log and time it.

    Args:
        run: Where the run's lines, figures and settings are kept.
        model: Set up by Fabric.
        optimizer: Set up by Fabric.
        train_loader: Yields effective batches, see `build_dataloaders`.
        val_loader: Yields micro-batches; evaluated after each epoch.

    Raises:
        UserError: The loss became NaN or infinite, or the warm-up is longer than the run.
        ValueError: The optimizer holds other parameters than the model's, and would train nothing.
    """
    fabric, settings = run.fabric, run.settings
    steps, done = len(train_loader) * settings.epochs, 0
    if settings.warmup_steps >= steps:
        raise UserError(f"--warmup_steps {settings.warmup_steps}: the run has only {steps} optimizer steps")
    if not isinstance(fabric.strategy, DeepSpeedStrategy):  # which owns flat copies of the parameters
        _check_ownership(model, optimizer)
    if settings.load:
        load(settings.load, model, optimizer)
    set_learning_rate(settings, optimizer, done, steps)
    run.start(model, train_loader)
    fabric.seed_everything(settings.seed + fabric.global_rank, verbose=False)  # dropout differs between the ranks
    for epoch in range(settings.epochs):
        train_loader.sampler.epoch = epoch
        meter, epoch_totals, seen = Meter(fabric), Totals(0.0, 0, 0), 0
        model.train()  # after from_pretrained and after each evaluation the inner module is in eval mode
        for batch_number, batch in enumerate(run.progress(train_loader), start=1):
            step = (f"epoch {epoch + 1}, batch {batch_number}", batch.samples)
            accumulate_gradients(fabric, model, batch.micro_batches, meter, step)
            if settings.max_grad_norm:
                fabric.clip_gradients(model, optimizer, max_norm=settings.max_grad_norm)
            optimizer.step()
            optimizer.zero_grad()
            done += 1
            set_learning_rate(settings, optimizer, done, steps)
            run.count(batch)
            before, seen = seen, seen + len(batch.samples)
            if before // settings.log_every < seen // settings.log_every or batch_number == len(train_loader):
                totals = meter.collect()  # here, and only here, the loop waits for the device
                epoch_totals += totals
                run.log_loss(epoch, batch_number, seen, totals.loss, optimizer.param_groups[0]["lr"])
        start = perf_counter()
        validation = _evaluate(fabric, model, val_loader, f"the validation after epoch {epoch + 1}")
        run.log_epoch(epoch, epoch_totals.accuracy, validation, seconds=perf_counter() - start)
    run.log_training()
    if settings.save != "no":
        data, random = train_loader.dataset, settings.from_scratch
        place = save(fabric, settings.save, run.folder, model, optimizer, data, random)
        run.print(f"Saved {place}")


def evaluate(run: Run, model: nn.Module, test_loader: DataLoader) -> Totals:
    """Print and return the totals of the test, and close the run."""
    totals = _evaluate(run.fabric, model, test_loader, "the test")
    run.log_test(totals)
    return totals


@torch.no_grad()
def _evaluate(fabric: Fabric, model: nn.Module, loader: Iterable[MicroBatch], name: str) -> Totals:
    """Count every sample of the loader's split once; `name` is for the message if a loss is not finite."""
    model.eval()
    meter = Meter(fabric)
    for micro_batch in loader:
        inputs = fabric.to_device(micro_batch.inputs)
        outputs = model(**inputs)
        meter.add(outputs.loss, count_correct(outputs, inputs["labels"]), micro_batch.items, (name, []))
    return meter.collect()


def _check_ownership(model: nn.Module, optimizer: Optimizer) -> None:
    """Sharding replaces the parameters: an optimizer made before it would train nothing and say nothing."""
    mine = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in mine for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("the optimizer holds parameters that the model has no more: make it after fabric.setup(model)")
