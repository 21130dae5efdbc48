"""The most demanding batches first: what would run out of memory at hour two does so in the first minute.

And what torch.compile will need before anything else, so that no step of the run waits for it.

A trial takes every micro-batch of an effective batch forward and backward, without a step, and leaves no trace: random
numbers, gradients and buffers are set back, so not one bit of the run changes.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy, ModelParallelStrategy
from torch import Tensor

from fabric_ladder.data.cutting import MicroBatchPlan
from fabric_ladder.data.loaders import EffectiveBatch, MicroBatch
from fabric_ladder.environment import count_device, reset_peak_memory
from fabric_ladder.errors import UserError, is_out_of_memory
from fabric_ladder.models.compile import is_compiled
from fabric_ladder.models.optimizer import state_dtypes
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.runs.prediction import Prediction, most_tokens
from fabric_ladder.training.gradients import accumulate_gradients, forget_gradients, run_model
from fabric_ladder.training.state import Training, random_state, set_random_state

CLIFFS = ("cuda",)  # devices whose memory ends all at once; a CPU's host swaps, and a trial would only take time


def try_longest(training: Training, prediction: Prediction | None) -> None:
    """Try the effective batches of this epoch that need the most memory, before the run's first step here.

    With `micro_batch_tokens` `auto` the number is chosen, too: what the prediction has found to fit, or the run before
    it was stopped, halved until all ranks have room. Where weights are sharded it is not halved, since a rank that runs
    out of memory leaves the others waiting; and without a prediction it is one sample at a time there.

    Under DeepSpeed nothing is tried: its engine adds up gradients where nobody can take them back.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: A batch does not fit; with `auto`, not sample by sample.
        UserError: With `auto`, another rank has no room.
    """
    run, settings, strategy = training.run, training.run.settings, training.run.fabric.strategy
    auto, tries = settings.micro_batch_tokens == "auto", not isinstance(strategy, DeepSpeedStrategy)
    if training.state.epoch == settings.epochs:
        if auto:  # by which the test is cut, too
            training.train_loader.sampler.cut_by_tokens(training.state.micro_batch_tokens or 1)
        return
    halves = auto and tries and not isinstance(strategy, ModelParallelStrategy)
    training.train_loader.sampler.set_epoch(training.state.epoch)
    before = training.state.micro_batch_tokens
    tokens = _first_tokens(training, prediction, halves) if auto else None
    if halves or (tries and run.fabric.device.type in CLIFFS):
        with run.throughput.excluded(), _without_a_trace(training):
            if halves:
                tokens = _halve_until_it_fits(training, tokens)
            elif problem := _find_problem(training, _heaviest(training)):
                raise problem
        _empty_cache(run.fabric.device)
        reset_peak_memory(run.fabric.device)  # which tries have raised
    if auto:
        training.state.fit(tokens)
        run.log_fit(tokens, new=tokens != before)


def compile_ahead(training: Training) -> None:
    """Have torch.compile make, before the first step here, what training and validation will need of it.

    To the compiler one row is another shape than several, and training another graph than evaluation; lengths and
    numbers of rows are dynamic. So up to four small passes show it all there is. All ranks must call this.

    Not under DeepSpeed, for the same reason as above: there the first steps compile.
    """
    done = training.state.epoch == training.run.settings.epochs
    if done or not is_compiled(training.model) or isinstance(training.run.fabric.strategy, DeepSpeedStrategy):
        return
    loader, fabric, model = training.train_loader, training.run.fabric, training.model
    with training.run.throughput.excluded(), _without_a_trace(training):
        for part in _shapes_of_training(training):
            _pass(training, [loader.dataset.micro_batch(part, training.state.epoch)])
        model.eval()
        with torch.no_grad():
            for part in _one_and_several(training, training.val_loader.sampler):
                run_model(fabric, model, training.val_loader.dataset.micro_batch(part))


def _shapes_of_training(training: Training) -> list[MicroBatchPlan]:
    """Return a part of one row and one of two, as far as training has micro-batches of one row and of several.

    Cut by samples, the first and the last effective batch show all sizes of an epoch; by tokens, or packed, any epoch
    may have both.
    """
    settings, sampler = training.run.settings, training.train_loader.sampler
    if settings.pack_rows:  # one shape
        return [MicroBatchPlan([0], 1, 1.0, [1])]
    if settings.micro_batch_tokens or (settings.packing and settings.micro_batch_size > 1):
        rows = list(range(min(2, len(sampler.lengths))))
        parts = [
            MicroBatchPlan(some, len(some), 1.0, [1] * len(some) if settings.packing else None)
            for some in (rows[:1], rows)
        ]
    else:
        parts = []
        for number in (0, len(sampler) - 1):
            sampler.set_epoch(training.state.epoch, start=number)
            parts += next(iter(sampler)).parts
    return _one_and_several(training, parts)


def _one_and_several(training: Training, parts: Iterable[MicroBatchPlan]) -> list[MicroBatchPlan]:
    """Return the first part of one row and the first of several, as far as any rank has such; as many on all ranks."""
    found: dict[bool, MicroBatchPlan] = {}
    for part in parts:
        found.setdefault(len(part.packs or part.rows) > 1, part)
    wanted = _largest(training, False in found, True in found)
    return [found.get(several) or next(iter(found.values())) for several in (False, True) if wanted[several]]


def _first_tokens(training: Training, prediction: Prediction | None, halves: bool) -> int:
    """Return the `micro_batch_tokens` to begin with, the same on all ranks, and cut by them."""
    predicted = prediction.found.get("micro_batch_tokens", 0) if prediction else 0  # which the first rank has alone
    (predicted,) = _largest(training, predicted)
    known = [tokens for tokens in (training.state.micro_batch_tokens, predicted) if tokens]
    if not (halves or predicted):  # no trial would find out
        known = [1]
    tokens = min(known or _largest(training, most_tokens(training.train_loader)))
    training.train_loader.sampler.cut_by_tokens(tokens)
    return tokens


def _halve_until_it_fits(training: Training, tokens: int) -> int:
    """Return the `micro_batch_tokens` that fit on all ranks, at most so many, and cut by them."""
    while True:
        sampler = training.train_loader.sampler
        sampler.cut_by_tokens(tokens)
        problem = _find_problem(training, _heaviest(training))
        samples = max(len(part.rows) for plan in sampler.heaviest() for part in plan.parts)
        failed, samples = _largest(training, problem is not None, samples)
        if not failed:
            break
        if samples == 1:
            raise problem or UserError("out of memory on another rank, with one sample at a time")
        tokens //= 2
    return tokens


def _heaviest(training: Training) -> list[EffectiveBatch]:
    return [training.train_loader.dataset[plan] for plan in training.train_loader.sampler.heaviest()]


def _find_problem(training: Training, batches: list[EffectiveBatch]) -> BaseException | None:
    """Try the batches; return the error if this rank ran out of memory.

    Nothing that the error knows may outlive this: its traceback holds the tensors of the pass that failed.
    """
    problem = None
    try:
        for batch in batches:
            _pass(training, batch.micro_batches)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = error.with_traceback(None)
        problem.__cause__ = problem.__context__ = None
    if problem:
        forget_gradients(training.run.fabric, training.optimizer)
        gc.collect()
        _empty_cache(training.run.fabric.device)
    return problem


def _empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def _pass(training: Training, micro_batches: list[MicroBatch]) -> None:
    """Go forward and backward, and forget the gradients."""
    fabric, model = training.run.fabric, training.model
    # DDP's ranks must not meet in a backward pass that one of them may not reach
    with fabric.no_backward_sync(model, enabled=isinstance(fabric.strategy, DDPStrategy)):
        accumulate_gradients(fabric, model, micro_batches, Meter(fabric))
    forget_gradients(fabric, training.optimizer)


def _largest(training: Training, *values: int) -> list[int]:
    """Return the largest of each value over the ranks."""
    values = torch.tensor(values, dtype=torch.float64, device=count_device(training.run.fabric.device))
    return [int(value) for value in training.run.fabric.all_reduce(values, reduce_op="max").tolist()]


@contextmanager
def _without_a_trace(training: Training) -> Iterator[None]:
    """Take up the memory that the optimizer will need, and set back what forward passes change."""
    model, device = training.model, training.run.fabric.device
    random, buffers = random_state(device), [buffer.clone() for buffer in model.buffers()]
    state = _future_state(training)
    model.train()
    yield
    del state
    forget_gradients(training.run.fabric, training.optimizer)
    set_random_state(random, device)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)


def _future_state(training: Training) -> list[Tensor]:
    """Return blank tensors as large as what the optimizer keeps from its first step on; none if it has that already."""
    settings = training.run.settings
    if training.optimizer.state or settings.optimizer_offload:
        return []
    parameters = [parameter for group in training.optimizer.param_groups for parameter in group["params"]]
    return [torch.empty_like(parameter, dtype=dtype) for parameter in parameters for dtype in state_dtypes(settings)]
