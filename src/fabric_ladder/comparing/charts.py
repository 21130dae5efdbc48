"""Draw a comparison's charts with Matplotlib: loss and accuracy over training, time, memory and test accuracy."""

import io
import math
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pandas as pd
from matplotlib import rc_context, rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fabric_ladder.comparing.matching import Row
from fabric_ladder.comparing.table import Column, Comparison, cell_text, value_text

HALF_LIFE = 0.05  # of the longest curve
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#c051a0", "#a58b00", "#7570d3", "#708090", "#e0455a")
DASHES = ("-", "--", ":", "-.")


def style(ink: str, grid: str) -> dict:
    """Return Matplotlib's settings for a theme with these colours of texts and of the grid."""
    return {
        "axes.axisbelow": True,
        "axes.edgecolor": grid,
        "axes.facecolor": "none",
        "axes.labelcolor": ink,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": "none",
        "font.size": 8,
        "grid.color": grid,
        "legend.frameon": False,
        "svg.fonttype": "none",  # text stays text
        "svg.hashsalt": "fabric_ladder",  # the same runs give the same file
        "text.color": ink,
        "text.parse_math": False,  # names may contain dollar signs
        "xtick.color": ink,
        "ytick.color": ink,
    }


STYLE = style("#1b2230", "#dfe3ea")
DARK_STYLE = style("#e8ecf3", "#3b4556")


class Chart(NamedTuple):
    """A figure with its file name, heading, caption, and a description in words."""

    name: str
    title: str
    caption: str
    description: str
    figure: Figure


class Curve(NamedTuple):
    """Losses or accuracies of one run.

    Attributes:
        row: Number of its row.
        x: Samples or epochs so far.
        thin: Losses as printed, or training accuracies.
        thick: Smoothed losses, or validation accuracies.
    """

    row: int
    x: list[float]
    thin: list[float]
    thick: list[float]


def draw_charts(comparison: Comparison) -> list[Chart]:
    """Return all charts whose figures are known. The caller sets the style."""
    columns = {column.key: column for column in comparison.columns}
    return [
        *_curves(comparison.rows, "losses"),
        *_curves(comparison.rows, "accuracies"),
        *_bars(comparison.rows, columns["minutes"], "Time", "Minutes of training, validation included."),
        *_bars(comparison.rows, columns["memory"], "Peak memory", "GB (10⁹ bytes) during training and validation."),
        *_test_accuracies(comparison.rows, columns["test_accuracy"]),
    ]


def save_charts(comparison: Comparison, folder: Path) -> None:
    """Write all charts as PNG files into a new folder. Each has a caption and the warning about unlike runs."""
    folder.mkdir()
    with rc_context(STYLE | {"figure.facecolor": "white"}):
        for chart in draw_charts(comparison):
            notes = textwrap.wrap(f"{chart.caption} {comparison.warning}", round(17 * chart.figure.get_figwidth()))
            chart.figure.set_figheight(chart.figure.get_figheight() + 0.3 + 0.14 * len(notes))
            chart.figure.suptitle(chart.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
            chart.figure.supxlabel("\n".join(notes), x=0.01, ha="left", fontsize=7)
            chart.figure.savefig(folder / f"{chart.name}.png", dpi=200)


def to_svg(comparison: Comparison, settings: dict) -> dict[str, tuple[Chart, str]]:
    """Return each chart and its SVG file by name, drawn with `STYLE` or `DARK_STYLE`."""
    found = {}
    with rc_context(settings):
        for chart in draw_charts(comparison):
            buffer = io.StringIO()
            chart.figure.savefig(buffer, format="svg", metadata={"Date": None})
            found[chart.name] = chart, buffer.getvalue()
    return found


def smooth(x: list[float], y: list[float], half_life: float) -> list[float]:
    """Return the exponential moving average of `y`, whose weights halve every `half_life` of `x`."""
    if not half_life:
        return y
    times = pd.to_datetime(pd.Series(x) / half_life, unit="s")
    return pd.Series(y).ewm(halflife="1s", times=times).mean().tolist()


def find_curves(rows: list[Row], name: str) -> tuple[list[Curve], str]:
    """Return one curve per run with points, and the unit of the x axis.

    Args:
        rows: Rows of the comparison.
        name: `losses` or `accuracies`.

    Returns:
        Curves over `samples`, or over `epochs` if a run's samples are unknown.
    """
    runs = [(number, getattr(run, name)) for number, row in enumerate(rows) for run in row.runs]
    runs = [(number, [point for point in points if math.isfinite(point.value)]) for number, points in runs]
    runs = [(number, points) for number, points in runs if points]
    unknown = any(point.samples is None for _, points in runs for point in points)
    unit = "epochs" if unknown else "samples"
    half_life = HALF_LIFE * max((points[-1].epochs for _, points in runs), default=0)
    curves = []
    for number, points in runs:
        values = [point.value for point in points]
        if name == "losses":
            thin, thick = values, smooth([point.epochs for point in points], values, half_life)
        else:
            thin, thick = [point.train_accuracy for point in points], values
        curves.append(Curve(number, [getattr(point, unit) for point in points], thin, thick))
    return curves, unit


def _curves(rows: list[Row], name: str) -> Iterator[Chart]:
    curves, unit = find_curves(rows, name)
    if not curves:
        return
    figure, axes = _figure(8.4, 3.3 + 0.06 * len(rows))
    lines = {}
    for curve in curves:
        look = {
            "color": COLOURS[curve.row % len(COLOURS)],
            "marker": "o" if len(curve.x) <= 20 else "",
            "markersize": 3,
        }
        axes.plot(curve.x, curve.thin, linewidth=0.8, alpha=0.4, **look)
        dash = DASHES[curve.row // len(COLOURS) % len(DASHES)]
        lines[curve.row], *_ = axes.plot(curve.x, curve.thick, dash, linewidth=1.8, **look)
    axes.set_xlim(left=0)
    axes.set_xlabel(unit)
    axes.grid(axis="y")
    names = [_name(rows, number) for number in lines]
    axes.legend(lines.values(), names, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
    ends = "; ".join(f"{rows[curve.row].label} ends at {curve.thick[-1]:.4g}" for curve in curves)
    if name == "losses":
        axes.set_ylim(bottom=0)
        axes.set_ylabel("training loss")
        caption = (
            f"Thin: as printed. Thick: moving average whose weights halve every {HALF_LIFE:.0%} of the longest curve."
        )
        yield Chart("loss", "Training loss", caption, f"Training loss over {unit}: {ends}.", figure)
    else:
        axes.set_ylabel("accuracy in %")
        caption = "Thin: training. Thick: validation."
        title = "Accuracy after each epoch"
        yield Chart("validation", title, caption, f"Validation accuracy over {unit}: {ends}.", figure)


def _bars(rows: list[Row], column: Column, title: str, caption: str) -> Iterator[Chart]:
    if all(row.mean(column.key) is None for row in rows):
        return
    figure, axes = _figure(8.4, 0.5 + 0.36 * len(rows))
    texts = [cell_text(row, rows[0], column) for row in rows]
    for number, (row, text) in enumerate(zip(rows, texts, strict=True)):
        mean = row.mean(column.key) or 0
        spread = row.spread(column.key) or 0
        axes.barh(
            number,
            mean,
            0.62,
            color=COLOURS[number % len(COLOURS)],
            xerr=spread or None,
            ecolor=rcParams["text.color"],
            capsize=3,
        )
        axes.annotate(text, (mean + spread, number), (5, 0), textcoords="offset points", va="center")
    _name_rows(axes, rows, column.unit)
    name = title.lower().split()[-1]
    yield Chart(name, title, f"{caption} Shorter is better.", _in_words(title, rows, texts), figure)


def _test_accuracies(rows: list[Row], column: Column) -> Iterator[Chart]:
    if all(row.mean(column.key) is None for row in rows):
        return
    figure, axes = _figure(8.4, 0.6 + 0.36 * len(rows))
    texts = []
    for number, row in enumerate(rows):
        interval = row.interval
        texts.append(value_text(row, column) + (" ({:.2f} to {:.2f})".format(*interval) if interval else ""))
        axes.annotate(texts[-1], (1, number), (8, 0), xycoords=("axes fraction", "data"), textcoords="offset points",
                      va="center")  # fmt: skip
        colour = COLOURS[number % len(COLOURS)]
        if interval:
            axes.plot(interval, [number, number], "-|", color=colour)
        axes.plot(row.values(column.key), [number] * len(row.values(column.key)), "D", color=colour, fillstyle="none")
        if (mean := row.mean(column.key)) is not None:
            axes.plot(mean, number, "o", color=colour, markersize=7)
    _name_rows(axes, rows, "test accuracy in %")
    caption = "Dots: mean. Diamonds: single seeds. Lines: Wilson's 95 % interval, if the size of the test set is known."
    yield Chart("accuracy", "Test accuracy", caption, _in_words("Test accuracy", rows, texts), figure)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _name(rows: list[Row], number: int) -> str:
    return textwrap.fill(f"{number + 1}\u2002{rows[number].label}", 28)


def _name_rows(axes: Axes, rows: list[Row], label: str) -> None:
    axes.set_yticks(range(len(rows)), [_name(rows, number) for number in range(len(rows))])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)
    axes.grid(axis="x")


def _in_words(title: str, rows: list[Row], texts: list[str]) -> str:
    return f"{title}: {'; '.join(f'{row.label} {text}' for row, text in zip(rows, texts, strict=True))}."
