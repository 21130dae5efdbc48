"""How far do more GPUs help? Memory and bytes sent by 1 to 1,024 GPUs, and from where on the link decides.

python scripts/plan_scaling.py --batch_size 1024 --micro_batch_size 8
python scripts/plan_scaling.py --model Qwen/Qwen3-8B --task instruction-tuning --batch_size 512 --tflops 989

Whatever is no option of this script is given to rungs 9, 10 and 12, as on their command line. Of the model only its
config is read.
"""

import logging
import sys
from dataclasses import replace
from functools import cache

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from fabric_ladder.advice import show_errors
from fabric_ladder.checkpoints.export import Arguments
from fabric_ladder.data.images import read_image_format
from fabric_ladder.errors import UserError
from fabric_ladder.models.build import build_model
from fabric_ladder.planning.candidates import EVAL_BATCH_TOKENS, read_settings
from fabric_ladder.planning.formulas import Counts
from fabric_ladder.planning.predict import blank_datasets, complete, largest_batches, to_rehearse
from fabric_ladder.planning.rehearsal import rehearse
from fabric_ladder.planning.scaling import LINKS, TECHNIQUES, Work, bytes_sent, describe_work, most_gpus
from fabric_ladder.planning.tracker import Peak
from fabric_ladder.settings import Settings

STANDARD = ["--config", "imdb_bloom_560m.yaml", "--batch_size", "1024", "--micro_batch_size", "8"]
GPUS = [2**power for power in range(11)]
REHEARSED = 16  # a rehearsal cuts every tensor into as many parts as there are GPUs
RUNGS = {"ddp": ("9_ddp",), "fsdp2": ("10_fsdp",)}
RUNGS |= {stage: ("12_deepspeed_zero", "--deepspeed", stage) for stage in ("zero1", "zero2", "zero3")}


@cache
def rehearsed(settings: Settings, length: int, pixels: int | None, ranks: int | None) -> tuple[Peak, Counts]:
    """Return a run's peak and its model's parameters; runs that differ in their number of GPUs alone share them."""
    with rehearse(settings, blank_datasets(2, pixels), ranks) as rehearsal:
        return rehearsal.peak(*largest_batches(settings, length, pixels, settings.ranks)), rehearsal.counts


def memory(technique: str, options: list[str], length: int, pixels: int | None, gpus: int) -> int | None:
    """Return the bytes of the tensors of each GPU at the peak, as the planner predicts them; None where it does not.

    FSDP2 is rehearsed on up to `REHEARSED` GPUs; on N more, what is sharded shrinks as 1 / N, and the rest stays.
    """
    rung, *extra = RUNGS[technique]
    try:
        settings = read_settings(rung, [*options, *extra], gpus)
    except UserError:  # of ZeRO in 32 bits it is not known
        return None
    share = -(-settings.batch_size // gpus)
    share = min(share, 2 * (settings.micro_batch_size or share))  # a second micro-batch adds to gradients, a third too

    def peak(ranks: int) -> int:
        alike = replace(to_rehearse(settings), devices=ranks, batch_size=share * ranks)
        return complete(settings, *rehearsed(alike, length, pixels, ranks if technique == "fsdp2" else None)).total

    if technique != "fsdp2":
        return peak(min(gpus, 2) if technique == "ddp" else 1)  # as many as change a GPU's own tensors
    if gpus <= REHEARSED:
        return peak(gpus)
    half, most = peak(REHEARSED // 2), peak(REHEARSED)
    return round(most - (half - most) * (1 - REHEARSED / gpus))


def parse() -> tuple[object, list[str]]:
    """Return this script's options, and those for the rungs."""
    parser = Arguments(description=__doc__.split("\n\n")[0], allow_abbrev=False, epilog="All other options are given "
                       "to the rungs, such as --config, --model, --batch_size, --micro_batch_size.")  # fmt: skip
    parser.add_argument("--length", type=int, help="tokens of a sample; default: --max_length")
    parser.add_argument("--tflops", type=float, default=312, help="peak of a GPU in 16 bits; default: 312, an A100")
    parser.add_argument("--utilization", type=float, default=0.4, help="share of the peak that is reached; default: "
                        "0.4, as Llama 3 in 16 bits on H100 (Dubey et al., 2024, table 4)")  # fmt: skip
    arguments, options = parser.parse_known_args()
    for name in ("tflops", "utilization"):
        if not getattr(arguments, name) > 0:
            raise UserError(f"--{name} {getattr(arguments, name)}: must be above 0")
    given = any(option.split("=")[0] == "--config" for option in options)
    return arguments, ["--from_scratch", "true", "--eval_batch_tokens", EVAL_BATCH_TOKENS,
                       *(STANDARD[2:] if given else STANDARD), *options]  # fmt: skip


def table(header: list[str], rows: list[list[str]]) -> Table:
    """Return a table whose first column stands left."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(header):
        result.add_column(title, justify="right" if number else "left")
    for row in rows:
        result.add_row(*row)
    return result


def main() -> None:
    """Print both tables."""
    arguments, options = parse()
    settings = read_settings("10_fsdp", options)
    image = read_image_format(settings)[0] if settings.task == "image-classification" else None
    length, pixels = (image.tokens, image.size) if image else (arguments.length or settings.max_length, None)
    if not 1 < length <= settings.max_length and not image:
        raise UserError(f"--length {length}: must be from 2 to --max_length {settings.max_length}")
    micro_batch = settings.micro_batch_size or settings.batch_size
    if isinstance(settings.micro_batch_tokens, int):
        micro_batch = min(settings.batch_size, max(1, settings.micro_batch_tokens // length))
    precision = settings.precision
    with torch.device("meta"):
        model = build_model(settings, blank_datasets(2, pixels))
    work: Work = describe_work(model, precision, settings.batch_size, micro_batch, length)
    counts = [gpus for gpus in GPUS if gpus <= work.samples]
    console = Console() if sys.stdout.isatty() else Console(width=120)
    console.print(
        f"{settings.model} ({work.weights / 1e6:,.1f} M parameters) · effective batch {work.samples} · micro-batch "
        f"{micro_batch} · samples of {length:,} tokens · {precision}", soft_wrap=True, highlight=False,
    )  # fmt: skip
    rows = []
    for gpus in counts:
        held = [memory(technique, options, length, pixels, gpus) for technique in TECHNIQUES]
        sent = [bytes_sent(technique, work, gpus) / 1e9 for technique in TECHNIQUES]
        shown = ["–" if one is None else f"{one / 1e9:.2f}" for one in held]
        rows.append([str(gpus), *(f"{one} · {other:.2f}" for one, other in zip(shown, sent, strict=True))])
    console.print("GB (10^9 bytes) of tensors at a GPU's peak · GB that it sends in an optimizer step", highlight=False)
    console.print(table(["GPUs", *TECHNIQUES], rows))
    speed = arguments.tflops * arguments.utilization * 1e12
    rows = []
    for link, rate in LINKS.items():
        most = [most_gpus(technique, work, counts, speed, rate) for technique in TECHNIQUES]
        rows.append([f"{link}, {rate / 1e9:g} GB/s", *("–" if gpus is None else str(gpus) for gpus in most)])
    console.print(f"The most GPUs that are kept busy at {arguments.tflops:g} TFLOP/s x {arguments.utilization:g}: "
                  "beyond, sending takes longer than computing", highlight=False)  # fmt: skip
    console.print(table(["link", *TECHNIQUES], rows))


if __name__ == "__main__":
    show_errors()
    for name in ("lightning.fabric", "lightning.pytorch"):
        logging.getLogger(name).setLevel(logging.WARNING)
    main()
