"""Plan a run: which rung fits a GPU, how much of its memory it takes, and what it costs.

python scripts/plan_memory.py --gpu T4
python scripts/plan_memory.py --config configs/imdb_bloom_560m.yaml --gpu_memory 16GB --full
python scripts/plan_memory.py --model Qwen/Qwen3-8B --length 2048 --gpu_memory 24GB --devices 2
python scripts/plan_memory.py --calibrate                         # measure this GPU's overhead once

All other options are passed to every rung. The script reads only the model's config, and downloads no weights and no
data. Without --length it plans for the longest sample of the data, if they are on this machine.
"""

import argparse
import gc
import os
import sys

from fabric_ladder.options import read_words
from fabric_ladder.settings import Settings
from fabric_ladder.tools.arguments import Arguments, new_path, rungs, write_new


def parse() -> tuple[argparse.Namespace, list[str]]:
    """Return this script's options, and the settings for the rungs."""
    parser = Arguments(__doc__, epilog="All other options are passed to every rung, e.g. --config, --model, "
                       "--max_length and --batch_size.")  # fmt: skip
    parser.add_argument("--gpu", metavar="T4", help="GPU to plan for: T4, RTX 4090, A100 80GB, …, or "
                        "GPUs that differ, separated by commas; default: this machine's")  # fmt: skip
    parser.add_argument("--gpu_memory", metavar="16GB", help="memory of a GPU: a whole "
                        "number of GB is the size as sold, 15.9GiB is exact; default: the GPU's")  # fmt: skip
    parser.add_argument(
        "--host_memory",
        metavar="64GB",
        help="CPU memory; default: this machine's with its GPUs, else 64 GB for each GPU",
    )
    parser.add_argument("--devices", metavar="N", type=int, help="GPUs of the machine; default: all of them, else 1")
    parser.add_argument("--length", metavar="N", type=int, help="tokens of the longest sample; default: from the data")
    parser.add_argument(
        "--rungs", metavar="1,2,…", type=rungs, help="numbers or names, separated by commas; default: all"
    )
    parser.add_argument("--full", action="store_true", help="also print a table of all candidates")
    parser.add_argument(
        "--json", metavar="FILE", type=new_path, help="write the figures of all candidates, in bytes; - prints them"
    )
    parser.add_argument("--calibrate", action="store_true", help="measure this GPU's memory overhead")
    arguments, settings = parser.parse_with_settings()
    if "gpu_memory_limit" in read_words(settings):
        parser.error("--gpu_memory_limit is for a run: here use --gpu_memory")
    given = [name for name, value in vars(arguments).items() if value and name != "calibrate"]
    if arguments.calibrate and given:
        parser.error(f"--calibrate plans nothing: leave out --{given[0]}")
    if arguments.full and str(arguments.json) == "-":
        parser.error("--json - prints only the JSON, which has all candidates: leave out --full")
    return arguments, settings


def main(arguments: argparse.Namespace, options: list[str]) -> None:
    """Plan, print and write."""
    gc.disable()  # a collection during imports and at the process's end takes two seconds in all
    os.environ["TORCHDYNAMO_DISABLE"] = "1"  # nothing is compiled, and bitsandbytes would import the compiler
    from rich.console import Console

    from fabric_ladder.planning.answer import print_answer, to_json
    from fabric_ladder.planning.calibration import calibrate
    from fabric_ladder.planning.plan import find_answer
    from fabric_ladder.techniques.advice import explain_errors

    gc.freeze()
    gc.enable()
    explain_errors()
    if arguments.calibrate:
        calibrate(Settings().cache_dir)
        return

    def report(names: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\033[KRehearsing {names[:60]}", end="\r", file=sys.stderr, flush=True)

    answer = find_answer(arguments, options, report)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    prints_json = str(arguments.json) == "-"
    if prints_json:
        print(to_json(answer), end="")
    else:
        print_answer(answer, Console(), arguments.full)
        if arguments.json:
            write_new(arguments.json, to_json(answer))
            print(f"Saved {arguments.json}")


if __name__ == "__main__":
    main(*parse())
