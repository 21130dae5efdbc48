"""Let torch.compile compile everything before the first step, so that no step of the run waits for it."""

from collections.abc import Iterable

import torch

from fabric_ladder.data.cutting import MicroBatchPlan
from fabric_ladder.distributed.strategies import strategy_traits
from fabric_ladder.runs.metrics import over_ranks
from fabric_ladder.techniques.compile import is_compiled
from fabric_ladder.training.fitting import trial_pass, without_a_trace
from fabric_ladder.training.gradients import run_model
from fabric_ladder.training.state import Training


def compile_ahead(training: Training) -> None:
    """Compile what training and validation need. All ranks must call it.

    torch.compile makes one graph for a single row and one for several rows, for training and for evaluation. Lengths
    and numbers of rows are dynamic, so up to four small passes compile everything.

    A strategy that accumulates gradients itself compiles in its first steps, since it could not undo a trial.
    """
    if training.is_over or not is_compiled(training.model) or strategy_traits(training.settings).owns_optimizer:
        return
    train_data, val_loader = training.train_loader.dataset, training.val_loader
    with training.run.throughput.excluded(), without_a_trace(training):
        for part in _training_parts(training):
            trial_pass(training, [train_data.micro_batch(part, training.state.epoch)])
        training.model.eval()
        with torch.no_grad():
            for part in _one_and_several(training, val_loader.sampler):
                run_model(training.fabric, training.model, val_loader.dataset.micro_batch(part))


def _training_parts(training: Training) -> list[MicroBatchPlan]:
    """Return a part with one row and a part with several rows, if training has such micro-batches.

    If samples are counted, the first and the last effective batch have all sizes of an epoch. If tokens are counted or
    samples are packed, any epoch may have both.
    """
    settings, sampler = training.settings, training.train_loader.sampler
    if settings.micro_batch_tokens or (settings.packing and settings.micro_batch_size > 1):
        rows = list(range(min(2, len(sampler.lengths))))
        parts = [
            MicroBatchPlan(some, len(some), 1.0, [1] * len(some) if settings.packing else None)
            for some in (rows[:1], rows)
        ]
    else:
        sampler.set_epoch(training.state.epoch)
        parts = sampler.first_and_last()
    return _one_and_several(training, parts)


def _one_and_several(training: Training, parts: Iterable[MicroBatchPlan]) -> list[MicroBatchPlan]:
    """Return the first part with one row and the first with several rows; equally many on all ranks."""
    found: dict[bool, MicroBatchPlan] = {}
    for part in parts:
        found.setdefault(len(part.packs or part.rows) > 1, part)
    wanted = over_ranks(training.fabric, "max", False in found, True in found)
    return [found.get(several) or next(iter(found.values())) for several in (False, True) if wanted[several]]
