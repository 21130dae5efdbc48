"""FSDP2: the modules that it shards, its options, and Fabric's strategy for it."""

import atexit
from collections.abc import Callable

import torch
import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy

from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings


def transformer_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules that FSDP gathers one at a time: the `_no_split_modules` of transformers.

    The other weights (embeddings, norms, the head) stay in the root's group.

    Raises:
        UserError: The architecture has no `_no_split_modules`.
    """
    names = set(model._no_split_modules or ())
    blocks = [module for module in model.modules() if type(module).__name__ in names]
    if not blocks:
        raise UserError(
            f"FSDP needs blocks, and transformers lists none for {model.config.model_type}: use src/9_ddp.py"
        )
    return blocks


def sharding_policy(settings: Settings, mesh: DeviceMesh) -> dict:
    """Return `fully_shard`'s options: the ranks, the mixed precision, and the offload of shards to CPU memory.

    Under `bf16-mixed` the shards have 32 bits, weights are gathered in bfloat16, and gradients are added over the ranks
    in 32 bits. Other precisions use the parameters' own type for all three.
    """
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=settings.accelerator == "cuda") if settings.offload else OffloadPolicy()
    return {
        "mesh": mesh["data_parallel"],
        "mp_policy": mixed if settings.precision == "bf16-mixed" else MixedPrecisionPolicy(),
        "offload_policy": offload,
    }


def free_gathered(model: nn.Module) -> None:
    """Free the weights that FSDP has left gathered, after a forward pass without a backward pass.

    `parameters()` returns them in place of the shards, which the optimizer knows.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _end_process_group() -> None:
    """End the process group before Python exits, or PyTorch warns. Fabric ends it only if NCCL is the only backend."""
    if dist.is_initialized():
        dist.destroy_process_group()


def fsdp_strategy(settings: Settings, shard: Callable[[nn.Module, DeviceMesh], nn.Module]) -> ModelParallelStrategy:
    """Return Fabric's strategy for FSDP2, with data parallelism only and without tensor parallelism.

    With CPU offload, gradients are clipped to a common norm on the CPU, which needs a CPU backend for collectives.
    """
    backend = None
    if settings.accelerator == "cuda" and settings.offload:
        backend = "cpu:gloo,cuda:nccl"
        atexit.register(_end_process_group)
    return ModelParallelStrategy(
        shard, data_parallel_size=settings.ranks, tensor_parallel_size=1, process_group_backend=backend
    )
