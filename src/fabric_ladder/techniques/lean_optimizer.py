"""A lean optimizer: SGD keeps no state."""

from fabric_ladder.models.optimizer import STATELESS
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import ALONE_OR_CHECKPOINTED, NextRung, Technique

WITHOUT_STATE = NextRung(
    "6_lean_optimizer", "keeps no optimizer state", replaces=("optimizer", "schedule", "learning_rate")
)


class LeanOptimizer(Technique):
    """PyTorch's SGD, chosen in `models/optimizer.py`."""

    setting = "optimizer"
    rung = "6_lean_optimizer"
    plans = ALONE_OR_CHECKPOINTED
    next_rung = NextRung(
        "13_lora",
        "trains thin adapters and keeps no gradient of the model",
        replaces=("lora", "learning_rate"),
    )

    def is_used(self, settings: Settings) -> bool:
        return settings.optimizer == "sgd"

    def saves_no_more(self, settings: Settings) -> bool:
        """Return whether the optimizer keeps no state on the device already."""
        return settings.optimizer in STATELESS or settings.optimizer_offload

    def notice(self, settings: Settings) -> str | None:
        if not settings.from_scratch:
            return None
        return (
            "SGD barely learns from random weights: expect near-chance accuracy, start from pretrained weights with "
            "--model, or use --optimizer sinkgd."
        )
