"""Predict the peak memory of the rungs for models with random weights.

    python benchmarks/memory_ladder.py [--model bloom-560m …] [--only TEXT …]

Models: BLOOM-560m, ViT-L/16, adapters on BLOOM-7b1, Qwen3-8B and Llama 3.1 8B with one more technique in each row,
until the model fits into 24 GB, and the models of the posts that have measured figures.

The predictions are for a GPU (`fabric_ladder.planning.predict`); harvest.py measures some of them, with the data made
here. All samples have full length: texts of 1,024 tokens (BLOOM-7b1: 512) unless named, images of 224 pixels. Figures
are the peak of training and validation in GB (10^9 bytes). FSDP and DeepSpeed run on one GPU unless named. The memory
of DeepSpeed and of 4-bit weights is predicted by formula. `torch.compile` is left out: it keeps at most as much.

`target` is the figure that a post prints for the same technique, batch and length (docs/from_the_posts.md).
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

from fabric_ladder.ladder import CHECKPOINTING, ON_HOST
from fabric_ladder.planning.candidates import read_settings
from fabric_ladder.planning.predict import largest_batches, predict_peak
from fabric_ladder.techniques.memory import ON_DEVICE, Peak

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
WHOLE = ("2_grad_accum", "5_low_precision")
RECOMPUTING = ("7_grad_checkpointing", "20_activation_offload", "21_selective_checkpointing")


class Entry(NamedTuple):
    """A rung, its options as on a command line, the target in GB, and the number of GPUs that FSDP shards over."""

    rung: str
    options: str = ""
    target: float | None = None
    gpus: int = 1

    @property
    def name(self) -> str:
        """The name in the table."""
        return f"{self.rung} {self.options}".strip() + (f", {self.gpus} GPUs" if self.gpus > 1 else "")


DOWNWARDS = [  # one more technique in each row
    Entry("1_batch_size_1"),
    Entry("4_mixed_precision", "--batch_size 1"),
    Entry("16_bf16_that_learns", "--batch_size 1"),
    Entry("16_bf16_that_learns", f"--batch_size 1 {CHECKPOINTED}"),
    Entry("18_low_bit_optimizer", f"--batch_size 1 {CHECKPOINTED}"),
    Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} {IN_8_BITS}"),
    Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} {PARKED}"),
    Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} {IN_4_BITS}"),
]
ADAPTED = Entry("14_qlora", CHECKPOINTED)
ALL = f"--precision bf16-true --optimizer sgd {CHECKPOINTED}"
TWELVE = "--batch_size 12 --micro_batch_size 12 --max_length 512"
SHARDED_WHOLE = f"--batch_size 256 --micro_batch_size 64 --precision 32-true {CHECKPOINTED}"
ALPACA = "--batch_size 128 --micro_batch_size 1 --max_length 1304 --lora_targets"  # its longest sample
ZERO = [f"--deepspeed {stage}" for stage in ("zero2", "zero2_offload", "zero3", "zero3_offload")]
ZERO_LADDER = [f"{stage} {CHECKPOINTED}" for stage in ("--deepspeed zero1", *ZERO)]
ENTRIES = {
    "bloom-560m": [
        *(Entry(rung) for rung in ("1_batch_size_1", "2_grad_accum", "3_torch_compile", "4_mixed_precision")),
        Entry("4_mixed_precision", "--precision 16-mixed"),
        *(Entry(rung) for rung in ("5_low_precision", "6_lean_optimizer", "7_grad_checkpointing", "8_init_on_device")),
        Entry("6_lean_optimizer", CHECKPOINTED),
        *(Entry(rung) for rung in SHARDED),
        *(Entry("12_deepspeed_zero", stage) for stage in ZERO),
        Entry("11_fsdp_cpu_offload", ALL),
        *(
            Entry(rung, more)
            for rung in ("13_lora", "14_qlora", "24_streamed_layers")
            for more in ("", CHECKPOINTED, "--lora_targets attention")
        ),
        *(Entry(rung, gpus=4) for rung in ("9_ddp", *SHARDED)),
        Entry("9_ddp", CHECKPOINTED, gpus=4),
        *(Entry("12_deepspeed_zero", options, gpus=4) for options in ZERO_LADDER),
        *(Entry(rung) for rung in (*FURTHER, *RECOMPUTING[1:])),
        Entry("18_low_bit_optimizer", IN_4_BITS),
        Entry("16_bf16_that_learns", f"--batch_size 1 {CHECKPOINTED}"),
        Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED}"),
        Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} {PARKED}"),
        Entry("22_float8"),
        Entry("23_tiled_mlp"),
        *(Entry("25_block_by_block", more) for more in ("", CHECKPOINTED)),
        Entry("26_stateless"),
        Entry("26_stateless", f"--batch_size 1 {CHECKPOINTED} --step_in_backward true --micro_batch_tokens null"),
        Entry("27_cuda_graphs"),
        *(Entry(rung, f"--train_blocks last:{count}") for rung in WHOLE for count in (12, 4)),
        *(Entry(rung, "--micro_batch_size 16") for rung in ("5_low_precision", *RECOMPUTING)),
        *(Entry(rung, "--attention eager") for rung in ("2_grad_accum", "4_mixed_precision", "5_low_precision")),
    ],
    "bloom-7b1": [
        Entry("13_lora", f"--batch_size {size} --micro_batch_size {size} --loss_chunk {chunk} {more}".strip())
        for more in ("", CHECKPOINTED)
        for chunk in (256, 1_000_000)
        for size in (1, 4)
    ],
    "qwen3-8b": [*DOWNWARDS, ADAPTED, Entry("25_block_by_block", f"--batch_size 1 {CHECKPOINTED}")],
    "llama-3.1-8b": [*DOWNWARDS, ADAPTED],
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
        *(Entry(rung, SHARDED_WHOLE, target, 4) for rung, target in zip(SHARDED, (6.59, 6.03), strict=True)),
        *(Entry(rung, "--micro_batch_size 16") for rung in RECOMPUTING),
        Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} --optimizer sgd"),
        Entry("17_step_in_backward", f"--batch_size 1 {CHECKPOINTED} --optimizer sgd --kahan_summation false"),
    ],
    "vit-base-16": [
        Entry("2_grad_accum", "--batch_size 16 --micro_batch_size 16", 3.71),
        Entry("4_mixed_precision", "--batch_size 16 --micro_batch_size 16", 3.04),
        Entry("9_ddp", "--batch_size 64 --micro_batch_size 16", 4.09, 4),
        Entry("10_fsdp", "--batch_size 64 --micro_batch_size 16", 2.83, 4),
    ],
    "distilbert-base-uncased": [
        Entry("2_grad_accum", f"{TWELVE} --attention eager --precision 64-true", 10.42),
        Entry("2_grad_accum", f"{TWELVE} --attention eager", 5.37),
        Entry("4_mixed_precision", f"{TWELVE} --attention eager", 4.46),
        Entry("12_deepspeed_zero", f"{TWELVE} --attention eager --batch_size 48 --deepspeed zero2", 3.99, 4),
        Entry("5_low_precision", f"{TWELVE} --attention eager", 2.87),
        *(Entry(rung, TWELVE) for rung in ("2_grad_accum", "4_mixed_precision", "5_low_precision")),
    ],
    "llama-2-7b": [
        Entry("13_lora", f"{ALPACA} q_proj,v_proj", 21.33),
        Entry("14_qlora", f"{ALPACA} q_proj,v_proj", 14.18),
        Entry("14_qlora", f"{ALPACA} q_proj,v_proj --optimizer sgd", 14.15),
        Entry("14_qlora", f"{ALPACA} all-linear", 16.62),
        Entry("14_qlora", f"{ALPACA} all-linear --lora_dropout 0"),
        Entry("13_lora", "--batch_size 128 --micro_batch_size 4 --max_length 256 --lora_targets q_proj,v_proj", 21),
    ],
}


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


def predict(model: str, entry: Entry, known: dict[str, Peak]) -> Peak:
    """Return the predicted peak; `known` holds the peaks of earlier settings."""
    options = entry.options.replace("--precision 16-mixed", "--precision bf16-mixed").split()  # of the same size
    settings = read_settings(entry.rung, [*options_of(model), *options, "--eval_batch_tokens", EVAL_TOKENS], entry.gpus)
    key = json.dumps(asdict(replace(settings, name="")))
    if key not in known:
        images = settings.task == "image-classification"
        length, image_size, classes = (PATCHES, PIXELS, 10) if images else (settings.max_length, None, 2)
        batches = largest_batches(settings, length, image_size)
        known[key] = predict_peak(settings, *batches, classes)
    return known[key]


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
        peak = predict(model, entry, known)
        seconds = perf_counter() - start
        cells = [f"{getattr(peak, part) / 1e9:.2f}" for part in (*ON_DEVICE, "host", "total")]
        rows.append([entry.name, *cells, entry.target and f"{entry.target:.2f}", peak.phase])
        predicted = peak._asdict() | {"total": peak.total, "seconds": seconds}
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
