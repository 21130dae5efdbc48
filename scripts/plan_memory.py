"""Will it fit? What to run on a GPU, what it takes of its memory, and what it costs; before a weight is downloaded.

python scripts/plan_memory.py --gpu T4
python scripts/plan_memory.py --config configs/imdb_bloom_560m.yaml --gpu_memory 16GB --full
python scripts/plan_memory.py --model Qwen/Qwen3-8B --length 2048 --gpu_memory 24GB,80GB --devices 2
python scripts/plan_memory.py --calibrate                         # measure this GPU's overhead once

Whatever is no option of this script is given to every rung, as on its command line. Of the model only its config is
read. Without --length the plan is made for the longest sample of the data, if they are here: none are downloaded.
"""

import argparse
import logging
import sys
from pathlib import Path

import psutil
import torch
from accelerate.utils import convert_file_size_to_int
from lightning import Fabric
from rich.console import Console

from fabric_ladder import build_model, build_optimizer, parse_settings
from fabric_ladder.advice import show_errors
from fabric_ladder.checkpoints.export import Arguments
from fabric_ladder.data import prepare
from fabric_ladder.data.images import read_image_format
from fabric_ladder.data.sources import find_source
from fabric_ladder.environment import prepare_cuda
from fabric_ladder.errors import UserError
from fabric_ladder.places import CONFIGS
from fabric_ladder.planning.candidates import CHECKPOINTING, list_choices, read_candidates
from fabric_ladder.planning.formulas import ASSUMED, keep_overhead, load_overhead, measure_overhead
from fabric_ladder.planning.gpus import ANY, find_gpu
from fabric_ladder.planning.planner import Machine, Plan, Samples, find_gpus, find_peaks, make_plan, recommend
from fabric_ladder.planning.predict import blank_datasets, largest_batches
from fabric_ladder.planning.report import Answer, print_answer, to_json, to_markdown
from fabric_ladder.rungs import choose_rungs
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.settings import Settings
from fabric_ladder.tools.outputs import check_outputs, write_outputs
from fabric_ladder.training.gradients import accumulate_gradients
from local_dataset_utilities import IMDB_ARCHIVE, read_split

STANDARD = ["--config", "imdb_bloom_560m.yaml"]  # what the rungs do on a GPU when they are told nothing


def read_sizes(text: str, option: str) -> tuple[int, ...]:
    """Return sizes such as 16GB or 15.9GiB, separated by commas, in bytes, ascending; a mere number is in GB.

    Raises:
        UserError: One does not parse.
    """
    parts = [part.strip().upper() for part in text.split(",")]  # a small b would be bits
    try:
        sizes = {convert_file_size_to_int(part if part[-1:].isalpha() else f"{part}GB") for part in parts}
    except (ValueError, OverflowError):
        sizes = {0}
    if 0 in sizes:
        raise UserError(f"{option} {text}: give a size such as 16GB or 15.9GiB, or several, separated by commas")
    return tuple(sorted(sizes))


def find_machine(arguments: argparse.Namespace) -> Machine:
    """Return what to plan for, by the options or as found here.

    Raises:
        UserError: An option makes no sense, or no GPU is named and none is here.
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
        raise UserError(
            "PyTorch finds no CUDA GPU here: say which one to plan for, as in --gpu T4 or --gpu_memory 16GB"
        )
    else:
        memory_limits = (gpu.memory,)
    return Machine(memory_limits, ASSUMED, host_memory, gpus, gpu)


def find_samples(settings: Settings, length: int | None) -> tuple[Samples, list[str]]:
    """Return what to plan for, and in words why it is not the longest sample of the data, if it is not.

    Raises:
        UserError: Something is wrong with the data, or the length is beyond `max_length`.
    """
    if settings.task == "image-classification":
        image_format, _ = read_image_format(settings)
        return Samples(image_format.tokens, image_size=image_format.size), []
    if length is not None:
        if not 1 < length <= settings.max_length:
            raise UserError(f"--length {length}: must be from 2 to --max_length {settings.max_length}")
        return Samples(length), []
    try:
        if find_source(settings, find_imdb, read_split).key[0] == "hub":
            raise FileNotFoundError(f"{settings.dataset} is on the Hub")
        datasets = prepare(settings, find_imdb, read_split)
    except FileNotFoundError as missing:
        assumed = f"{missing}, and a plan downloads no data: it is for --max_length {settings.max_length}"
        return Samples(settings.max_length), [f"{assumed}; --length N plans for samples of N tokens."]
    except UserError as error:
        raise UserError(f"{error}; or plan without data, for samples of N tokens: --length N") from error
    classes = len(datasets.class_names) or 2
    return Samples(max(max(split["length"][:]) for split in datasets.splits.values()), classes), []


def find_imdb(data_dir: str) -> Path:
    """Return IMDb's folder or archive, where a run would look before it downloads it.

    Raises:
        FileNotFoundError: It is not there.
    """
    for path in (Path(folder) / name for folder in (data_dir, "") for name in ("aclImdb", IMDB_ARCHIVE)):
        if path.exists():
            return path
    raise FileNotFoundError(f"IMDb is not in {data_dir}")


def what_it_takes(
    plans: list[Plan], options: list[str], samples: Samples, machine: Machine, memory_limit: int,
) -> str:  # fmt: skip
    """Say what would help where nothing fits: a larger GPU, more of them, or shorter samples."""
    able = [plan for plan in plans if not plan.emulated]
    if not able:
        return (
            f"Nothing to recommend: bfloat16 is only emulated by {machine.gpu.name}; plan without --precision bf16-true"
        )
    least = min(able, key=lambda plan: plan.peak.total)
    if least.free >= 0:
        return f"Nothing fits: {least.candidate.name} needs {least.host / 1e9:.1f} GB of the host's memory."
    remedies = [f"a GPU of {least.needed / 1e9:.1f} GB, for {least.candidate.name}"]
    for gpus in (2, 4, 8):
        if gpus <= machine.gpus:
            continue
        try:
            (candidate,), _ = read_candidates([("10_fsdp", CHECKPOINTING)], options, gpus, machine.gpu)
        except UserError:  # which it does not go with, or an effective batch too small for so many
            break
        larger = machine._replace(memory_limits=(memory_limit,), host_memory=None, gpus=gpus)
        (figures,) = find_peaks([candidate], samples, larger)
        if make_plan(candidate, figures, options, larger, memory_limit).fits:
            remedies.append(f"--devices {gpus}, for 10_fsdp with checkpointing")
            break
    if samples.image_size is None:
        remedies.append(f"shorter samples, say --max_length {samples.length // 2}")
    return f"Nothing fits. It would take {'; or '.join(remedies)}."


def train_briefly(options: list[str], lengths: tuple[int, ...]) -> None:
    """Take three optimizer steps with random weights, in micro-batches of so many tokens a sample each."""
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
    prepare_cuda("cuda", deterministic=False)  # as runs do
    shape = [*STANDARD, "--model", str(CONFIGS / "models" / "bloom-560m.json"), "--precision", "bf16-true"]
    overhead = measure_overhead(lambda: train_briefly(shape, (512, 448, 200, 320)))
    path = keep_overhead(cache_dir, torch.cuda.get_device_name(0), overhead)
    print(
        f"CUDA context {overhead.context / 1e9:.3f} GB, cuBLAS workspace {overhead.workspace / 1e9:.3f} GB, "
        f"fragmentation {overhead.fragmentation:.1%} of the peak: {overhead.source}"
    )
    print(f"Saved {path}")


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options, and those for the rungs."""
    parser = Arguments(description=__doc__.split("\n\n")[0], allow_abbrev=False, epilog="All other options are given "
                       "to every rung, such as --config, --model, --max_length, --batch_size.")  # fmt: skip
    parser.add_argument("--gpu", metavar="T4", help="GPU to plan for, say T4, RTX 4090 or A100 80GB; default: as found")
    parser.add_argument("--gpu_memory", metavar="16GB,…", help="of one GPU; several plan for each; default: the GPU's")
    parser.add_argument("--host_memory", metavar="64GB", help="of the machine; default: this one's, if its GPUs are "
                        "planned for")  # fmt: skip
    parser.add_argument("--devices", type=int, help="GPUs of the machine; default: those found, else 1")
    parser.add_argument("--length", type=int, help="tokens of the longest sample; default: that of the data")
    parser.add_argument("--rungs", metavar="1,2,…", help="numbers or names, separated by commas; default: all")
    parser.add_argument("--full", action="store_true", help="print a table of all ways, too")
    parser.add_argument("--markdown", metavar="FILE", help="write the full answer as Markdown")
    parser.add_argument("--json", metavar="FILE", help="write all figures, in bytes")
    parser.add_argument("--calibrate", action="store_true", help="measure what this GPU needs beside tensors")
    arguments, options = parser.parse_known_args()
    given = any(option.split("=")[0] == "--config" for option in options)
    return arguments, options if given else [*STANDARD, *options]


def find_answer(arguments: argparse.Namespace, options: list[str]) -> Answer:
    """Plan for every size of GPU."""
    machine = find_machine(arguments)
    choices = list_choices(machine.gpus)
    if arguments.rungs:
        names = {rung.stem for rung in choose_rungs(arguments.rungs.split(","))}
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


if __name__ == "__main__":
    show_errors()
    for name in ("lightning.fabric", "lightning.pytorch"):  # the second logs for both
        logging.getLogger(name).setLevel(logging.WARNING)  # which precision a rehearsal takes is no news
    arguments, options = parse()
    outputs = {name: getattr(arguments, name) for name in ("markdown", "json") if getattr(arguments, name)}
    check_outputs({f"--{option}": name for option, name in outputs.items()})
    if arguments.calibrate:
        calibrate(Settings().cache_dir)
        sys.exit()
    answer = find_answer(arguments, options)
    print_answer(answer, Console(), arguments.full)
    make = {"markdown": to_markdown, "json": to_json}
    write_outputs({path: make[option](answer) for option, path in outputs.items()})
    for path in outputs.values():
        print(f"Saved {path}")
