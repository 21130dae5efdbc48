"""A rank that waits in a collective that never ends. Its watch waits five seconds.

Arguments: the rank, the number of ranks, the port of rank 0. Only the watch is imported, not the package.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import sleep

import torch.distributed as dist

WATCH = Path(__file__).parents[2] / "src" / "fabric_ladder" / "distributed" / "watch.py"

if __name__ == "__main__":
    rank, ranks, port = map(int, sys.argv[1:])
    spec = spec_from_file_location("watch", WATCH)
    spec.loader.exec_module(module := module_from_spec(spec))
    module.PATIENCE = 5.0
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    watch = module.RankWatch()
    watch.meet()
    print("met", flush=True)
    if rank == 1:
        sleep(600)  # the other ranks' collective waits for this rank
    try:
        dist.barrier()
    except RuntimeError as error:
        if not module.lost_contact(error):
            raise
        watch.join()  # the watch ends this process
