"""Run a rung on the CPU with tapes in place of CUDA graphs, and with the trial of the heaviest batches.

Arguments: `filled`, or `exact` for no filler documents, the rung, and the rung's arguments.
"""

import runpy
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))
import torch

from fabric_ladder.data.loaders import TextCollator
from fabric_ladder.settings import Settings
from fabric_ladder.training import fitting, graphs
from support.helpers import SRC
from support.tape import TapeRecorder

if __name__ == "__main__":
    filled, rung = sys.argv[1] == "filled", SRC / f"{sys.argv[2]}.py"
    sys.argv = [str(rung), *sys.argv[3:]]
    fitting.HARD_LIMITS = ("cuda", "cpu")
    graphs.CudaRecorder, graphs.RATE = TapeRecorder, torch.float64  # as the CPU's fused kernels read a rate
    Settings.replays = property(lambda settings: settings.cuda_graphs)
    if not filled:
        TextCollator.most = property(lambda _: 0, lambda *_: None)
    runpy.run_path(str(rung), run_name="__main__")
