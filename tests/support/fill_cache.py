"""Wait until the file `go` exists, then load texts.csv, and print the result.

python fill_cache.py READY MODEL: writes the file READY before it waits.
"""

import sys
import time
from pathlib import Path

from fabric_ladder.data.load import load_datasets
from fabric_ladder.settings import DataSettings

if __name__ == "__main__":
    Path(sys.argv[1]).touch()
    while not Path("go").exists():
        time.sleep(0.001)
    datasets = load_datasets(DataSettings(dataset="texts.csv", model=sys.argv[2], cache_dir="cache"))
    print(datasets.fingerprint, len(datasets.splits["train"]))
