"""Run the scripts whose output the documents quote, and store the lines that they print.

    python benchmarks/printed.py [--part checkpointing …]

Results are in benchmarks/results/printed.json: for each part its command and the lines that it printed.
"""

import argparse
import os

import common  # first import: it makes the project importable
import torch

OUT = common.RESULTS / "printed.json"
PARTS = {
    "adapters bloom-7b1": "scripts/plan_memory.py --config configs/imdb_bloom_560m.yaml --length 1024 "
    "--gpu_memory 24GB --model bigscience/bloom-7b1 --task instruction-tuning --rungs 13,14 --lora_targets attention "
    "--full",
    "4-bit llama-3.1-70b": "scripts/plan_memory.py --config configs/imdb_bloom_560m.yaml --length 512 "
    "--gpu_memory 24GB --devices 2 --model meta-llama/Llama-3.1-70B --task instruction-tuning --precision bf16-true "
    "--lora true --quantization nf4 --activation_checkpointing true --rungs 9,10,11 --lora_targets attention --full",
    "streamed qwen3-8b": "scripts/plan_memory.py --config configs/imdb_bloom_560m.yaml --length 1024 "
    "--gpu_memory 24GB --model Qwen/Qwen3-8B --task instruction-tuning --activation_checkpointing true "
    "--micro_batch_size 4 --rungs 13,14,24 --lora_targets attention --full",
    "streamed llama-3.1-70b": "scripts/plan_memory.py --config configs/imdb_bloom_560m.yaml --length 512 "
    "--gpu_memory 24GB --model meta-llama/Llama-3.1-70B --task instruction-tuning --quantization nf4 "
    "--activation_checkpointing true --rungs 14,24 --lora_targets attention --full",
    "plan bloom-560m T4": "scripts/plan_memory.py --gpu T4",
    "checkpointing": "benchmarks/operations.py checkpointing --threads 1",
}


def main() -> None:
    """Run the chosen parts, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    common.check_storable(OUT)
    torch.set_num_threads(1)  # as `checkpointing` has; the plans use none
    os.environ["COLUMNS"] = "200"  # for tables
    for part in args.part:
        command = PARTS[part].split()
        lines = common.run_child(command).splitlines()
        print(*lines, sep="\n")
        record = common.environment(torch.device("cpu")) | {"command": common.shown(command), "printed": lines}
        common.write_result(OUT, part, record)


if __name__ == "__main__":
    main()
