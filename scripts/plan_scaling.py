"""Predict how far more GPUs help: memory and traffic on 1 to 1,024 GPUs, and where the link becomes the bottleneck.

python scripts/plan_scaling.py --batch_size 1024 --micro_batch_size 8
python scripts/plan_scaling.py --model Qwen/Qwen3-8B --task instruction-tuning --batch_size 512 --tflops 989

All other options are passed to rungs 9, 10 and 12. The script reads only the model's config.
"""

import argparse
import logging

from fabric_ladder.tools.arguments import Arguments


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options, and the settings for the rungs."""
    parser = Arguments(__doc__, epilog="All other options are passed to the rungs, e.g. --config, --model, "
                       "--batch_size and --micro_batch_size.")  # fmt: skip
    parser.add_argument("--length", metavar="N", type=int, help="tokens of a sample; default: --max_length")
    parser.add_argument("--tflops", type=float, default=312, help="peak of a GPU in 16 bits; default: 312, an A100")
    parser.add_argument("--utilization", type=float, default=0.4, help="reached share of the peak; default: 0.4, as "
                        "Llama 3 in 16 bits on H100 (Dubey et al., 2024, table 4)")  # fmt: skip
    arguments, options = parser.parse_with_settings()
    for name in ("tflops", "utilization"):
        if not getattr(arguments, name) > 0:
            parser.error(f"--{name} {getattr(arguments, name)}: must be above 0")
    return arguments, options


def main(arguments: argparse.Namespace, options: list[str]) -> None:
    """Print both tables."""
    from fabric_ladder.planning.scaling_tables import print_tables
    from fabric_ladder.techniques.advice import show_errors

    show_errors()
    for name in ("lightning.fabric", "lightning.pytorch"):  # Lightning would print the precision of every rehearsal
        logging.getLogger(name).setLevel(logging.WARNING)
    print_tables(arguments, options)


if __name__ == "__main__":
    main(*parse())
