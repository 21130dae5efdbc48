"""The most demanding batches first: what would run out of memory at hour two does so in the first minute.

And what torch.compile will need before anything else, so that no step of the run waits for it.

A trial takes every micro-batch of an effective batch forward and backward, without a step, and leaves no trace: random
numbers, gradients and buffers are set back, so not one bit of the run changes.
"""

import gc
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from lightning.fabric.strategies import DDPStrategy, DeepSpeedStrategy
from torch import Tensor
from torch.utils.data import DataLoader

from fabric_ladder.batching import EffectiveBatch, MicroBatch
from fabric_ladder.compiling import is_compiled
from fabric_ladder.cutting import Part
from fabric_ladder.errors import UserError, is_out_of_memory
from fabric_ladder.gradients import accumulate_gradients, run_model
from fabric_ladder.hardware import reset_peak_memory
from fabric_ladder.metrics import Meter
from fabric_ladder.resume import Keeper, random_state, set_random_state

CLIFFS = ("cuda",)  # devices whose memory ends all at once; a CPU's host swaps, and a trial would only take time
WHOLE = 2**62  # micro_batch_tokens that cut nothing
MOMENTS = {"adam": 2, "adamw": 2, "adam-8bit": 2}  # tensors of a parameter's shape that an optimizer keeps of it


def try_longest(keeper: Keeper) -> None:
    """Try the effective batches of this epoch that need the most memory, before the run's first step here.

    With `micro_batch_tokens` `auto` the number is chosen, too: all tokens of the longest batch at once, or what the run
    has chosen before it was stopped, halved until all ranks have room.

    Not under DeepSpeed, whose engine adds up gradients where nobody can take them back.

    Raises:
        torch.OutOfMemoryError, RuntimeError, MemoryError: A batch does not fit; with `auto`, not sample by sample.
        UserError: With `auto`, another rank has no room.
    """
    run, settings, device = keeper.run, keeper.settings, keeper.fabric.device
    auto = settings.micro_batch_tokens == "auto"
    done = keeper.place.epoch == settings.epochs
    if done or isinstance(keeper.fabric.strategy, DeepSpeedStrategy) or not (auto or device.type in CLIFFS):
        return
    keeper.loader.sampler.epoch = keeper.place.epoch
    with run.pace.beside(), _without_a_trace(keeper):
        if auto:
            _choose_tokens(keeper)
        elif problem := _find_problem(keeper, _heaviest(keeper)):
            raise problem
    reset_peak_memory(device)  # which failed tries have raised


def compile_ahead(keeper: Keeper, val_loader: DataLoader) -> None:
    """Have torch.compile make, before the first step here, what training and validation will need of it.

    To the compiler one row is another shape than several, and training another graph than evaluation; lengths and
    numbers of rows are dynamic. So up to four small passes show it all there is. All ranks must call this.

    Not under DeepSpeed, for the same reason as above: there the first steps compile.
    """
    done = keeper.place.epoch == keeper.settings.epochs
    if done or not is_compiled(keeper.model) or isinstance(keeper.fabric.strategy, DeepSpeedStrategy):
        return
    loader, fabric, model = keeper.loader, keeper.fabric, keeper.model
    with keeper.run.pace.beside(), _without_a_trace(keeper):
        for part in _shapes_of_training(keeper):
            _pass(keeper, [loader.dataset.micro_batch(part, keeper.place.epoch)])
        model.eval()
        with torch.no_grad():
            for part in _one_and_several(keeper, val_loader.sampler):
                run_model(fabric, model, val_loader.dataset.micro_batch(part))


def _shapes_of_training(keeper: Keeper) -> list[Part]:
    """Return a part of one row and one of two, as far as training has micro-batches of one row and of several.

    Cut by samples, the first and the last effective batch show all sizes of an epoch; by tokens, or packed, any epoch
    may have both.
    """
    settings, sampler = keeper.settings, keeper.loader.sampler
    if settings.micro_batch_tokens or (settings.packing and settings.micro_batch_size > 1):
        rows = list(range(min(2, len(sampler.lengths))))
        parts = [Part(some, len(some), 1.0, [1] * len(some) if settings.packing else None) for some in (rows[:1], rows)]
    else:
        sampler.epoch, parts = keeper.place.epoch, []
        for number in (0, len(sampler) - 1):
            sampler.start = number
            parts += next(iter(sampler)).parts
    return _one_and_several(keeper, parts)


def _one_and_several(keeper: Keeper, parts: Iterable[Part]) -> list[Part]:
    """Return the first part of one row and the first of several, as far as any rank has such; as many on all ranks."""
    found: dict[bool, Part] = {}
    for part in parts:
        found.setdefault(len(part.packs or part.rows) > 1, part)
    wanted = _largest(keeper, False in found, True in found)
    return [found.get(kind) or next(iter(found.values())) for kind in (False, True) if wanted[kind]]


def _choose_tokens(keeper: Keeper) -> None:
    run, place = keeper.run, keeper.place
    tokens, before = place.fitted, place.fitted
    if tokens is None:
        _set_tokens(keeper, WHOLE)
        whole = max(micro_batch.padded for batch in _heaviest(keeper) for micro_batch in batch.micro_batches)
        (tokens,) = _largest(keeper, whole)
    while True:
        _set_tokens(keeper, tokens)
        batches = _heaviest(keeper)
        problem = _find_problem(keeper, batches)
        rows = max(len(part.inputs["labels"]) for batch in batches for part in batch.micro_batches)
        failed, rows = _largest(keeper, problem is not None, rows)
        if not failed:
            break
        if rows == 1:
            raise problem or UserError("out of memory on another rank, with one sample at a time")
        tokens //= 2
    place.fitted = run.record["settings"]["micro_batch_tokens"] = tokens
    run.record["results"]["fitted_micro_batch_tokens"] = tokens
    run.write_record()
    run.print(f"Micro-batches of {tokens} tokens fit", log=tokens != before)


def _set_tokens(keeper: Keeper, tokens: int) -> None:
    for settings in (keeper.settings, keeper.loader.sampler.settings):  # of images, the sampler has its own
        settings.micro_batch_tokens = tokens


def _heaviest(keeper: Keeper) -> list[EffectiveBatch]:
    return [keeper.loader.dataset[plan] for plan in keeper.loader.sampler.heaviest()]


def _find_problem(keeper: Keeper, batches: list[EffectiveBatch]) -> BaseException | None:
    """Try the batches; return the error if this rank ran out of memory.

    Nothing that the error knows may outlive this: its traceback holds the tensors of the pass that failed.
    """
    problem = None
    try:
        for batch in batches:
            _pass(keeper, batch.micro_batches)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        problem = error.with_traceback(None)
        problem.__cause__ = problem.__context__ = None
    if problem:
        keeper.optimizer.zero_grad()
        gc.collect()
        if keeper.fabric.device.type == "cuda":
            torch.cuda.empty_cache()
    return problem


def _pass(keeper: Keeper, micro_batches: list[MicroBatch]) -> None:
    """Go forward and backward, and forget the gradients."""
    fabric, model = keeper.fabric, keeper.model
    # DDP's ranks must not meet in a backward pass that one of them may not reach
    with fabric.no_backward_sync(model, enabled=isinstance(fabric.strategy, DDPStrategy)):
        accumulate_gradients(fabric, model, micro_batches, Meter(fabric), ("", []))
    keeper.optimizer.zero_grad()


def _largest(keeper: Keeper, *values: int) -> list[int]:
    """Return the largest of each value over the ranks."""
    values = torch.tensor(values, dtype=torch.float64, device=keeper.fabric.device)
    return [int(value) for value in keeper.fabric.all_reduce(values, reduce_op="max").tolist()]


@contextmanager
def _without_a_trace(keeper: Keeper) -> Iterator[None]:
    """Take up the memory that the optimizer will need, and set back what forward passes change."""
    model, device = keeper.model, keeper.fabric.device
    random, buffers = random_state(device), [buffer.clone() for buffer in model.buffers()]
    state = _future_state(keeper)
    model.train()
    yield
    del state
    keeper.optimizer.zero_grad()
    set_random_state(random, device)
    with torch.no_grad():
        for buffer, before in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(before)


def _future_state(keeper: Keeper) -> list[Tensor]:
    """Return blank tensors as large as what the optimizer keeps from its first step on; none if it has that already."""
    if keeper.optimizer.state:
        return []
    dtype = torch.uint8 if keeper.settings.optimizer == "adam-8bit" else None
    parameters = [parameter for group in keeper.optimizer.param_groups for parameter in group["params"]]
    count = MOMENTS.get(keeper.settings.optimizer, 0)
    return [torch.empty_like(parameter, dtype=dtype) for parameter in parameters for _ in range(count)]
