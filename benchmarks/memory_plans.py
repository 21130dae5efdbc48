"""What to run on which GPU, for five models: docs/memory_plans.md, and a table in docs/memory.md.

    python benchmarks/memory_plans.py [--model NAME …]

The figures go into benchmarks/results/memory_plans.json, in GB (10^9 bytes); the models that are not named keep theirs.

The shapes are those in configs/models/; nothing is measured. BLOOM-560m and ViT-L/16 are fine-tuned as classifiers with
the configs of the series that the rungs follow, the others by instructions of up to 1,024 tokens, 16 of them for an
optimizer step. The sizes of memory are those of GPUs that compute in bfloat16.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import common  # first of all: it makes the project importable without an installation
import torch

from fabric_ladder.environment import write_whole

OUT = common.RESULTS / "memory_plans.json"
PAGE, GUIDE = common.ROOT / "docs" / "memory_plans.md", common.ROOT / "docs" / "memory.md"
GPUS = {"8 to 141 GB": ["--gpu_memory", "8GB,16GB,24GB,40GB,80GB,141GB"], "T4": ["--gpu", "T4"]}
TEXT = ["--config", "configs/imdb_bloom_560m.yaml", "--length", "1024"]
INSTRUCTIONS = [*TEXT, "--task", "instruction-tuning"]
MODELS = {
    "bloom-560m": TEXT,
    "vit-large-16": ["--config", "configs/cifar10_vit_large.yaml", "--image_size", "224"],
    "llama-3.2-1b": INSTRUCTIONS,
    "bloom-7b1": INSTRUCTIONS,
    "qwen3-8b": INSTRUCTIONS,
}
MARKS = "<!-- by benchmarks/memory_plans.py -->", "<!-- end -->"
HEADER = "| GPU | all weights | GB | speed | known cost in accuracy | adapters | GB | speed |"


def plan(command: list[str]) -> dict:
    """Return the planner's answer for a model on some GPUs, in short."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "plan.json"
        subprocess.run(
            [sys.executable, *command, "--json", str(out)], check=True, cwd=common.ROOT, stdout=subprocess.DEVNULL
        )
        return shorten(json.loads(out.read_text(encoding="utf-8")))


def shorten(answer: dict) -> dict:
    """Return of a plan in JSON what is kept.

    Returns:
        `answers`: for each GPU what is recommended; `ways`: of each way the GB of the GPU by the micro-batch, as far as
        they were needed to find what fits, and of the host's memory.
    """
    answers, ways = {}, {}
    for size in answer["sizes"]:
        gpu = f"{size['gpu_memory'] / 1e9:g} GB" if not answer["gpu"]["memory"] else answer["gpu"]["name"]
        answers[gpu] = {}
        for weights, number in size["recommended"].items():
            row = None if number is None else size["rows"][number]
            answers[gpu][weights] = row and {name: row[name] for name in ("name", "micro_batch", "costs")} | {
                "GB": round(row["needed"] / 1e9, 2), "speed": round(row["speed"], 2),
            }  # fmt: skip
        for row in size["rows"]:
            way = ways.setdefault(row["name"], {"host": round(row["host"] / 1e9, 1)})
            way[str(row["micro_batch"])] = round(row["needed"] / 1e9, 2)
    ways = {name: ", ".join(f"{size}: {value}" for size, value in way.items()) for name, way in ways.items()}
    return {"answers": answers, "ways": ways}


def in_short(answer: dict | None) -> str:
    """Return a recommended way in a few words."""
    if answer is None:
        return "–"
    name = answer["name"].replace("checkpointing", "ckpt.")
    return name + (f", micro-batch {answer['micro_batch']}" if answer["micro_batch"] else "")


def answers_of(results: dict[str, dict], model: str) -> dict[str, dict]:
    """Return what is recommended for a model, by GPU."""
    found = (results.get(f"{model}, {gpus}", {"answers": {}}) for gpus in GPUS)
    return {name: answer for each in found for name, answer in each["answers"].items()}


def page(results: dict[str, dict]) -> str:
    """Return docs/memory_plans.md."""
    versions = results[f"{next(iter(MODELS))}, T4"]["versions"]
    dates = sorted(record["date"][:10] for record in results.values())
    about = " ".join(__doc__.split("\n\n")[-1].split())
    lines = [
        "# What to run on which GPU\n",
        f"Predicted, not measured: `python benchmarks/memory_plans.py`, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, {dates[0]} to {dates[-1]}, with the rungs and the known costs of that day. "
        f"{about} The host's memory must be large enough.\n",
        "The first way trains all weights, the second adapters. ckpt.: activation checkpointing; GB: taken of the GPU, "
        "with CUDA's own; speed: 1 is a busy GPU in 16 bits, a guess. What adapters and all else cost in accuracy: "
        "[results](results.md#2000-reviews). For your own model, GPU and settings, with the command: "
        "`python scripts/plan_memory.py --gpu T4`; every way: `--full`.\n",
    ]
    for model, options in MODELS.items():
        command = " ".join(["python scripts/plan_memory.py", *options, "--model", f"configs/models/{model}.json"])
        lines += [f"\n## {model}\n\n`{command} --gpu_memory 16GB`\n", HEADER, "|---|---|---:|---:|---|---|---:|---:|"]
        for gpu, answer in answers_of(results, model).items():
            cells = [gpu]
            for weights, way in answer.items():
                figures = [f"{way['GB']:.2f}", f"{way['speed']:.2f}"] if way else ["", ""]
                cells += [in_short(way), *figures]
                if weights == "all weights":
                    cells.append(", ".join(cost.split(" (")[0] for cost in way["costs"]) if way else "")
            lines.append(f"| {' | '.join(cells)} |")
        lines.append(f"<!-- figures: {OUT.name} {model},*.answers -->")
    return "\n".join(lines) + "\n"


def guide(results: dict[str, dict], before: str) -> str:
    """Return docs/memory.md with the table of what is recommended."""
    table = ["| GPU | " + " | ".join(MODELS) + " |", "|---|" + "---|" * len(MODELS)]
    columns = [answers_of(results, model) for model in MODELS]
    for gpu in columns[0]:
        ways = [column.get(gpu, {}).values() for column in columns]
        cells = ["; ".join(in_short(way) for way in each if way) or "–" for each in ways]
        table.append(f"| {gpu} | " + " | ".join(cells) + " |")
    start, rest = before.split(MARKS[0])
    return "\n".join([start + MARKS[0], *table, MARKS[1] + rest.split(MARKS[1])[1]])


def main() -> None:
    """Plan for the chosen models, and write the figures and both pages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=list(MODELS))
    for model in parser.parse_args().model:
        for gpus, machine in GPUS.items():
            print(f"{model}, {gpus} …", file=sys.stderr, flush=True)
            command = ["scripts/plan_memory.py", *MODELS[model], "--model", f"configs/models/{model}.json", *machine]
            record = common.environment(torch.device("cpu")) | {"command": common.shown(command)}
            common.write_result(OUT, f"{model}, {gpus}", record | plan(command))
    results = common.read_results(OUT)
    write_whole(PAGE, page(results))
    write_whole(GUIDE, guide(results, GUIDE.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
