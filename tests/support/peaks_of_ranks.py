"""Take two optimizer steps of DDP or FSDP on real tensors, on as many gloo processes as the settings have devices.

The argument has the settings as JSON. The first process prints the peak of its tensors, in bytes.
"""

import json
import os
import sys

import torch

from fabric_ladder import Settings
from fabric_ladder.planning.predict import largest_batches
from support.planning import peak_of_ranks

if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    length = values.pop("length")
    settings = Settings(**values)
    torch.set_num_threads(1)
    training, _ = largest_batches(settings, length)
    peak = peak_of_ranks(settings, training)
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(json.dumps({"total": peak.total, "host": peak.host, "phase": peak.phase}))
