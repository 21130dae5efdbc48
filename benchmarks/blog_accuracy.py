"""What the blog's recipe learns beside rungs 1 and 2: the same reviews, initial weights, learning rate, seeds.

    python benchmarks/blog_accuracy.py [--sides rung_1 blog_1 rung_2 blog_16] [--seeds 3]

MiniLM in 32-bit on 5,000 reviews, up to 128 tokens, one epoch, one thread; 2,000 other reviews for the test. The blog's
scripts 1 and 2 are blog_recipe.py with one review a step and with 16; rungs 1 and 2 are the unchanged scripts. A seed
sets the order of the reviews, dropout and the head's initial weights, so the sides draw the same weights and another
order. Each run is a process of its own and takes about 20 minutes; what results/blog_accuracy.json has already is not
run again. `python benchmarks/evidence_tables.py` writes the table.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import common  # first of all: it makes the project importable without an installation
import torch
from against_blog import model_options
from common import CannotMeasureError
from evidence_sets import MINILM

from fabric_ladder import parse_settings

OUT = common.RESULTS / "blog_accuracy.json"
SIDES = {  # a rung, or the blog's recipe, and its effective batch
    "rung_1": ("1_batch_size_1", 1),
    "blog_1": (None, 1),
    "rung_2": ("2_grad_accum", 16),
    "blog_16": (None, 16),
}
SEED, TESTED = 123, 2000
DATA = f"--train_samples 5000 --validation_samples 500 --test_samples {TESTED}".split()


def measure(side: str, seed: int, data: list[str]) -> dict:
    """Train, test, and return a side's figures with what they depend on."""
    rung, batch_size = SIDES[side]
    with tempfile.TemporaryDirectory() as folder:
        options = [*MINILM, *model_options("minilm", Path(folder))[:2], "--accelerator", "cpu", *data]
        options += ["--batch_size", str(batch_size), "--micro_batch_size", "1", "--seed", str(seed)]
        if rung:
            command = common.rung_command(options, rung)
        else:
            texts = Path(folder) / "texts"
            common.save_texts(parse_settings(options), texts)
            command = common.blog_command(texts, options)
        figures = common.run_command(command, threads=1)
    return common.environment(torch.device("cpu")) | {"child": common.shown(command), "figures": figures}


def main() -> int:
    """Run what is not kept yet; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--seeds", type=int, default=3, help="so many from 123 on (default 3)")
    args = parser.parse_args()
    common.imdb_archive()
    for seed in range(SEED, SEED + args.seeds):
        for side in args.sides:
            if (name := f"{side} {seed}") not in common.read_results(OUT):
                record = measure(side, seed, DATA)
                common.write_result(OUT, name, record)
                print(f"{name}: test accuracy {record['figures']['test_accuracy']:.2%}", flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CannotMeasureError as reason:
        sys.exit(f"not measured: {reason}")
