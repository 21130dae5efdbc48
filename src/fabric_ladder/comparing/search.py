"""Rank the runs of a search for the best values of settings, by their validation."""

import statistics
from pathlib import Path
from typing import NamedTuple

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fabric_ladder.errors import read_outside


class Tried(NamedTuple):
    """The runs with the same values of the searched settings, one for each seed.

    Attributes:
        values: The searched settings by name, as words of a command line.
        runs: Folders of the finished runs.
        failed: Whether a run has no result, for example because its loss was not finite.
    """

    values: dict[str, str]
    runs: list[Path]
    failed: bool

    @property
    def words(self) -> str:
        """The values as options of a command line."""
        return " ".join(f"--{name} {value}" for name, value in self.values.items())


class Figures(NamedTuple):
    """The figures of one run; accuracies are in percent.

    Attributes:
        metric: `loss` or `accuracy`: the setting `best_metric`.
        validation: This figure of the validation of the tested weights.
        tested: `accuracy`, or `loss` where there is none.
        test: This figure of the test.
    """

    metric: str
    validation: float
    tested: str
    test: float


def read_figures(folder: Path) -> Figures:
    """Return the figures of a finished run."""
    record = read_outside(folder / "run.json")
    results, metric = record["results"], record["settings"]["best_metric"]
    best = results.get("best_validation")
    validation = best["value"] if best else results["epochs"][-1][f"validation_{metric}"]
    tested = "accuracy" if "test_accuracy" in results else "loss"
    test = results[f"test_{tested}"] * (100 if tested == "accuracy" else 1)
    return Figures(metric, validation * 100 if metric == "accuracy" else validation, tested, test)


def print_search(rung: str, tried: list[Tried], console: Console) -> None:
    """Print the figures of all values of a rung, and the best ones by the mean validation over the seeds."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column(rung, overflow="fold")
    known: dict[int, list[Figures]] = {}
    for number, values in enumerate(tried):
        if values.runs and not values.failed:
            known[number] = [read_figures(run) for run in values.runs]
    if not known:
        console.print(f"{rung}: no value has a result for every seed", highlight=False)
        return
    any_figures = next(iter(known.values()))[0]
    metric = any_figures.metric
    table.add_column(f"validation {metric}", justify="right")
    table.add_column(f"test {any_figures.tested}", justify="right")
    for number, values in enumerate(tried):
        figures = known.get(number)
        cells = (
            [_cell([each.validation for each in figures]), _cell([each.test for each in figures])] if figures else []
        )
        table.add_row(escape(values.words), *(cells or ["failed", ""]))
    console.print(table)
    means = {number: statistics.mean(each.validation for each in figures) for number, figures in known.items()}
    best = (min if metric == "loss" else max)(means, key=means.get)
    line = f"Best of {rung}: {tried[best].words}, by the validation {metric} {means[best]:.4g}"
    console.print(escape(line + _at_the_edge(tried, best)), highlight=False, soft_wrap=True)


def _cell(values: list[float]) -> str:
    """Return the mean, and the sample standard deviation of several seeds."""
    spread = f" ± {statistics.stdev(values):.2g}" if len(values) > 1 else ""
    return f"{statistics.mean(values):.4g}{spread}"


def _at_the_edge(tried: list[Tried], best: int) -> str:
    """Return a hint if the best value of a number is the smallest or the largest one, with at least three values."""
    hints = []
    for name, value in tried[best].values.items():
        try:
            numbers = sorted({float(each.values[name]) for each in tried})
        except ValueError:
            continue  # the values are not numbers
        if len(numbers) > 2 and float(value) in (numbers[0], numbers[-1]):
            side = "smallest" if float(value) == numbers[0] else "largest"
            hints.append(f"; {value} is the {side} --{name} tried, so try beyond it")
    return "".join(hints)
