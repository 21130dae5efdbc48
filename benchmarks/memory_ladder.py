"""Peak memory of the rungs, with random weights of the shapes of BLOOM-560m, ViT-L/16, Qwen3-8B and Llama 3.1 8B.

    python benchmarks/memory_ladder.py [--model bloom-560m|vit-large-16|qwen3-8b|llama-3.1-8b] [--only TEXT …]

Those of 8 billion parameters are tuned on instructions, one technique more in each row, until a GPU of 24 GB has room.

It is predicted for a GPU (see `fabric_ladder.planning.predict`); harvest.py measures it, on data made here. All samples
are as long as they may be: texts of 1,024 tokens, images of 224 pixels. It is the peak of training and validation, in
10^9 bytes. FSDP and DeepSpeed run on one GPU,
where there is nothing to share, but something to offload; four are predicted only. What DeepSpeed and 4-bit weights
take is predicted by formula, and `torch.compile` left out of the prediction, since it keeps at most as much.

`target` is what the log of the memory series, which the rungs follow, prints for the same technique and micro-batch on
ViT-L/16 and CIFAR-10.
"""

import argparse
import csv
import json
import re
import sys
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import NamedTuple

import common  # first of all: it makes the project importable without an installation
import numpy as np
import torch
from PIL import Image

from fabric_ladder.planning.candidates import CHECKPOINTING, NAMED, ON_HOST, read_settings
from fabric_ladder.planning.predict import largest_batches, predict_peak
from fabric_ladder.planning.tracker import ON_DEVICE, Peak

OUT = common.RESULTS / "memory_ladder.json"
CONFIGS = common.ROOT / "configs"
TOKENS, PIXELS, PATCHES = 1024, 224, 197  # of a text; of an image's side; tokens of an image
EVAL_TOKENS = "4096"  # of a batch of the evaluation: the default on a GPU
SHARDED = ("10_fsdp", "11_fsdp_cpu_offload")
FURTHER = ("16_bf16_that_learns", "17_step_in_backward", "18_low_bit_optimizer", "19_optimizer_offload")
HEADER = ["GB", "parameters", "gradients", "optimizer", "activations", "logits", "other", "in host", "predicted",
          "target", "highest in"]  # fmt: skip
CHECKPOINTED, PARKED = " ".join(CHECKPOINTING), " ".join(ON_HOST)
IN_8_BITS, IN_4_BITS = "--optimizer adam-8bit", "--optimizer adam-4bit"
RECOMPUTING = ("7_grad_checkpointing", "20_activation_offload", "21_selective_checkpointing")


class Entry(NamedTuple):
    """A rung and its options as on a command line; the target in GB; the GPUs that FSDP shards over."""

    rung: str
    options: str = ""
    target: float | None = None
    gpus: int = 1

    @property
    def name(self) -> str:
        """What stands in the table: values that speak for themselves without their option's name."""
        options = self.options.replace("--micro_batch_size", "micro-batch")
        for pair, words in NAMED.items():
            options = options.replace(" ".join(pair), words)
        options = re.sub(r"--\w+ ", "", options)
        return f"{self.rung} {options}".strip() + (f", {self.gpus} GPUs" if self.gpus > 1 else "")


DOWNWARDS = [  # one technique more in each, and what does without the host
    Entry("1_batch_size_1"),
    Entry("4_mixed_precision", "--batch_size 1"),
    Entry("16_bf16_that_learns", "--batch_size 1"),
    Entry("16_bf16_that_learns", f"--batch_size 1 {CHECKPOINTED}"),
    Entry("18_low_bit_optimizer", f"--batch_size 1 {CHECKPOINTED}"),
    Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} {IN_8_BITS}"),
    Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} {IN_8_BITS} {PARKED}"),
    Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} {IN_4_BITS}"),
]
ALL = f"--precision bf16-true --optimizer sgd {CHECKPOINTED}"
ZERO = [f"--deepspeed {stage}" for stage in ("zero2", "zero2_offload", "zero3", "zero3_offload")]
ENTRIES = {
    "bloom-560m": [
        *(Entry(rung) for rung in ("1_batch_size_1", "2_grad_accum", "3_torch_compile", "4_mixed_precision")),
        Entry("4_mixed_precision", "--precision 16-mixed"),
        *(Entry(rung) for rung in ("5_low_precision", "6_lean_optimizer", "7_grad_checkpointing", "8_init_on_device")),
        Entry("6_lean_optimizer", CHECKPOINTED),
        *(Entry(rung) for rung in SHARDED),
        *(Entry("12_deepspeed_zero", stage) for stage in ZERO),
        Entry("11_fsdp_cpu_offload", ALL),
        *(Entry(rung, more) for rung in ("13_lora", "14_qlora") for more in ("", CHECKPOINTED)),
        *(Entry(rung, gpus=4) for rung in SHARDED),
        *(Entry(rung) for rung in (*FURTHER, *RECOMPUTING[1:])),
        Entry("18_low_bit_optimizer", IN_4_BITS),
        Entry("16_bf16_that_learns", f"--batch_size 1 {CHECKPOINTED}"),
        Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED}"),
        Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} {PARKED}"),
        Entry("22_float8"),
        *(Entry(rung, "--micro_batch_size 16") for rung in ("5_low_precision", *RECOMPUTING)),
        *(Entry(rung, "--attention eager") for rung in ("2_grad_accum", "4_mixed_precision", "5_low_precision")),
    ],
    "qwen3-8b": DOWNWARDS,
    "llama-3.1-8b": DOWNWARDS,
    "vit-large-16": [
        Entry("2_grad_accum", "--micro_batch_size 64", 26.84),
        Entry("3_torch_compile", "--micro_batch_size 64"),
        Entry("4_mixed_precision", "--micro_batch_size 64", 18.21),
        Entry("4_mixed_precision", "--micro_batch_size 64 --precision 16-mixed", 18.21),
        Entry("5_low_precision", "--micro_batch_size 64", 13.82),
        Entry("5_low_precision", "--micro_batch_size 16", 5.69),
        Entry("5_low_precision", "--micro_batch_size 4", 3.91),
        Entry("6_lean_optimizer", "--micro_batch_size 16"),
        Entry("6_lean_optimizer", f"--micro_batch_size 16 {CHECKPOINTED}"),
        Entry("11_fsdp_cpu_offload", f"--micro_batch_size 16 {ALL}"),
        *(Entry("12_deepspeed_zero", f"--micro_batch_size 16 {stage}") for stage in ZERO),
        Entry("22_float8", "--micro_batch_size 64"),
        Entry("6_lean_optimizer", f"--micro_batch_size 1 {CHECKPOINTED}"),
        Entry("11_fsdp_cpu_offload", f"--micro_batch_size 1 {ALL}"),
        *(Entry(rung, "--micro_batch_size 16", gpus=4) for rung in SHARDED),
        *(Entry(rung, "--micro_batch_size 16") for rung in RECOMPUTING),
        Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} --optimizer sgd"),
        Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} --optimizer sgd --kahan_summation false"),
    ],
}


def options_of(model: str) -> list[str]:
    """Return the options that all entries of a model share."""
    config = "cifar10_vit_large.yaml" if model.startswith("vit") else "imdb_bloom_560m.yaml"
    path = CONFIGS / "models" / f"{model}.json"
    task = ["--task", "instruction-tuning"] if model.endswith("8b") else []
    return ["--config", str(CONFIGS / config), "--model", str(path), "--from_scratch", "true", *task]


def predict(model: str, entry: Entry, known: dict[str, Peak]) -> Peak:
    """Return the predicted peak; `known` are those of the same settings."""
    options = entry.options.replace("--precision 16-mixed", "--precision bf16-mixed").split()  # of the same size
    settings = read_settings(entry.rung, [*options_of(model), *options, "--eval_batch_tokens", EVAL_TOKENS])
    ranks = entry.gpus if entry.rung in SHARDED else None
    key = json.dumps([asdict(replace(settings, name="")), ranks])
    if key not in known:
        images = settings.task == "image-classification"
        length, image_size, classes = (PATCHES, PIXELS, 10) if images else (TOKENS, None, 2)
        batches = largest_batches(settings, length, image_size, entry.gpus)
        known[key] = predict_peak(settings, *batches, ranks, classes)
    return known[key]


def make_data(model: str, folder: Path) -> None:
    """Write texts or images for three effective batches."""
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
    """Return the options that name what `make_data` has written."""
    if model.startswith("vit"):
        return ["--dataset", str(folder), "--train_samples", "192", "--validation_samples", "32"]
    return ["--dataset", str(folder / "texts.csv"), "--train_samples", "48", "--validation_samples", "8"]


def row(entry: Entry, peak: Peak) -> list[str | None]:
    """Return the cells of a line of the table."""
    cells = [f"{getattr(peak, part) / 1e9:.2f}" for part in (*ON_DEVICE, "host", "total")]
    return [entry.name, *cells, entry.target and f"{entry.target:.2f}", peak.phase]


def tensor_lines(peak: Peak, count: int) -> list[str]:
    """Describe the tensors that hold most together at the peak."""
    return [
        f"{number * storage.bytes / 1e9:.3f} GB: {number} x {storage.part} {list(storage.shape)} {storage.dtype}, "
        f"made by {storage.made_by}"
        for number, storage in peak.tensors[:count]
    ]


def run_model(model: str, only: list[str], tensors: int, out: Path | None) -> None:
    """Predict a model's entries, print and write them."""
    rows, records, known, lines = [], [], {}, []
    for entry in ENTRIES[model]:
        if only and not any(text in entry.name for text in only):
            continue
        print(f"{model}: {entry.name} …", file=sys.stderr, flush=True)
        start = perf_counter()
        peak = predict(model, entry, known)
        seconds = perf_counter() - start
        rows.append(row(entry, peak))
        largest = tensor_lines(peak, 8)
        predicted = peak._asdict() | {"total": peak.total, "tensors": largest, "seconds": seconds}
        records.append(entry._asdict() | {"predicted": predicted})
        if entry.target and peak.total / 1e9 > entry.target:
            lines.append(
                f"{entry.name}: {peak.total / 1e9 - entry.target:.2f} GB above the target, most is {largest[0]}"
            )
        lines += [f"{entry.name}: {line}" for line in largest[:tensors]]
    print(f"{model}: predicted")
    common.print_table(HEADER, rows)
    print(*lines, sep="\n", end="\n\n" if lines else "", flush=True)
    if out:
        conditions = {"tokens": TOKENS, "pixels": PIXELS, "eval_batch_tokens": int(EVAL_TOKENS)}
        environment = common.environment(torch.device("cpu"))
        common.write_result(out, model, environment | {"conditions": conditions, "entries": records})


def main() -> None:
    """Predict the entries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(ENTRIES), action="append", help="default: all")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="entries with one of these in their name")
    parser.add_argument("--tensors", type=int, default=0, metavar="N", help="name the N largest at each peak")
    default = OUT.relative_to(common.ROOT)
    parser.add_argument("--out", type=Path, help=f"results file; default: {default}, with --only none")
    args = parser.parse_args()
    out = args.out or (None if args.only else OUT)
    for model in args.model or ENTRIES:
        run_model(model, args.only, args.tensors, out)


if __name__ == "__main__":
    main()
