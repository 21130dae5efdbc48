"""Fabric Ladder: one train loop under numbered scripts that differ only in their technique."""

from fabric_ladder.cli import parse_settings
from fabric_ladder.data.loaders import build_dataloaders
from fabric_ladder.errors import UserError
from fabric_ladder.models.build import build_model
from fabric_ladder.models.optimizer import build_optimizer
from fabric_ladder.runs.run import Run
from fabric_ladder.settings import Settings
from fabric_ladder.training.loop import evaluate, train

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
