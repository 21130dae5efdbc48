"""Fabric's DDP, with each gradient held once."""

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import nn


class DDPInBuckets(DDPStrategy):
    """DDP whose gradients are views of its buckets from the first backward pass on.

    DDP averages the gradients in buckets, which together have the size of all gradients and are never freed. A gradient
    is a view of its bucket if it exists when DDP wraps the model, and stays a view until it is set to None. After that,
    a backward pass without synchronization allocates a second copy, even with `gradient_as_bucket_view` (see
    `torch/nn/parallel/distributed.py`). Therefore `forget_gradients` sets the gradients to 0.
    """

    def __init__(self):
        super().__init__(gradient_as_bucket_view=True)

    def setup_module(self, module: nn.Module) -> nn.parallel.DistributedDataParallel:
        """Wrap the model."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return super().setup_module(module)
