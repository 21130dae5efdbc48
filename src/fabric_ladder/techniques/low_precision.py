"""Low precision: weights, gradients and optimizer state in 16 bits (`bf16-true`, `16-true`), by Fabric."""

from fabric_ladder.settings import Settings
from fabric_ladder.techniques.lean_optimizer import WITHOUT_STATE
from fabric_ladder.techniques.technique import NextRung, Technique

IN_16_BITS = NextRung("5_low_precision", "halves weights, gradients and optimizer state", replaces=("precision",))


class LowPrecision(Technique):
    """Fabric converts the model; this project does nothing more."""

    setting = "precision"
    rung = "5_low_precision"
    next_rung = WITHOUT_STATE

    def is_used(self, settings: Settings) -> bool:
        """Return whether the weights have 16 bits."""
        return settings.precision in ("bf16-true", "16-true")
