"""The one train loop and the one evaluation, under every rung."""

from collections.abc import Iterable
from time import perf_counter

import torch
from lightning import Fabric
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from fabric_ladder.batching import MicroBatch
from fabric_ladder.metrics import Meter, Step, Totals
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
    last backward pass; the forward passes before it must be told so too.
    """
    for number, micro_batch in enumerate(micro_batches, start=1):
        inputs = fabric.to_device(micro_batch.inputs)
        with fabric.no_backward_sync(model, enabled=number < len(micro_batches)):
            outputs = model(**inputs)
            fabric.backward(outputs.loss * micro_batch.weight)
        meter.add(outputs.loss, outputs.logits, inputs["labels"], micro_batch.items, step)


def train(
    run: Run, model: nn.Module, optimizer: Optimizer, train_loader: DataLoader, val_loader: DataLoader,
    scheduler: LRScheduler | None = None,
) -> None:  # fmt: skip
    """Fine-tune for `settings.epochs`, and print, log and time it.

    Args:
        run: Where the run's lines, figures and settings are kept.
        model: Set up by Fabric.
        optimizer: Set up by Fabric.
        train_loader: Yields effective batches, see `build_dataloaders`.
        val_loader: Yields micro-batches; evaluated after each epoch.
        scheduler: Counts optimizer steps, of which there are `len(train_loader) * settings.epochs`.

    Raises:
        UserError: The loss became NaN or infinite.
    """
    fabric, settings = run.fabric, run.settings
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
            if scheduler:
                scheduler.step()
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
        meter.add(outputs.loss, outputs.logits, inputs["labels"], micro_batch.items, (name, []))
    return meter.collect()
