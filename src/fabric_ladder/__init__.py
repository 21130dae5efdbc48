"""Fabric Ladder: one train loop under numbered scripts that differ only in their technique."""

import logging
import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from fabric_ladder.errors import show_errors
from fabric_ladder.places import runs_script

if runs_script():  # before the imports of packages that may be missing
    show_errors()

from fabric_ladder.options import answer_early

if TYPE_CHECKING:
    from fabric_ladder.cli import parse_settings
    from fabric_ladder.data.loaders import build_dataloaders
    from fabric_ladder.errors import UserError
    from fabric_ladder.runs.run import Run
    from fabric_ladder.settings import Settings
    from fabric_ladder.techniques.build import build_model, build_optimizer
    from fabric_ladder.training.loop import evaluate, train

HOMES = {
    "Run": "runs.run",
    "Settings": "settings",
    "UserError": "errors",
    "build_dataloaders": "data.loaders",
    "build_model": "techniques.build",
    "build_optimizer": "techniques.build",
    "evaluate": "training.loop",
    "parse_settings": "cli",
    "train": "training.loop",
}
__all__ = [*HOMES]

answer_early()

# libraries print these lines when they are imported, about kernels that this machine cannot use or that nothing calls
for _name in ("torchao", "torch.utils._pytree", "bitsandbytes.backends.cpu.ops"):
    logging.getLogger(_name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", "The PEFT config's `base_model_name_or_path` was renamed")  # of a folder that moved


def __getattr__(name: str):
    """Import a name when it is first used, so that `--help` and the doctor do not wait for torch."""
    if name not in HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"fabric_ladder.{HOMES[name]}"), name)
