"""Where the figures of a run go while it runs: metrics.csv always, TensorBoard or Weights & Biases too if asked for."""

import importlib.util
import warnings
from pathlib import Path

from lightning.fabric.loggers import CSVLogger, Logger, TensorBoardLogger

from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings

PACKAGES = {"tensorboard": "tensorboard==2.21.0", "wandb": "wandb==0.31.0"}


def check_logger(settings: Settings) -> None:
    """Refuse a logger whose package is not installed.

    Raises:
        UserError: The message says what to install.
    """
    package = PACKAGES.get(settings.logger)
    if package and importlib.util.find_spec(settings.logger) is None:
        raise UserError(f"--logger {settings.logger} needs a package: pip install {package}")


class RunLog:
    """Writes rows of figures into a run's folder.

    Args:
        folder: `runs/<script>/<n>`.
        settings: `logger`, and for Weights & Biases the run's settings.
        rows: Of a run that goes on: optimizer step, samples and figures of the rows so far.
    """

    def __init__(self, folder: Path, settings: Settings, rows: list[tuple[int, int, dict]] = ()):
        self._csv = CSVLogger(folder.parent.parent, folder.parent.name, folder.name, flush_logs_every_n_steps=1)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Experiment logs directory", UserWarning)  # it writes metrics.csv anew
            writer = self._csv.experiment
        for step, samples, figures in rows:
            writer.log_metrics(figures | {"samples": samples}, step)
        writer.save()
        self._live: Logger | None = None
        if settings.logger == "tensorboard":
            later = rows[-1][1] + 1 if rows else None  # what the run had drawn beyond its checkpoint is hidden
            self._live = TensorBoardLogger(folder, name="", version="tensorboard", purge_step=later)
        elif settings.logger == "wandb":
            from lightning.pytorch.loggers import WandbLogger

            name = f"{folder.parent.name}/{folder.name}"
            self._live = WandbLogger(name=name, save_dir=folder, project="fabric-ladder", config=vars(settings))

    def write(self, step: int, samples: int, **figures: float) -> None:
        """Add a row.

        Args:
            step: Optimizer steps so far, for metrics.csv.
            samples: Samples so far, which live curves are drawn against: so those of unlike batches can be compared.
            **figures: Names and values.
        """
        self._csv.log_metrics(figures | {"samples": samples}, step)
        if self._live:
            self._live.log_metrics(figures, samples)

    def close(self) -> None:
        """Write what is left, and let live loggers go."""
        if self._live:
            self._live.finalize("success")
