"""Predict the peak memory of the rungs for models with random weights.

    python benchmarks/memory_ladder.py [--model bloom-560m …] [--only TEXT …]

Models: BLOOM-560m, ViT-L/16, adapters on BLOOM-7b1, Qwen3-8B and Llama 3.1 8B with one more technique in each row,
until the model fits into 24 GB, and the models of the posts that have measured figures.

The predictions are for a GPU (`fabric_ladder.planning.predict`); harvest.py measures some of them, with the data made
here. All samples have full length: texts of 1,024 tokens (BLOOM-7b1: 512) unless named, images of 224 pixels. Figures
are the peak of training and validation in GB (10^9 bytes). FSDP and DeepSpeed run on one GPU unless named. The memory
of DeepSpeed and of 4-bit weights is predicted by formula. `torch.compile` is left out: it keeps at most as much.

`memory_ladder.csv` lists the rungs and options of each model, and the GPUs that FSDP shards over. `target_gb` is the
figure that a post prints for the same technique, batch and length (docs/from_the_posts.md).
"""

import csv
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import common  # first import: it makes the project importable
import numpy as np
from PIL import Image

from fabric_ladder.models.layers import find_blocks, meta_model
from fabric_ladder.planning.candidates import read_settings
from fabric_ladder.planning.overhead import ANY_GPU
from fabric_ladder.planning.predict import keep_most, largest_batches, predict_peak
from fabric_ladder.techniques.memory import ON_DEVICE, Peak
from fabric_ladder.techniques.memory_budget import stated_budget

OUT = common.RESULTS / "memory_ladder.json"
ROWS = common.ROOT / "benchmarks" / "memory_ladder.csv"
CONFIGS = common.ROOT / "configs"
TOKENS, PIXELS, PATCHES = 1024, 224, 197  # of a text; of an image's side; tokens of an image
EVAL_TOKENS = "4096"  # of a batch of the evaluation: the default on a GPU
HEADER = ["GB", "parameters", "gradients", "optimizer", "activations", "logits", "other", "in host", "predicted",
          "target", "highest in"]  # fmt: skip


class Entry(NamedTuple):
    """A row of `memory_ladder.csv`; the options are those of a command line."""

    rung: str
    options: str = ""
    target: float | None = None
    gpus: int = 1

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.rung} {self.options}".strip() + (f", {self.gpus} GPUs" if self.gpus > 1 else "")


def read_entries() -> dict[str, list[Entry]]:
    """Return the entries of each model, in the order of the file."""
    found: dict[str, list[Entry]] = {}
    with open(ROWS, newline="", encoding="utf-8") as file:
        for row in csv.DictReader(file):
            target = float(row["target_gb"]) if row["target_gb"] else None
            found.setdefault(row["model"], []).append(Entry(row["rung"], row["options"], target, int(row["gpus"])))
    return found


ENTRIES = read_entries()


def options_of(model: str) -> list[str]:
    """Return the options that all entries of a model share."""
    if model == "bloom-7b1":
        config = f"--config {CONFIGS}/belle_bloomz_7b1_lora.yaml --model {common.MODELS}/bloom-7b1.json"
        more = "--max_length 512 --packing false --activation_checkpointing false --warmup_steps 0"
        return f"{config} --from_scratch true {more}".split()
    config = "cifar10_vit_large.yaml" if model.startswith("vit") else "imdb_bloom_560m.yaml"
    path = CONFIGS / "models" / f"{model}.json"
    task = ["--task", "instruction-tuning"] if model.endswith(("7b", "8b")) else []
    return ["--config", str(CONFIGS / config), "--model", str(path), "--from_scratch", "true", *task]


def predict(model: str, entry: Entry, known: dict[str, Peak]) -> tuple[Peak, dict[str, int]]:
    """Return the predicted peak, and what a memory budget leads to; `known` holds the peaks of earlier settings."""
    options = entry.options.replace("--precision 16-mixed", "--precision bf16-mixed").split()  # of the same size
    settings = read_settings(entry.rung, [*options_of(model), *options, "--eval_batch_tokens", EVAL_TOKENS], entry.gpus)

    def peak_of(kept: int) -> Peak:
        key = json.dumps(asdict(replace(settings, name="", memory_budget=None, kept_blocks=kept)))
        if key not in known:
            images = settings.task == "image-classification"
            length, image_size, classes = (PATCHES, PIXELS, 10) if images else (settings.max_length, None, 2)
            batches = largest_batches(settings, length, image_size)
            known[key] = predict_peak(replace(settings, kept_blocks=kept), *batches, classes)
        return known[key]

    if not settings.memory_budget:
        return peak_of(0), {}
    blocks = len(find_blocks(meta_model(settings)))
    kept, peak = keep_most(peak_of(0), peak_of, blocks, ANY_GPU.needed, stated_budget(settings))
    return peak, {"blocks": blocks, "recomputed": blocks - kept, "needed": ANY_GPU.needed(peak)}


def make_data(model: str, folder: Path) -> None:
    """Write images or texts for three effective batches."""
    rng = np.random.default_rng(0)
    if model.startswith("vit"):
        for number in range(320):
            path = folder / f"class{number % 10}" / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            Image.fromarray(rng.integers(0, 256, (32, 32, 3), np.uint8)).save(path)
        return
    words = np.array(["".join(letters) for letters in rng.choice(list("abcdefghij"), (2000, 6))])
    with open(folder / "texts.csv", "w", newline="", encoding="utf-8") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        rows.writerows([" ".join(rng.choice(words, TOKENS + 100)), number % 2] for number in range(80))


def data_options(model: str, folder: Path) -> list[str]:
    """Return the options that choose the data of `make_data`."""
    if model.startswith("vit"):
        return ["--dataset", str(folder), "--train_samples", "192", "--validation_samples", "32"]
    return ["--dataset", str(folder / "texts.csv"), "--train_samples", "48", "--validation_samples", "8"]


def run_model(model: str, only: list[str], out: Path | None) -> None:
    """Predict a model's entries, print and write them."""
    rows, records, known = [], [], {}
    for entry in ENTRIES[model]:
        if only and not any(text in entry.name for text in only):
            continue
        print(f"{model}: {entry.name} …", file=sys.stderr, flush=True)
        start = perf_counter()
        peak, more = predict(model, entry, known)
        seconds = perf_counter() - start
        cells = [f"{getattr(peak, part) / 1e9:.2f}" for part in (*ON_DEVICE, "host", "total")]
        rows.append([entry.name, *cells, entry.target and f"{entry.target:.2f}", peak.phase])
        predicted = peak._asdict() | {"total": peak.total, "seconds": seconds} | more
        records.append(entry._asdict() | {"predicted": predicted})
    print(f"{model}: predicted")
    common.print_table(HEADER, rows)
    if out:
        conditions = {"tokens": TOKENS, "pixels": PIXELS, "eval_batch_tokens": int(EVAL_TOKENS)}
        common.write_result(out, model, {"conditions": conditions, "entries": records})


def main() -> None:
    """Predict the entries."""
    parser = common.new_parser(__doc__)
    parser.add_argument("--model", choices=list(ENTRIES), action="append", help="default: all")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="entries whose name contains a TEXT")
    parser.add_argument("--out", type=Path, help=f"results file; default: {OUT}; with --only nothing is stored")
    args = parser.parse_args()
    out = args.out or (None if args.only else OUT)
    if out:
        common.check_storable(out)
    for model in args.model or ENTRIES:
        run_model(model, args.only, out)


if __name__ == "__main__":
    main()
