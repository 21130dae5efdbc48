"""Let torch.compile compile everything before the first step, so that no step of the run waits for it."""

from collections.abc import Iterable, Iterator
from itertools import chain, islice

from fabric_ladder.data.cutting import MicroBatchPlan
from fabric_ladder.data.sampler import BatchPlan
from fabric_ladder.runs.metrics import over_ranks
from fabric_ladder.training.fitting import trial_pass, without_a_trace
from fabric_ladder.training.state import Training

PLANNED = 100_000  # samples, in about 3 s; a graph takes longer


def compile_ahead(training: Training) -> None:
    """Compile what training needs. All ranks must call it.

    torch.compile makes one graph for a single row and one for several rows. Lengths and numbers of rows are dynamic, so
    one or two passes compile everything. Evaluation is not compiled.

    A strategy that accumulates gradients itself compiles in its first steps, since it could not undo a trial.
    """
    settings = training.settings
    if training.is_over or not settings.compile or settings.owns_optimizer:
        return
    data = training.train_loader.dataset
    with training.run.throughput.excluded(), without_a_trace(training):
        for part in _training_parts(training):
            trial_pass(training, [data.micro_batch(part, training.state.epoch)])


def _training_parts(training: Training) -> list[MicroBatchPlan]:
    """Return a part with one row and a part with several rows, if training has such micro-batches.

    If samples are counted, the first and the last effective batch have all sizes of an epoch. If tokens are counted or
    samples are packed, any effective batch may have both.
    """
    settings, sampler = training.settings, training.train_loader.sampler
    if settings.micro_batch_tokens or (settings.packing and settings.micro_batch_size > 1):
        return _one_and_several(training, _all_parts(training))
    sampler.set_epoch(training.state.epoch)
    return _one_and_several(training, sampler.first_and_last())


def _all_parts(training: Training) -> Iterator[MicroBatchPlan]:
    """Yield the parts of all effective batches; of too many, those of the first ones and then a part of each kind."""
    settings, sampler = training.settings, training.train_loader.sampler

    def plans() -> Iterator[BatchPlan]:
        for epoch in range(training.state.epoch, settings.epochs):
            sampler.set_epoch(epoch)
            yield from sampler

    rest = plans()
    yield from chain.from_iterable(plan.parts for plan in islice(rest, PLANNED // settings.batch_size))
    if next(rest, None):
        for rows in ([0], [0, 1]):
            yield MicroBatchPlan(rows, len(rows), 1.0, [1] * len(rows) if settings.packing else None)


def _one_and_several(training: Training, parts: Iterable[MicroBatchPlan]) -> list[MicroBatchPlan]:
    """Return the first part with one row and the first with several rows; equally many on all ranks."""
    found: dict[bool, MicroBatchPlan] = {}
    for part in parts:
        found.setdefault(len(part.packs or part.rows) > 1, part)
        if len(found) == 2:
            break
    wanted = over_ranks(training.fabric, "max", False in found, True in found)
    return [found.get(several) or next(iter(found.values())) for several in (False, True) if wanted[several]]
