"""Prediction of numbers: `--problem_type regression`.

The model has an output for each column of numbers. The loss is the mean squared error (MSE), as a mean over the columns
and then over the samples. The test also prints Pearson's correlation, as a mean over the columns.
"""

import math
import warnings
from collections.abc import Callable

import datasets as hf
import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import mse_loss
from torchmetrics import MetricCollection
from torchmetrics.regression import MeanSquaredError, PearsonCorrCoef

from fabric_ladder.data.label_kind import Described, LabelKind, matrix, without_nan
from fabric_ladder.data.objective import in_32_bit
from fabric_ladder.data.rows import shown
from fabric_ladder.environment import NO_FLOAT64
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

LARGEST = 1e18  # the squares of larger numbers are beyond 32 bits
warnings.filterwarnings("ignore", "The variance of predictions or target is close to zero")  # the test prints nan


class Regression(LabelKind):
    """Numbers from one or several columns."""

    def reader(self, settings: DataSettings, features: dict) -> tuple[object, Callable[[dict], list]]:
        columns = self.columns(settings)
        return hf.Sequence(hf.Value("float64")), lambda row: [_number(row.get(column), column) for column in columns]

    def number(self, splits: dict[str, hf.Dataset], settings: DataSettings) -> dict[str, hf.Dataset]:
        self.names = list(self.columns(settings))
        splits = {split: table.rename_column("label", "labels") for split, table in splits.items()}
        numbers = matrix(splits["train"])
        for name, first, spread in zip(self.names, numbers[0], np.ptp(numbers, axis=0), strict=True):
            if spread == 0 and len(numbers) > 1:
                raise UserError(f"all training texts have the same {name}, {first:g}: there is nothing to learn")
        return splits

    def loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        logits = in_32_bit(logits)
        return mse_loss(logits, labels.to(logits.dtype))

    def correct(self, logits: Tensor, labels: Tensor) -> Tensor:
        # a number is not right or wrong
        return torch.zeros((), dtype=torch.int64, device=logits.device)

    def notes(self, split: hf.Dataset) -> list[str]:
        numbers = matrix(split)
        columns = zip(self.names, numbers.mean(0), numbers.var(0), strict=True)
        described = "; ".join(
            f"{name} has mean {mean:.4g} and variance {variance:.4g}" for name, mean, variance in columns
        )
        return [f"Numbers to predict: {described}. An MSE above the variance is worse than always guessing the mean"]

    def start_counts(self, device: torch.device) -> MetricCollection:
        dtype = torch.float32 if device.type in NO_FLOAT64 else torch.float64
        columns = len(self.names)
        metrics = {"mse": MeanSquaredError(num_outputs=columns), "pearson": _Correlation(columns)}
        # looking for metrics with equal sums would wait for the device
        return MetricCollection(metrics, compute_groups=False).to(device).set_dtype(dtype)

    def count(self, counts: MetricCollection, logits: Tensor, labels: Tensor) -> None:
        dtype = counts["mse"].dtype
        counts.update(logits.to(dtype), labels.to(dtype))

    def describe(self, figures: dict[str, Tensor]) -> Described:
        mean = figures["pearson"].nanmean()
        columns = {"names": self.names} | {name: without_nan(figure) for name, figure in figures.items()}
        return Described({"test_pearson": without_nan(mean)[0], "columns": columns}, [f"Test Pearson {mean:.4f}"])


class _Correlation(PearsonCorrCoef):
    """Pearson's correlation; also NaN if numbers differ only by rounding errors, which torchmetrics would correlate."""

    def compute(self) -> Tensor:
        result = super().compute()
        for mean, spread in ((self.mean_x, self.var_x), (self.mean_y, self.var_y)):
            parts = (self.n_total, self.n_total * mean, spread + self.n_total * mean**2)
            count, total, squares = (part.view(-1, self.num_outputs).sum(0) for part in parts)  # over the ranks
            result = torch.where(squares - total**2 / count < 1e-12 * squares, math.nan, result)
        return result


def _number(value: object, column: str) -> float:
    if value is None or value == "":
        raise ValueError(f"no {column}")
    try:
        number = math.nan if isinstance(value, list | dict) else float(value)
    except (ValueError, TypeError):
        number = math.nan
    except OverflowError:  # an integer
        number = math.inf
    if abs(number) > LARGEST and str(value).strip()[-1].isdigit():
        raise ValueError(
            f"{column} is {shown(value)}, whose square is beyond 32 bits: divide the numbers by a constant"
        )
    if not math.isfinite(number):
        raise ValueError(f"{column} is {shown(value)}, not a number")
    return number
