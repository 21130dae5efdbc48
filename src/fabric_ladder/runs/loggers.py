"""Where the figures of a run go while it runs: always to metrics.csv, and to the trackers that `logger` names."""

import importlib.util
import io
import os
import re
import shutil
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger

from fabric_ladder.errors import UserError, first_line, refused
from fabric_ladder.settings import Settings

PACKAGES = {
    "tensorboard": "tensorboard==2.21.0",
    "trackio": "trackio==0.43.0",
    "mlflow": "mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1",
    "wandb": "wandb==0.31.0",
}
PROJECT = "fabric-ladder"  # the trackers' project of all scripts
TAGS = {"train": "train", "validation": "val", "test": "test"}  # the first part of a figure's tag, by its name


def check_logger(settings: Settings) -> None:
    """Refuse an unknown logger, or one whose package is not installed.

    Raises:
        UserError: The message names the known loggers, or the package to install.
    """
    for name in _names(settings):
        if name not in ("csv", *PACKAGES):
            known = f"csv, {', '.join(PACKAGES)}"
            raise UserError(f"--logger {name}: expected one or several of {known}, separated by commas")
        if name in PACKAGES and importlib.util.find_spec(name) is None:
            raise UserError(f"--logger {name} needs a package: pip install {PACKAGES[name]}")


class RunLog:
    """Writes rows of figures into a run's folder, and to the trackers.

    Args:
        folder: `runs/<script>/<n>`.
        settings: `logger`, and for the trackers all settings of the run.
        rows: The rows so far of a resumed run, which are written again: optimizer step, samples and figures.
    """

    def __init__(self, folder: Path, settings: Settings, rows: list[tuple[int, int, dict]] = ()):
        self._csv = CSVLogger(folder.parent.parent, folder.parent.name, folder.name, flush_logs_every_n_steps=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Experiment logs directory", UserWarning)  # metrics.csv starts again
            self._csv.experiment.save()
        self._trackers = {}
        for name in _names(settings):
            if name != "csv":
                with refused(f"--logger {name} cannot start: log in or configure it, or leave it out"):
                    self._trackers[name] = _start(name, folder, vars(settings))
        for row in rows:
            self.write(*row)

    def write(self, step: int, samples: int, figures: dict[str, float], in_file: bool = True) -> None:
        """Add a row.

        Args:
            step: Optimizer steps so far, for metrics.csv.
            samples: Samples so far, the x-axis of the curves: runs with different batch sizes can be compared.
            figures: Names and values; trackers get `train/loss` for `loss`, `val/loss` for `validation_loss`.
            in_file: Whether metrics.csv gets the row, too.
        """
        values = {_tag(name): value for name, value in figures.items()}
        self._for_each_tracker(lambda tracker: tracker.log_metrics(values, samples))
        if in_file:
            self._csv.log_metrics(figures | {"samples": samples}, step)

    def close(self) -> None:
        """Write what is left, and close the trackers."""
        self._for_each_tracker(lambda tracker: tracker.finalize("success"))

    def _for_each_tracker(self, action: Callable) -> None:
        """Call `action` with every tracker. A tracker that fails is dropped and does not stop the run."""
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:  # each tracker has its own kinds of errors
                del self._trackers[name]
                left = "it gets no more figures; metrics.csv has them all"
                print(f"--logger {name} failed ({first_line(error)}): {left}", file=sys.stderr, flush=True)


class Trackio:
    """A run in Trackio's database on this machine, with the two methods of Lightning's loggers that are used."""

    def __init__(self, name: str, config: dict):
        import trackio

        with redirect_stdout(io.StringIO()):  # stdout has only the run's own lines
            self._run = trackio.init(PROJECT, name, config=config, auto_log_gpu=False, auto_log_cpu=False)
        self._finish = trackio.finish  # `self._run.finish` would print again at exit

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Add values by their names."""
        self._run.log(metrics, step)

    def finalize(self, status: str) -> None:
        """Write what is left."""
        with redirect_stdout(io.StringIO()):
            self._finish()


def _start(tracker: str, folder: Path, config: dict) -> Logger | Trackio:
    """Start a run with the folder's name in a tracker. It logs in now, where an error can be refused."""
    name = f"{folder.parent.name}/{folder.name}"
    if tracker == "trackio":
        return Trackio(name, config)
    if tracker == "tensorboard":
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # a resumed run writes its rows again
        logger = TensorBoardLogger(folder, name="", version="tensorboard")
    elif tracker == "wandb":
        from lightning.pytorch.loggers import WandbLogger

        logger = WandbLogger(name=name, save_dir=folder, project=PROJECT, config=config)
    else:
        from lightning.pytorch.loggers import MLFlowLogger

        database = f"sqlite:///{folder.parent.parent.absolute() / 'mlflow.db'}"
        logger = MLFlowLogger(PROJECT, name, os.environ.get("MLFLOW_TRACKING_URI") or database)
        logger.log_hyperparams(config)
    _ = logger.experiment
    return logger


def _names(settings: Settings) -> list[str]:
    return list(dict.fromkeys(re.findall(r"[\w-]+", settings.logger)))


def _tag(name: str) -> str:
    """Return the tag of a figure: its split and its name."""
    split, _, figure = name.partition("_")
    return f"{TAGS[split]}/{figure}" if split in TAGS else f"train/{name}"
