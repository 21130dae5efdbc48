"""Will it fit? The peak memory of every rung, before a weight is downloaded, and the fastest rung that fits.

python scripts/plan_memory.py --config configs/imdb_bloom_560m.yaml --gpu_memory 16GB
python scripts/plan_memory.py --model Qwen/Qwen3-8B --length 2048 --gpu_memory 24GB,80GB --devices 2
python scripts/plan_memory.py --calibrate                         # measure this GPU's overhead once

Whatever is no option of this script is given to every rung, as on its command line. Of the model only its config is
read. Without --length the data is loaded, and the plan is made for its longest sample.
"""

import logging
import re
import sys
from dataclasses import replace
from pathlib import Path

import psutil
import torch
from lightning import Fabric
from rich.console import Console

from fabric_ladder import build_model, build_optimizer, parse_settings
from fabric_ladder.candidates import AGAIN, Candidate, candidates
from fabric_ladder.comparing.outputs import check_outputs, write_outputs
from fabric_ladder.errors import UserError, show_errors
from fabric_ladder.export import Arguments
from fabric_ladder.gradients import accumulate_gradients
from fabric_ladder.memory import blank_datasets, largest_batches
from fabric_ladder.metrics import Meter
from fabric_ladder.overhead import Overhead, keep_overhead, load_overhead, measure_overhead
from fabric_ladder.plan_text import Answer, print_answer, to_json, to_markdown
from fabric_ladder.planner import Limits, Plan, Samples, find_peaks, make_plan, make_ways
from fabric_ladder.rungs import choose_rungs
from fabric_ladder.settings import CONFIGS, Settings
from local_dataset_utilities import DatasetError, load_datasets, read_image_format

UNITS = {"": 1e9, "GB": 1e9, "GIB": 2**30, "MB": 1e6, "MIB": 2**20}
STANDARD = ["--config", "imdb_bloom_560m.yaml"]  # what the rungs do on a GPU when they are told nothing


def read_sizes(text: str, option: str) -> tuple[int, ...]:
    """Return sizes such as 16GB or 15.9GiB, separated by commas, in bytes, ascending.

    Raises:
        UserError: One does not parse.
    """
    sizes = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", part)
        if not found or found.group(2).upper() not in UNITS or not float(found.group(1)):
            raise UserError(f"{option} {text}: give a size such as 16GB or 15.9GiB, or several, separated by commas")
        sizes.append(round(float(found.group(1)) * UNITS[found.group(2).upper()]))
    return tuple(sorted(set(sizes)))


def find_samples(settings: Settings, length: int | None) -> Samples:
    """Return what to plan for: of texts, the longest of the data, unless a length is given.

    Raises:
        UserError: There is no data, or the length is beyond `max_length`.
    """
    if settings.task == "image-classification":
        form, _ = read_image_format(settings)
        return Samples(form.tokens, image_size=form.size)
    if length is None:
        try:
            datasets = load_datasets(settings)
        except DatasetError as error:
            raise UserError(f"{error}; or plan without data, for samples of N tokens: --length N") from error
        classes = len(datasets.class_names) or 2
        return Samples(max(max(split["length"][:]) for split in datasets.splits.values()), classes)
    if not 1 < length <= settings.max_length:
        raise UserError(f"--length {length}: must be from 2 to --max_length {settings.max_length}")
    return Samples(length)


def what_it_takes(
    plans: list[Plan], options: list[str], samples: Samples, overhead: Overhead, memory: int, gpus: int
) -> str:
    """Say what would help where nothing fits: a larger GPU, more of them, or shorter samples."""
    least = min(plans, key=lambda plan: plan.peak.total)
    needs = (least.peak.total + least.overhead) / 1e9
    if least.room >= 0:
        return f"Nothing fits: {least.candidate.name} needs {least.host / 1e9:.1f} GB of the host's memory."
    ways = [f"a GPU of {needs:.1f} GB, for {least.candidate.name}"]
    for number in (2, 4, 8):
        if number <= gpus:
            continue
        found, _ = make_ways([Candidate("10_fsdp", AGAIN, several=True)], options, number)
        (figures,) = find_peaks(found, samples, Limits((memory,), overhead))
        if make_plan(found[0], figures, options, overhead, memory).fits:
            ways.append(f"--devices {number}, for 10_fsdp with checkpointing")
            break
    if samples.image_size is None:
        ways.append(f"shorter samples, say --max_length {samples.length // 2}")
    return f"Nothing fits. It would take {'; or '.join(ways)}."


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
        accumulate_gradients(fabric, model, real, Meter(fabric), ("", []))
        optimizer.step()
        optimizer.zero_grad()


def calibrate(cache_dir: str) -> None:
    """Measure this GPU's overhead by training a model of BLOOM-560m's shape, keep it, and print it."""
    shape = [*STANDARD, "--model", str(CONFIGS / "models" / "bloom-560m.json"), "--precision", "bf16-true"]
    overhead = measure_overhead(lambda: train_briefly(shape, (512, 448, 200, 320)))
    path = keep_overhead(cache_dir, torch.cuda.get_device_name(0), overhead)
    print(
        f"CUDA context {overhead.context / 1e9:.3f} GB, cuBLAS workspace {overhead.workspace / 1e9:.3f} GB, "
        f"fragmentation {overhead.fragmentation:.1%} of the peak: {overhead.source}"
    )
    print(f"Saved {path}")


def parse() -> tuple[object, list[str]]:
    """Return this script's options, and those for the rungs."""
    parser = Arguments(description=__doc__.split("\n\n")[0], allow_abbrev=False, epilog="All other options are given "
                       "to every rung, such as --config, --model, --max_length, --batch_size.")  # fmt: skip
    parser.add_argument("--gpu_memory", metavar="16GB,…", help="of one GPU; several plan for each; default: as found")
    parser.add_argument("--host_memory", metavar="64GB", help="of the machine; default: this one's, if its GPUs are "
                        "planned for")  # fmt: skip
    parser.add_argument("--devices", type=int, help="GPUs of the machine; default: those found, else 1")
    parser.add_argument("--length", type=int, help="tokens of the longest sample; default: that of the data")
    parser.add_argument("--rungs", metavar="1,2,…", help="numbers or names, separated by commas; default: all")
    parser.add_argument("--markdown", metavar="FILE", help="write the table as Markdown")
    parser.add_argument("--json", metavar="FILE", help="write all figures, in bytes")
    parser.add_argument("--calibrate", action="store_true", help="measure what this GPU needs beside tensors")
    return parser.parse_known_args()


if __name__ == "__main__":
    show_errors()
    for name in ("lightning.fabric", "lightning.pytorch"):  # the second logs for both
        logging.getLogger(name).setLevel(logging.WARNING)  # which precision a rehearsal takes is no news
    arguments, options = parse()
    if not any(option.split("=")[0] == "--config" for option in options):
        options = [*STANDARD, *options]
    outputs = {name: getattr(arguments, name) for name in ("markdown", "json") if getattr(arguments, name)}
    check_outputs({f"--{option}": name for option, name in outputs.items()})

    ### 1 The GPUs
    if arguments.calibrate:
        calibrate(Settings().cache_dir)
        sys.exit()
    gpu = host_memory = None
    found = torch.cuda.device_count()
    gpus = arguments.devices if arguments.devices is not None else found or 1
    if gpus < 1:
        raise UserError(f"--devices {gpus}: must be at least 1")
    if arguments.gpu_memory:
        memories = read_sizes(arguments.gpu_memory, "--gpu_memory")
    elif found:
        smallest = min((torch.cuda.get_device_properties(number) for number in range(found)),
                       key=lambda each: each.total_memory)  # fmt: skip
        gpu, memories, host_memory = smallest.name, (smallest.total_memory,), psutil.virtual_memory().total
    else:
        raise UserError("PyTorch finds no CUDA GPU here: say which one to plan for, as in --gpu_memory 16GB")
    if arguments.host_memory:
        (host_memory,) = read_sizes(arguments.host_memory, "--host_memory")[-1:]

    ### 2 The candidates
    chosen = candidates(gpus)
    if arguments.rungs:
        names = {rung.stem for rung in choose_rungs(arguments.rungs.split(","))}
        chosen = [candidate for candidate in chosen if candidate.rung in names]
    ways, problems = make_ways(chosen, options, gpus)
    settings = ways[0].settings
    if Path(settings.model).is_file() and "--from_scratch" not in options:
        options += ["--from_scratch", "true"]  # a config file alone holds no weights to start from
    samples = find_samples(replace(settings, notices=[]), arguments.length)

    ### 3 Their peaks
    overhead = load_overhead(settings.cache_dir, gpu)
    figures = find_peaks(ways, samples, Limits(memories, overhead))
    plans, takes = {}, {}
    for memory in memories:
        plans[memory] = [make_plan(way, its, options, overhead, memory, host_memory)
                         for way, its in zip(ways, figures, strict=True)]  # fmt: skip
        if not any(plan.fits for plan in plans[memory]):
            takes[memory] = what_it_takes(plans[memory], options, samples, overhead, memory, gpus)

    ### 4 The answer
    name = Path(settings.model).name if Path(settings.model).exists() else settings.model
    batch = max(way.settings.batch_size for way in ways)
    answer = Answer(name, figures[0].counts.all, batch, samples, gpus, overhead, plans, problems, takes, options)
    print_answer(answer, Console() if sys.stdout.isatty() else Console(width=180))
    make = {"markdown": to_markdown, "json": to_json}
    write_outputs({path: make[option](answer) for option, path in outputs.items()})
    for path in outputs.values():
        print(f"Saved {path}")
