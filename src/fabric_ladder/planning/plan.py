"""Plan a run: find the machine and the samples, and plan every rung."""

import argparse
from collections.abc import Callable

import psutil

from fabric_ladder.data.hub import find_shipped_config
from fabric_ladder.data.images import read_image_format
from fabric_ladder.data.load import load_datasets, tokenizer_name
from fabric_ladder.data.text_sources import find_source
from fabric_ladder.data.tokens import load_tokenizer
from fabric_ladder.environment import read_size
from fabric_ladder.errors import UserError
from fabric_ladder.models.configs import count_positions
from fabric_ladder.options import read_named_config, read_words
from fabric_ladder.planning.answer import Answer
from fabric_ladder.planning.candidates import list_choices, read_candidates
from fabric_ladder.planning.gpus import ANY, card_memory, find_gpu, own_gpus
from fabric_ladder.planning.overhead import overhead_of
from fabric_ladder.planning.planner import Machine, Samples, make_plans, recommend
from fabric_ladder.rungs import RUNGS
from fabric_ladder.runs.folder import short_name
from fabric_ladder.settings import FACTS, Settings
from fabric_ladder.techniques import technique_of
from local_dataset_utilities import find_dataset

HOST_MEMORY = 64_000_000_000  # bytes of CPU memory for each GPU of a machine that is only named


def find_machine(arguments: argparse.Namespace) -> tuple[Machine, list[str]]:
    """Return the machine to plan for, from the options or from this machine, and notes about it.

    All GPUs run the same micro-batches, so different GPUs are planned as copies of the one with the least memory, with
    the lowest compute capability.

    Raises:
        UserError: An option is invalid, or no GPU is named and this machine has none.
    """
    found, host_memory, notes = own_gpus(), None, []
    named = [find_gpu(name) for name in arguments.gpu.split(",")] if arguments.gpu else []
    gpus = arguments.devices
    if gpus is None:
        gpus = len(named) if len(named) > 1 else len(found) or 1
    if len(named) > 1 and gpus != len(named):
        raise UserError(f"--gpu {arguments.gpu} --devices {gpus}: these are {len(named)} GPUs; leave out --devices")
    if gpus < 1:
        raise UserError(f"--devices {gpus}: must be at least 1")
    if not named and found and not arguments.gpu_memory:
        named, host_memory = found, psutil.virtual_memory().total
    gpu = min(named, key=lambda each: each.memory, default=ANY)
    if len({each.name for each in named}) > 1:
        gpu = gpu._replace(capability=min(each.capability for each in named))
        notes.append(f"The GPUs differ: the plan gives each the {gpu.memory / 1e9:g} GB of the {gpu.name}.")
    if arguments.host_memory:
        host_memory = read_size(arguments.host_memory, "--host_memory")
    elif host_memory is None:
        host_memory = gpus * HOST_MEMORY
        notes.append(f"CPU memory counts up to {host_memory / 1e9:g} GB; --host_memory changes it.")
    if arguments.gpu_memory:
        gpu = gpu._replace(memory=card_memory(arguments.gpu_memory))
    elif gpu is ANY:
        raise UserError("PyTorch finds no CUDA GPU here; name one to plan for, e.g. --gpu T4 or --gpu_memory 16GB")
    return Machine(gpu, gpus, host_memory), notes


def _with_length(options: list[str], length: int | None) -> list[str]:
    """Return the options with the length of the samples as `max_length`, where that of the settings does not suit it.

    Raises:
        UserError: The model has fewer positions.
    """
    given = read_words(options)
    if length is None or "max_length" in given:
        return options
    named = read_named_config(given) | given
    settings = Settings(**{name: value for name, value in named.items() if name in FACTS})
    if length > (positions := count_positions(settings)):
        raise UserError(f"--length {length} is beyond the {positions} positions of {settings.model}")
    fits = settings.max_length <= positions if "max_length" in named else length <= settings.max_length
    return options if fits else [*options, "--max_length", str(length)]


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
        elif not _has_tokenizer(settings):
            missing = f"The tokenizer of {settings.model} is not on this machine"
        datasets = None if missing else load_datasets(settings)
    except UserError as error:
        raise UserError(f"{error}; or plan without data, for samples of N tokens: --length N") from error
    if missing:
        assumed = f"{missing}, and a plan downloads no data: it is for --max_length {settings.max_length}"
        return Samples(settings.max_length), [f"{assumed}; --length N plans for samples of N tokens."]
    classes = len(datasets.class_names) or 2
    longest = max(max(split["length"][:]) for split in datasets.splits.values())
    return Samples(longest, classes, train=len(datasets.splits["train"])), []


def _has_tokenizer(settings: Settings) -> bool:
    """Return False if only the config of the model is here: it is shipped, and its tokenizer cannot be loaded."""
    name = tokenizer_name(settings)
    if name != settings.model or not find_shipped_config(name):
        return True
    try:
        load_tokenizer(name)
    except UserError:
        return False
    return True


def find_answer(arguments: argparse.Namespace, options: list[str], report: Callable[[str], None]) -> Answer:
    """Plan every rung, or the rungs that were asked for.

    Args:
        arguments: Options of the planner's script.
        options: The user's options for all rungs.
        report: Called with the names of the candidates whose rehearsal starts.

    Raises:
        UserError: No rung can be planned.
    """
    machine, about_machine = find_machine(arguments)
    given = read_words(options)
    if "check_only" in given:
        raise UserError("--check_only checks one rung's start: give it to the rung's script")
    if given.get("accelerator") in ("cpu", "mps"):
        raise UserError(f"--accelerator {given['accelerator']}: plans are for CUDA GPUs; leave it out")
    options = _with_length(options, arguments.length)
    choices, unplanned = list_choices(arguments.rungs or RUNGS, machine.gpus)
    if not choices:
        raise UserError("; ".join(f"{rung}: {reason}" for rung, reason in unplanned.items()))
    candidates, problems = read_candidates(choices, options, machine.gpus, machine.gpu)
    if not candidates:
        raise UserError(next(iter(problems.values())))
    problems |= unplanned
    settings = candidates[0].settings
    machine = machine._replace(overhead=overhead_of(machine.gpu, settings.cache_dir))
    if arguments.length and settings.task == "image-classification":
        raise UserError(f"--length {arguments.length}: images have no length; leave it out")
    samples, notes = find_samples(settings, arguments.length)
    every = bool(arguments.full or arguments.json or arguments.rungs)
    plans = make_plans(candidates, samples, machine, every, report)
    adapted = [plan.candidate.settings for plan in recommend(plans).values() if plan.candidate.settings.lora]
    notes += [f"{line}." for line in map(technique_of("13_lora").notice, adapted) if line]
    batch_size = max(candidate.settings.batch_size for candidate in candidates)
    return Answer(short_name(settings.model), batch_size, samples, machine, plans, problems, [*about_machine, *notes])
