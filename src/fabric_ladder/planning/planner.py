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
from fabric_ladder.planning.gpus import ANY, Gpu
from fabric_ladder.planning.overhead import ASSUMED, Overhead
from fabric_ladder.planning.predict import blank_datasets, largest_batches
from fabric_ladder.planning.rehearsal import Rehearsal, rehearse, to_rehearse
from fabric_ladder.rungs import makes_weights_on_device
from fabric_ladder.runs.prediction import relevant
from fabric_ladder.techniques import used
from fabric_ladder.techniques.memory import Counts, Peak

LIBRARIES = 2_000_000_000  # bytes of CPU memory of a process with CUDA and without a model: a guess


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
        gpu: Type of the GPUs, with their memory.
        gpus: Number of GPUs.
        host_memory: CPU memory in bytes; None: unlimited.
        overhead: GPU memory that a run needs in addition to its tensors.
    """

    gpu: Gpu = ANY
    gpus: int = 1
    host_memory: int | None = None
    overhead: Overhead = ASSUMED


class Plan(NamedTuple):
    """A candidate on a machine, with the largest micro-batch that fits, or with the smallest if none fits.

    Attributes:
        candidate: Rung, options and settings.
        micro_batch: Size in samples; None: the settings give it.
        counts: Numbers of the model's weights.
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
    counts: Counts
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
        """Measured costs in accuracy of the techniques in use, in words."""
        return accuracy_costs(self.candidate.settings)

    @property
    def trains(self) -> str:
        """The weights that the run trains, in words."""
        return "all weights" if self.counts.trained == self.counts.all else "some of the weights"


def make_plans(candidates: list[Candidate], samples: Samples, machine: Machine) -> list[Plan]:
    """Rehearse every candidate with the deciding micro-batch sizes, in one process per core.

    Candidates share a rehearsal if they differ only in their formulas or in their micro-batches.

    The processes are forked, since a new interpreter would import the libraries for seconds. If this process sees a
    GPU, a forked process dies in its first backward pass (pytorch#33248). Then this process rehearses alone.
    """
    groups: dict[str, list[Candidate]] = {}
    for candidate in sorted(candidates, key=lambda each: not relevant(each.settings)["sharded"]):  # FSDP takes longest
        emulated = emulates(candidate.settings.precision, machine.gpu.capability)
        key = json.dumps([emulated, relevant(to_rehearse(candidate.settings))])
        groups.setdefault(key, []).append(candidate)
    tasks = [(group, samples, machine) for group in groups.values()]
    processes = min(os.cpu_count() or 1, len(tasks))
    if processes > 1 and "fork" in get_all_start_methods() and not torch.cuda.is_available():
        with ProcessPoolExecutor(processes, get_context("fork"), _enter_fork) as pool:
            done = list(pool.map(_plan_together, tasks))
    else:
        done = map(_plan_together, tasks)
    found = {plan.candidate.name: plan for plans in done for plan in plans}
    return [found[candidate.name] for candidate in candidates]


def recommend(plans: list[Plan]) -> dict[str, Plan]:
    """Return the best plan that fits for training all weights, and the best for training some of them.

    The best plan has the fewest known costs in accuracy. Among equals the fastest plan wins, then the lower rung, which
    changes less. Plans with emulated bfloat16 are never recommended.
    """
    best: dict[str, Plan] = {}
    for plan in sorted(plans, key=lambda plan: (plan.trains, len(plan.costs), -plan.speed)):
        if plan.fits and not plan.emulated:
            best.setdefault(plan.trains, plan)
    return best


def _enter_fork() -> None:
    torch.set_num_threads(1)  # a fork does not copy the threads
    gc.freeze()  # the garbage collector skips the parent's objects


def _plan_together(task: tuple[list[Candidate], Samples, Machine]) -> list[Plan]:
    """Return the plans of candidates that share a rehearsal."""
    candidates, samples, machine = task
    datasets = blank_datasets(samples.classes, samples.image_size)
    with rehearse(candidates[0].settings, datasets, machine.gpu.capability) as rehearsal:
        return [_make_plan(candidate, rehearsal, samples, machine) for candidate in candidates]


def _make_plan(candidate: Candidate, rehearsal: Rehearsal, samples: Samples, machine: Machine) -> Plan:
    """Rehearse micro-batches until the largest that fits is found."""
    settings = candidate.settings
    peaks: dict[int | None, Peak] = {}
    tokens: dict[int | None, int] = {}

    def needed(size: int | None) -> int:
        if size not in peaks:
            cut = settings if size is None else replace(settings, micro_batch_size=size, micro_batch_tokens=None)
            batches = largest_batches(cut, samples.length, samples.image_size)
            peaks[size] = rehearsal.peak(cut, *batches)
            tokens[size] = batches[0][0].padded
        return machine.overhead.needed(peaks[size])

    sizes = candidate.micro_batches
    if needed(sizes[-1]) <= machine.gpu.memory:
        size = sizes[-1]
    else:
        size = sizes[max(0, bisect(sizes, machine.gpu.memory, hi=len(sizes) - 1, key=needed) - 1)]
    loaded = 4 * rehearsal.counts.all  # each rank loads all weights in 32 bits into CPU memory first
    if makes_weights_on_device(candidate.rung) or any(technique.loads_on_device for technique in used(settings)):
        loaded = 0
    host = settings.devices * (LIBRARIES + max(loaded, peaks[size].host))
    free = machine.gpu.memory - needed(size)
    return Plan(
        candidate,
        micro_batch=size,
        counts=rehearsal.counts,
        peak=peaks[size],
        needed=needed(size),
        free=free,
        host=host,
        fits=free >= 0 and (machine.host_memory is None or host <= machine.host_memory),
        speed=relative_speed(settings, tokens[size], machine.gpu),
        emulated=emulates(settings.precision, machine.gpu.capability),
        command=_command(candidate, size),
    )


def _command(candidate: Candidate, size: int | None) -> str:
    """Return the command line of a run with this micro-batch."""
    settings = candidate.settings
    words = list(candidate.words)
    if size is not None and size != settings.micro_batch_size:
        words += ["--micro_batch_size", str(size)]
    if settings.ranks > 1:
        words += ["--devices", str(settings.ranks)]
    return shlex.join(["python", f"src/{candidate.rung}.py", *words])
