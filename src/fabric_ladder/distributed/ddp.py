"""Fabric's DDP, with each gradient held once."""

import torch
from lightning.fabric.strategies import DDPStrategy
from torch import nn


class DDPInBuckets(DDPStrategy):
    """DDP whose gradients are parts of its buckets, from the first backward pass on.

    The ranks average their gradients in buckets that are as large as all of them and are always there. A gradient is
    part of its bucket if it is there when the model is wrapped, and as long as nobody sets it to None: else a pass
    without synchronization makes another beside it, with `gradient_as_bucket_view` too
    (`torch/nn/parallel/distributed.py` says so there). So `forget_gradients` sets them to 0 instead.
    """

    def __init__(self):
        super().__init__(gradient_as_bucket_view=True)

    def setup_module(self, module: nn.Module) -> nn.parallel.DistributedDataParallel:
        """Wrap the model."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.zeros_like(parameter)
        return super().setup_module(module)
