"""The one train loop and the one evaluation, under every rung."""

from collections.abc import Callable, Iterable
from time import perf_counter

import torch
from lightning import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric_ladder.batching import MicroBatch
from fabric_ladder.checkpoint import load, save
from fabric_ladder.errors import UserError, shape_told
from fabric_ladder.fitting import compile_ahead, try_longest
from fabric_ladder.gradients import accumulate_gradients, is_usable, run_model
from fabric_ladder.metrics import Meter, Totals
from fabric_ladder.optimizers import set_learning_rate
from fabric_ladder.prediction import expect
from fabric_ladder.reporting import Run
from fabric_ladder.resume import Keeper


def train(run: Run, model: nn.Module, optimizer: Optimizer, train_loader: DataLoader, val_loader: DataLoader) -> None:
    """Fine-tune for `settings.epochs`, and print, log and time it.

    Args:
        run: Where the run's lines, figures and settings are kept.
        model: Set up by Fabric.
        optimizer: Set up by Fabric.
        train_loader: Yields effective batches, see `build_dataloaders`.
        val_loader: Yields micro-batches; evaluated after each epoch.

    Raises:
        UserError: A loss or a gradient became NaN or infinite, or the warm-up is longer than the run.
        ValueError: The optimizer holds other parameters than the model's, and would train nothing.
    """
    with run.abandoned_on_error():
        _train(run, model, optimizer, train_loader, val_loader)


def evaluate(run: Run, model: nn.Module, test_loader: DataLoader) -> Totals:
    """Print and return the totals of the test, and close the run."""
    with run.abandoned_on_error():
        totals = _evaluate(run.fabric, model, test_loader, "the test", run.stopper.asked)
        if totals is None:
            run.keeper.leave()
        run.keeper.end()
        run.log_test(totals)
    return totals


def _train(run: Run, model: nn.Module, optimizer: Optimizer, train_loader: DataLoader, val_loader: DataLoader) -> None:
    fabric, settings = run.fabric, run.settings
    steps = len(train_loader) * settings.epochs
    if settings.warmup_steps >= steps:
        raise UserError(f"--warmup_steps {settings.warmup_steps}: the run has only {steps} optimizer steps")
    if not isinstance(fabric.strategy, DeepSpeedStrategy):  # which owns flat copies of the parameters
        _check_ownership(model, optimizer)
    if settings.load:
        load(settings.load, model, optimizer)
    fabric.seed_everything(settings.seed + fabric.global_rank, verbose=False)  # dropout differs between the ranks
    run.expected = expect(run, model, train_loader, val_loader)
    keeper = run.keeper = Keeper(run, model, optimizer, train_loader)
    keeper.begin()
    try_longest(keeper)
    compile_ahead(keeper, val_loader)
    set_learning_rate(settings, optimizer, keeper.done, steps)
    while (place := keeper.place).epoch < settings.epochs:
        train_loader.sampler.epoch, train_loader.sampler.start = place.epoch, place.batch
        model.train()  # after from_pretrained and after each evaluation the inner module is in eval mode
        if not place.batch:  # the checkpoint is from before the iterator was made, which draws a random number
            keeper.restore_random()
        batches = iter(train_loader)
        keeper.restore_random()
        for batch in run.progress(batches, place.batch):
            keeper.mark()
            step = (f"epoch {place.epoch + 1}, batch {place.batch + 1}", batch.samples)
            stop = run.stopper.asked_alone
            if not accumulate_gradients(fabric, model, batch.micro_batches, keeper.meter, step, stop):
                keeper.set_back()
                keeper.leave()
            if is_usable(keeper, step):
                if settings.max_grad_norm:  # asked to raise an error, it would wait for the device
                    fabric.clip_gradients(model, optimizer, max_norm=settings.max_grad_norm, error_if_nonfinite=False)
                optimizer.step()
            optimizer.zero_grad()
            place.batch += 1
            set_learning_rate(settings, optimizer, keeper.done, steps)
            run.pace.count(batch)
            before, place.seen = place.seen, place.seen + len(batch.samples)
            if before // settings.log_every < place.seen // settings.log_every or place.batch == len(train_loader):
                totals = keeper.meter.collect()  # here, and only here, the loop waits for the device
                place.totals += totals
                if totals.items:  # else all batches were skipped
                    run.log_loss(place.epoch, place.batch, place.seen, totals.loss, optimizer.param_groups[0]["lr"])
            keeper.after_step()
        keeper.mark()
        with run.pace.beside():
            name, start = f"the validation after epoch {place.epoch + 1}", perf_counter()
            validation = _evaluate(fabric, model, val_loader, name, run.stopper.asked)
            if validation:
                run.pace.count_evaluation(val_loader.sampler.tokens, perf_counter() - start)
        if validation is None:
            keeper.set_back()
            keeper.leave()
        run.log_epoch(place.epoch, place.totals.accuracy, validation)
        keeper.after_epoch(validation)
    if place.trained:  # stopped in the test
        return
    run.log_training()
    if settings.save != "no":
        data, random = train_loader.dataset, settings.from_scratch
        folder = save(fabric, settings.save, run.folder, model, optimizer, data, random)
        run.print(f"Saved {folder}")
    place.trained = True


@torch.no_grad()
def _evaluate(
    fabric: Fabric, model: nn.Module, loader: Iterable[MicroBatch], name: str, stop: Callable[[], bool] = bool
) -> Totals | None:
    """Count every sample of the loader's split once, unless `stop` asks to stop.

    `name` is for the message if a loss is not finite.
    """
    model.eval()
    meter = Meter(fabric)
    for micro_batch in loader:
        with shape_told(micro_batch.inputs, of="the evaluation"):
            loss, correct = run_model(fabric, model, micro_batch)
        meter.add(loss, correct, micro_batch.items, (name, []))
        if stop():
            return None
    return meter.collect()


def _check_ownership(model: nn.Module, optimizer: Optimizer) -> None:
    """Sharding replaces the parameters: an optimizer made before it would train nothing and say nothing."""
    mine = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in mine for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("the optimizer holds parameters that the model has no more: make it after fabric.setup(model)")
