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

No constant is fitted. Errors are (predicted - published) / published. `--fill` writes the
tables of docs/from_the_posts.md from the results.
"""

import csv
import json
import sys
import tempfile
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import common  # first import: it makes the project importable
import pandas as pd
import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from fabric_ladder.planning.run_memory import MemoryPrediction, predict_memory
from fabric_ladder.techniques import adapter_inputs, lora, qlora
from fabric_ladder.techniques.chunked_loss import ChunkedLoss
from fabric_ladder.techniques.memory import ON_DEVICE

HERE = common.ROOT / "benchmarks"
OUT = common.RESULTS / "published.json"
UNITS = {"GB": 10**9, "GiB": 2**30}
NUMBERS = ("length", "micro_batch_size", "gpus", "classes")  # arguments of predict_memory that are no settings
GROUPS = {  # part of the options -> technique; the first that fits
    "24_streamed": "streamed layers", "gpus=": "several GPUs", "14_qlora": "QLoRA", "13_lora": "LoRA",
    "optimizer=adam-": "low-bit optimizer",
    "activation_checkpointing": "checkpointing", "mixed": "mixed precision", "5_low": "16-bit weights",
}  # fmt: skip
TABLES = {  # header and cells of a row
    "rows": (
        "row | peer | model | technique | published, GB | predicted, GB | error",
        "{number} | {peer} | {model} | {technique} | {published_gb:.2f} | {predicted_gb:.2f} | {error:+.0%}{mark}",
    ),
    "techniques": (
        "technique | rows | median error | 90th percentile | mean, signed",
        "{name} | {rows} | {median:.1%} | {percentile_90:.1%} | {mean:+.1%}",
    ),
}
# Models that are not shipped: a shipped config with changes, or the whole config. LitGPT never ties the head
# (litgpt/model.py); its own shapes are in litgpt/config.py. ViT-H: timm's vit_huge_patch14_224.
SHAPES = json.loads((HERE / "published_shapes.json").read_text(encoding="utf-8"))
FORWARD = qlora._Rehearsed4bit.forward


def read_rows(name: str = "published_memory.csv") -> list[dict[str, str]]:
    """Return the rows of a file, by default the published peaks, each with its `number`, counted from 1."""
    with open(HERE / name, newline="", encoding="utf-8") as file:
        return [row | {"number": number} for number, row in enumerate(csv.DictReader(file), 1)]


def keep_inputs(ctx: FunctionCtx, inputs: Tensor, layer: nn.Module) -> Tensor:
    """Compute a 4-bit layer as `FORWARD` does, and keep its input for the backward pass."""
    ctx.inputs = inputs
    return FORWARD(ctx, inputs, layer)


PEERS = {  # word of `options` -> what it replaces; as in PEFT, 16-bit adapters keep their input after dropout
    "adapters=16-bit": [
        (lora, "_keep_trained_in_32_bit", lambda model: model.to(torch.bfloat16)),
        (adapter_inputs, "keep_16_bit_inputs", lambda _: None),
    ],
    "four_bits=keep": [(qlora._Rehearsed4bit, "forward", staticmethod(keep_inputs))],
    "loss=whole": [(ChunkedLoss, "is_used", lambda *_: False)],
}


def predict(options: str) -> MemoryPrediction:
    """Return the prediction for the options of a row; raises UserError where predict_memory refuses them."""
    words = options.split()
    values = dict(word.split("=", 1) for word in words if word not in PEERS)
    model = values.pop("model")
    shape = dict(SHAPES.get(model, {"base": model}))
    base = shape.pop("base", None)
    config = json.loads((common.MODELS / f"{base}.json").read_text(encoding="utf-8")) if base else {}
    arguments = {name: int(value) if name in NUMBERS else value for name, value in values.items()}
    with ExitStack() as stack:
        path = Path(stack.enter_context(tempfile.TemporaryDirectory()), f"{model}.json")
        path.write_text(json.dumps(config | shape), encoding="utf-8")
        for word in PEERS.keys() & words:
            for replaced in PEERS[word]:
                stack.enter_context(patch.object(*replaced))
        return predict_memory(str(path), **arguments)


def compare(row: dict[str, str]) -> dict:
    """Predict a row; return its record: bytes published and predicted, the error and the parts of the peak."""
    unit, measure = row["unit"].split(", ")
    published = float(row["peak_gb"]) * UNITS[unit]
    found = predict(row["options"])
    predicted = {"allocated": found.tensors.total, "reserved": found.reserved, "process": found.expected}[measure]
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
    table = pd.DataFrame([record for record in records if record["counts"]], columns=["group", "error"])
    found = {}
    for name, rows in [("all", table), *table.groupby("group", sort=False)] if len(table) else []:
        sizes = rows["error"].abs()
        found[name] = {
            "rows": len(rows), "median": sizes.median(), "percentile_90": sizes.quantile(0.9), "largest": sizes.max(),
            "mean": rows["error"].mean(),
        }  # fmt: skip
    return found


def in_gb(record: dict) -> dict:
    """Return a record with its sizes in GB, and the mark of a row that does not count."""
    sizes = {f"{side}_gb": record[side] / 1e9 for side in ("published", "predicted")}
    return record | sizes | {"mark": "" if record["counts"] else " (does not count)"}


def table(name: str, result: dict) -> list[str]:
    """Return the lines of a table."""
    if name == "rows":
        return common.table(*TABLES[name], [in_gb(row) | {"peer": row["source"].split()[0]} for row in result["rows"]])
    return common.table(*TABLES[name], [each | {"name": key} for key, each in result["errors"].items()])


def fill_page(check: bool = False) -> list[Path]:
    """Write the tables of the stored results into docs/from_the_posts.md; see `common.fill_pages`."""
    result = common.read_results(OUT)["published"]
    return common.fill_pages(
        "published", lambda name: table(name, result), check, {"published_peaks": table("rows", result)}
    )


def main() -> None:
    """Predict the rows, print the tables and store them."""
    parser = common.new_parser(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="rows with a TEXT; FILE keeps the others")
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results")
    parser.add_argument("--fill", action="store_true", help="only write the tables of docs/from_the_posts.md")
    args = parser.parse_args()
    if args.fill:
        fill_page()
        return
    if args.json:
        common.check_storable(args.json)
    stored = common.read_results(args.json).get("published", {}) if args.only and args.json else {}
    rows, found = read_rows(), {record["number"]: record for record in stored.get("rows", [])}
    for row in rows:
        if row["options"] and (not args.only or any(word in str([*row.values()]) for word in args.only)):
            print(f"{row['number']} {row['source']}: {row['model']} …", file=sys.stderr, flush=True)
            found[row["number"]] = compare(row)
    records = [found[number] for number in sorted(found)]
    reasons = Counter(row["reason"].partition(":")[0] for row in rows if not row["options"])
    result = {"rows": records, "errors": summarize(records), "reasons": reasons}
    counted = sum(record["counts"] for record in records)
    result["totals"] = {"published": len(rows), "predicted": len(records), "counted": counted}
    for name in TABLES:
        print(*table(name, result), sep="\n")
    if args.json:
        common.write_result(args.json, "published", result)


if __name__ == "__main__":
    main()
