"""Plan a run: find the machine and the samples, and plan every rung."""

import argparse
from pathlib import Path

import psutil
from accelerate.utils import convert_file_size_to_int

from fabric_ladder.data.images import read_image_format
from fabric_ladder.data.sources import find_source
from fabric_ladder.errors import UserError
from fabric_ladder.planning.candidates import list_choices, read_candidates
from fabric_ladder.planning.gpus import ANY, find_gpu, own_gpus
from fabric_ladder.planning.overhead import load_overhead
from fabric_ladder.planning.planner import Machine, Samples, make_plans
from fabric_ladder.planning.report import Answer
from fabric_ladder.rungs import RUNGS
from fabric_ladder.settings import Settings
from local_dataset_utilities import find_dataset, load_datasets

STANDARD = ["--config", "imdb_bloom_560m.yaml"]  # the default of the rungs on a GPU


def read_size(text: str, option: str) -> int:
    """Return a size such as 16GB or 15.9GiB in bytes; the default unit is GB.

    Raises:
        UserError: The size does not parse.
    """
    size = text.strip().upper()  # a lowercase b would mean bits
    try:
        found = convert_file_size_to_int(size if size[-1:].isalpha() else f"{size}GB")
    except (ValueError, OverflowError):
        found = 0
    if found < 1:
        raise UserError(f"{option} {text}: give a size such as 16GB or 15.9GiB")
    return found


def find_machine(arguments: argparse.Namespace) -> Machine:
    """Return the machine to plan for, from the options or from this machine.

    Raises:
        UserError: An option is invalid, or no GPU is named and this machine has none.
    """
    found, gpu, host_memory = own_gpus(), ANY, None
    gpus = arguments.devices if arguments.devices is not None else len(found) or 1
    if gpus < 1:
        raise UserError(f"--devices {gpus}: must be at least 1")
    if arguments.gpu:
        gpu = find_gpu(arguments.gpu)
    elif found and not arguments.gpu_memory:
        gpu, host_memory = min(found, key=lambda each: each.memory), psutil.virtual_memory().total
    if arguments.host_memory:
        host_memory = read_size(arguments.host_memory, "--host_memory")
    if arguments.gpu_memory:
        gpu = gpu._replace(memory=read_size(arguments.gpu_memory, "--gpu_memory"))
    elif gpu is ANY:
        raise UserError("PyTorch finds no CUDA GPU here; name one to plan for, e.g. --gpu T4 or --gpu_memory 16GB")
    return Machine(gpu, gpus, host_memory)


def find_samples(settings: Settings, length: int | None) -> tuple[Samples, list[str]]:
    """Return the samples to plan for, and the reason if they are not the longest sample of the data.

    Raises:
        UserError: The data cannot be read, or the length is above `max_length`.
    """
    if settings.task == "image-classification":
        image_format, _ = read_image_format(settings)
        return Samples(image_format.tokens, image_size=image_format.size), []
    if length is not None:
        if not 1 < length <= settings.max_length:
            raise UserError(f"--length {length}: must be from 2 to --max_length {settings.max_length}")
        return Samples(length), []
    missing = ""
    try:
        if find_source(settings).key[0] == "hub":
            missing = f"{settings.dataset} is on the Hub"
        elif settings.dataset == "imdb" and not find_dataset(settings.data_dir):
            missing = f"IMDb is not in {settings.data_dir}"
        datasets = None if missing else load_datasets(settings)
    except UserError as error:
        raise UserError(f"{error}; or plan without data, for samples of N tokens: --length N") from error
    if missing:
        assumed = f"{missing}, and a plan downloads no data: it is for --max_length {settings.max_length}"
        return Samples(settings.max_length), [f"{assumed}; --length N plans for samples of N tokens."]
    classes = len(datasets.class_names) or 2
    return Samples(max(max(split["length"][:]) for split in datasets.splits.values()), classes), []


def find_answer(arguments: argparse.Namespace, options: list[str]) -> Answer:
    """Plan every rung, or the rungs that were asked for.

    Raises:
        UserError: No rung can be planned.
    """
    machine = find_machine(arguments)
    choices, unplanned = list_choices(arguments.rungs or RUNGS, machine.gpus)
    if not choices:
        raise UserError("; ".join(f"{rung}: {reason}" for rung, reason in unplanned.items()))
    candidates, problems = read_candidates(choices, options, machine.gpus, machine.gpu)
    if not candidates:
        raise UserError(next(iter(problems.values())))
    problems |= unplanned
    settings = candidates[0].settings
    machine = machine._replace(overhead=load_overhead(settings.cache_dir, machine.gpu.name))
    samples, notes = find_samples(settings, arguments.length)
    plans = make_plans(candidates, samples, machine)
    name = Path(settings.model).name if Path(settings.model).exists() else settings.model
    batch_size = max(candidate.settings.batch_size for candidate in candidates)
    return Answer(name, batch_size, samples, machine, plans, problems, notes)
