"""Run the scripts whose output the documents quote, and store it with its seconds and peak memory.

    python benchmarks/printed.py [--part checkpointing …]

Results are in benchmarks/results/printed.json: for each part its command, the lines that it printed, the seconds of the
whole process, and its peak memory. Other programs on the machine affect the seconds.
"""

import argparse
import os
import subprocess
import sys
from time import perf_counter

import common  # first import: it makes the project importable
import torch

OUT = common.RESULTS / "printed.json"
PARTS = {
    "adapters bloom-7b1": "scripts/plan_memory.py --config configs/imdb_bloom_560m.yaml --length 1024 "
    "--gpu_memory 24GB --model configs/models/bloom-7b1.json --task instruction-tuning --rungs 13,14 --full",
    "plan bloom-560m T4": "scripts/plan_memory.py --gpu T4 --model configs/models/bloom-560m.json",
    "checkpointing": "benchmarks/operations.py checkpointing --threads 1",
}


def run(command: list[str]) -> dict:
    """Run a script; return the lines that it printed, and the seconds and peak bytes of its process."""
    start = perf_counter()
    wide = os.environ | {"COLUMNS": "200"}  # for tables
    with subprocess.Popen(
        [sys.executable, *command], cwd=common.ROOT, env=wide, stdout=subprocess.PIPE, text=True
    ) as child:
        lines = child.stdout.read().splitlines()
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        raise SystemExit(f"{common.shown(command)} ended with status {child.returncode}")
    seconds = {"seconds": perf_counter() - start, "processor_seconds": usage.ru_utime + usage.ru_stime}
    return seconds | {"peak_memory_bytes": usage.ru_maxrss * 1024, "printed": lines}


def main() -> None:
    """Run the chosen parts, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    for part in parser.parse_args().part:
        command = PARTS[part].split()
        record = common.environment(torch.device("cpu")) | {"command": common.shown(command)} | run(command)
        common.write_result(OUT, part, record)
        print(*record["printed"], sep="\n")


if __name__ == "__main__":
    main()
