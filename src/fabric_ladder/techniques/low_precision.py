"""Low precision: weights, gradients and optimizer state in 16 bits (`bf16-true`, `16-true`), by Fabric."""

from fabric_ladder.errors import UserError
from fabric_ladder.models.cpu_bfloat16 import replaces_bfloat16
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique


def computed_in_32_bits(settings: Settings) -> str | None:
    """Return a line for a CPU on which PyTorch has no fast bfloat16."""
    if not replaces_bfloat16(settings):
        return None
    return "PyTorch has no fast bfloat16 on this CPU: matrices are multiplied in 32 bits, and the result is rounded"


class LowPrecision(Technique):
    """Fabric converts the model; this project does nothing more."""

    def check_precision(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        if settings.precision == "16-true" and settings.optimizer in ("adam", "adamw") and not settings.lora:
            raise UserError(
                f"--precision 16-true: the epsilon of --optimizer {settings.optimizer} is 0 in float16, and every step "
                "would divide by it; use --precision bf16-true, or --optimizer sgd"
            )

    def notice(self, settings: Settings) -> str | None:
        return computed_in_32_bits(settings)
