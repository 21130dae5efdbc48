"""A memory budget: activation checkpointing recomputes only as many blocks as it must.

The first blocks are recomputed, and the last ones keep their activations. The backward pass begins with the last block,
so the kept activations are gone when the first block is recomputed; the other way around both would be in memory.

The planner finds the number before the first step (`planning/predict.py: keep_most`): it rehearses the step with more
and fewer kept blocks, and takes the most that stay within the budget.
"""

from torch import nn

from fabric_ladder.environment import read_size
from fabric_ladder.models.layers import find_blocks
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique


def keep_activations(model: nn.Module, blocks: int) -> None:
    """Let the last blocks of a checkpointed model keep their activations, and the others recompute them.

    Args:
        model: Its blocks are checkpointed, apart from frozen ones.
        blocks: Number of the last blocks; 0: all are recomputed.
    """
    found = find_blocks(model)
    for block in found[len(found) - blocks :]:
        block.gradient_checkpointing = False


def stated_budget(settings: Settings) -> int | None:
    """Return the bytes of `memory_budget`; None: there is none, or it is that of the GPU (`auto`).

    Raises:
        UserError: It is no size.
    """
    budget = settings.memory_budget
    return None if budget in (None, "auto") else read_size(budget, "--memory_budget")


class MemoryBudget(Technique):
    """Recompute only the blocks whose activations have no room; `ActivationCheckpointing` recomputes them."""

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        stated_budget(settings)  # refuses what is no size
        return None

    def notice(self, settings: Settings) -> str | None:
        if settings.memory_budget == "auto" and settings.accelerator != "cuda":
            return "Memory budget: auto is that of a GPU, so no block is recomputed; --memory_budget 8GB states another"
        return None

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        """Keep the activations of blocks in a rehearsal; a run does it once the planner has found their number."""
        keep_activations(model, settings.kept_blocks)
        return model

    def further_blocks(self, settings: Settings) -> int:
        """Return the number of kept blocks: a rehearsal of a shorter model leaves out only recomputed ones."""
        return settings.kept_blocks
