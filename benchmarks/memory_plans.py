"""The fastest rung that fits, for five models on six sizes of GPU: docs/memory_plans.md, and a table in docs/memory.md.

    python benchmarks/memory_plans.py

The shapes are those in configs/models/; nothing is measured. BLOOM-560m and ViT-L/16 are fine-tuned as classifiers with
the configs of the series that the rungs follow, the others by instructions of up to 1,024 tokens, 16 of them for an
optimizer step.
"""

import argparse
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import common  # first of all: it makes the project importable without an installation

from fabric_ladder.environment import describe_versions

SIZES = "8GB,16GB,24GB,40GB,80GB,141GB"
TEXT = ["--config", "configs/imdb_bloom_560m.yaml", "--length", "1024"]
INSTRUCTIONS = [*TEXT, "--task", "instruction-tuning"]
MODELS = {
    "bloom-560m": TEXT,
    "vit-large-16": ["--config", "configs/cifar10_vit_large.yaml", "--image_size", "224"],
    "llama-3.2-1b": INSTRUCTIONS,
    "bloom-7b1": INSTRUCTIONS,
    "qwen3-8b": INSTRUCTIONS,
}
DOCUMENT = common.ROOT / "docs" / "memory_plans.md"
MARKS = "<!-- by benchmarks/memory_plans.py -->", "<!-- end -->"


def plan(model: str, options: list[str], folder: Path) -> str:
    """Return the planner's Markdown for a model."""
    out = folder / f"{model}.md"
    command = [sys.executable, "scripts/plan_memory.py", *options, "--model", f"configs/models/{model}.json",
               "--gpu_memory", SIZES, "--markdown", str(out)]  # fmt: skip
    subprocess.run(command, check=True, cwd=common.ROOT, stdout=subprocess.DEVNULL)
    return out.read_text(encoding="utf-8")


def chosen(text: str) -> list[str]:
    """Return the table's cells: for each size the fastest way to train all weights, and with adapters."""
    cells = []
    for size in SIZES.split(","):
        start = rf"^{size[:-2]} GB: Fastest that fits, "
        found = {
            kind: re.search(rf"{start}{kind}: (.+?) \(", text, re.MULTILINE) for kind in ("all weights", "adapters")
        }
        words = [match.group(1).replace("checkpointing", "ckpt.") for match in found.values() if match]
        cells.append("; ".join(words) or "–")
    return cells


def main() -> None:
    """Plan for all models, and write both files."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        texts = {}
        for model, options in MODELS.items():
            print(f"{model} …", file=sys.stderr, flush=True)
            texts[model] = plan(model, options, Path(folder))
    table = ["| GPU | " + " | ".join(MODELS) + " |", "|---|" + "---|" * len(MODELS)]
    columns = [chosen(text) for text in texts.values()]
    table += [f"| {size} | " + " | ".join(cells) + " |" for size, cells in
              zip(SIZES.split(","), zip(*columns, strict=True), strict=True)]  # fmt: skip
    versions = describe_versions()
    about = " ".join(__doc__.split("\n\n")[-1].split())
    head = (
        "# Will it fit?\n\n"
        f"Predicted, not measured: `python benchmarks/memory_plans.py`, torch {versions['torch']}, transformers "
        f"{versions['transformers']}. {about} Where two ways stand in a cell, the first trains all weights, the second "
        "adapters; ckpt. is activation checkpointing."
    )
    parts = [head, "\n".join(table), *(f"## {model}\n\n{text}" for model, text in texts.items())]
    DOCUMENT.write_text("\n\n".join(parts).rstrip() + "\n", encoding="utf-8")
    guide = common.ROOT / "docs" / "memory.md"
    before, rest = guide.read_text(encoding="utf-8").split(MARKS[0])
    after = rest.split(MARKS[1])[1]
    guide.write_text("\n".join([before + MARKS[0], *table, MARKS[1] + after]), encoding="utf-8")
    print(f"Wrote {DOCUMENT.relative_to(common.ROOT)} and the table in {guide.relative_to(common.ROOT)}")


if __name__ == "__main__":
    main()
