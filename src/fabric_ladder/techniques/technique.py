"""The base class of all techniques, with all that a technique can state about itself."""

from typing import NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig

from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings, show
from fabric_ladder.techniques.memory import Counts, Peak

CHECKPOINTING = ("--activation_checkpointing", "true")
ALONE_OR_CHECKPOINTED = ((), CHECKPOINTING)


class NextRung(NamedTuple):
    """The rung that needs less memory than another one.

    Attributes:
        name: The script, for example `18_low_bit_optimizer`; None: the same script with other options.
        reason: How it saves memory, as in "it …".
        options: Options that it needs, as words of a command line: `("--packing", "true")`.
        replaces: Settings that the rung sets itself: the user's own are left out of the command.
    """

    name: str | None
    reason: str
    options: tuple[str, ...] = ()
    replaces: tuple[str, ...] = ()


class Technique:
    """One technique, with everything that this project does about it.

    A subclass overrides what its technique needs. The functions that build a model, build an optimizer, check settings,
    predict memory, plan and advise are loops over the techniques in use; none of them names a technique.

    Attributes:
        setting: The field of `Settings` that switches the technique on.
        rung: The script that shows the technique; empty for a technique without a rung of its own.
        next_rung: What to try when memory runs out with this rung.
        advises_first: Whether its next rung is the advice on every rung that uses it.
        refused_precisions: Values of `--precision` that it cannot work with.
        refused_on_mps: The part that Apple silicon's GPU cannot do, and what to use; empty: it can do all.
        rounds_lengths: Whether lengths are rounded by default, so that there are fewer shapes.
        adapters: Whether it trains a few new weights in 32 bits and freezes the model's own.
        trains_all: Whether it leaves all of the model's weights trained.
        shards: Whether each rank has only a part of the weights or of the optimizer's state.
        frees_gradients: Whether no gradient is left after the backward pass.
        state_on_device: Whether the optimizer's state is on the device.
        short_name: Its name in the names of plans, where the planner adds it to a rung.
        plans: The planner tries the rung with each of these options; empty: it leaves the rung out.
        needs_gpus: The least number of GPUs for the rung.
        recomputes: Whether the backward pass repeats the forward pass.
        explained_errors: Texts in libraries' errors, each with one line about the cause and the remedy.
    """

    setting: str = ""
    rung: str = ""
    next_rung: NextRung | None = None
    advises_first: bool = False
    refused_precisions: tuple[str, ...] = ()
    refused_on_mps: str = ""
    rounds_lengths: bool = False
    adapters: bool = False
    trains_all: bool = True
    shards: bool = False
    frees_gradients: bool = False
    state_on_device: bool = True
    short_name: str = ""
    plans: tuple[tuple[str, ...], ...] = ((),)
    needs_gpus: int = 1
    recomputes: bool = False
    explained_errors: tuple[tuple[str, str], ...] = ()

    def is_used(self, settings: Settings) -> bool:
        """Return whether these settings use the technique."""
        return getattr(settings, self.setting) not in (False, None, "no")

    def next_to_try(self, settings: Settings) -> NextRung | None:
        """Return what to try when memory runs out with this rung."""
        return self.next_rung

    def as_option(self, phase: str | None) -> str | None:
        """Return how the technique is added to a run without it, and how it saves memory in this phase."""
        return None

    def save_more(self, settings: Settings) -> NextRung | None:
        """Return options of the same technique that save more memory."""
        return None

    def saves_no_more(self, settings: Settings) -> bool:
        """Return whether a run with these settings would save no memory on this technique's rung."""
        return self.is_used(settings)

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
        return None

    def on_cuda(self, settings: Settings) -> dict[str, str]:
        """Return the switches that the technique needs to be fast on a CUDA GPU, each with its reason."""
        return {}

    def is_installed(self) -> bool:
        """Return whether this machine has what the technique needs; a default must not turn it on otherwise."""
        return True

    def describe_batch(self, settings: Settings, ranks: int) -> str | None:
        """Return the words of the header line about the effective batch, if they are the technique's own."""
        return None

    def size_setting(self, settings: Settings, evaluates: bool = False) -> str | None:
        """Return the setting that limits how much is in memory at a time, if it is not one of the micro-batch's."""
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

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        """Return the model with the technique applied, before Fabric sets it up."""
        return model

    def change_optimizer(self, kind: type[Optimizer], settings: Settings, model: nn.Module) -> type[Optimizer]:
        """Return the class of the optimizer with the technique applied."""
        return kind

    def rate_factor(self, name: str, settings: Settings) -> float:
        """Return the learning rate of the parameter with this name, relative to the learning rate of the run."""
        return 1.0

    def state_dtypes(self, settings: Settings) -> list[torch.dtype | None]:
        """Return the dtypes of its state tensors of a parameter's size; None: the parameter's own dtype."""
        return []

    def planned(self, gpus: int) -> tuple[tuple[str, ...], ...]:
        """Return the options that the planner tries on N GPUs."""
        return self.plans if gpus >= self.needs_gpus else ()

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

    def bytes_per_pass(self, settings: Settings) -> int:
        """Return the bytes per weight that cross a link to other GPUs or to CPU memory in each pass."""
        return 0
