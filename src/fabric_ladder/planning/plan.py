"""Plan a run: find the machine and the samples, predict every rung, and recommend; calibrate the prediction."""

import argparse
from pathlib import Path

import psutil
import torch
from accelerate.utils import convert_file_size_to_int
from lightning import Fabric

from fabric_ladder.cli import parse_settings
from fabric_ladder.data.images import read_image_format
from fabric_ladder.data.sources import find_source
from fabric_ladder.environment import prepare_cuda
from fabric_ladder.errors import UserError
from fabric_ladder.places import CONFIGS
from fabric_ladder.planning.candidates import list_choices, read_candidates
from fabric_ladder.planning.gpus import ANY, find_gpu
from fabric_ladder.planning.overhead import ASSUMED, keep_overhead, load_overhead, measure_overhead
from fabric_ladder.planning.planner import Machine, Plan, Samples, find_gpus, find_peaks, make_plan, recommend
from fabric_ladder.planning.predict import blank_datasets, largest_batches
from fabric_ladder.planning.report import Answer
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.build import build_model, build_optimizer
from fabric_ladder.techniques.technique import CHECKPOINTING
from fabric_ladder.training.gradients import accumulate_gradients
from local_dataset_utilities import find_dataset, load_datasets

STANDARD = ["--config", "imdb_bloom_560m.yaml"]  # the default of the rungs on a GPU


def read_sizes(text: str, option: str) -> tuple[int, ...]:
    """Return sizes such as 16GB or 15.9GiB, separated by commas, in bytes, ascending; the default unit is GB.

    Raises:
        UserError: A size does not parse.
    """
    parts = [part.strip().upper() for part in text.split(",")]  # a lowercase b would mean bits
    try:
        sizes = {convert_file_size_to_int(part if part[-1:].isalpha() else f"{part}GB") for part in parts}
    except (ValueError, OverflowError):
        sizes = {0}
    if 0 in sizes:
        raise UserError(f"{option} {text}: give a size such as 16GB or 15.9GiB, or several, separated by commas")
    return tuple(sorted(sizes))


def find_machine(arguments: argparse.Namespace) -> Machine:
    """Return the machine to plan for, from the options or from this machine.

    Raises:
        UserError: An option is invalid, or no GPU is named and this machine has none.
    """
    found, gpu, host_memory = find_gpus(), ANY, None
    gpus = arguments.devices if arguments.devices is not None else len(found) or 1
    if gpus < 1:
        raise UserError(f"--devices {gpus}: must be at least 1")
    if arguments.gpu:
        gpu = find_gpu(arguments.gpu)
    elif found and not arguments.gpu_memory:
        gpu, host_memory = min(found, key=lambda each: each.memory), psutil.virtual_memory().total
    if arguments.host_memory:
        host_memory = read_sizes(arguments.host_memory, "--host_memory")[-1]
    if arguments.gpu_memory:
        memory_limits = read_sizes(arguments.gpu_memory, "--gpu_memory")
    elif gpu is ANY:
        raise UserError("PyTorch finds no CUDA GPU here; name one to plan for, e.g. --gpu T4 or --gpu_memory 16GB")
    else:
        memory_limits = (gpu.memory,)
    return Machine(memory_limits, ASSUMED, host_memory, gpus, gpu)


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


def what_it_takes(
    plans: list[Plan], options: list[str], samples: Samples, machine: Machine, memory_limit: int,
) -> str:  # fmt: skip
    """Return a line about what would help if nothing fits: a larger GPU, more GPUs, or shorter samples."""
    able = [plan for plan in plans if not plan.emulated]
    if not able:
        return (
            f"Nothing to recommend: bfloat16 is only emulated by {machine.gpu.name}; plan without --precision bf16-true"
        )
    least = min(able, key=lambda plan: plan.peak.total)
    if least.free >= 0:
        return f"Nothing fits: {least.candidate.name} needs {least.host / 1e9:.1f} GB of CPU memory."
    remedies = [f"a GPU of {least.needed / 1e9:.1f} GB, for {least.candidate.name}"]
    for gpus in (2, 4, 8):
        if gpus <= machine.gpus:
            continue
        try:
            (candidate,), _ = read_candidates([("10_fsdp", CHECKPOINTING)], options, gpus, machine.gpu)
        except UserError:  # an option does not fit FSDP, or the effective batch is too small for N GPUs
            break
        larger = machine._replace(memory_limits=(memory_limit,), host_memory=None, gpus=gpus)
        (figures,) = find_peaks([candidate], samples, larger)
        if make_plan(candidate, figures, options, larger, memory_limit).fits:
            remedies.append(f"--devices {gpus}, for 10_fsdp with checkpointing")
            break
    if samples.image_size is None:
        remedies.append(f"shorter samples, e.g. --max_length {samples.length // 2}")
    return f"Nothing fits. It would take {'; or '.join(remedies)}."


def train_briefly(options: list[str], lengths: tuple[int, ...]) -> None:
    """Take three optimizer steps with random weights, in micro-batches whose samples have these lengths in tokens."""
    settings = parse_settings([*options, "--from_scratch", "true"], batch_size=4 * len(lengths), micro_batch_size=4)
    fabric = Fabric(accelerator=settings.accelerator, devices=1, precision=settings.precision)
    model = fabric.setup(build_model(settings, blank_datasets(2)))
    optimizer = fabric.setup_optimizers(build_optimizer(settings, model))
    batch = [largest_batches(settings, length)[0][0] for length in lengths]
    for _ in range(3):
        real = [each._replace(inputs={name: torch.ones_like(tensor, device="cpu") for name, tensor in
                                      each.inputs.items()}) for each in batch]  # fmt: skip
        accumulate_gradients(fabric, model, real, Meter(fabric))
        optimizer.step()
        optimizer.zero_grad()


def calibrate(cache_dir: str) -> None:
    """Measure this GPU's overhead by training a model of BLOOM-560m's shape, keep it, and print it."""
    prepare_cuda("cuda", deterministic=False)  # as in a run
    shape = [*STANDARD, "--model", str(CONFIGS / "models" / "bloom-560m.json"), "--precision", "bf16-true"]
    overhead = measure_overhead(lambda: train_briefly(shape, (512, 448, 200, 320)))
    path = keep_overhead(cache_dir, torch.cuda.get_device_name(0), overhead)
    print(
        f"CUDA context {overhead.context / 1e9:.3f} GB, cuBLAS workspace {overhead.workspace / 1e9:.3f} GB, "
        f"fragmentation {overhead.fragmentation:.1%} of the peak: {overhead.source}"
    )
    print(f"Saved {path}")


def find_answer(arguments: argparse.Namespace, options: list[str]) -> Answer:
    """Plan for every size of GPU."""
    machine = find_machine(arguments)
    choices = list_choices(machine.gpus)
    if arguments.rungs:
        names = {rung.stem for rung in arguments.rungs}
        choices = [choice for choice in choices if choice[0] in names]
    candidates, problems = read_candidates(choices, options, machine.gpus, machine.gpu)
    settings = candidates[0].settings
    if Path(settings.model).is_file() and "--from_scratch" not in options:
        options = [*options, "--from_scratch", "true"]  # a config file alone holds no weights to start from
    machine = machine._replace(overhead=load_overhead(settings.cache_dir, machine.gpu.name))
    samples, notes = find_samples(settings, arguments.length)
    figures = find_peaks(candidates, samples, machine)
    plans, takes = {}, {}
    for limit in machine.memory_limits:
        plans[limit] = [make_plan(candidate, its, options, machine, limit)
                        for candidate, its in zip(candidates, figures, strict=True)]  # fmt: skip
        if not any(recommend(plans[limit]).values()):
            takes[limit] = what_it_takes(plans[limit], options, samples, machine, limit)
    name = Path(settings.model).name if Path(settings.model).exists() else settings.model
    batch_size = max(candidate.settings.batch_size for candidate in candidates)
    return Answer(name, figures[0].counts.all, batch_size, samples, machine, options, plans, problems, takes, notes)
