"""Fabric Ladder: one train loop under numbered scripts that differ only in their technique."""

from fabric_ladder.batching import build_dataloaders
from fabric_ladder.errors import UserError
from fabric_ladder.loop import evaluate, train
from fabric_ladder.models import build_model
from fabric_ladder.optimizers import build_optimizer
from fabric_ladder.reporting import Run
from fabric_ladder.settings import Settings, parse_settings

__all__ = [
    "Run",
    "Settings",
    "UserError",
    "build_dataloaders",
    "build_model",
    "build_optimizer",
    "evaluate",
    "parse_settings",
    "train",
]
