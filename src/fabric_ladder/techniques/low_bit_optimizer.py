"""Adam's moments in 8 bits (bitsandbytes) or 4 bits (`adam_4bit.py`)."""

import importlib.util

from torch.optim import Optimizer

from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.adam_4bit import Adam4bit
from fabric_ladder.techniques.technique import NextRung, Technique


class LowBitOptimizer(Technique):
    """Replace Adam by a class with small moments."""

    setting = "optimizer"
    rung = "18_low_bit_optimizer"
    next_rung = NextRung(
        "19_optimizer_offload", "keeps the optimizer's state in the host's memory", replaces=("optimizer",)
    )

    def is_used(self, settings: Settings) -> bool:
        """Return whether the optimizer is Adam in 8 or 4 bits."""
        return settings.optimizer in ("adam-8bit", "adam-4bit")

    def saves_no_more(self, settings: Settings) -> bool:
        """Return whether the optimizer has small moments already, or none."""
        return self.is_used(settings) or settings.optimizer == "sgd"

    def check(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        """Refuse 8 bits without bitsandbytes."""
        if settings.optimizer == "adam-8bit":
            if settings.accelerator == "mps":
                raise UserError("--optimizer adam-8bit: bitsandbytes does not support mps; use --optimizer adafactor")
            if importlib.util.find_spec("bitsandbytes") is None:
                raise UserError("--optimizer adam-8bit needs bitsandbytes: pip install bitsandbytes==0.50.2")

    def change_optimizer(self, kind: type[Optimizer], settings: Settings) -> type[Optimizer]:
        """Return the class of the same optimizer with small moments."""
        if settings.optimizer == "adam-4bit":
            return Adam4bit
        import bitsandbytes

        return bitsandbytes.optim.Adam8bit
