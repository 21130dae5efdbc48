"""Tiled MLP: compute a block's MLP over tiles of tokens, and recompute each tile for the backward pass.

The MLP computes each token alone. So its wide tensors need to exist for one tile at a time (Bekman et al., 2025, Arctic
Long Sequence Training, arXiv:2506.13996). Only the input and the output have all tokens.

Autograd adds up the weight gradients of the tiles before it hands them on. So DDP, FSDP, and an optimizer that steps in
the backward pass see one gradient for each weight, as without tiles.
"""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_utils import local_torch_dtype

from fabric_ladder.models.layers import find_blocks, find_mlp, meta_model
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.checkpointing import may_draw
from fabric_ladder.techniques.technique import Technique


def use_tiles(model: nn.Module, tile: int, draws: bool) -> None:
    """Compute the MLPs of a model of transformers over tiles, in place; the names of the weights do not change.

    Args:
        model: Before or after adapters are added.
        tile: Tokens of a tile.
        draws: Whether an MLP may draw random numbers, which its recomputation must draw again.
    """
    for block in find_blocks(model):
        parts = find_mlp(block)
        forwards = [part.forward for part in parts]
        for part in parts[:-1]:
            part.forward = _pass_on
        parts[-1].forward = partial(_in_tiles, partial(_chain, forwards), tile, draws)


def _pass_on(hidden: Tensor) -> Tensor:
    """Return the input of an MLP's first module, which the last module then computes too."""
    return hidden


def _chain(forwards: list[Callable], hidden: Tensor, *others: Tensor) -> Tensor:
    for forward in forwards[:-1]:
        hidden = forward(hidden)
    return forwards[-1](hidden, *others)


def _in_tiles(mlp: Callable, tile: int, draws: bool, *inputs: Tensor) -> Tensor:
    """Return the MLP of hidden states (rows, tokens, width), computed over tiles of all rows' tokens."""
    shape = inputs[0].shape
    if shape[:-1].numel() <= tile:
        return mlp(*inputs)
    if torch.is_grad_enabled():
        mlp = partial(checkpoint, mlp, use_reentrant=False, preserve_rng_state=draws)
    tiles = zip(*(each.flatten(0, -2).split(tile) for each in inputs), strict=True)
    # A checkpoint of PyTorch 2.11 saves an empty tensor of the default dtype, which Fabric changes for the forward pass
    # alone. Then a checkpoint around this one would find another dtype when it recomputes.
    with local_torch_dtype(inputs[0].dtype):
        outputs = [mlp(*each) for each in tiles]
    # FSDP2 warns of a block that returns a view; nobody else has the tensor that is viewed here
    return torch.ops.aten._unsafe_view(torch.cat(outputs), shape)


class TiledMLP(Technique):
    """Compute the MLP of each block over tiles of tokens."""

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        model = meta_model(settings)
        blocks = find_blocks(model)
        if blocks and all(map(find_mlp, blocks)):
            return None
        return f"the blocks of {model.config.model_type} have no MLP that computes each token alone; leave it out"

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        use_tiles(model, settings.mlp_tile, may_draw(model.config, settings))
        return model
