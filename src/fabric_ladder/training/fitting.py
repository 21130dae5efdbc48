"""Try the largest batches first. A run that would exceed the memory after two hours then fails in a minute.

A trial runs the forward and backward pass of every micro-batch of an effective batch, without an optimizer step. It
then restores random numbers, gradients and buffers, so that not one bit of the run changes.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.data.sampler import BatchPlan
from fabric_ladder.environment import reset_peak_memory
from fabric_ladder.errors import UserError, is_out_of_memory
from fabric_ladder.models.layers import find_blocks
from fabric_ladder.runs.metrics import Meter, over_ranks
from fabric_ladder.runs.prediction import Prediction, most_tokens
from fabric_ladder.techniques import state_dtypes, used
from fabric_ladder.techniques.memory_budget import keep_activations
from fabric_ladder.training.gradients import accumulate_gradients, forget_gradients
from fabric_ladder.training.graphs import Graphs
from fabric_ladder.training.state import Training, random_state, set_random_state

HARD_LIMITS = ("cuda",)  # devices whose memory has a hard limit; a CPU swaps, and a trial would only take time


def keep_within_budget(training: Training, prediction: Prediction | None) -> None:
    """Let as many blocks keep their activations as the memory budget has room for, the same on all ranks.

    Without a prediction (`auto` on a CPU) all do. If the prediction failed, none do.
    """
    if not training.settings.memory_budget:
        return
    blocks = len(find_blocks(training.model.module))
    kept = prediction.found.get("kept_blocks", 0) if prediction else blocks  # only rank 0 has a prediction
    (recomputed,) = over_ranks(training.fabric, "max", blocks - kept)
    keep_activations(training.model.module, blocks - recomputed)


def try_longest(training: Training, prediction: Prediction | None) -> None:
    """Try the effective batches of this epoch that need the most memory, before the first step.

    With `micro_batch_tokens` `auto` this also chooses the number of tokens. It starts with the predicted number, or
    with the number of the resumed run, and halves it while a rank runs out of memory.

    Where weights are sharded it does not halve, since the other ranks would wait for a rank that runs out of memory.
    Without a prediction the ranks then take one sample at a time. A strategy that accumulates gradients itself gets no
    trial, since they could not be removed again.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: A batch does not fit; with `auto`, not even one sample.
        UserError: With `auto`, one sample does not fit on another rank.
    """
    run, state, sampler = training.run, training.state, training.train_loader.sampler
    settings, device = run.settings, run.fabric.device
    tries = not settings.owns_optimizer
    auto = settings.micro_batch_tokens == "auto"
    if training.is_over:
        if auto:  # the test loader uses the same number
            sampler.cut_by_tokens(state.micro_batch_tokens or 1)
        return
    sampler.set_epoch(state.epoch)
    halves = auto and tries and not settings.shards_weights
    if auto:
        sampler.cut_by_tokens(_first_tokens(training, prediction, halves))
    if halves or (tries and device.type in HARD_LIMITS):
        with run.throughput.excluded(), without_a_trace(training):
            if halves:
                _halve_until_it_fits(training)
            else:
                _try(training, sampler.heaviest())
        _empty_cache(device)
        if training.graphs:
            training.graphs.passes = training.graphs.replayed = 0
        else:  # a replay allocates nothing: the trial of a training with graphs has seen its peak
            reset_peak_memory(device)
    if auto:
        new = sampler.micro_batch_tokens != state.micro_batch_tokens
        state.micro_batch_tokens = sampler.micro_batch_tokens
        run.log_fit(state.micro_batch_tokens, new)


def _first_tokens(training: Training, prediction: Prediction | None, halves: bool) -> int:
    """Return the `micro_batch_tokens` to start with, the same on all ranks."""
    predicted = prediction.found.get("micro_batch_tokens", 0) if prediction else 0  # only rank 0 has a prediction
    (predicted,) = over_ranks(training.fabric, "max", predicted)
    if not predicted and not halves:
        return 1  # no trial would find a larger number
    known = [tokens for tokens in (training.state.micro_batch_tokens, predicted) if tokens]
    return min(known or over_ranks(training.fabric, "max", most_tokens(training.train_loader)))


def _halve_until_it_fits(training: Training) -> None:
    """Halve `micro_batch_tokens` until the heaviest effective batches fit on all ranks."""
    sampler = training.train_loader.sampler
    while True:
        plans = sampler.heaviest()
        problem = _find_problem(training, plans)
        samples = max(len(part.rows) for plan in plans for part in plan.parts)
        failed, samples = over_ranks(training.fabric, "max", problem is not None, samples)
        if not failed:
            return
        if samples == 1:
            raise problem or UserError("out of memory on another rank, with one sample at a time")
        sampler.cut_by_tokens(sampler.micro_batch_tokens // 2)


def _try(training: Training, plans: list[BatchPlan]) -> None:
    # the first passes run without graphs, the second are recorded; a rare shape then runs beside the graphs' memory
    for graphs in (training.graphs, training.graphs, None) if training.graphs else (None,):
        for plan in plans:
            trial_pass(training, training.train_loader.dataset[plan].micro_batches, graphs)


def _find_problem(training: Training, plans: list[BatchPlan]) -> BaseException | None:
    """Try the batches, and return the error if this rank ran out of memory.

    The error is returned without its traceback, which would hold the tensors of the failed pass.
    """
    problem = None
    try:
        _try(training, plans)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = error.with_traceback(None)
        problem.__cause__ = problem.__context__ = None
    if problem:
        forget_gradients(training.fabric, training.optimizer)
        if training.graphs:
            training.graphs.forget()
        gc.collect()
        _empty_cache(training.fabric.device)
        reset_peak_memory(training.fabric.device)
    return problem


def _empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()


def trial_pass(training: Training, micro_batches: list[MicroBatch], graphs: Graphs | None = None) -> None:
    """Run the forward and backward passes, and forget the gradients."""
    fabric, model = training.fabric, training.model
    # ranks with whole weights must not meet in a backward pass that one of them may not reach
    with fabric.no_backward_sync(model, enabled=not training.settings.shards_weights):
        accumulate_gradients(fabric, model, micro_batches, Meter(fabric), graphs=graphs)
    forget_gradients(fabric, training.optimizer, training.graphs)


@contextmanager
def without_a_trace(training: Training) -> Iterator[None]:
    """Allocate the memory that the optimizer will need, and undo at the end what forward passes change."""
    model, device = training.model, training.fabric.device
    random = random_state(device)
    buffers = [buffer.clone() for buffer in model.buffers()]
    state = _future_state(training)
    model.train()
    yield
    del state
    set_random_state(random, device)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)


def _future_state(training: Training) -> list[Tensor]:
    """Return tensors as large as the state that the optimizer makes in its first step; empty if it has one already."""
    settings = training.settings
    on_device = all(technique.state_on_device for technique in used(settings))
    if training.optimizer.state or not on_device:
        return []
    groups = training.optimizer.param_groups
    trained = [parameter for group in groups for parameter in group["params"] if parameter.requires_grad]
    dtypes = state_dtypes(settings)
    return [torch.empty_like(parameter, dtype=dtype) for parameter in trained for dtype in dtypes]
