"""The one train loop and the one evaluation of all rungs."""

from pathlib import Path
from time import perf_counter

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fabric_ladder.checkpoints.disk import check_disk_space
from fabric_ladder.checkpoints.load import check_meaning
from fabric_ladder.checkpoints.save import read_state, save
from fabric_ladder.data.label_kind import MOST_CLASSES, Counts
from fabric_ladder.data.sampler import check_steps
from fabric_ladder.distributed.preemption import exit_for
from fabric_ladder.models.optimizer import set_learning_rate
from fabric_ladder.runs.metrics import Meter, Score, describe_classes
from fabric_ladder.runs.prediction import predict
from fabric_ladder.runs.run import Run
from fabric_ladder.training.compiling import compile_ahead
from fabric_ladder.training.fitting import keep_within_budget, try_longest
from fabric_ladder.training.gradients import (
    accumulate_gradients,
    find_broken_gradient,
    forget_gradients,
    name_shape,
    run_model,
)
from fabric_ladder.training.state import Training


def train(
    run: Run, model: nn.Module, optimizer: Optimizer, train_loader: DataLoader, val_loader: DataLoader
) -> Training:
    """Fine-tune for `settings.epochs`, with printed, logged and timed lines.

    Args:
        run: Prints and records; has the settings.
        model: Set up by Fabric.
        optimizer: Set up by Fabric.
        train_loader: Yields effective batches, see `build_dataloaders`.
        val_loader: Yields micro-batches; evaluated after each epoch.

    Returns:
        The training, for `evaluate`.

    Raises:
        UserError: A loss or a gradient became NaN or infinite, or the run has too few steps for its settings.
        ValueError: The optimizer holds other parameters than the model's, and would train nothing.
    """
    training = Training(run, model, optimizer, train_loader, val_loader)
    with training.closed_on_error():
        _start(training)
        while not training.is_over:
            _train_epoch(training)
        if not training.state.trained:  # a run that stopped in the test is trained already
            _finish(training)
    return training


def evaluate(training: Training, test_loader: DataLoader) -> Score:
    """Print and return the score on the test split, and close the run."""
    run, fabric = training.run, training.fabric
    with training.closed_on_error():
        names, kind = test_loader.dataset.class_names, test_loader.dataset.kind
        counts = classes = described = None
        if kind:
            counts = kind.start_counts(fabric.device)
        elif 0 < len(names) <= MOST_CLASSES:
            counts = torch.zeros((len(names), len(names)), dtype=torch.int64, device=fabric.device)
        score = _evaluate(training, test_loader, "the test", counts)
        if score is None:
            _stop(training)
        if counts is not None:
            if kind:
                described = kind.describe(counts.compute())
            else:
                classes = describe_classes(names, fabric.all_reduce(counts, reduce_op="sum").tolist())
        run.log_test(score, training.state.optimizer_steps, classes, described)
        training.close()
        training.checkpointer.finish()
    return score


def _start(training: Training) -> None:
    """Start the run or resume it from a checkpoint, and try everything that could fail late."""
    run, fabric, settings = training.run, training.fabric, training.settings
    model, optimizer, state = training.model, training.optimizer, training.state
    steps = state.steps_per_epoch * settings.epochs
    check_steps(settings, len(training.train_loader.dataset))
    if not settings.owns_optimizer:  # an engine trains copies of the parameters
        _check_ownership(model, optimizer)
    resumed = training.checkpointer.find()
    if settings.load and not resumed:
        data, folder = training.train_loader.dataset, Path(settings.load)
        if line := run.record.on_rank_zero(lambda: check_meaning(folder, model.module, data)):
            run.print(line)
        read_state(f"--load {folder}", folder, model, optimizer)
    fabric.seed_everything(settings.seed + fabric.global_rank, verbose=False)  # dropout differs between the ranks
    run.record.on_rank_zero(lambda: check_disk_space(settings, model, steps, training.checkpointer.count()))
    prediction = predict(run.planner, fabric, settings, model, training.train_loader, training.val_loader)
    run.start(model, training.train_loader, prediction, resumed)
    training.stop_request.begin()
    with run.throughput.excluded():
        training.checkpointer.restore(state.load_state_dict)
    keep_within_budget(training, prediction)
    try_longest(training, prediction)
    compile_ahead(training)
    _prepare_step(training)


def _prepare_step(training: Training) -> None:
    """Set the learning rate of the next optimizer step, and the block whose turn it is (`BlockSteps`)."""
    settings, optimizer, state = training.settings, training.optimizer, training.state
    steps = state.steps_per_epoch * settings.epochs
    set_learning_rate(settings, optimizer, state.optimizer_steps, steps)
    if take_turn := getattr(getattr(optimizer, "optimizer", None), "take_turn", None):
        take_turn(state.optimizer_steps, steps)


def _train_epoch(training: Training) -> None:
    """Train an epoch, or the rest of one, with its validations."""
    run, fabric = training.run, training.fabric
    model, optimizer, state = training.model, training.optimizer, training.state
    stop_request = training.stop_request
    training.train_loader.sampler.set_epoch(state.epoch, start=state.batch)
    model.train()  # after from_pretrained and after each evaluation the inner module is in eval mode
    for batch in run.progress_bar(state.iterate(training.train_loader), state.batch):
        if state.batch:  # `iterate` has begun the first step of an epoch
            state.begin_step()
        if training.validation_is_due:  # here and not after the step, so that a resumed run does not miss it
            _validate_within_epoch(training)
            if training.is_over:
                return

        stop = stop_request.requested_within_step
        if not accumulate_gradients(fabric, model, batch.micro_batches, state.meter, stop, optimizer, training.graphs):
            _undo_and_stop(training)
        # recorded on the device; the next printed line stops the run
        state.meter.commit(state.step(batch.samples), _update_weights(training))

        lines_before = state.samples // run.log_every
        state.advance(batch)
        _prepare_step(training)
        run.throughput.count(batch)
        run.end_step()

        if lines_before < state.samples // run.log_every or state.batch == state.steps_per_epoch:
            _log_rest(training)
        if stop_request.requested():
            _stop(training)
        within_epoch = state.batch < state.steps_per_epoch
        if _saves_here(training) and within_epoch and not training.validation_is_due:
            _save_checkpoint(training)
    _validate_epoch(training)


def _update_weights(training: Training) -> Tensor:
    """Clip the gradients, step, and forget them; return whether one was not finite, as a boolean on the device."""
    fabric, model, optimizer, settings = training.fabric, training.model, training.optimizer, training.settings

    def update() -> Tensor:
        broken = find_broken_gradient(fabric, optimizer)
        if settings.max_grad_norm:  # with error_if_nonfinite it would wait for the device
            fabric.clip_gradients(model, optimizer, max_norm=settings.max_grad_norm, error_if_nonfinite=False)
        optimizer.step()
        forget_gradients(fabric, optimizer, training.graphs)
        return broken

    if training.graphs and settings.precision != "16-mixed":  # whose scaler decides on the host whether to step
        return training.graphs.update(update, optimizer)
    return update()


def _saves_here(training: Training) -> bool:
    """Return whether `save_every` asks for a checkpoint after this optimizer step; the last step has one too."""
    every = training.settings.save_every
    return every > 0 and (training.state.optimizer_steps % every == 0 or training.is_over)


def _validate_within_epoch(training: Training) -> None:
    """Validate, and leave no trace in the training; without patience left, end the epoch here."""
    run, state = training.run, training.state
    place = f"epoch {state.epoch + 1}, batch {state.batch}"
    score = _validate(training, f"the validation after {place}")
    state.undo_step()  # the evaluation has drawn a random number
    training.model.train()
    if training.is_over:
        _log_rest(training)
        _log_epoch(training, score)
    else:
        run.log_validation(state.epoch, state.batch, state.samples, score)
    if _saves_here(training) or _keeps(training):
        _save_checkpoint(training, score)


def _validate_epoch(training: Training) -> None:
    state = training.state
    score = _validate(training, f"the validation after epoch {state.epoch + 1}")
    _log_epoch(training, score)
    keeps = _keeps(training)
    state.next_epoch()
    if training.settings.save_every or keeps:
        _save_checkpoint(training, score)


def _log_epoch(training: Training, validation: Score) -> None:
    run, state = training.run, training.state
    run.log_epoch(state.epoch, state.score, validation, state.optimizer_steps)


def _keeps(training: Training) -> bool:
    """Return whether the weights of the validation just made must be kept."""
    return training.settings.best_weights and training.state.not_better == 0


def _log_rest(training: Training) -> None:
    """Print the loss since the last such line."""
    run, state = training.run, training.state
    score = state.collect()  # on one device only this line waits for it
    if score.items:  # otherwise the line was just printed
        learning_rate = training.optimizer.param_groups[0]["lr"]
        run.log_loss(state.epoch, state.batch, state.samples, score.loss, learning_rate)


def _validate(training: Training, name: str) -> Score:
    """Return the score of the validation set; `name` is for messages."""
    run, state, val_loader = training.run, training.state, training.val_loader
    state.begin_step()
    with run.throughput.excluded():
        start = perf_counter()
        score = _evaluate(training, val_loader, name)
        if score:
            run.throughput.count_evaluation(val_loader.sampler.tokens, perf_counter() - start)
    if score is None:
        _undo_and_stop(training)
    state.judge(score, training.settings.best_metric)
    return score


@torch.compiler.set_stance("force_eager")  # on an H100 a compiled evaluation was not faster (gpu.json)
@torch.no_grad()
def _evaluate(training: Training, loader: DataLoader, name: str, counts: Tensor | Counts | None = None) -> Score | None:
    """Return the score on the loader's split, each sample counted once, or None after a request to stop.

    `name` is for the message if a loss is not finite. `counts` gets this rank's samples, see `run_model`.
    """
    training.model.eval()
    meter = Meter(training.fabric)
    for micro_batch in loader:
        with name_shape(micro_batch.inputs, phase="the evaluation"):
            loss, correct = run_model(training.fabric, training.model, micro_batch, counts)
        meter.add(loss, correct, micro_batch.items)
        meter.commit((name, []))
        if training.stop_request.requested():
            return None
    return meter.collect()


def _finish(training: Training) -> None:
    """Print the figures of the training, go back to the best weights, and save the model."""
    run, settings, state = training.run, training.settings, training.state
    if state.epoch < settings.epochs:
        run.log_early_stop(state.not_better, settings.best_metric)
    if training.graphs:
        run.print(training.graphs.describe())
    run.log_training(state.samples_hash)
    if settings.best_weights:
        known = state.best_step == state.optimizer_steps or training.checkpointer.read_best(state.best_step)
        run.log_best(settings.best_metric, state.best, state.best_place, known)
    if settings.save != "no":
        data, random = training.train_loader.dataset, settings.from_scratch
        folder = save(training.fabric, settings.save, run.folder, training.model, training.optimizer, data, random)
        run.print(f"Saved {folder}")
        if settings.task != "instruction-tuning":
            run.print(f"Use it: python scripts/predict.py {run.folder} FILE")
    training.state.trained = True


def _save_checkpoint(training: Training, validation: Score | None = None) -> bool:
    """Write a checkpoint, with the score of the validation at this step, and return whether that worked.

    Raises:
        UserError: A loss or a gradient was not finite. The weights may be damaged, so the last checkpoint stays.
    """
    state = training.state
    state.meter.score()
    with training.run.throughput.excluded():
        position, rank_state = state.state_dict(), state.rank_state_dict()
    minimized = None
    if validation:
        minimized = validation.loss if training.settings.best_metric == "loss" else -validation.accuracy
    return training.checkpointer.save(state.optimizer_steps, position, rank_state, minimized)


def _undo_and_stop(training: Training) -> None:
    """Go back to the last point from which the run can resume exactly, and stop there."""
    training.state.undo_step()
    forget_gradients(training.fabric, training.optimizer, training.graphs)
    _stop(training)


def _stop(training: Training) -> None:
    """Write a checkpoint, print how to resume, and end the process. All ranks must call it."""
    reason = training.stop_request.reason
    training.run.log_stop(reason, training.state.describe() if _save_checkpoint(training) else None)
    training.close()
    exit_for(reason, training.fabric.global_rank)


def _check_ownership(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer made before sharding replaced the parameters: it would train nothing, without an error."""
    own = {id(parameter) for parameter in model.parameters()}
    if any(id(parameter) not in own for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError("the optimizer holds parameters that the model has no more: make it after fabric.setup(model)")
