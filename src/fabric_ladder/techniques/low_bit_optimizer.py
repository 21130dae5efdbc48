"""Adam's moments in 8 bits (`adam_8bit.py`, bitsandbytes) or 4 bits (`adam_4bit.py`, torchao)."""

import importlib.util
from dataclasses import replace

import torch
from torch import nn
from torch.optim import Optimizer

from fabric_ladder.settings import Settings
from fabric_ladder.techniques.adam_4bit import BLOCK, AdamByParts
from fabric_ladder.techniques.compile import keep_kernels
from fabric_ladder.techniques.memory import Counts, Peak
from fabric_ladder.techniques.technique import Technique

MOMENT_BYTES = {  # of a weight's two moments, with a 32-bit constant for each block of moments
    "adam-8bit": 2 * (1 + 4 / 256),
    "adam-4bit": 2 * (1 / 2 + 4 / BLOCK),
}


class LowBitOptimizer(Technique):
    """Replace Adam by a class with small moments."""

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if settings.optimizer == "adam-4bit":
            try:
                import torchao.optim  # noqa: F401
            except ImportError:  # versions before 0.11 have it under another name
                return "it needs torchao: pip install torchao==0.18.0"
            return "torchao steps in 32 bits; use --precision 32-true" if settings.precision == "64-true" else None
        if settings.accelerator == "mps":
            return "bitsandbytes does not support mps; use --optimizer adafactor"
        if importlib.util.find_spec("bitsandbytes") is None:
            return "it needs bitsandbytes: pip install bitsandbytes==0.50.2"
        return None

    def change_optimizer(self, kind: type[Optimizer], settings: Settings, model: nn.Module) -> type[Optimizer]:
        if settings.optimizer == "adam-4bit":
            keep_kernels(settings.cache_dir)
            return AdamByParts
        from fabric_ladder.techniques.adam_8bit import Adam8bit  # imports bitsandbytes, which takes long

        return Adam8bit

    def state_dtypes(self, settings: Settings) -> list[torch.dtype | None]:
        """Return the moments; two of 4 bits count as one tensor of bytes. Scales of blocks are left out."""
        return [torch.uint8] * 2 if settings.optimizer == "adam-8bit" else [torch.uint8]

    def packages(self, settings: Settings) -> tuple[str, ...]:
        return ("bitsandbytes",) if settings.optimizer == "adam-8bit" else ("torchao",)

    def rehearsed(self, settings: Settings) -> Settings:
        """Return settings without moments in place of 8-bit ones; those of 4 bits run on fake tensors."""
        return replace(settings, optimizer="sgd") if settings.optimizer == "adam-8bit" else settings

    def add_memory(self, peak: Peak, counts: Counts, settings: Settings) -> Peak:
        """Add the moments of 8-bit Adam.

        Each weight has two moments of one byte, and each block of 256 moments a 32-bit constant (Dettmers et al., 2022,
        8-bit Optimizers via Block-wise Quantization; bitsandbytes 0.50).
        """
        if settings.optimizer != "adam-8bit":
            return peak
        return peak._replace(optimizer_state=peak.optimizer_state + round(counts.trained * MOMENT_BYTES["adam-8bit"]))
