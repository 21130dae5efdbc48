"""Where the figures of a run go while it runs: metrics.csv always, and the trackers that are asked for."""

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
PROJECT = "fabric-ladder"  # that the trackers keep the runs of all scripts under
SPLITS = {"train": "train", "validation": "val", "test": "test"}  # in front of a figure's name, and of its tag


def check_logger(settings: Settings) -> None:
    """Refuse a logger that there is not, or whose package is not installed.

    Raises:
        UserError: The message says which there are, or what to install.
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
        rows: Of a run that goes on: optimizer step, samples and figures of the rows so far, which are written anew.

    Attributes:
        lost: Whether metrics.csv gets no more rows; trackers do.
    """

    def __init__(self, folder: Path, settings: Settings, rows: list[tuple[int, int, dict]] = ()):
        self._csv = CSVLogger(folder.parent.parent, folder.parent.name, folder.name, flush_logs_every_n_steps=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Experiment logs directory", UserWarning)  # it writes metrics.csv anew
            self._csv.experiment.save()
        self._trackers, self.lost = {}, False
        for name in _names(settings):
            if name != "csv":
                with refused(f"--logger {name} cannot start: log in or configure it, or leave it out"):
                    self._trackers[name] = _start(name, folder, settings)
        for step, samples, figures in rows:
            self.write(step, samples, **figures)

    def write(self, step: int, samples: int, **figures: float) -> None:
        """Add a row.

        Args:
            step: Optimizer steps so far, for metrics.csv.
            samples: Samples so far, which curves are drawn against: so those of unlike batches can be compared.
            **figures: Names and values; trackers get `train/loss` for `loss`, `val/loss` for `validation_loss`.
        """
        values = {_tag(name): value for name, value in figures.items()}
        self._tell(lambda tracker: tracker.log_metrics(values, samples))
        if not self.lost:
            self._csv.log_metrics(figures | {"samples": samples}, step)

    def close(self) -> None:
        """Write what is left, and let the trackers go."""
        self._tell(lambda tracker: tracker.finalize("success"))

    def _tell(self, action: Callable) -> None:
        """Let every tracker do something; one that fails, by an error of its own kind, is not worth the run."""
        for name, tracker in list(self._trackers.items()):
            try:
                action(tracker)
            except Exception as error:
                del self._trackers[name]
                left = "it gets no more figures; metrics.csv has them all"
                print(f"--logger {name} failed ({first_line(error)}): {left}", file=sys.stderr, flush=True)


class Trackio:
    """A run in Trackio's database on this machine, with the two methods of Lightning's loggers that are used."""

    def __init__(self, name: str, config: dict):
        import trackio

        with redirect_stdout(io.StringIO()):  # where only the run's own lines are printed
            self._run = trackio.init(PROJECT, name, config=config, auto_log_gpu=False, auto_log_cpu=False)
        self._finish = trackio.finish  # the run's own would be called, and print, at exit once more

    def log_metrics(self, metrics: dict[str, float], step: int) -> None:
        """Add values, by their names."""
        self._run.log(metrics, step)

    def finalize(self, status: str) -> None:
        """Write what is left."""
        with redirect_stdout(io.StringIO()):
            self._finish()


def _start(tracker: str, folder: Path, settings: Settings) -> Logger | Trackio:
    """Start a tracker's run of the folder's name: in the folder, or where the tracker keeps all of them."""
    name, config = f"{folder.parent.name}/{folder.name}", vars(settings)
    if tracker == "tensorboard":
        shutil.rmtree(folder / "tensorboard", ignore_errors=True)  # of a run that goes on
        started = TensorBoardLogger(folder, name="", version="tensorboard")
        _ = started.experiment  # made here, where it may fail
        return started
    if tracker == "trackio":
        return Trackio(name, config)
    if tracker == "wandb":
        from lightning.pytorch.loggers import WandbLogger

        started = WandbLogger(name=name, save_dir=folder, project=PROJECT, config=config)
        _ = started.experiment  # logs in here, where it may fail
        return started
    from lightning.pytorch.loggers import MLFlowLogger

    database = f"sqlite:///{folder.parent.parent.absolute() / 'mlflow.db'}"
    started = MLFlowLogger(PROJECT, name, os.environ.get("MLFLOW_TRACKING_URI") or database)
    started.log_hyperparams(config)
    return started


def _names(settings: Settings) -> list[str]:
    return list(dict.fromkeys(re.findall(r"[\w-]+", settings.logger)))


def _tag(name: str) -> str:
    """Return the name with its split in front: of none, the training's."""
    split, _, figure = name.partition("_")
    return f"{SPLITS[split]}/{figure}" if split in SPLITS else f"train/{name}"
