"""Which rung runs a model on a GPU: the peak of each, the largest micro-batch that fits, and the fastest of those."""

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
from fabric_ladder.planning.formulas import Counts, Overhead
from fabric_ladder.planning.gpus import ANY, Gpu, match_gpu
from fabric_ladder.planning.predict import blank_datasets, complete, largest_batches, to_rehearse
from fabric_ladder.planning.rehearsal import Rehearsal, rehearse
from fabric_ladder.planning.tracker import Peak
from fabric_ladder.runs.prediction import relevant

LIBRARIES = 2_000_000_000  # bytes of a process's host memory without a model, with CUDA: a guess
LARGEST_TENSORS = 8  # named in a plan


class Samples(NamedTuple):
    """What a plan is made for.

    Attributes:
        length: Tokens of the longest sample; of an image, its patches and the one for the class.
        classes: Of a classifier.
        image_size: Pixels of a side of an image; None: the samples are texts.
    """

    length: int
    classes: int = 2
    image_size: int | None = None


class Machine(NamedTuple):
    """Where a plan is to run.

    Attributes:
        memory_limits: Bytes of a GPU; of several, a plan is made for each.
        overhead: What a run needs of a GPU on top of its tensors.
        host_memory: Bytes of the machine's memory; None: as much as it takes.
        gpus: Their number.
        gpu: What they are, but for their memory.
    """

    memory_limits: tuple[int, ...]
    overhead: Overhead
    host_memory: int | None = None
    gpus: int = 1
    gpu: Gpu = ANY


class Figures(NamedTuple):
    """A candidate's peaks and padded tokens, both by micro-batch, and its model's parameters."""

    peaks: dict[int | None, Peak]
    tokens: dict[int | None, int]
    counts: Counts


class Plan(NamedTuple):
    """A candidate on a GPU of some size.

    Attributes:
        candidate: Rung, options and settings.
        micro_batch: Samples; None: as the settings say.
        peak: What its tensors hold.
        needed: Bytes of the GPU that it needs in all.
        free: Bytes that the GPU has left; negative: that it lacks.
        host: Bytes of a machine's memory that it needs.
        fits: Whether GPU and host have as much.
        speed: See `relative_speed`.
        emulated: Whether it would compute in a bfloat16 that the GPU has not.
        command: That runs it.
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
        """What it is known to cost in accuracy."""
        return accuracy_costs(self.candidate.settings)

    @property
    def overhead(self) -> int:
        """Bytes of the GPU on top of the tensors."""
        return self.needed - self.peak.total


def find_gpus() -> list[Gpu]:
    """Return the GPUs here, asked in another process, and hide them all from this one.

    So it can fork processes, see `find_peaks`. To be called before this process looks for a GPU itself.
    """
    with ProcessPoolExecutor(1) as pool:
        gpus = pool.submit(_list_gpus).result()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    return gpus


def find_peaks(candidates: list[Candidate], samples: Samples, machine: Machine) -> list[Figures]:
    """Rehearse every candidate with the micro-batches that decide, in as many processes as there are cores.

    Candidates that differ in what their formulas add, or in their micro-batches alone, share a rehearsal.

    The processes are forked, since a new interpreter would take seconds to import the libraries. Where this one sees a
    GPU, the first backward pass would end them (pytorch#33248): then it rehearses alone, unless `find_gpus` hid it.
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
    """Return a candidate with its largest micro-batch that fits; with its smallest, if none does.

    Args:
        candidate: Rung and settings.
        figures: Of the candidate.
        options: Of the user, for the command.
        machine: Where it is to run.
        memory_limit: Bytes of a GPU, one of the machine's limits.
    """
    free = {size: memory_limit - machine.overhead.needed(peak) for size, peak in figures.peaks.items()}
    fitting = [size for size in candidate.micro_batches if free.get(size, -1) >= 0]
    size = fitting[-1] if fitting else candidate.micro_batches[0]
    peak, settings, rung = figures.peaks[size], candidate.settings, candidate.rung
    loaded = 0 if "init" in rung or settings.quantization != "no" else 4 * figures.counts.all  # 0: made on the GPU
    host = settings.devices * (LIBRARIES + max(loaded, peak.host))  # each rank loads all weights in 32-bit first
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
        speed=relative_speed(settings, rung, figures.tokens[size], machine.gpu),
        emulated=emulates(settings.precision, machine.gpu.capability),
        command=shlex.join(["python", f"src/{rung}.py", *words]),
    )


def recommend(plans: list[Plan]) -> dict[str, Plan | None]:
    """Return the best that fits: of those that train all weights, and of those that train adapters.

    It is the one with the fewest known costs in accuracy, of those the fastest, and of equally fast ones the lower
    rung, which changes less. Emulated bfloat16 is none.
    """

    def best(adapters: bool) -> Plan | None:
        fitting = [
            plan for plan in plans if plan.fits and not plan.emulated and plan.candidate.settings.lora == adapters
        ]
        return min(fitting, key=lambda plan: (len(plan.costs), -plan.speed), default=None)

    return {"all weights": best(adapters=False), "adapters": best(adapters=True)}


def _list_gpus() -> list[Gpu]:
    found = [torch.cuda.get_device_properties(number) for number in range(torch.cuda.device_count())]
    return [
        (match_gpu(gpu.name) or ANY)._replace(name=gpu.name, memory=gpu.total_memory, capability=(gpu.major, gpu.minor))
        for gpu in found
    ]


def _enter_fork() -> None:
    torch.set_num_threads(1)  # the threads of the process before are not here
    gc.freeze()  # nor is its garbage searched


def _rehearse_together(task: tuple[list[Candidate], Samples, Machine]) -> dict[str, Figures]:
    """Return the figures of candidates that share a rehearsal, by their names."""
    candidates, samples, machine = task
    first, datasets = candidates[0], blank_datasets(samples.classes, samples.image_size)
    emulated = emulates(first.settings.precision, machine.gpu.capability)
    with rehearse(to_rehearse(first.settings), datasets, first.fsdp_ranks, emulated) as rehearsal:
        return {candidate.name: _find_figures(candidate, rehearsal, samples, machine) for candidate in candidates}


def _find_figures(candidate: Candidate, rehearsal: Rehearsal, samples: Samples, machine: Machine) -> Figures:
    """Rehearse micro-batches until it is known which is the largest that fits, for each size of GPU."""
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

    sizes, kept = candidate.micro_batches, complete(candidate.settings, rehearsal.kept, rehearsal.counts).total
    for limit in machine.memory_limits:
        if 2 * kept > limit or needed(sizes[-1]) > limit:  # the whole batch at once hardly or does not fit
            bisect(sizes, limit, hi=1 if kept > limit else None, key=needed)
    return figures
