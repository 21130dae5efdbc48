"""A lean optimizer: SGD keeps no state."""

from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique


class LeanOptimizer(Technique):
    """PyTorch's SGD, chosen in `models/optimizer.py`."""

    def notice(self, settings: Settings) -> str | None:
        if not settings.from_scratch:
            return None
        return (
            "SGD barely learns from random weights: expect near-chance accuracy, start from pretrained weights with "
            "--model, or use --optimizer sinkgd."
        )
