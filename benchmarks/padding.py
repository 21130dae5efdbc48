"""Tokens computed per token trained, packed and not, and what that is worth; exit status 1 when a target is missed.

    python benchmarks/padding.py [--part tokens minilm bloom] [--size 1.0] [--repeats 3] [--threads 2]

Parts:
    tokens  Cuts of effective batches of 16 and 64: IMDb's reviews, their first sentences, which are about as long as
            the texts of AG News (60 tokens), and Chinese instructions; up to 1,024 tokens. The micro-batches of
            the training loader are counted; nothing is computed.
    minilm  MiniLM on such first sentences, an effective batch of 16: samples/s of each cut.
    bloom   A BLOOM of 6 layers on them.

Speeds come from an unchanged src/2_grad_accum.py in a process of its own, in 32-bit, the cuts in turns. The best
packed cut is held against the best other. `--size 0.1` rehearses on a tenth of the texts, which proves nothing.
"""

import json
import re
import statistics
import sys
from functools import partial
from pathlib import Path

import common  # first import: it makes the project importable
import datasets as hf
import numpy as np
import torch
from against_blog import BLOOM, model_options
from common import alternate, medians, part_parser, run_parts
from lightning import Fabric

import local_dataset_utilities as data
from fabric_ladder import build_dataloaders, parse_settings
from fabric_ladder.settings import DataSettings

OUT = common.RESULTS / "padding.json"
RUNG = "2_grad_accum"
INSTRUCTIONS = "instructions_zh_2000.json"
LONGEST, ROW = 1024, "packed, rows of 1,024, "
COUNTED, TRAINED = 12_800, 640  # numbers of counted and of trained texts
WORDS = 36  # least words of the sentences; their mean is 60 tokens of MiniLM
CUTS = {  # counted
    "unpacked, 1 sample": ["--micro_batch_size", "1"],
    "unpacked, 4,096 tokens": ["--micro_batch_tokens", "4096"],
    "unpacked, all at once": [],
    f"{ROW}one at a time": ["--packing", "true", "--micro_batch_size", "1"],
    f"{ROW}4,096 tokens": ["--packing", "true", "--micro_batch_tokens", "4096"],
    f"{ROW}16,384 tokens": ["--packing", "true", "--micro_batch_tokens", "16384"],
} | {f"--pack_rows {rows}": ["--packing", "true", "--pack_rows", str(rows)] for rows in (1, 2, 4)}
SIDES = {  # timed
    "unpacked, 1 sample": ["--micro_batch_size", "1"],
    "unpacked, 4 samples": ["--micro_batch_size", "4"],
    "unpacked, 16 samples": ["--micro_batch_size", "16"],
    "unpacked, 1,024 tokens": ["--micro_batch_tokens", "1024"],
    "unpacked, 4,096 tokens": ["--micro_batch_tokens", "4096"],
    "packed, one row": ["--packing", "true", "--micro_batch_size", "1"],
    "packed, one row of 256": ["--packing", "true", "--micro_batch_size", "1", "--max_length", "256"],
    "packed, 4 rows of 256": ["--packing", "true", "--micro_batch_size", "4", "--max_length", "256"],
}  # no text has 256 tokens
FASTER = [("samples/s of the best packed cut / of the best other", "min", 1.3)]
TEXTS = ("IMDb", "first sentences", "instructions")
TARGETS = {  # (ratio, "min" or "max", bound)
    "tokens": [
        (f"{texts}, batch {batch}, {name}", "max", 1.03) for texts in TEXTS for batch in (16, 64) for name in CUTS
        if name.startswith(ROW)
    ],
    "minilm": FASTER,
    "bloom": FASTER,
}  # fmt: skip


def options_of(folder: Path, model: str, *more: str) -> list[str]:
    """Return the settings of a model of `model_options`, on the CPU."""
    return [*common.BASE, "--accelerator", "cpu", *model_options(model, folder), *more]


def drawn(counts: dict[str, int]) -> list[str]:
    """Return the settings that draw a number of texts for each split."""
    return [part for split, count in counts.items() for part in (f"--{split}_samples", str(count))]


def save_first_sentences(folder: Path, counts: dict[str, int]) -> list[str]:
    """Write the first sentences of reviews for each split; return the settings that choose them."""
    draw = drawn(counts)
    common.save_texts(parse_settings(options_of(folder, "bloom", *draw)), folder / "reviews")
    (folder / "short").mkdir()
    for split, reviews in hf.load_from_disk(folder / "reviews").items():
        rows = [{"text": first_sentences(row["text"]), "label": row["label"]} for row in reviews]
        lines = "".join(f"{json.dumps(row)}\n" for row in rows)
        (folder / "short" / f"{split}.jsonl").write_text(lines, encoding="utf-8")
    return ["--dataset", str(folder / "short"), *draw]


def first_sentences(text: str) -> str:
    """Return the first sentences of a text with at least `WORDS` words; each is cut after `WORDS` words."""
    kept, sentences = [], re.split(r"(?<=[.!?])\s+", text.replace("<br />", " "))
    for sentence in sentences:
        if len(kept) >= WORDS:
            break
        kept += sentence.split()[:WORDS]
    return " ".join(kept)


def count_tokens(folder: Path, size: float) -> dict:
    """Count the tokens of each cut of an epoch."""
    counts = {"train": max(64, round(COUNTED * size)), "validation": 1, "test": 1}
    tokenizer = ["--tokenizer", model_options("minilm", folder)[1]]
    chosen = {
        "IMDb": [*tokenizer, *drawn(counts)],
        "first sentences": [*tokenizer, *save_first_sentences(folder, counts)],
    }
    if (path := Path(DataSettings().data_dir) / INSTRUCTIONS).is_file():
        chosen["instructions"] = ["--task", "instruction-tuning", "--dataset", str(path), "--bad_samples", "skip"]
    figures, ratios, texts = {}, {}, {}
    for name, options in chosen.items():
        options = options_of(folder, "bloom", *options, "--max_length", str(LONGEST))
        datasets = data.load_datasets(parse_settings(options))
        lengths = np.asarray(datasets.splits["train"]["length"][:])
        texts[name] = {"texts": len(lengths), "mean tokens": float(lengths.mean()), "longest": int(lengths.max())}
        for batch in (16, 64):
            for cut, more in CUTS.items():
                settings = parse_settings([*options, "--batch_size", str(batch), *more])
                side = f"{name}, batch {batch}, {cut}"
                figures[side] = count(settings, datasets)
                if cut.startswith(ROW):
                    ratios[side] = figures[side]["computed per token"]
    shown = [[side, *figure.values()] for side, figure in figures.items()]
    common.print_table(["tokens", *next(iter(figures.values()))], shown)
    return {"conditions": {"max_length": LONGEST, "texts": texts}, "figures": figures, "ratios": ratios}


def count(settings, datasets) -> dict[str, float]:
    """Return padding, passes and shapes of an epoch's micro-batches."""
    fabric = Fabric(accelerator="cpu", devices=1)
    batches = list(build_dataloaders(fabric, datasets, settings)[0])
    parts = [part for batch in batches for part in batch.micro_batches]
    return {
        "computed per token": sum(part.padded for part in parts) / sum(part.tokens for part in parts),
        "passes a batch": len(parts) / len(batches),
        "shapes": len({part.inputs["input_ids"].shape for part in parts}),
    }


def measure_speed(part: str, folder: Path, size: float, repeats: int, threads: int) -> dict:
    """Train on first sentences, cut in every way."""
    counts = {"train": max(32, round(TRAINED * size)), "validation": 16, "test": 16}
    options = options_of(folder, part, *save_first_sentences(folder, counts), "--batch_size", "16")
    lengths = data.load_datasets(parse_settings(options)).splits["train"]["length"][:]  # which fills the cache
    sides = {name: partial(common.run_rung, RUNG, [*options, *cut], threads) for name, cut in SIDES.items()}
    figures = alternate(repeats, **sides)
    middle = medians(figures)
    speeds = {name: figure["samples_per_second"] for name, figure in middle.items()}
    packed, other = (
        max((name for name in SIDES if name.startswith(kind)), key=speeds.get) for kind in ("packed", "unpacked")
    )
    ratios = {FASTER[0][0]: speeds[packed] / speeds[other]}
    conditions = {"model": "all-MiniLM-L6-v2" if part == "minilm" else BLOOM, "mean tokens": statistics.mean(lengths)}
    conditions |= counts | {"best": [packed, other]}
    return {"conditions": conditions, "repeats": figures, "medians": middle, "ratios": ratios}


def main() -> int:
    """Measure the chosen parts and return the exit status."""
    parser = part_parser(__doc__, ("tokens", "minilm", "bloom"), 3, OUT)
    parser.add_argument("--size", type=float, default=1.0, help="share of the texts; below 1 for a rehearsal")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    def measure(part: str, folder: Path) -> dict:
        common.imdb_archive()
        if part == "tokens":
            return count_tokens(folder, args.size)
        return measure_speed(part, folder, args.size, args.repeats, args.threads)

    return run_parts({part: partial(measure, part) for part in args.part}, args.out, TARGETS)


if __name__ == "__main__":
    sys.exit(main())
