"""Run the scripts whose output the documents quote, and store the lines that they print.

    python benchmarks/printed.py [--part "plan bloom-560m T4" …]

Results are in benchmarks/results/printed.json: for each part its command and the lines that it printed.
"""

import os

import common  # first import: it makes the project importable

OUT = common.RESULTS / "printed.json"
PLAN = (
    "scripts/plan_memory.py --config configs/imdb_bloom_560m.yaml --gpu_memory 24GB --task instruction-tuning --full "
    "--lora_targets attention"
)
LLAMA = f"{PLAN} --length 512 --model meta-llama/Llama-3.1-70B --quantization nf4 --activation_checkpointing true"
PARTS = {
    "adapters bloom-7b1": f"{PLAN} --length 1024 --model bigscience/bloom-7b1 --rungs 13,14",
    "4-bit llama-3.1-70b": f"{LLAMA} --devices 2 --precision bf16-true --lora true --rungs 9,10,11",
    "streamed qwen3-8b": f"{PLAN} --length 1024 --model Qwen/Qwen3-8B --activation_checkpointing true "
    "--micro_batch_size 4 --rungs 13,14,24",
    "streamed llama-3.1-70b": f"{LLAMA} --micro_batch_size 1 --rungs 14,24",
    "plan bloom-560m T4": "scripts/plan_memory.py --gpu T4",
    "plan bloom-560m two T4": "scripts/plan_memory.py --gpu T4 --devices 2",
    "several bloom-560m two T4": "scripts/plan_memory.py --gpu T4 --devices 2 --rungs 9,10,11 --full",
}


def main() -> None:
    """Run the chosen parts, one after the other."""
    parser = common.new_parser(__doc__)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    args = parser.parse_args()
    common.check_storable(OUT)
    os.environ["COLUMNS"] = "200"  # for tables
    for part in args.part:
        command = PARTS[part].split()
        lines = common.run_child(command).splitlines()
        print(*lines, sep="\n")
        common.write_result(OUT, part, {"command": common.shown(command), "printed": lines})


if __name__ == "__main__":
    main()
