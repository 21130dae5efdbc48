"""Two optimizer steps of rung 10 or 11 on real tensors, on as many gloo processes as are asked for.

Arguments: settings of the rung, as JSON. The first process prints what its tensors held at their peak, in bytes.
"""

import json
import sys

import torch
from lightning import Fabric
from torch.distributed.fsdp import fully_shard

from fabric_ladder import Settings, build_model, build_optimizer
from fabric_ladder.fsdp import fsdp_strategy, sharding_policy, transformer_blocks
from fabric_ladder.gradients import accumulate_gradients
from fabric_ladder.memory import blank_datasets, largest_batches
from fabric_ladder.metrics import Meter
from fabric_ladder.tracker import PeakTracker


def shard(model, mesh):
    how = sharding_policy(settings, mesh)
    for block in transformer_blocks(model):
        fully_shard(block, **how)
    return fully_shard(model, **how)


if __name__ == "__main__":
    values = json.loads(sys.argv[1])
    length = values.pop("length")
    settings = Settings(**values)
    torch.set_num_threads(1)
    fabric = Fabric(accelerator="cpu", devices=settings.devices, precision=settings.precision,
                    strategy=fsdp_strategy(settings, shard))  # fmt: skip
    fabric.launch()
    training, _ = largest_batches(settings, length, ranks=settings.devices)
    model = fabric.setup(build_model(settings, blank_datasets(2)))
    optimizer = fabric.setup_optimizers(build_optimizer(settings, model))
    tracker = PeakTracker()
    with tracker:
        for _ in range(2):
            for parameter in model.parameters():
                tracker.watch(parameter, parked=settings.offload)
            for state in optimizer.optimizer.state.values():
                for tensor in state.values():
                    tracker.hold(tensor, "host" if settings.offload else "optimizer_state")
            tracker.forget_peak()
            real = [each._replace(inputs={name: torch.ones_like(tensor, device="cpu") for name, tensor in
                                          each.inputs.items()}) for each in training]  # fmt: skip
            with tracker.at("training", gathering=True):
                accumulate_gradients(fabric, model, real, Meter(fabric), ("", []))
            with tracker.at("optimizer", on_host=settings.offload):
                optimizer.step()
                optimizer.zero_grad()
    if fabric.global_rank == 0:
        peak = tracker.peak()
        print(json.dumps({"total": peak.total, "host": peak.host, "phase": peak.phase}))
    torch.distributed.destroy_process_group()
