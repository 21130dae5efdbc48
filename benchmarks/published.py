"""Predict peaks of GPU memory that other projects published, and compare.

    python benchmarks/published.py [--only TEXT …] [--json FILE]
    python benchmarks/published.py --fill

`published_memory.csv` holds a row for each published peak. The columns `options`, `chosen` and `reason` are ours: the
arguments of `predict_memory`, the place where the peer documents them, and the reason why a row is not predicted or
does not count. `unit` names the unit and the measure.

| measure | compared with |
|---|---|
| allocated | the tensors (`tensors.total`) |
| reserved | the tensors, cuBLAS's workspaces and fragmentation: `expected` without the CUDA context |
| process | all memory of the process (`expected`) |

Three words of `options` replace a part of our code by the peer's, where the peer's code shows it:

- `adapters=16-bit`: adapters are in 16 bits, and each keeps its own input after dropout.
- `four_bits=keep`: 4-bit layers keep their inputs, as bitsandbytes 0.42 did.
- `loss=whole`: the loss is transformers' own, which converts all logits to 32 bits.

No constant is fitted. Errors are (predicted - published) / published. Differences within a series cancel what the
peer's model code adds. `--fill` writes the tables of docs/published_peaks.md from the results.
"""

import argparse
import csv
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import common  # first import: it makes the project importable
import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fabric_ladder.planning.memory import MemoryPrediction, predict_memory
from fabric_ladder.techniques import adapter_inputs, lora, qlora
from fabric_ladder.techniques.chunked_loss import ChunkedLoss
from fabric_ladder.techniques.memory import ON_DEVICE

ROWS = common.ROOT / "benchmarks" / "published_memory.csv"
OUT = common.RESULTS / "published.json"
PAGE = common.ROOT / "docs" / "published_peaks.md"
UNITS = {"GB": 10**9, "GiB": 2**30}
NUMBERS = ("length", "micro_batch_size", "gpus", "classes")  # arguments of predict_memory that are no settings
GROUPS = {  # part of the options -> technique; the first that fits
    "gpus=": "several GPUs", "14_qlora": "QLoRA", "13_lora": "LoRA", "optimizer=adam-": "low-bit optimizer",
    "activation_checkpointing": "checkpointing", "mixed": "mixed precision", "5_low": "16-bit weights",
}  # fmt: skip
SERIES = {  # what is saved -> the numbers of two rows
    "ViT-L: 32-bit to mixed precision": (2, 3),
    "ViT-L: mixed precision to 16-bit weights": (3, 4),
    "ViT-L: 64 to 16 images": (4, 5),
    "ViT-L: 16 to 4 images and accumulation": (5, 6),
    "ViT-L: Adam to SGD": (6, 7),
    "ViT-L, 4 GPUs: CPU offload": (10, 11),
    "ViT-H: 32-bit to 8-bit AdamW (bitsandbytes)": (63, 64),
    "ViT-H: 32-bit to 8-bit AdamW (torchao)": (63, 65),
    "ViT-H: 32-bit to 4-bit AdamW (torchao)": (63, 68),
    "Llama 2 7B: 16-bit to 8-bit AdamW (bitsandbytes)": (69, 70),
    "Llama 2 7B: 16-bit to 8-bit AdamW (torchao)": (69, 71),
    "Llama 2 7B: 16-bit to 4-bit AdamW (torchao)": (69, 72),
    "Llama 3.2 3B: chunked loss": (46, 47),
    "Llama 3.2 3B: activation checkpointing": (47, 48),
    "Llama 3.2 3B: step in backward": (48, 49),
    "Llama 3.2 3B: activation offload": (49, 50),
    "Llama 3.2 3B: 16-bit to 8-bit AdamW": (50, 51),
    "Llama 3.2 3B: LoRA to QLoRA": (52, 53),
    "Llama 2 7B: LoRA to QLoRA": (20, 21),
    "Mistral 7B: LoRA to QLoRA": (28, 29),
    "Falcon 7B: LoRA to QLoRA": (13, 14),
}
ROW_HEADER = ["row", "source", "model", "technique", "batch", "optimizer", "published", "predicted", "error"]
SUMMARY_HEADER = ["technique", "rows", "median", "90th percentile", "largest", "mean, signed"]
SERIES_HEADER = ["saved by, GB", "published", "predicted", "difference"]
# Shapes that are not shipped: a shipped config with changes, or the whole config. LitGPT never ties the head
# (litgpt/model.py); its own shapes are in litgpt/config.py. ViT-H: timm's vit_huge_patch14_224.
GEMMA = {"model_type": "gemma", "vocab_size": 256000, "head_dim": 256, "tie_word_embeddings": False}
UNTIED = {"tie_word_embeddings": False}
SHAPES = {
    "falcon-7b": {
        "model_type": "falcon", "vocab_size": 65024, "hidden_size": 4544, "num_hidden_layers": 32,
        "num_attention_heads": 71, "multi_query": True, "parallel_attn": True, "bias": False, **UNTIED,
    },
    "gemma-2b": GEMMA | {
        "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8,
        "num_key_value_heads": 1,
    },
    "gemma-7b": GEMMA | {
        "hidden_size": 3072, "intermediate_size": 24576, "num_hidden_layers": 28, "num_attention_heads": 16,
        "num_key_value_heads": 16,
    },
    "gemma-2-2b-untied": {"base": "gemma-2-2b", **UNTIED},
    "gemma-2-9b-untied": {"base": "gemma-2-9b", **UNTIED},
    "llama-2-70b": {"base": "llama-3.1-70b", "vocab_size": 32000},
    "llama-3.2-1b-untied": {"base": "llama-3.2-1b", **UNTIED},
    "llama-3.2-3b-untied": {"base": "llama-3.2-3b", **UNTIED},
    "phi-2": {
        "model_type": "phi", "vocab_size": 51200, "hidden_size": 2560, "intermediate_size": 10240,
        "num_hidden_layers": 32, "num_attention_heads": 32, "partial_rotary_factor": 0.4,
    },
    "stablelm-base-alpha-3b": {
        "model_type": "gpt_neox", "vocab_size": 50688, "hidden_size": 4096, "intermediate_size": 16384,
        "num_hidden_layers": 16, "num_attention_heads": 32, "bos_token_id": 0, "eos_token_id": 0,
    },
    "vit-huge-14": {
        "base": "vit-large-16", "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32,
        "num_attention_heads": 16, "patch_size": 14,
    },
}  # fmt: skip


def read_rows() -> list[dict[str, str]]:
    """Return the published peaks, each with its `number`, counted from 1."""
    with open(ROWS, newline="", encoding="utf-8") as file:
        return [row | {"number": number} for number, row in enumerate(csv.DictReader(file), 1)]


@contextmanager
def adapters_in_16_bits() -> Iterator[None]:
    """Give models adapters in 16 bits in this block. As in PEFT, each keeps its input after dropout."""
    with (
        patch.object(lora, "_keep_trained_in_32_bit", lambda model: model.to(torch.bfloat16)),
        patch.object(adapter_inputs, "keep_16_bit_inputs", lambda _: None),
    ):
        yield


@contextmanager
def four_bits_that_keep() -> Iterator[None]:
    """Let 4-bit layers keep their inputs for the backward pass in this block."""
    forward = qlora._Rehearsed4bit.forward

    def keep(ctx: FunctionCtx, inputs: Tensor, layer: nn.Module) -> Tensor:
        ctx.inputs = inputs
        return forward(ctx, inputs, layer)

    with patch.object(qlora._Rehearsed4bit, "forward", staticmethod(keep)):
        yield


def predict(options: str) -> MemoryPrediction:
    """Return the prediction for the options of a row.

    Raises:
        UserError: predict_memory refuses them.
    """
    values = dict(word.split("=", 1) for word in options.split())
    for word, way in PEERS.items():
        if word in options:
            with way():
                return predict(options.replace(word, ""))
    arguments = {name: int(value) if name in NUMBERS else value for name, value in values.items() if name != "model"}
    path = common.MODELS / f"{values['model']}.json"
    if values["model"] not in SHAPES:
        return predict_memory(str(path), **arguments)
    shape = dict(SHAPES[values["model"]])
    base = shape.pop("base", None)
    config = json.loads((common.MODELS / f"{base}.json").read_text(encoding="utf-8")) if base else {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / path.name
        path.write_text(json.dumps(config | shape), encoding="utf-8")
        return predict_memory(str(path), **arguments)


PEERS = {  # word of `options` -> the peer's way
    "adapters=16-bit": adapters_in_16_bits,
    "four_bits=keep": four_bits_that_keep,
    "loss=whole": lambda: patch.object(ChunkedLoss, "is_used", lambda *_: False),  # as transformers computes it
}


def compare(row: dict[str, str]) -> dict:
    """Predict a row; return its record: bytes published and predicted, the error and the parts of the peak."""
    unit, measure = row["unit"].split(", ")
    published = float(row["peak_gb"]) * UNITS[unit]
    found = predict(row["options"])
    predicted = {
        "allocated": found.tensors.total,
        "reserved": found.reserved,
        "process": found.expected,
    }[measure]
    names = ("number", "source", "model", "technique", "batch", "optimizer", "options")
    return {name: row[name] for name in names} | {
        "measure": measure, "counts": not row["reason"], "group": group(row["options"]),
        "published": published, "predicted": predicted, "error": predicted / published - 1,
        "parts": {name: getattr(found.tensors, name) for name in (*ON_DEVICE, "phase")},
    }  # fmt: skip


def group(options: str) -> str:
    """Return the technique under which the errors of a row are counted."""
    return next((name for text, name in GROUPS.items() if text in options), "32-bit weights")


def summarize(records: list[dict]) -> dict[str, dict[str, float]]:
    """Return the number of rows and the errors (median, 90th percentile, largest, mean), in all and by technique."""
    groups = {"all": records}
    for record in records:
        groups.setdefault(record["group"], []).append(record)
    found = {}
    for name, members in groups.items():
        errors = np.array([record["error"] for record in members])
        found[name] = {
            "rows": len(members),
            "median": float(np.median(abs(errors))),
            "percentile_90": float(np.percentile(abs(errors), 90)),
            "largest": float(abs(errors).max()),
            "mean": float(errors.mean()),
        }
    return found


def differences(records: list[dict]) -> dict[str, dict[str, float]]:
    """Return what each step of a series saves in bytes, published and predicted."""
    known = {record["number"]: record for record in records}
    return {
        name: {side: known[first][side] - known[second][side] for side in ("published", "predicted")}
        for name, (first, second) in SERIES.items()
        if first in known and second in known
    }


def row_cells(record: dict) -> list[str]:
    """Return the cells of a row in the table of all rows."""
    named = [record[name] for name in ("source", "model", "technique", "batch", "optimizer")]
    mark = "" if record["counts"] else " (difference only)"
    figures = [f"{record[side] / 1e9:.2f}" for side in ("published", "predicted")]
    return [str(record["number"]), *named, *figures, f"{record['error']:+.0%}{mark}"]


def summary_cells(name: str, figures: dict[str, float]) -> list[str]:
    """Return the cells of a technique in the table of errors."""
    errors = [f"{figures[each]:.1%}" for each in ("median", "percentile_90", "largest")]
    return [name, str(figures["rows"]), *errors, f"{figures['mean']:+.1%}"]


def series_cells(name: str, saved: dict[str, float]) -> list[str]:
    """Return the cells of a difference."""
    published, predicted = saved["published"], saved["predicted"]
    return [name, f"{published / 1e9:.2f}", f"{predicted / 1e9:.2f}", f"{(predicted - published) / 1e9:+.2f}"]


def tables(result: dict) -> dict[str, tuple[list[str], list[list[str]]]]:
    """Return the header and the rows of each table."""
    return {
        "rows": (ROW_HEADER, [row_cells(record) for record in result["rows"]]),
        "techniques": (SUMMARY_HEADER, [summary_cells(*item) for item in result["errors"].items()]),
        "series": (SERIES_HEADER, [series_cells(*item) for item in result["series"].items()]),
    }


def fill_page() -> None:
    """Write the tables of the page from the stored results."""
    made = tables(common.read_results(OUT)["published"])
    common.rewrite(PAGE, lambda text: common.fill(text, "published", lambda name: common.markdown_table(*made[name])))


def main() -> None:
    """Predict the rows, print the tables and store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="rows that contain one of the TEXTs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    parser.add_argument("--fill", action="store_true", help="only write the tables of docs/published_peaks.md")
    args = parser.parse_args()
    if args.fill:
        fill_page()
        return
    if args.json:
        common.check_storable(args.json)
    rows, records = read_rows(), []
    for row in rows:
        text = " ".join(map(str, row.values()))
        if row["options"] and (not args.only or any(word in text for word in args.only)):
            print(f"{row['number']} {row['source']}: {row['model']} …", file=sys.stderr, flush=True)
            records.append(compare(row))
    reasons = Counter(row["reason"].partition(":")[0] for row in rows if not row["options"])
    counted = [record for record in records if record["counts"]]
    result = {"rows": records, "errors": summarize(counted), "series": differences(records), "reasons": reasons}
    result["totals"] = {"published": len(rows), "predicted": len(records), "counted": len(counted)}
    for header, cells in tables(result).values():
        common.print_table(header, cells)
    if args.json:
        common.write_result(args.json, "published", common.environment(torch.device("cpu")) | result)


if __name__ == "__main__":
    main()
