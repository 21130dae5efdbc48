"""Freezing: train the last blocks and the head; the embeddings and all blocks below keep their weights.

Frozen weights have no gradients and no optimizer state. The backward pass ends at the first trained block, so the
blocks below keep no activations.

A head that shares the embedding table stays frozen too. Otherwise the table's gradient would need the activations of
all blocks.
"""

import re
from collections.abc import Iterator

from torch import nn

from fabric_ladder.models.layers import find_blocks, meta_model
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique


def trained_blocks(settings: Settings) -> int | None:
    """Return the number of trained blocks, or None for a value that is neither `none` nor `last:N`."""
    if settings.train_blocks == "none":
        return 0
    found = re.fullmatch(r"last:([1-9]\d{0,8})", settings.train_blocks, re.ASCII)
    return int(found[1]) if found else None


def trained_weights(model: nn.Module, count: int) -> list[nn.Parameter]:
    """Return the weights of the last blocks, and of the modules after them that share no weight with a frozen module.

    The modules after the blocks are the final norm or pooler of the body, and the head. A norm inside an encoder or
    decoder stays frozen: DeBERTa, for example, uses it in all blocks.

    Args:
        model: A model of transformers with blocks.
        count: Number of trained blocks.
    """
    blocks = find_blocks(model)
    parts = [*blocks[len(blocks) - count :], *_after(model.base_model, blocks[-1]), *_after(model, blocks[-1])]
    trained = {module for part in parts for module in part.modules()}
    frozen = {
        parameter
        for module in model.modules()
        if module not in trained
        for parameter in module.parameters(recurse=False)
    }
    return [parameter for parameter in model.parameters() if parameter not in frozen]


def train_only(model: nn.Module, trained: set[nn.Parameter]) -> None:
    """Freeze all other weights of a model."""
    for parameter in model.parameters():
        parameter.requires_grad_(parameter in trained)
    model.disable_input_require_grads()  # checkpointing has enabled gradients of the embeddings' output


def _after(parent: nn.Module, block: nn.Module) -> Iterator[nn.Module]:
    """Yield the children that the parent defines after the one with this block."""
    found = False
    for child in parent.children():
        if found:
            yield child
        found = found or any(module is block for module in child.modules())


class Freezing(Technique):
    """Train the last blocks and the head."""

    trains_all = False

    def is_used(self, settings: Settings) -> bool:
        return settings.train_blocks != "all"

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        count = trained_blocks(settings)
        if count is None:
            return "write all, none or last:N, for example last:4"
        model = meta_model(settings)
        blocks = len(find_blocks(model))
        if not blocks:
            return f"transformers marks no blocks in {model.config.model_type}; use --train_blocks all"
        if count > blocks:
            return f"{settings.model} has {blocks} blocks; use last:{blocks} or fewer"
        if not trained_weights(model, count):
            return "no weights are left to train, since the head shares the embedding table; use last:1 or more"
        return None

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        """Freeze weights; frozen blocks keep no activations, so they are not checkpointed."""
        count = trained_blocks(settings)
        train_only(model, set(trained_weights(model, count)))
        blocks = find_blocks(model)
        for block in blocks[: len(blocks) - count]:
            block.gradient_checkpointing = False
        return model

    def further_blocks(self, settings: Settings) -> int:
        """Return the number of trained blocks: a rehearsal of a shorter model leaves out only frozen ones."""
        return trained_blocks(settings)
