"""Block by block: the blocks of a model are trained in turn, one at a time (BAdam: Luo et al., 2024, arXiv:2404.02827).

Only the trained block has gradients and optimizer state, and a copy in 32 bits where the weights have 16. The backward
pass ends at it: the blocks below keep no activations. After its turn the copy is rounded, and the state is dropped.

The modules after the last block, such as a classifier, are trained all the time. Embeddings and the head of a language
model are frozen.

The first block comes first, because its turn needs the most memory: what fits in the first step fits later too.
"""

import torch
from torch import nn
from torch.optim import Optimizer

from fabric_ladder.models.layers import find_blocks, meta_model
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.freezing import train_only, trained_weights
from fabric_ladder.techniques.technique import Technique

MOST_STEPS = 100  # of a turn that is chosen: BAdam's README advises 50 to 100


class BlockSteps(Optimizer):
    """Mixin for an optimizer: it trains one block at a time, in 32 bits.

    Attributes:
        blocks: The weights of each block, in the order of the turns.
        block_steps: Optimizer steps of a turn, or `auto`.
    """

    blocks: list[list[nn.Parameter]]
    block_steps: int | str

    def __init__(self, groups: list[dict], **options) -> None:
        super().__init__(groups, **options)
        self._train(0)

    def take_turn(self, done: int, steps: int) -> None:
        """Train the block whose turn the next step is; it depends only on the number of steps.

        Args:
            done: Optimizer steps done so far.
            steps: Optimizer steps of the whole run. With `auto` each block gets a turn if the run has that many.
        """
        length = self.block_steps
        if length == "auto":
            length = max(1, min(MOST_STEPS, steps // len(self.blocks)))
        self._train(done // length % len(self.blocks))

    @torch.no_grad()
    def step(self) -> None:
        """Step the weights that have a gradient, and free the gradients of those that are stepped in 32 bits."""
        stepped = [
            parameter for group in self.param_groups for parameter in group["params"] if parameter.grad is not None
        ]
        rounded = {parameter: parameter.data for parameter in stepped if parameter.dtype.itemsize < 4}
        for parameter, weight in rounded.items():
            gradient, parameter.grad = parameter.grad, None
            copy = self.state[parameter].pop("copy", None)  # an optimizer makes its state where it finds none
            parameter.data = weight.float() if copy is None else copy
            parameter.grad = gradient.float()
        try:
            super().step()
        finally:
            for parameter, weight in rounded.items():
                parameter.grad = None
                self.state[parameter]["copy"] = parameter.data
                parameter.data = weight.copy_(parameter.data)

    def _train(self, turn: int) -> None:
        for number, block in enumerate(self.blocks):
            for parameter in block:
                parameter.requires_grad_(number == turn)
                if number != turn:
                    parameter.grad = None
                    self.state.pop(parameter, None)


class BlockByBlock(Technique):
    """Train the blocks in turn."""

    trains_all = False

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if settings.ranks > 1:
            return "only on one device, since several expect the same gradients in each step; use --devices 1"
        if settings.optimizer in ("adam-8bit", "adam-4bit"):
            return "the state of one block is small, and kept in 32 bits; use --optimizer adam"
        model = meta_model(settings)
        sizes = [sum(parameter.numel() for parameter in block.parameters()) for block in find_blocks(model)]
        if not sizes:
            return f"transformers marks no blocks in {model.config.model_type}; leave it out"
        if sizes[0] < max(sizes):
            return "a later block has more weights than the first, and memory could run out in its turn; leave it out"
        return None

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        blocks = find_blocks(model)
        head = model.get_output_embeddings()
        train_only(model, {*trained_weights(model, len(blocks))} - {*(head.parameters() if head else ())})
        return model

    def change_optimizer(self, kind: type[Optimizer], settings: Settings, model: nn.Module) -> type[Optimizer]:
        blocks = find_blocks(model)
        for block in blocks:
            block.requires_grad_(True)  # an earlier optimizer, of a notebook's cell, has frozen all but one
        chosen = {"blocks": [[*block.parameters()] for block in blocks], "block_steps": settings.block_steps}
        return type(f"Block{kind.__name__}", (BlockSteps, kind), chosen)

    def state_dtypes(self, settings: Settings) -> list[torch.dtype | None]:
        """Return what 16-bit weights have in addition: a copy in 32 bits, and moments of 32 bits instead of 16."""
        if not settings.precision.endswith("16-true"):
            return []
        return [torch.float32] * (2 if settings.optimizer in ("adam", "adamw") else 1)
