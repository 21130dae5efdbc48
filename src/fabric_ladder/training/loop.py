"""The one train loop and the one evaluation, under every rung."""

from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter

import torch
from lightning import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric_ladder.checkpoints.checkpointer import Checkpointer
from fabric_ladder.checkpoints.room import check_room
from fabric_ladder.checkpoints.save import read_state, save
from fabric_ladder.data.loaders import EffectiveBatch, MicroBatch
from fabric_ladder.errors import UserError
from fabric_ladder.models.optimizer import set_learning_rate
from fabric_ladder.runs.metrics import MOST_CLASSES, Meter, Totals, describe_classes, describe_step
from fabric_ladder.runs.prediction import predict
from fabric_ladder.runs.run import Run
from fabric_ladder.training.fitting import compile_ahead, try_longest
from fabric_ladder.training.gradients import (
    accumulate_gradients,
    find_broken_gradient,
    forget_gradients,
    name_shape,
    run_model,
)
from fabric_ladder.training.state import Training, TrainingState


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
    with run.released_on_error():
        state = TrainingState(run.fabric, len(train_loader))
        training = Training(run, model, optimizer, train_loader, val_loader, state)
        checkpointer = _start(training)
        while state.epoch < run.settings.epochs:
            _train_epoch(training, checkpointer)
            _validate(training, checkpointer)
        if not state.trained:  # else stopped in the test
            _finish(training)


def evaluate(run: Run, model: nn.Module, test_loader: DataLoader) -> Totals:
    """Print and return the totals of the test, and close the run."""
    with run.released_on_error():
        names, confusion, classes = test_loader.dataset.class_names, None, None
        if 0 < len(names) <= MOST_CLASSES:
            confusion = torch.zeros((len(names), len(names)), dtype=torch.int64, device=run.fabric.device)
        totals = _evaluate(run.fabric, model, test_loader, "the test", run.stop_request.made, confusion)
        if totals is None:
            run.checkpointer.stop()
        if confusion is not None:
            classes = describe_classes(names, run.fabric.all_reduce(confusion, reduce_op="sum").tolist())
        run.log_test(totals, classes)
        run.checkpointer.finish()
    return totals


def _start(training: Training) -> Checkpointer:
    """Start the run, or resume it from a checkpoint, and try what could fail late."""
    run, model, optimizer, train_loader, val_loader, state = training
    fabric, settings = run.fabric, run.settings
    steps = state.steps_per_epoch * settings.epochs
    if settings.warmup_steps >= steps:
        raise UserError(f"--warmup_steps {settings.warmup_steps}: the run has only {steps} optimizer steps")
    if not isinstance(fabric.strategy, DeepSpeedStrategy):  # which owns flat copies of the parameters
        _check_ownership(model, optimizer)
    if settings.load:
        read_state(f"--load {settings.load}", Path(settings.load), model, optimizer)
    fabric.seed_everything(settings.seed + fabric.global_rank, verbose=False)  # dropout differs between the ranks
    checkpointer = Checkpointer(run, model, optimizer, state, train_loader.dataset.fingerprint)
    resumed = checkpointer.find()
    run.record.on_rank_zero(lambda: check_room(settings, model, there=1 if resumed else 0))
    prediction = predict(fabric, settings, model, train_loader, val_loader)
    run.start(model, train_loader, checkpointer, prediction, resumed)
    checkpointer.restore()
    try_longest(training, prediction)
    compile_ahead(training)
    set_learning_rate(settings, optimizer, state.optimizer_steps, steps)
    return checkpointer


def _train_epoch(training: Training, checkpointer: Checkpointer) -> None:
    run, model, optimizer, train_loader, _, state = training
    fabric, settings = run.fabric, run.settings
    train_loader.sampler.set_epoch(state.epoch, start=state.batch)
    model.train()  # after from_pretrained and after each evaluation the inner module is in eval mode
    if not state.batch:  # the checkpoint is from before the iterator was made, which draws a random number
        state.restore_random()
    state.mark()  # set back to batch 0, the run makes its iterator again
    batches = iter(train_loader)
    state.restore_random()
    for batch in run.progress_bar(batches, state.batch):
        if state.batch:
            state.mark()
        stop = run.stop_request.made_alone
        if not accumulate_gradients(fabric, model, batch.micro_batches, state.meter, stop, optimizer):
            _stop(training, checkpointer)
        if _is_usable(training, batch):
            if settings.max_grad_norm:  # asked to raise an error, it would wait for the device
                fabric.clip_gradients(model, optimizer, max_norm=settings.max_grad_norm, error_if_nonfinite=False)
            optimizer.step()
        forget_gradients(fabric, optimizer)
        logged = state.samples // run.log_every
        state.advance(batch.samples)
        set_learning_rate(settings, optimizer, state.optimizer_steps, len(train_loader) * settings.epochs)
        run.throughput.count(batch)
        if logged < state.samples // run.log_every or state.batch == len(train_loader):
            totals = state.collect()  # here, and only here, the loop waits for the device
            if totals.items:  # else all batches were skipped
                run.log_loss(state.epoch, state.batch, state.samples, totals.loss, optimizer.param_groups[0]["lr"])
        checkpointer.after_step()


def _is_usable(training: Training, batch: EffectiveBatch) -> bool:
    """Return whether the optimizer may step with the gradient of the effective batch, and count or discard its losses.

    By `on_nan` `stop` it always may: what is not finite is noted on the device and stops the run at the next printed
    line. By `skip` all ranks wait for their devices, agree, and leave out a batch that is not finite.

    Raises:
        UserError: More than `nan_limit` batches would be left out.
    """
    run, state = training.run, training.state
    fabric, settings, meter = run.fabric, run.settings, state.meter
    broken, step = find_broken_gradient(fabric, training.optimizer), state.step(batch.samples)
    if settings.on_nan == "skip":
        flags = torch.stack([~meter.pending_losses().isfinite().all(), broken]).float()
        in_loss, in_gradient = fabric.all_reduce(flags, reduce_op="max").tolist()
        if in_loss or in_gradient:
            text = f"the {'loss' if in_loss else 'gradient'} is not finite at {describe_step(step)}"
            if state.skipped == settings.nan_limit:
                raise UserError(
                    f"{text}: the run stops, since --nan_limit {settings.nan_limit} batches are left out already; try "
                    "a lower --learning_rate, --max_grad_norm 1 or another --precision"
                )
            state.discard_step()
            run.log_skipped(state.skipped, text)
            return False
    meter.commit(step, broken)
    return True


def _validate(training: Training, checkpointer: Checkpointer) -> None:
    run, state, val_loader = training.run, training.state, training.val_loader
    state.mark()
    with run.throughput.excluded():
        name, start = f"the validation after epoch {state.epoch + 1}", perf_counter()
        validation = _evaluate(run.fabric, training.model, val_loader, name, run.stop_request.made)
        if validation:
            run.throughput.count_evaluation(val_loader.sampler.tokens, perf_counter() - start)
    if validation is None:
        _stop(training, checkpointer)
    run.log_epoch(state.epoch, state.totals.accuracy, validation)
    state.next_epoch()
    checkpointer.after_epoch(validation)


def _stop(training: Training, checkpointer: Checkpointer) -> None:
    """Go back to the last point from which the run can resume exactly, write a checkpoint, and end the process."""
    training.state.rewind()
    forget_gradients(training.run.fabric, training.optimizer)
    checkpointer.stop()


def _finish(training: Training) -> None:
    """Print the training's figures, and save what was trained."""
    run, settings, state = training.run, training.run.settings, training.state
    try:
        run.log_training(state.samples_hash)
    finally:  # a disk without room for the log may not cost the model
        if settings.save != "no":
            data, random = training.train_loader.dataset, settings.from_scratch
            folder = save(run.fabric, settings.save, run.folder, training.model, training.optimizer, data, random)
            run.print(f"Saved {folder}")
    state.finish()


@torch.no_grad()
def _evaluate(
    fabric: Fabric, model: nn.Module, loader: Iterable[MicroBatch], name: str, stop: Callable[[], bool],
    confusion: Tensor | None = None,
) -> Totals | None:  # fmt: skip
    """Count every sample of the loader's split once; None if `stop` asks to stop.

    `name` is for the message if a loss is not finite; `confusion`, if given, gets this rank's samples by their classes.
    """
    model.eval()
    meter = Meter(fabric)
    for micro_batch in loader:
        with name_shape(micro_batch.inputs, phase="the evaluation"):
            loss, correct = run_model(fabric, model, micro_batch, confusion)
        meter.add(loss, correct, micro_batch.items)
        meter.commit((name, []))
        if stop():
            return None
    return meter.collect()


def _check_ownership(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer made before sharding replaced the parameters: it would train nothing and say nothing."""
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("the optimizer holds parameters that the model has no more: make it after fabric.setup(model)")
