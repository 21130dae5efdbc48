"""Find the rungs that fit a GPU, the largest micro-batch of each, and the best rung."""

import gc
import os
import shlex
from bisect import bisect
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, ThreadPoolExecutor, wait
from dataclasses import replace
from multiprocessing import get_all_start_methods, get_context
from typing import NamedTuple

import torch

from fabric_ladder.environment import emulates
from fabric_ladder.models.layers import meta_model
from fabric_ladder.places import SRC
from fabric_ladder.planning.candidates import Candidate
from fabric_ladder.planning.gpus import ANY, Gpu
from fabric_ladder.planning.overhead import ANY_GPU, Bounds
from fabric_ladder.planning.predict import blank_datasets, largest_batches
from fabric_ladder.planning.rehearsal import Rehearsal, rehearsal_key, rehearse
from fabric_ladder.runs.prediction import relevant
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import state_dtypes, trains_all, used
from fabric_ladder.techniques.memory import Counts, Peak

LIBRARIES = 2_000_000_000  # bytes of CPU memory of a process with CUDA and without a model: a guess


class Samples(NamedTuple):
    """The samples of a plan.

    Attributes:
        length: Tokens of the longest sample. An image has a token for each patch and one for the class.
        classes: Number of classes of a classifier.
        image_size: Side of an image in pixels; None: the samples are texts.
        train: Number of training samples; None: unknown.
    """

    length: int
    classes: int = 2
    image_size: int | None = None
    train: int | None = None

    @property
    def sizes(self) -> tuple[int, int | None, int]:
        """Length, side of an image and classes, for `largest_batches`."""
        return self.length, self.image_size, self.classes


class Machine(NamedTuple):
    """The machine of a plan.

    Attributes:
        gpu: Type of the GPUs, with their memory.
        gpus: Number of GPUs.
        host_memory: CPU memory in bytes; None: unlimited.
        overhead: GPU memory that a run on one GPU needs in addition to its tensors.
    """

    gpu: Gpu = ANY
    gpus: int = 1
    host_memory: int | None = None
    overhead: Bounds = ANY_GPU


class Plan(NamedTuple):
    """A candidate on a machine, with the largest micro-batch that fits, or with the smallest if none fits.

    Attributes:
        candidate: Rung, options and settings.
        micro_batch: Size in samples; None: the settings give it.
        counts: Numbers of the model's weights.
        peak: Memory of the tensors.
        needed: Expected bytes of GPU memory, with the overhead.
        low: The least bytes that the run may need.
        high: The most bytes that the run may need.
        free: Bytes of GPU memory above `high`; negative if bytes are missing.
        host: Needed bytes of CPU memory on the machine.
        fits: Whether GPU memory and CPU memory are large enough.
        emulated: Whether the GPU would emulate bfloat16.
        command: Command line of the run.
    """

    candidate: Candidate
    micro_batch: int | None
    counts: Counts
    peak: Peak
    needed: int
    low: int
    high: int
    free: int
    host: int
    fits: bool
    emulated: bool
    command: str


def make_plans(
    candidates: list[Candidate], samples: Samples, machine: Machine, every: bool, report: Callable[[str], None]
) -> list[Plan]:
    """Rehearse candidates with the deciding micro-batch sizes, in one process per core.

    The processes are forked, since a new interpreter would import the libraries for seconds. If this process sees a
    GPU, a forked process dies in its first backward pass (pytorch#33248). Then this process rehearses alone.

    Args:
        candidates: Rungs with options.
        samples: The samples to plan for.
        machine: The machine to plan for.
        every: Rehearse every candidate. Otherwise only candidates that `recommend` may choose: the search ends when no
            other candidate has as good a rank.
        report: Called with the names of the candidates whose rehearsal starts.

    Returns:
        The plans, in the candidates' order.
    """
    processes = min(os.cpu_count() or 1, len({rehearsal_key(each.settings) for each in candidates}))
    forks = processes > 1 and "fork" in get_all_start_methods() and not torch.cuda.is_available()
    pool = ProcessPoolExecutor(processes, get_context("fork"), _enter_fork) if forks else ThreadPoolExecutor(1)
    search = _Search(candidates, machine, every)
    running: set[Future] = set()
    with pool:
        while running or search.others:
            while len(running) < processes and (group := search.start()):
                report(", ".join(candidate.name for candidate in group))
                running.add(pool.submit(_plan_together, group, samples, machine))
            if not running:
                break
            done, running = wait(running, return_when=FIRST_COMPLETED)
            for task in done:
                search.found += task.result()
    order = [candidate.name for candidate in candidates]
    return sorted(search.found, key=lambda plan: order.index(plan.candidate.name))


class _Search:
    """Chooses the candidates to rehearse.

    A candidate is promising while no plan of its kind of training fits with a better rank.

    Args:
        candidates: Rungs with options.
        machine: The machine to plan for.
        every: Choose all candidates. So does a search in which no candidate can fit, to say what would be needed.

    Attributes:
        others: The candidates that were not chosen yet.
        found: The plans so far.
    """

    def __init__(self, candidates: list[Candidate], machine: Machine, every: bool):
        capability, memory = machine.gpu.capability, machine.gpu.memory
        able = [each for each in candidates if not emulates(each.settings.precision, capability)]
        able = [each for each in able if not every and _least_bytes(each.settings) < memory]
        self.every = not able
        self.found: list[Plan] = []
        self.others = able or sorted(candidates, key=lambda each: not relevant(each.settings)["sharded"])  # FSDP: slow

    def start(self) -> list[Candidate]:
        """Return the candidates to rehearse next, which share a rehearsal; empty: nothing promising is left."""
        first = next(iter(self.others), None) if self.every else self._most_promising()
        key = first and rehearsal_key(first.settings)
        chosen = [each for each in self.others if first and rehearsal_key(each.settings) == key]
        self.others = [each for each in self.others if each not in chosen]
        return chosen

    def _most_promising(self) -> Candidate | None:
        best = {kind: plan.candidate.rank for kind, plan in recommend(self.found).items()}
        promising = [each for each in self.others if each.trains not in best or each.rank <= best[each.trains]]
        return min(promising, key=lambda each: each.rank, default=None)


def _least_bytes(settings: Settings) -> int:
    """Return bytes that stay on one GPU in any case: weights, gradients and optimizer state; 0: unknown."""
    if not trains_all(settings) or settings.strategy not in ("single", "ddp"):
        return 0
    width = 2 if settings.precision in ("bf16-true", "16-true") else 4
    state = sum(width if dtype is None else dtype.itemsize for dtype in state_dtypes(settings))
    kept = state * all(technique.state_on_device for technique in used(settings))
    gradients = width * (not any(technique.frees_gradients for technique in used(settings)))
    weights = sum(parameter.numel() for parameter in meta_model(settings).parameters())
    return weights * (width + gradients + kept)


def recommend(plans: list[Plan]) -> dict[str, Plan]:
    """Return the best plan that fits for training all weights, and the best for training some of them.

    The first of the two has the lower measured cost in accuracy, in steps of `WITHIN_NOISE`; among equals all weights
    come first. The best plan has the best rank of its candidate. Among equals the plan that needs the least memory
    wins, then the lower rung, which changes less. Plans with emulated bfloat16 are never recommended.
    """
    best: dict[str, Plan] = {}
    for plan in sorted(plans, key=lambda plan: (plan.candidate.rank, plan.needed)):
        if plan.fits and not plan.emulated:
            best.setdefault(plan.candidate.trains, plan)
    return best


def _enter_fork() -> None:
    torch.set_num_threads(1)  # a fork does not copy the threads
    gc.freeze()  # the garbage collector skips the parent's objects


def _plan_together(candidates: list[Candidate], samples: Samples, machine: Machine) -> list[Plan]:
    """Return the plans of candidates that share a rehearsal."""
    datasets = blank_datasets(samples.classes, samples.image_size)
    with rehearse(candidates[0].settings, datasets, machine.gpu.capability) as rehearsal:
        return [_make_plan(candidate, rehearsal, samples, machine) for candidate in candidates]


def _make_plan(candidate: Candidate, rehearsal: Rehearsal, samples: Samples, machine: Machine) -> Plan:
    """Rehearse micro-batches until the largest that fits is found."""
    settings = candidate.settings
    overhead = machine.overhead.on(settings.ranks)
    peaks: dict[int | None, Peak] = {}

    def most(size: int | None) -> int:
        if size not in peaks:
            part = cut(settings, size)
            peaks[size] = rehearsal.peak(part, *largest_batches(part, *samples.sizes))
        return overhead.bounds(peaks[size])[1]

    room = machine.gpu.memory
    sizes = candidate.micro_batches
    size = sizes[-1]  # a single pass can need less than several: it adds no gradients to earlier ones
    if most(size) > room:
        size = sizes[0]
        if most(size) <= room:
            size = sizes[bisect(sizes, room, 1, len(sizes) - 1, key=most) - 1]
    host = host_bytes(candidate.rung, settings, rehearsal.counts, peaks[size])
    needed = overhead.needed(peaks[size])
    low, high = overhead.bounds(peaks[size])
    free = room - high
    return Plan(
        candidate,
        micro_batch=size,
        counts=rehearsal.counts,
        peak=peaks[size],
        needed=needed,
        low=low,
        high=high,
        free=free,
        host=host,
        fits=free >= 0 and (machine.host_memory is None or host <= machine.host_memory),
        emulated=emulates(settings.precision, machine.gpu.capability),
        command=_command(candidate, size),
    )


def host_bytes(rung: str, settings: Settings, counts: Counts, peak: Peak) -> int:
    """Return the bytes of CPU memory that a run of this rung needs on the machine."""
    # each rank loads all weights into CPU memory first, in 32 bits unless a technique reads them in another form
    on_device = "fabric.init_module()" in (SRC / f"{rung}.py").read_text(encoding="utf-8")
    loaded = 0 if on_device else 4 * counts.all
    for technique in used(settings):
        loaded = technique.loaded_bytes(loaded, counts, settings)
    return settings.devices * (LIBRARIES + max(loaded, peak.host))


def cut(settings: Settings, size: int | None) -> Settings:
    """Return settings with micro-batches of this many samples; None: as the settings are."""
    return settings if size is None else replace(settings, micro_batch_size=size, micro_batch_tokens=None)


def _command(candidate: Candidate, size: int | None) -> str:
    """Return the command line of a run with this micro-batch."""
    settings = candidate.settings
    words = list(candidate.words)
    if size is not None and size != settings.micro_batch_size:
        words += ["--micro_batch_size", str(size)]
    if settings.ranks > 1:
        words += ["--devices", str(settings.ranks)]
    return shlex.join(["python", f"src/{candidate.rung}.py", *words])
