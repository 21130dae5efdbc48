"""Properties of the strategies, so that other modules test for a property and not for a strategy's name."""

from dataclasses import dataclass

from torch import nn

from fabric_ladder.distributed.deepspeed import EngineState
from fabric_ladder.settings import Settings


@dataclass(frozen=True)
class StrategyTraits:
    """Properties of a strategy.

    Attributes:
        shards_weights: Each rank keeps only a part of each weight.
        owns_optimizer: Its engine trains copies of the weights, wraps the optimizer and adds up the gradients, so
            nothing can undo a trial step. The engine also skips steps whose gradient is not finite.
        checkpoint_file: The file that every sharded checkpoint of this strategy has.
    """

    shards_weights: bool = False
    owns_optimizer: bool = False
    checkpoint_file: str = "optimizer.json"


TRAITS = {
    "single": StrategyTraits(),
    "ddp": StrategyTraits(),
    "fsdp": StrategyTraits(shards_weights=True),
    "deepspeed": StrategyTraits(owns_optimizer=True, checkpoint_file=EngineState.file),
}


def strategy_traits(settings: Settings) -> StrategyTraits:
    """Return the properties of the strategy that the rung has chosen."""
    return TRAITS[settings.strategy]


def engine_state(model: nn.Module) -> EngineState | None:
    """Return the engine that saves and loads a model set up by Fabric, or None if its strategy has no engine."""
    engine = model._forward_module
    return EngineState(engine) if hasattr(engine, "save_checkpoint") else None
