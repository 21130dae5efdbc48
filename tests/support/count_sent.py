"""Runs the script in COUNT_SENT, and writes into COUNTED what its rank 0 hands to collectives in an optimizer step.

Counted are the tensors of `torch.distributed`'s own operations, as they are dispatched, from the start of the second
step to the start of the third: in the first, FSDP2 and DeepSpeed prepare themselves.
"""

import json
import os
import runpy
import sys
from collections import Counter
from pathlib import Path

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.append(str(Path(__file__).parents[1]))
from fabric_ladder.training import loop

KINDS = {"allreduce_": 0, "allreduce_coalesced_": 0, "_allgather_base_": 0, "allgather_into_tensor_coalesced_": 0,
         "allgather_": 0, "_reduce_scatter_base_": 1, "reduce_scatter_tensor_coalesced_": 1, "reduce_": 0,
         "broadcast_": 0}  # fmt: skip
SMALL = 1024  # bytes: sums of losses and norms, and whether to stop


class Counted(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sent = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation.namespace == "c10d" and (name := operation._schema.name.split("::")[1]) != "barrier":
            whole = [tensor for tensor in tree_leaves(args[KINDS[name]]) if isinstance(tensor, Tensor)]
            size = sum(tensor.nbytes for tensor in whole)
            if size > SMALL:
                self.sent[name] += size
        return operation(*args, **(kwargs or {}))


def count_steps(counted):
    """Note the sums at the start of each step."""
    accumulate, starts = loop.accumulate_gradients, []

    def wrapped(*arguments):
        starts.append(Counter(counted.sent))
        if len(starts) == 3 and os.environ.get("LOCAL_RANK", "0") == "0":
            Path(os.environ["COUNTED"]).write_text(json.dumps(starts[2] - starts[1]))
        return accumulate(*arguments)

    loop.accumulate_gradients = wrapped


if __name__ == "__main__":
    with Counted() as counted:
        count_steps(counted)
        runpy.run_path(os.environ["COUNT_SENT"], run_name="__main__")
