"""Draw a comparison's charts with Matplotlib: loss and accuracy over training, time, memory and test accuracy."""

import io
import textwrap
from collections.abc import Sequence
from itertools import chain
from statistics import fmean

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fabric_ladder.comparing.logs import Point
from fabric_ladder.comparing.matching import Row
from fabric_ladder.comparing.table import Column, Comparison, cell_text

COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#c051a0", "#a58b00", "#7570d3", "#708090", "#e0455a")
WIDEST = 48  # characters of a line
DASHES = ("-", "--", ":", "-.")
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": "#dfe3ea",
    "axes.facecolor": "none",
    "axes.labelcolor": "#1b2230",
    "axes.spines.right": False,
    "axes.spines.top": False,
    "figure.facecolor": "white",
    "font.size": 8,
    "grid.color": "#dfe3ea",
    "legend.frameon": False,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "fabric_ladder",  # the same runs give the same file
    "text.color": "#1b2230",
    "text.parse_math": False,  # names may contain dollar signs
    "xtick.color": "#1b2230",
    "ytick.color": "#1b2230",
}


def draw_charts(comparison: Comparison) -> dict[str, bytes]:
    """Return all charts whose figures are known, as SVG files by their titles."""
    rows = comparison.rows
    columns = {column.key: column for column in comparison.columns}
    with rc_context(STYLE):
        figures = [
            _curves(rows, "losses", "Training loss", "training loss"),
            _curves(rows, "accuracies", "Validation accuracy (thin: training)", "accuracy in %"),
        ]
        if "test_accuracy" in columns:
            figures.append(_dots(rows, columns["test_accuracy"], "Test accuracy with Wilson's 95 % interval"))
        if "test_mse" in columns:
            figures.append(_dots(rows, columns["test_mse"], "Mean squared error of the test"))
        figures.append(_dots(rows, columns["memory"], "Peak memory"))
        figures.append(_dots(rows, columns["minutes"], "Time of training and validation"))
        return {each.axes[0].get_title(loc="left"): _save(each, comparison.warning) for each in figures if each}


def _save(figure: Figure, warning: str) -> bytes:
    if warning:
        lines = [figure.axes[0].get_xlabel(), *textwrap.wrap(warning, 58)]
        figure.axes[0].set_xlabel("\n".join(lines), loc="left")
        figure.set_figheight(figure.get_figheight() + 0.15 * len(lines))
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def _curves(rows: list[Row], name: str, title: str, unit: str) -> Figure | None:
    """Draw the `losses` or `accuracies` over samples if they are known for all runs, else over epochs.

    Seeds with the same samples are drawn as their mean and, as a band, their range.
    """
    points = {number: [getattr(run, name) for run in row.runs if getattr(run, name)] for number, row in enumerate(rows)}
    every = list(chain.from_iterable(points.values()))
    if max(map(len, every), default=0) < 2:
        return None  # one point is no curve
    known = all(point.samples is not None for run in every for point in run)
    over = "samples" if known else "epochs"
    figure, axes = _figure(2.6 + 0.16 * len(rows), title)
    band = ""
    for number, runs in points.items():
        look = {"color": COLOURS[number % len(COLOURS)]}
        if len(runs) > 1 and all(_x(run, over) == _x(runs[0], over) for run in runs):
            moments = [*zip(*runs, strict=True)]
            low, high = ([side(point.value for point in moment) for moment in moments] for side in (min, max))
            axes.fill_between(_x(runs[0], over), low, high, alpha=0.2, linewidth=0, **look)
            band = "   (line: mean of the seeds, band: their range)"
            runs = [[_average(moment) for moment in moments]]
        label = textwrap.fill(rows[number].label, WIDEST)
        for run in runs:
            x = _x(run, over)
            look |= {"marker": "o" if len(x) <= 20 else "", "markersize": 2}
            if name == "accuracies":
                axes.plot(x, [point.train_accuracy for point in run], linewidth=0.8, alpha=0.4, **look)
            dash = DASHES[number // len(COLOURS) % len(DASHES)]
            axes.plot(x, [point.value for point in run], dash, linewidth=1.2, label=label, **look)
            label = None
    axes.set_xlim(left=0)
    axes.set_xlabel(over + band)
    axes.set_ylabel(unit)
    axes.grid(axis="y")
    figure.legend(loc="outside lower left")
    return figure


def _x(points: Sequence[Point], over: str) -> list[float]:
    return [getattr(point, over) for point in points]


def _average(points: Sequence[Point]) -> Point:
    trained = [point.train_accuracy for point in points if point.train_accuracy is not None]
    mean = fmean(point.value for point in points)
    return points[0]._replace(value=mean, train_accuracy=fmean(trained) if trained else None)


def _dots(rows: list[Row], column: Column, title: str) -> Figure | None:
    """Draw a figure of each row with its spread over the seeds, or with the interval of the test accuracy."""
    if all(row.mean(column.key) is None for row in rows):
        return None
    labels = [textwrap.wrap(row.label, WIDEST) for row in rows]
    tallest = max(map(len, labels))
    figure, axes = _figure(0.8 + (0.3 + 0.15 * tallest) * len(rows), title)
    for number, row in enumerate(rows):
        text = cell_text(row, rows[0], column)
        mean = row.mean(column.key)
        if mean is not None:
            errors = [[row.spread(column.key) or 0]] * 2
            if column.key == "test_accuracy" and row.interval:
                low, high = row.interval
                errors = [[mean - low], [high - mean]]
                text += f", {low:.2f} to {high:.2f}"
            axes.errorbar(mean, number, xerr=errors, fmt="o", capsize=3, color=COLOURS[number % len(COLOURS)])
        lines = "\n".join([*labels[number], text])
        axes.text(0, number - 0.15, lines, transform=axes.get_yaxis_transform(), va="bottom")
    axes.set_yticks([])
    axes.set_ylim(len(rows) - 0.75, -0.95)
    if not column.points:
        axes.set_xlim(left=0)
    axes.set_xlabel(column.unit)
    axes.grid(axis="x")
    return figure


def _figure(height: float, title: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(4, height), layout="constrained")  # inches; 8 points are 10 pixels on a page of 400
    axes = figure.add_subplot()
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    return figure, axes
