"""All techniques in use: each has a module of its own, which its row of the ladder names."""

from collections.abc import Collection
from importlib import import_module

import torch

from fabric_ladder.errors import UserError
from fabric_ladder.ladder import LADDER, Row
from fabric_ladder.settings import FULL_PASS, Settings, show
from fabric_ladder.techniques.technique import Technique

LINK = 25e9  # bytes per second: PCIe 4.0 with 16 lanes, in each direction; NVLink is faster
SPEED = 100e12  # FLOP per second of 16-bit matrix multiplications in training: an RTX 4090 or an A100, roughly
# An H100 waits for kernel launches: it worked 0.57 s on 160 reviews, for which rung 5 takes about two seconds
# (docs/gpu.md). A gain from twice the tokens is an estimate.
HOPPER_FULL_PASS = 2048


def _load(row: Row) -> Technique:
    module, name = row.mechanism.split(".")
    kind = getattr(import_module(f"{__name__}.{module}"), name)
    kind.row = row
    return kind()


TECHNIQUES: tuple[Technique, ...] = tuple(_load(row) for row in LADDER if row.mechanism)


def used(settings: Settings) -> tuple[Technique, ...]:
    """Return the techniques that these settings use, in the order of their use."""
    return tuple(technique for technique in TECHNIQUES if technique.is_used(settings))


def technique_of(rung: str) -> Technique | None:
    """Return the technique that a rung shows, None for a rung without a module of its own."""
    return next((technique for technique in TECHNIQUES if technique.row.rung == rung), None)


def cuda_defaults(settings: Settings, chosen: Collection[str], capability: tuple[int, int] | None) -> dict[str, str]:
    """Return the switches that the techniques in use turn on on a CUDA GPU, each with its reason.

    A default must not stop a run, so a switch stays off where another technique or the model refuses it.

    Args:
        settings: `devices` need not be resolved.
        chosen: Names of settings that the user or the script has chosen.
        capability: Compute capability of the GPU.
    """
    techniques = used(settings)
    wanted = {name: reason for technique in techniques for name, reason in technique.on_cuda(settings).items()}
    return {
        each.setting: wanted[each.setting]
        for each in TECHNIQUES
        if each.setting in wanted.keys() - chosen
        and not each.is_used(settings)
        and not any(technique.conflict(each) for technique in techniques)
        and not each.reason_against(settings, capability)
    }


def full_pass(settings: Settings, capability: tuple[int, int] | None) -> int:
    """Return the padded tokens of the shortest pass that is worth its time: with fewer a pass takes as long.

    Every pass launches its kernels (`FULL_PASS`; a faster GPU computes more tokens meanwhile). Sharded and offloaded
    weights also cross a link in every pass, while the GPU computes. For N weights the transfer takes N * bytes / LINK,
    and the computation N * FLOPs * tokens / SPEED. So the tokens that hide the transfer do not depend on N.
    Checkpointing repeats launches and FLOPs alike. Frozen weights have no gradient of their own.

    Args:
        settings: `devices` need not be resolved.
        capability: Compute capability of the GPU; None: not known, or Apple's GPU.
    """
    techniques = used(settings)
    moved = sum(technique.bytes_per_pass(settings) for technique in techniques)
    flops = 8 if any(technique.recomputes for technique in techniques) else 6  # per weight and token
    flops -= 2 * (settings.stream_layers and settings.lora)
    launches = HOPPER_FULL_PASS if capability and capability[0] == 9 else FULL_PASS
    return max(launches, round(moved / LINK * SPEED / flops))


def trains_all(settings: Settings) -> bool:
    """Return whether all weights of the model are trained."""
    return all(technique.trains_all for technique in used(settings))


def trains_adapters(settings: Settings) -> bool:
    """Return whether only adapters are trained."""
    return any(technique.adapters for technique in used(settings))


def state_dtypes(settings: Settings) -> list[torch.dtype | None]:
    """Return the dtypes of the optimizer's state tensors of a parameter's size; None: the parameter's own dtype."""
    dtypes = [None] * 2 if settings.optimizer in ("adam", "adamw") else []
    return sum((technique.state_dtypes(settings) for technique in used(settings)), dtypes)


def check_together(settings: Settings) -> None:
    """Refuse techniques that cannot be used together.

    Raises:
        UserError: In one line, which setting, why, and what to do.
    """
    techniques = used(settings)
    for technique in techniques:
        for other in techniques:
            if reason := technique.conflict(other):
                value = show(getattr(settings, technique.setting))
                raise UserError(f"--{technique.setting} {value}: {reason}")
