"""Mixed precision: 32-bit weights, matrix multiplications in 16 bits (`bf16-mixed`, `16-mixed`), by Fabric."""

from fabric_ladder.environment import emulates
from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.low_precision import computed_in_32_bits
from fabric_ladder.techniques.technique import Technique


class MixedPrecision(Technique):
    """Fabric casts the inputs of each operation; this project does nothing more."""

    def check_precision(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        if settings.precision == "16-mixed" and capability is None and settings.accelerator != "mps":
            raise UserError("--precision 16-mixed needs a CUDA GPU; use --precision bf16-mixed")
        if settings.precision == "bf16-mixed" and emulates(settings.precision, capability):
            other = "32-true" if settings.shards_weights else "16-mixed"
            raise UserError(
                f"--precision bf16-mixed: a GPU of compute capability {capability[0]}.{capability[1]}, below 8.0, only "
                f"emulates bfloat16; use --precision {other}"
            )

    def notice(self, settings: Settings) -> str | None:
        return computed_in_32_bits(settings)
