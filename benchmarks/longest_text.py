"""Predict the longest text that Llama 3.1 8B trains on, on GPUs of several sizes, with and without a tiled MLP.

    python benchmarks/longest_text.py [--tile 2048] [--sizes 8 16 24 80]

One text is in memory at a time, with activation checkpointing and chunked cross-entropy. A text fits if the expected
memory of the process, with assumptions about CUDA's own memory, is at most the size of the GPU. Lengths are multiples
of 1,024 tokens, up to the 131,072 positions of the model.
"""

import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from itertools import product

import common  # first import: it makes the project importable

from fabric_ladder.ladder import CHECKPOINTING
from fabric_ladder.models.configs import load_config
from fabric_ladder.planning.candidates import read_settings
from fabric_ladder.planning.overhead import ANY_GPU
from fabric_ladder.planning.predict import blank_datasets, largest_batches
from fabric_ladder.planning.rehearsal import rehearse
from fabric_ladder.settings import show

MODEL = str(common.MODELS / "llama-3.1-8b.json")
STEP = 1024  # tokens
OPTIONS = ["--model", MODEL, "--task", "instruction-tuning", "--batch_size", "1", "--micro_batch_size", "1"]
OPTIONS += [*CHECKPOINTING, "--lora_targets", "attention"]
WAYS = {
    "adapters on 4-bit weights": "14_qlora",
    "adapters": "13_lora",
    "all weights, 8-bit Adam": "18_low_bit_optimizer",
}


@contextmanager
def memory_of(rung: str, options: list[str], most: int) -> Iterator[Callable[[int], int]]:
    """Set up a run on fake tensors once; yield a function of a text's steps, up to `most`, that returns its bytes."""
    settings = read_settings(rung, [*OPTIONS, "--max_length", str(most * STEP), *options])

    @cache
    def memory(steps: int) -> int:
        length = steps * STEP
        training, evaluations = largest_batches(replace(settings, eval_batch_tokens=length), length)
        needed = ANY_GPU.needed(rehearsal.peak(settings, training, evaluations))
        print(f"  {rung} {' '.join(options)}: {length:,} tokens, {needed / 1e9:.2f} GB", file=sys.stderr, flush=True)
        return needed

    with rehearse(settings, blank_datasets(0)) as rehearsal:
        yield memory


def main() -> None:
    """Search, print, write the results."""
    parser = common.new_parser(__doc__, common.RESULTS / "longest_text.json")
    parser.add_argument("--tile", type=int, default=2048, help="tokens (default: %(default)s)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 16, 24, 80], help="GB (default: %(default)s)")
    args = parser.parse_args()
    common.check_storable(args.out)
    most = load_config(MODEL).max_position_embeddings // STEP
    rows = []
    for way, rung in WAYS.items():
        for offload, tile in product((False, True), (None, args.tile)):
            more = ["--activation_offload", show(offload), "--mlp_tile", show(tile)]
            with memory_of(rung, more, most) as memory:
                found = {  # memory grows with the length, so the longest text that fits is found by halving
                    f"{size} GB": STEP * bisect_right(range(1, most + 1), size * 1e9, key=memory) for size in args.sizes
                }
            rows.append({"way": way, "rung": rung, "activation_offload": offload, "mlp_tile": tile} | found)
    common.print_table([*rows[0]], [[*row.values()] for row in rows])
    common.write_result(args.out, "llama-3.1-8b", {"step": STEP, "most": most * STEP, "rows": rows})


if __name__ == "__main__":
    main()
