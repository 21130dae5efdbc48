"""The base class of all techniques, with all that a technique can state about itself."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig

from fabric_ladder.errors import UserError
from fabric_ladder.ladder import SHARDED, Row
from fabric_ladder.settings import Settings, show
from fabric_ladder.techniques.memory import Counts, Peak


class Technique:
    """The mechanism of one technique: what it changes in a training, its own checks, and its memory.

    A subclass overrides what its technique needs. The functions that build a model, build an optimizer, check settings
    and predict memory are loops over the techniques in use; none of them names a technique. Other facts are in
    `ladder.py`.

    Attributes:
        row: Its row of the ladder, which names the class.
        refused_precisions: Values of `--precision` that it cannot work with.
        refused_on_mps: The part that Apple silicon's GPU cannot do, and what to use; empty: it can do all.
        rounds_lengths: Whether lengths are rounded by default, so that there are fewer shapes.
        adapters: Whether it trains a few new weights in 32 bits and freezes the model's own.
        trains_all: Whether it leaves all of the model's weights trained.
        shards: Whether each rank has only a part of the weights or of the optimizer's state.
        frees_gradients: Whether no gradient is left after the backward pass.
        keeps_passes: Whether gradients stay from step to step, and so does the memory of a pass.
        state_on_device: Whether the optimizer's state is on the device.
        recomputes: Whether the backward pass repeats the forward pass.
        whole_batch: Whether the effective batch is one micro-batch.
        explained_errors: Texts in libraries' errors, each with one line about the cause and the remedy.
    """

    row: Row
    refused_precisions: tuple[str, ...] = ()
    refused_on_mps: str = ""
    rounds_lengths: bool = False
    adapters: bool = False
    trains_all: bool = True
    shards: bool = False
    frees_gradients: bool = False
    keeps_passes: bool = False
    state_on_device: bool = True
    recomputes: bool = False
    whole_batch: bool = False
    explained_errors: tuple[tuple[str, str], ...] = ()

    @property
    def setting(self) -> str:
        """The field of `Settings` that switches the technique on."""
        return self.row.setting

    def is_used(self, settings: Settings) -> bool:
        """Return whether these settings use the technique."""
        value = getattr(settings, self.setting)
        return value in self.row.values if self.row.values else value not in (False, None, "no")

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        """Return why the technique in use cannot work with these settings, and what to do.

        Args:
            settings: Resolved; for a switch that a GPU turns on by itself, as they were read.
            capability: Compute capability of the GPU; None: a CPU, or Apple silicon.
        """
        return None

    def check(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        """Refuse settings that the technique cannot work with; change nothing.

        Raises:
            UserError: The reason and the remedy, in one line.
        """
        if self.is_used(settings) and (reason := self.reason_against(settings, capability)):
            raise UserError(f"--{self.setting} {show(getattr(settings, self.setting))}: {reason}")

    def conflict(self, other: "Technique") -> str | None:
        """Return why the technique cannot be used together with another one, and what to do."""
        conflicts = self.row.conflicts
        return conflicts.get(other.row.key) or (conflicts.get(SHARDED) if other.shards else None)

    def on_cuda(self, settings: Settings) -> dict[str, str]:
        """Return the switches that the technique needs to be fast on a CUDA GPU, each with its reason."""
        return {}

    def is_installed(self) -> bool:
        """Return whether this machine has what the technique needs; a default must not turn it on otherwise."""
        return True

    def describe_batch(self, settings: Settings, ranks: int) -> str | None:
        """Return the words of the header line about the effective batch, if they are the technique's own."""
        return None

    def packages(self, settings: Settings) -> tuple[str, ...]:
        """Return the packages that a run's versions should list too."""
        return ()

    def notice(self, settings: Settings) -> str | None:
        """Return a line that the run prints first about the technique in use."""
        return None

    def loading_options(self, settings: Settings, config: PretrainedConfig) -> dict:
        """Return options for transformers' `from_pretrained`, for weights that must be read in another form."""
        return {}

    def check_precision(self, settings: Settings, capability: tuple[int, int] | None) -> None:
        """Refuse a precision that the technique in use cannot work with, like `check`; the planner calls it too."""

    def reading(self, settings: Settings) -> AbstractContextManager:
        """Return the context in which pretrained weights are read."""
        return nullcontext()

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        """Return the model with the technique applied, before Fabric sets it up."""
        return model

    def change_optimizer(self, kind: type[Optimizer], settings: Settings, model: nn.Module) -> type[Optimizer]:
        """Return the class of the optimizer with the technique applied."""
        return kind

    def state_dtypes(self, settings: Settings) -> list[torch.dtype | None]:
        """Return the dtypes of its state tensors of a parameter's size; None: the parameter's own dtype."""
        return []

    def rehearsed(self, settings: Settings) -> Settings:
        """Return settings whose step runs on fake tensors; `add_memory` adds what the rehearsal leaves out."""
        return settings

    def further_blocks(self, settings: Settings) -> int:
        """Return the number of blocks that a rehearsal with a few blocks of the model needs in addition."""
        return 0

    def rehearse_model(self, model: nn.Module, settings: Settings) -> None:
        """Change a model of the settings that `rehearsed` returned, so that it makes the tensors of the technique."""

    def add_memory(self, peak: Peak, counts: Counts, settings: Settings) -> Peak:
        """Return the peak of a rehearsal with the memory that only formulas give.

        Args:
            peak: The peak of the settings that `rehearsed` returned, with the memory of the techniques before this.
            counts: Numbers of the model's weights.
            settings: The run's settings.
        """
        return peak

    def unpredictable(self, settings: Settings) -> str | None:
        """Return why the memory of the settings is not known."""
        return None

    def loaded_bytes(self, loaded: int, counts: Counts, settings: Settings) -> int:
        """Return the bytes of weights that a rank has in CPU memory first; `loaded` bytes without the technique."""
        return loaded

    def bytes_per_pass(self, settings: Settings) -> float:
        """Return the bytes per weight that cross a link to other GPUs or to CPU memory in each pass."""
        return 0
