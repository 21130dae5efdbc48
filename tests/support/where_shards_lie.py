"""Run the rung of the first argument, and print the devices of its weights and its optimizer state."""

import runpy
import sys
from pathlib import Path

from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

lay = {}


def note(optimizer, *_):
    weights = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    moments = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    moments = [value for value in moments if value.ndim]  # a count of steps may be on any device
    for name, tensors in (("parameters", weights), ("optimizer", moments)):
        lay[name] = "+".join(sorted({tensor.device.type for tensor in tensors}))


if __name__ == "__main__":
    register_optimizer_step_post_hook(note)
    rung = Path(__file__).parents[2] / "src" / f"{sys.argv.pop(1)}.py"
    sys.path[0] = str(rung.parent)
    runpy.run_path(str(rung), run_name="__main__")
    print(", ".join(f"{name} on {places}" for name, places in lay.items()))
