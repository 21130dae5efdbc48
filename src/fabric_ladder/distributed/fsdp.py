"""FSDP2: which modules are sharded, with which options, and the strategy of Fabric that does it."""

import atexit
from collections.abc import Callable

import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that are gathered one at a time: those that transformers says must not be split.

    What is left over (embeddings that are tied to the head, norms, the head) stays in the root's group.

    Raises:
        UserError: The architecture names no such modules.
    """
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(f"{model.config.model_type} names no blocks that FSDP could shard: use src/9_ddp.py")
    return blocks


def sharding_policy(settings: Settings, mesh: DeviceMesh) -> dict:
    """Return `fully_shard`'s options: the ranks, the mixed precision, and whether the shards are parked on the CPU.

    Under `bf16-mixed` the shards stay in 32-bit, weights are gathered in bfloat16, and gradients are summed over the
    ranks in 32-bit; under the others everything is in the parameters' own precision.
    """
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=settings.accelerator == "cuda") if settings.offload else OffloadPolicy()
    return {
        "mesh": mesh["data_parallel"],
        "mp_policy": mixed if settings.precision == "bf16-mixed" else MixedPrecisionPolicy(),
        "offload_policy": offload,
    }


def _end_process_group() -> None:
    """End it before Python ends, else PyTorch warns; Fabric does so where NCCL is the only backend."""
    if dist.is_initialized():
        dist.destroy_process_group()


def fsdp_strategy(settings: Settings, shard: Callable[[nn.Module, DeviceMesh], nn.Module]) -> ModelParallelStrategy:
    """Return Fabric's strategy for FSDP2: every rank has data of its own, and no tensor is cut inside a block.

    With CPU offload, gradients on the CPU need a collective backend of their own, to be clipped to a common norm.
    """
    backend = None
    if settings.accelerator == "cuda" and settings.offload:
        backend = "cpu:gloo,cuda:nccl"
        atexit.register(_end_process_group)
    return ModelParallelStrategy(
        shard, data_parallel_size=settings.ranks, tensor_parallel_size=1, process_group_backend=backend
    )
