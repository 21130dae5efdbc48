"""Predict memory and traffic of one run on 1 to 1,024 GPUs, and the number of GPUs that each link can feed."""

import argparse
import sys
from dataclasses import replace
from functools import cache

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from fabric_ladder.data.images import read_image_format
from fabric_ladder.errors import UserError
from fabric_ladder.planning.candidates import EVAL_BATCH_TOKENS, read_settings
from fabric_ladder.planning.predict import blank_datasets, complete, largest_batches, to_rehearse
from fabric_ladder.planning.rehearsal import rehearse
from fabric_ladder.planning.scaling import LINKS, TECHNIQUES, Work, bytes_sent, describe_work, most_gpus
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.build import build_model
from fabric_ladder.techniques.memory import Counts, Peak

STANDARD = ["--config", "imdb_bloom_560m.yaml", "--batch_size", "1024", "--micro_batch_size", "8"]
GPUS = [2**power for power in range(11)]
REHEARSED = 16  # most GPUs of a rehearsal, which cuts every tensor into one part per GPU
RUNGS = {"ddp": ("9_ddp",), "fsdp2": ("10_fsdp",)}
RUNGS |= {stage: ("12_deepspeed_zero", "--deepspeed", stage) for stage in ("zero1", "zero2", "zero3")}


@cache
def rehearsed(settings: Settings, length: int, pixels: int | None, ranks: int | None) -> tuple[Peak, Counts]:
    """Return a run's peak and its model's parameters; runs that only differ in their number of GPUs share them."""
    with rehearse(settings, blank_datasets(2, pixels), ranks) as rehearsal:
        return rehearsal.peak(*largest_batches(settings, length, pixels, settings.ranks)), rehearsal.counts


def memory(technique: str, options: list[str], length: int, pixels: int | None, gpus: int) -> int | None:
    """Return the predicted bytes of tensors on each GPU at the peak, or None if the planner has no prediction.

    FSDP2 is rehearsed on up to `REHEARSED` GPUs. On more, the sharded part shrinks as 1 / N, and the rest is constant.
    """
    rung, *extra = RUNGS[technique]
    try:
        settings = read_settings(rung, [*options, *extra], gpus)
    except UserError:  # ZeRO in 32 bits has no prediction
        return None
    share = -(-settings.batch_size // gpus)
    share = min(
        share, 2 * (settings.micro_batch_size or share)
    )  # two micro-batches: the second adds to existing gradients

    def peak(ranks: int) -> int:
        alike = replace(to_rehearse(settings), devices=ranks, batch_size=share * ranks)
        return complete(settings, *rehearsed(alike, length, pixels, ranks if technique == "fsdp2" else None)).total

    if technique != "fsdp2":
        return peak(min(gpus, 2) if technique == "ddp" else 1)  # more GPUs change nothing
    if gpus <= REHEARSED:
        return peak(gpus)
    half, most = peak(REHEARSED // 2), peak(REHEARSED)
    return round(most - (half - most) * (1 - REHEARSED / gpus))


def table(header: list[str], rows: list[list[str]]) -> Table:
    """Return a table with a left-aligned first column."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, title in enumerate(header):
        result.add_column(title, justify="right" if number else "left")
    for row in rows:
        result.add_row(*row)
    return result


def print_tables(arguments: argparse.Namespace, options: list[str]) -> None:
    """Print the table of memory and traffic, and the table of links."""
    given = any(option.split("=")[0] == "--config" for option in options)
    standard = STANDARD[2:] if given else STANDARD
    options = ["--from_scratch", "true", "--eval_batch_tokens", EVAL_BATCH_TOKENS, *standard, *options]
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
