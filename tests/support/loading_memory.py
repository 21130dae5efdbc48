"""Print the growth of the process in bytes when it loads many.parquet, and when it loads it three more times.

python loading_memory.py MODEL, where few.parquet, in the same folder, is loaded first.
"""

import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from fabric_ladder import Settings, build_dataloaders
from local_dataset_utilities import load_datasets


def held():
    """Return the bytes of the process without mapped files."""
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024


def watch():
    global peak
    while True:
        peak = max(peak, held())
        time.sleep(0.002)


def start(name):
    """Return the first batches."""
    sizes = {"batch_size": 16, "micro_batch_size": 16, "eval_batch_tokens": 1024, "pad_to_multiple_of": 1}
    settings = Settings(dataset=name, model=sys.argv[1], cache_dir="cache", accelerator="cpu", max_length=64, **sizes)
    loaders = build_dataloaders(SimpleNamespace(global_rank=0, world_size=1), load_datasets(settings), settings)
    return [next(iter(loader)) for loader in loaders]


if __name__ == "__main__":
    peak = 0
    threading.Thread(target=watch, daemon=True).start()
    start("few.parquet")
    for _ in range(4):
        peak = before = held()
        start("many.parquet")
        print(peak - before)
