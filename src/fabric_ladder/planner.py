"""Which rung runs a model on a GPU: the peak of each, the largest micro-batch that fits, and the fastest of those."""

import json
import multiprocessing
import os
import shlex
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, replace
from typing import NamedTuple

from fabric_ladder.candidates import Candidate, relative_speed
from fabric_ladder.errors import UserError
from fabric_ladder.formulas import Counts
from fabric_ladder.memory import blank_datasets, largest_batches
from fabric_ladder.models import build_model
from fabric_ladder.overhead import Overhead
from fabric_ladder.prediction import complete, rehearsed
from fabric_ladder.rehearsal import Rehearsal, enter_fork, rehearse
from fabric_ladder.rungs import script_defaults
from fabric_ladder.settings import Settings, parse_settings
from fabric_ladder.tracker import Peak

LIBRARIES = 2_000_000_000  # bytes of a process's host memory without a model, with CUDA: a guess
EVALUATED = 4096  # tokens of an evaluation's batch on a GPU, unless the user says otherwise
NO_MATTER = (  # to a rehearsal: what its batches say, and what takes no memory of the device
    "batch_size micro_batch_size micro_batch_tokens pad_to_multiple_of name config notices save learning_rate schedule"
).split()


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


class Limits(NamedTuple):
    """The GPUs of a plan: their sizes in bytes, and what a run needs beside its tensors."""

    sizes: tuple[int, ...]
    overhead: Overhead

    def need(self, peak: Peak) -> int:
        """Return the bytes of a GPU that tensors of this peak need."""
        return peak.total + self.overhead.beside(peak.total)


class Way(NamedTuple):
    """A candidate as it would be run.

    Attributes:
        candidate: Rung and options.
        settings: Of the run; on a CPU, which they are checked on, and with the plan's devices.
        sizes: Micro-batches worth trying, in samples, ascending; (None,) where the user has settled them.
    """

    candidate: Candidate
    settings: Settings
    sizes: tuple[int | None, ...]


class Figures(NamedTuple):
    """A way's peaks and padded tokens, both by micro-batch, and its model's parameters."""

    peaks: dict[int | None, Peak]
    tokens: dict[int | None, int]
    counts: Counts


class Plan(NamedTuple):
    """A way on a GPU of some size.

    Attributes:
        candidate: Rung and options.
        micro_batch: Samples; None: as the settings say.
        peak: What its tensors hold.
        overhead: Bytes beside them.
        host: Bytes of a machine's memory.
        fits: Whether GPU and host have room.
        room: Bytes that the GPU has left; negative: that it lacks.
        speed: See `relative_speed`.
        adapters: Whether adapters are trained, not all weights.
        command: That runs it.
    """

    candidate: Candidate
    micro_batch: int | None
    peak: Peak
    overhead: int
    host: int
    fits: bool
    room: int
    speed: float
    adapters: bool
    command: str


def make_ways(found: list[Candidate], options: list[str], gpus: int) -> tuple[list[Way], dict[str, str]]:
    """Read the settings of every candidate.

    Args:
        found: Candidates; what `options` says already is taken out of their own options.
        options: Of the user, as on a rung's command line.
        gpus: Devices of the plan.

    Returns:
        The ways, and by name why others cannot be gone.

    Raises:
        UserError: No candidate can run: the reason of the first.
    """
    given = {word.split("=")[0] for word in options if word.startswith("--")}
    ways, problems = {}, {}
    for candidate in found:
        pairs = zip(candidate.options[::2], candidate.options[1::2], strict=True)
        candidate = candidate._replace(options=sum((pair for pair in pairs if pair[0] not in given), ()))
        if candidate in ways or candidate.name in problems:
            continue
        try:
            ways[candidate] = _make_way(candidate, options, gpus if candidate.several else 1, given)
        except UserError as error:
            problems[candidate.name] = str(error)
    if not ways:
        raise UserError(next(iter(problems.values()), "there is nothing to plan"))
    return list(ways.values()), problems


def find_peaks(ways: list[Way], samples: Samples, limits: Limits) -> list[Figures]:
    """Rehearse every way with the micro-batches that decide, in as many processes as there are cores.

    Ways that differ in their micro-batches alone share a rehearsal.
    """
    groups: dict[str, list[int]] = {}
    for number, way in enumerate(ways):
        kept = {name: value for name, value in asdict(rehearsed(way.settings)).items() if name not in NO_MATTER}
        groups.setdefault(json.dumps([kept, _shards(way)]), []).append(number)
    order = sorted(groups.values(), key=lambda numbers: not _shards(ways[numbers[0]]))  # those take longest
    tasks = [([ways[number] for number in numbers], samples, limits) for numbers in order]
    cores = min(len(tasks), len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    if cores > 1 and "fork" in multiprocessing.get_all_start_methods():  # a spawned one would load all libraries anew
        how = {"mp_context": multiprocessing.get_context("fork"), "initializer": enter_fork}
        with ProcessPoolExecutor(cores, **how) as pool:
            done = list(pool.map(_rehearse_together, tasks))
    else:
        done = [_rehearse_together(task) for task in tasks]
    pairs = zip(order, done, strict=True)
    found = {number: figures for numbers, group in pairs for number, figures in zip(numbers, group, strict=True)}
    return [found[number] for number in range(len(ways))]


def make_plan(
    way: Way, figures: Figures, options: list[str], overhead: Overhead, memory: int, host_memory: int | None = None
) -> Plan:
    """Return a way with its largest micro-batch that fits; with its smallest, if none does.

    Args:
        way: Rung and settings.
        figures: Of the way.
        options: Of the user, for the command.
        overhead: What comes on top of the tensors.
        memory: Bytes of a GPU.
        host_memory: Bytes of the machine's memory; None: as much as it takes.
    """
    room = {size: memory - peak.total - overhead.beside(peak.total) for size, peak in figures.peaks.items()}
    fitting = [size for size in way.sizes if room.get(size, -1) >= 0]
    size = fitting[-1] if fitting else way.sizes[0]
    peak, settings = figures.peaks[size], way.settings
    host = _host_bytes(settings, way.candidate.rung, peak, figures.counts)
    words = list(way.candidate.options)
    if size is not None and size != script_defaults(way.candidate.rung).get("micro_batch_size", size):
        words += ["--micro_batch_size", str(size)]
    if settings.ranks > 1:
        words += ["--devices", str(settings.ranks)]
    return Plan(
        candidate=way.candidate,
        micro_batch=size,
        peak=peak,
        overhead=overhead.beside(peak.total),
        host=host,
        fits=bool(fitting) and (host_memory is None or host <= host_memory),
        room=room[size],
        speed=relative_speed(settings, way.candidate.rung, figures.tokens[size]),
        adapters=settings.lora,
        command=shlex.join(["python", f"src/{way.candidate.rung}.py", *options, *words]),
    )


def recommend(plans: Iterable[Plan]) -> dict[str, Plan | None]:
    """Return the fastest that fits: of those that train all weights, and of those that train adapters.

    Of equally fast ones the lower rung, which changes less.
    """
    best = {"all weights": None, "adapters": None}
    for plan in plans:
        kind = "adapters" if plan.adapters else "all weights"
        if plan.fits and (best[kind] is None or plan.speed > best[kind].speed):
            best[kind] = plan
    return best


def _make_way(candidate: Candidate, options: list[str], gpus: int, given: set[str]) -> Way:
    here = ["--accelerator", "cpu", "--devices", "1", "--from_scratch", "true"]  # checked here, planned for there
    if "--eval_batch_tokens" not in given:
        here += ["--eval_batch_tokens", str(EVALUATED)]
    settings = parse_settings([*options, *candidate.options, *here], **script_defaults(candidate.rung))
    settings.name = candidate.rung
    settings.devices = gpus
    if gpus > settings.batch_size:
        raise UserError(f"--batch_size {settings.batch_size} is below the number of devices, {gpus}: raise it")
    if given & {"--micro_batch_size", "--micro_batch_tokens"}:
        return Way(candidate, settings, (None,))
    share = -(-settings.batch_size // gpus)
    return Way(candidate, settings, tuple(sorted({*(2**power for power in range(share.bit_length())), share})))


def _shards(way: Way) -> int | None:
    return way.settings.ranks if "fsdp" in way.candidate.rung else None


def _rehearse_together(task: tuple[list[Way], Samples, Limits]) -> list[Figures]:
    """Find the figures of ways that share a rehearsal."""
    ways, samples, limits = task
    settings, ranks = rehearsed(ways[0].settings), _shards(ways[0])
    datasets = blank_datasets(samples.classes, samples.image_size)
    with rehearse(lambda: build_model(settings, datasets), settings, ranks) as rehearsal:
        return [_find_figures(way, rehearsal, samples, limits) for way in ways]


def _find_figures(way: Way, rehearsal: Rehearsal, samples: Samples, limits: Limits) -> Figures:
    """Rehearse micro-batches as long as it is open which one is the largest that fits, from the likelier end on.

    At each moment of a step the tensors are a straight line over the micro-batch's size, so the peak is the highest of
    many lines: between two known sizes it lies below their chord, beyond them above it.
    """
    figures, sizes = Figures({}, {}, rehearsal.counts), way.sizes

    def need(number: int) -> int:
        size = sizes[number]
        if size not in figures.peaks:
            settings = way.settings if size is None else replace(way.settings, micro_batch_size=size)
            batches = largest_batches(settings, samples.length, samples.image_size, way.settings.ranks)
            figures.peaks[size] = complete(way.settings, rehearsal.peak(*batches), rehearsal.counts)
            figures.tokens[size] = batches[0][0].padded
        return limits.need(figures.peaks[size])

    def on_line(first: int, second: int, number: int) -> float:
        slope = (need(second) - need(first)) / (sizes[second] - sizes[first])
        return need(first) + slope * (sizes[number] - sizes[first])

    for limit in limits.sizes:
        low, high = 0, len(sizes) - 1
        ends = (high, low) if 2 * rehearsal.kept < limit else (low, high)
        if any(need(end) <= limit if end == high else need(end) > limit for end in ends):
            continue
        while high - low > 1:
            known = [number for number in range(low) if sizes[number] in figures.peaks]
            if known and on_line(known[-1], low, low + 1) > limit:
                break
            safe = [number for number in range(low + 1, high) if on_line(low, high, number) <= limit]
            middle = safe[-1] if safe else low + 1
            low, high = (middle, high) if need(middle) <= limit else (low, middle)
    return figures


def _host_bytes(settings: Settings, rung: str, peak: Peak, counts: Counts) -> int:
    """Return the bytes of a machine's memory: each rank loads all weights in 32-bit before it moves or shares them."""
    loaded = 4 * counts.all
    if "init" in rung or settings.quantization != "no":
        loaded = 0  # made on the GPU
    return settings.devices * (LIBRARIES + max(loaded, peak.host))
