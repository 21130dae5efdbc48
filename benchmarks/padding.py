"""Measure the tokens that are computed for each token trained, packed and unpacked, and the speed of both.

    python benchmarks/padding.py [--part tokens minilm bloom] [--repeats 3] [--threads 2]

Parts:
    tokens  Cuts of effective batches of 16 and 64 on one GPU: IMDb's reviews, their first sentences, which are about
            as long as the texts of AG News (60 tokens), and Chinese instructions; up to 1,024 tokens. The micro-batches
            of the training loader are counted; nothing is computed.
    minilm  MiniLM on the first sentences, an effective batch of 16: samples/s of each cut.
    bloom   A BLOOM of 6 layers on them.

Speeds come from an unchanged src/2_grad_accum.py in its own process, in 32-bit. The cuts take turns.
"""

import json
import re
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path

import common  # first import: it makes the project importable
import numpy as np
import torch
from common import model_options, part_parser, rung_command
from lightning import Fabric

from fabric_ladder import build_dataloaders, parse_settings
from fabric_ladder.data.load import load_datasets
from fabric_ladder.data.splits import TextDatasets
from fabric_ladder.data.tables import complete_splits, read_splits
from fabric_ladder.data.text_sources import find_source
from fabric_ladder.settings import DataSettings, Settings
from fabric_ladder.techniques import full_pass
from fabric_ladder.techniques.advice import explain_errors

OUT = common.RESULTS / "padding.json"
INSTRUCTIONS = "instructions_zh_2000.json"
PACKED = "--packing true --micro_batch_size"
COUNTED, TRAINED = 12_800, 640  # texts
WORDS = 36  # least words of the sentences; their mean is 60 tokens of MiniLM
CUTS = {  # counted
    "unpacked, 1 sample": "--micro_batch_size 1",
    "unpacked, 4,096 tokens": "--micro_batch_tokens 4096",
    "unpacked, 16,384 tokens": "--micro_batch_tokens 16384",
    "unpacked, all at once": "",
    "packed, rows of 1,024, one at a time": f"{PACKED} 1",
    "packed, rows of 1,024, 4,096 tokens": "--packing true --micro_batch_tokens 4096",
    "packed, rows of 1,024, 16,384 tokens": "--packing true --micro_batch_tokens 16384",
}
MOVING = {  # rungs whose passes move weights; they cut 16,384 unpacked tokens less often
    "10_fsdp": {"strategy": "fsdp"},
    "11_fsdp_cpu_offload": {"strategy": "fsdp", "offload": True},
    "12_deepspeed_zero": {"strategy": "deepspeed", "deepspeed": "zero2"},
    **{f"12_deepspeed_zero {stage}": {"strategy": "deepspeed", "deepspeed": stage}
       for stage in ("zero2_offload", "zero3", "zero3_offload")},
}  # fmt: skip
SIDES = {  # timed; no text has 256 tokens
    **{f"unpacked, {size} sample{'s' * (size > 1)}": f"--micro_batch_size {size}" for size in (1, 4, 16)},
    **{f"unpacked, {tokens:,} tokens": f"--micro_batch_tokens {tokens}" for tokens in (1024, 4096)},
    "packed, one row": f"{PACKED} 1",
    "packed, one row of 256": f"{PACKED} 1 --max_length 256",
    "packed, 4 rows of 256": f"{PACKED} 4 --max_length 256",
}
SPEED = "samples/s of the best packed cut / of the best other"


def options_of(model: str, folder: Path, train: int, held_out: int) -> list[str]:
    """Return the settings of a model and the number of its texts."""
    counts = f"--train_samples {train} --validation_samples {held_out} --test_samples {held_out} --accelerator cpu"
    return [*common.BASE, *model_options(model, folder), *counts.split()]


def save_first_sentences(folder: Path, options: list[str]) -> list[str]:
    """Write the first sentences of the reviews that the settings draw; return the setting that chooses them."""
    settings = parse_settings(options)
    splits, *_ = read_splits(settings, find_source(settings), folder)
    (folder / "short").mkdir()
    for split, reviews in complete_splits(splits, settings).items():
        lines = [json.dumps({"text": first_sentences(row["text"]), "label": row["label"]}) + "\n" for row in reviews]
        (folder / "short" / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
    return ["--dataset", str(folder / "short")]


def first_sentences(text: str) -> str:
    """Return the first sentences of a text with at least `WORDS` words; each is cut after `WORDS` words."""
    kept = []
    for sentence in re.split(r"(?<=[.!?])\s+", text.replace("<br />", " ")):
        if len(kept) >= WORDS:
            break
        kept += sentence.split()[:WORDS]
    return " ".join(kept)


def count_tokens(folder: Path) -> dict:
    """Count the tokens of each cut of an epoch."""
    options = options_of("bloom", folder, COUNTED, 1)
    tokenizer = ["--tokenizer", model_options("minilm", folder)[1]]
    instructions = Path(DataSettings().data_dir) / INSTRUCTIONS
    chosen = {
        "IMDb": tokenizer,
        "first sentences": [*tokenizer, *save_first_sentences(folder, options)],
        "instructions": f"--task instruction-tuning --bad_samples skip --dataset {instructions}".split(),
    }
    figures, texts = {}, {}
    cuts = {cut: (how, {}) for cut, how in CUTS.items()}
    cuts |= {rung: (CUTS["unpacked, 16,384 tokens"], how) for rung, how in MOVING.items()}
    for name, more in chosen.items():
        datasets = load_datasets(parse_settings([*options, *more]))
        lengths = np.asarray(datasets.splits["train"]["length"][:])
        texts[name] = {"texts": len(lengths), "mean tokens": float(lengths.mean()), "longest": int(lengths.max())}
        for batch, (cut, (how, strategy)) in product((16, 64), cuts.items()):
            settings = parse_settings([*options, *more, "--batch_size", str(batch), *how.split()])
            figures[f"{name}, batch {batch}, {cut}"] = count(settings, strategy, datasets)
    return {"conditions": {"max_length": 1024, "texts": texts}, "medians": figures}


def count(settings: Settings, strategy: dict, datasets: TextDatasets) -> dict[str, float]:
    """Return padding, passes and shapes of an epoch's micro-batches, as a GPU would get them with a strategy."""
    settings = replace(settings, full_pass=full_pass(replace(settings, **strategy), None))
    fabric = Fabric(accelerator="cpu", devices=1)
    batches = list(build_dataloaders(fabric, datasets, settings)[0])
    parts = [part for batch in batches for part in batch.micro_batches]
    return {
        "computed per token": sum(part.padded for part in parts) / sum(part.tokens for part in parts),
        "passes a batch": len(parts) / len(batches),
        "shapes": len({part.inputs["input_ids"].shape for part in parts}),
    }


def measure_speed(model: str, repeats: int, threads: int, folder: Path) -> dict:
    """Train on first sentences, cut in every way."""
    options = [*options_of(model, folder, TRAINED, 16), "--batch_size", "16"]
    options += save_first_sentences(folder, options)
    lengths = load_datasets(parse_settings(options)).splits["train"]["length"][:]  # this fills the cache
    commands = {name: rung_command(options, "2_grad_accum", *cut.split()) for name, cut in SIDES.items()}
    turns = common.take_turns(commands, repeats, threads)
    speeds = {name: figures["samples_per_second"] for name, figures in turns["medians"].items()}
    best = [max((name for name in SIDES if name.startswith(kind)), key=speeds.get) for kind in ("packed", "unpacked")]
    conditions = {"mean tokens": float(np.mean(lengths)), "train": TRAINED, "best": best}
    return {"conditions": conditions} | turns | {"ratios": {SPEED: speeds[best[0]] / speeds[best[1]]}}


def main() -> None:
    """Measure the chosen parts."""
    args = part_parser(__doc__, ["tokens", "minilm", "bloom"], 3, OUT).parse_args()
    explain_errors()
    torch.set_num_threads(args.threads)
    measures = {part: partial(measure_speed, part, args.repeats, args.threads) for part in args.part}
    if "tokens" in measures:
        measures["tokens"] = count_tokens
    common.run_parts(measures, args.out)


if __name__ == "__main__":
    main()
