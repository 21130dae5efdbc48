"""Find the rungs that fit a GPU, the largest micro-batch of each, and the fastest rung."""

import gc
import json
import os
import shlex
from bisect import bisect
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_all_start_methods, get_context
from typing import NamedTuple

import torch

from fabric_ladder.environment import emulates
from fabric_ladder.planning.candidates import Candidate, accuracy_costs, relative_speed
from fabric_ladder.planning.gpus import ANY, Gpu, match_gpu
from fabric_ladder.planning.overhead import Overhead
from fabric_ladder.planning.predict import blank_datasets, complete, largest_batches, to_rehearse
from fabric_ladder.planning.rehearsal import Rehearsal, rehearse
from fabric_ladder.rungs import makes_weights_on_device
from fabric_ladder.runs.prediction import relevant
from fabric_ladder.techniques import used
from fabric_ladder.techniques.memory import Counts, Peak

LIBRARIES = 2_000_000_000  # bytes of CPU memory of a process with CUDA and without a model: a guess
LARGEST_TENSORS = 8  # groups of tensors listed in a plan


class Samples(NamedTuple):
    """The samples of a plan.

    Attributes:
        length: Tokens of the longest sample. An image has a token for each patch and one for the class.
        classes: Number of classes of a classifier.
        image_size: Side of an image in pixels; None: the samples are texts.
    """

    length: int
    classes: int = 2
    image_size: int | None = None


class Machine(NamedTuple):
    """The machine of a plan.

    Attributes:
        memory_limits: Sizes of GPU memory in bytes. Each size gets a plan.
        overhead: GPU memory that a run needs in addition to its tensors.
        host_memory: CPU memory in bytes; None: unlimited.
        gpus: Number of GPUs.
        gpu: Type of the GPUs. `memory_limits` replaces its memory.
    """

    memory_limits: tuple[int, ...]
    overhead: Overhead
    host_memory: int | None = None
    gpus: int = 1
    gpu: Gpu = ANY


class Figures(NamedTuple):
    """A candidate's peaks and padded tokens by micro-batch size, and its numbers of parameters."""

    peaks: dict[int | None, Peak]
    tokens: dict[int | None, int]
    counts: Counts


class Plan(NamedTuple):
    """A candidate on a GPU with a given memory.

    Attributes:
        candidate: Rung, options and settings.
        micro_batch: Size in samples; None: the settings give it.
        peak: Memory of the tensors.
        needed: Needed bytes of GPU memory, with the overhead.
        free: Free bytes of GPU memory; negative if bytes are missing.
        host: Needed bytes of CPU memory on the machine.
        fits: Whether GPU memory and CPU memory are large enough.
        speed: Result of `relative_speed`.
        emulated: Whether the GPU would emulate bfloat16.
        command: Command line of the run.
    """

    candidate: Candidate
    micro_batch: int | None
    peak: Peak
    needed: int
    free: int
    host: int
    fits: bool
    speed: float
    emulated: bool
    command: str

    @property
    def costs(self) -> list[str]:
        """Known costs in accuracy, in words."""
        return accuracy_costs(self.candidate.settings)

    @property
    def overhead(self) -> int:
        """Bytes of GPU memory in addition to the tensors."""
        return self.needed - self.peak.total


def find_gpus() -> list[Gpu]:
    """Return this machine's GPUs, found by another process, and hide them from this process.

    Then this process can be forked, see `find_peaks`. Call this before CUDA is initialized.
    """
    with ProcessPoolExecutor(1) as pool:
        gpus = pool.submit(_list_gpus).result()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return gpus


def find_peaks(candidates: list[Candidate], samples: Samples, machine: Machine) -> list[Figures]:
    """Rehearse every candidate with the deciding micro-batch sizes, in one process per core.

    Candidates share a rehearsal if they differ only in their formulas or in their micro-batches.

    The processes are forked, since a new interpreter would import the libraries for seconds. If this process sees a
    GPU, a forked process dies in its first backward pass (pytorch#33248). Then this process rehearses alone.
    """
    groups: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda each: not each.fsdp_ranks):  # FSDP takes longest: first
        settings = to_rehearse(candidate.settings)
        emulated = emulates(candidate.settings.precision, machine.gpu.capability)
        key = json.dumps([emulated, candidate.fsdp_ranks, relevant(settings)])
        groups.setdefault(key, []).append(candidate)
    tasks = [(group, samples, machine) for group in groups.values()]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if min(cores, len(tasks)) > 1 and "fork" in get_all_start_methods() and not torch.cuda.is_available():
        with ProcessPoolExecutor(min(cores, len(tasks)), get_context("fork"), _enter_fork) as pool:
            done = list(pool.map(_rehearse_together, tasks))
    else:
        done = map(_rehearse_together, tasks)
    found = {name: figures for group in done for name, figures in group.items()}
    return [found[candidate.name] for candidate in candidates]


def make_plan(candidate: Candidate, figures: Figures, options: list[str], machine: Machine, memory_limit: int) -> Plan:
    """Return a candidate with its largest micro-batch that fits, or with its smallest if all are too large.

    Args:
        candidate: Rung and settings.
        figures: Figures of the candidate.
        options: The user's options, for the command.
        machine: The machine of the run.
        memory_limit: GPU memory in bytes, from the machine's limits.
    """
    free = {size: memory_limit - machine.overhead.needed(peak) for size, peak in figures.peaks.items()}
    fitting = [size for size in candidate.micro_batches if free.get(size, -1) >= 0]
    size = fitting[-1] if fitting else candidate.micro_batches[0]
    peak = figures.peaks[size]
    settings = candidate.settings
    rung = candidate.rung
    loaded = 4 * figures.counts.all  # each rank loads all weights in 32 bits into CPU memory first
    if makes_weights_on_device(rung) or any(technique.loads_on_device for technique in used(settings)):
        loaded = 0
    host = settings.devices * (LIBRARIES + max(loaded, peak.host))
    words = [*options, *candidate.options]
    if size is not None and size != settings.micro_batch_size:
        words += ["--micro_batch_size", str(size)]
    if settings.ranks > 1:
        words += ["--devices", str(settings.ranks)]
    return Plan(
        candidate,
        micro_batch=size,
        peak=peak,
        needed=machine.overhead.needed(peak),
        free=free[size],
        host=host,
        fits=bool(fitting) and (machine.host_memory is None or host <= machine.host_memory),
        speed=relative_speed(settings, figures.tokens[size], machine.gpu),
        emulated=emulates(settings.precision, machine.gpu.capability),
        command=shlex.join(["python", f"src/{rung}.py", *words]),
    )


def recommend(plans: list[Plan]) -> dict[str, Plan | None]:
    """Return the best plan that fits for training all weights, and the best for training adapters.

    The best plan has the fewest known costs in accuracy. Among equals the fastest plan wins, then the lower rung, which
    changes less. Plans with emulated bfloat16 are never recommended.
    """

    def best(adapters: bool) -> Plan | None:
        fitting = [plan for plan in plans if plan.fits and not plan.emulated and plan.candidate.adapters == adapters]
        return min(fitting, key=lambda plan: (len(plan.costs), -plan.speed), default=None)

    return {"all weights": best(adapters=False), "adapters": best(adapters=True)}


def _list_gpus() -> list[Gpu]:
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [
        (match_gpu(gpu.name) or ANY)._replace(name=gpu.name, memory=gpu.total_memory, capability=(gpu.major, gpu.minor))
        for gpu in found
    ]


def _enter_fork() -> None:
    torch.set_num_threads(1)  # a fork does not copy the threads
    gc.freeze()  # the garbage collector skips the parent's objects


def _rehearse_together(task: tuple[list[Candidate], Samples, Machine]) -> dict[str, Figures]:
    """Return the figures of candidates that share a rehearsal, by name."""
    candidates, samples, machine = task
    first, datasets = candidates[0], blank_datasets(samples.classes, samples.image_size)
    emulated = emulates(first.settings.precision, machine.gpu.capability)
    with rehearse(to_rehearse(first.settings), datasets, first.fsdp_ranks, emulated) as rehearsal:
        return {candidate.name: _find_figures(candidate, rehearsal, samples, machine) for candidate in candidates}


def _find_figures(candidate: Candidate, rehearsal: Rehearsal, samples: Samples, machine: Machine) -> Figures:
    """Rehearse micro-batches until the largest that fits is found, for each size of GPU memory."""
    figures = Figures({}, {}, rehearsal.counts)

    def needed(size: int | None) -> int:
        if size not in figures.peaks:
            settings = candidate.settings
            if size is not None:
                settings = replace(settings, micro_batch_size=size, micro_batch_tokens=None)
            batches = largest_batches(settings, samples.length, samples.image_size, settings.ranks)
            peak = complete(settings, rehearsal.peak(*batches), rehearsal.counts)
            figures.peaks[size] = peak._replace(tensors=peak.tensors[:LARGEST_TENSORS])
            figures.tokens[size] = batches[0][0].padded
        return machine.overhead.needed(figures.peaks[size])

    sizes = candidate.micro_batches
    kept = complete(candidate.settings, rehearsal.kept, rehearsal.counts).total
    for limit in machine.memory_limits:
        if 2 * kept > limit or needed(sizes[-1]) > limit:  # the largest micro-batch does not fit
            bisect(sizes, limit, hi=1 if kept > limit else None, key=needed)
    return figures
