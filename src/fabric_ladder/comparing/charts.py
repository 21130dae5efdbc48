"""The comparison's charts, drawn by Matplotlib: PNG files, and SVG in the colours of the page that shows it."""

import io
import json
import math
import re
import textwrap
from collections.abc import Iterator, Sequence
from html import escape
from typing import NamedTuple

import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullLocator, StrMethodFormatter

from fabric_ladder.comparing.matching import Row
from fabric_ladder.comparing.table import Column, Comparison, cell_text, value_text

HALF_LIFE = 0.05  # of the longest curve
FEW = 20  # points that a line shows
AVERAGE = f"moving average whose weights halve every {HALF_LIFE:.0%} of the longest curve"
CURVES = {  # of a run: heading, axis and caption
    "losses": ("Training loss", "training loss", f"Thin: as printed. Thick: {AVERAGE}."),
    "accuracies": (
        "Accuracy after each epoch",
        "accuracy in %",
        "Thin: training, as it went on. Thick: validation.",
    ),
}
WIDE, NARROW = 8.4, 4.6  # inches
INK, SOFT, GRID, WARNING = "#1b2230", "#566072", "#dfe3ea", "#8a3b00"
COLOURS = ("#0b67b2", "#c2490a", "#007a55", "#a8388a", "#7d6200", "#5b4bc4", "#4a5568", "#b3263a")
DASHES = ("-", "--", ":", "-.")  # with 8 colours, 32 lines that are unlike
VARIABLES = {INK: "ink", SOFT: "soft", GRID: "line"} | {colour: f"c{n}" for n, colour in enumerate(COLOURS)}
STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": GRID,
    "axes.labelcolor": SOFT,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 8,
    "grid.color": GRID,
    "legend.frameon": False,
    "path.simplify_threshold": 1.0,  # pixels, of which there are 72 to the inch in SVG: long runs stay small
    "svg.fonttype": "none",  # text stays text
    "text.color": INK,
    "text.parse_math": False,  # a name may hold dollar signs
    "xtick.color": SOFT,
    "ytick.color": SOFT,
}


class Chart(NamedTuple):
    """A figure with its file's name, its heading, the line below it, what it shows in words, and its lines' names."""

    name: str
    title: str
    caption: str
    description: str
    figure: Figure
    lines: Sequence[str] = ()


class Curve(NamedTuple):
    """A run's losses, as printed and their moving average, or its accuracies, of training and of validation.

    Attributes:
        row: Number of its row.
        x: Samples, epochs or minutes so far.
        thin: As printed, or of training.
        thick: Smoothed, or of validation.
    """

    row: int
    x: list[float]
    thin: list[float]
    thick: list[float]


def draw_charts(comparison: Comparison) -> list[Chart]:
    """Return loss and accuracy over samples and minutes, time, memory and test accuracy, as far as they are known."""
    rows, columns = comparison.rows, {column.key: column for column in comparison.columns}
    of_time, of_memory = "Minutes of training with its validation.", "GB (10⁹ bytes) while training and validating."
    with rc_context(STYLE):
        charts = [
            *_curves(rows),
            *_bars(rows, columns["minutes"], "time", "Time", of_time),
            *_bars(rows, columns["memory"], "memory", "Peak memory", of_memory),
            *_accuracies(rows, columns["test_accuracy"]),
        ]
    return charts


def to_png(comparison: Comparison) -> dict[str, bytes]:
    """Return PNG files by name; each says what the runs differ in beyond their technique."""
    pictures = {}
    for chart in draw_charts(comparison):
        figure, buffer = chart.figure, io.BytesIO()
        notes = textwrap.wrap(f"{chart.caption} {comparison.warning}", round(17 * figure.get_figwidth()))
        with rc_context(STYLE):
            figure.set_figheight(figure.get_figheight() + 0.3 + 0.14 * len(notes))
            figure.suptitle(chart.title, x=0.01, ha="left", fontsize=10, fontweight="bold")
            figure.supxlabel(
                "\n".join(notes), x=0.01, ha="left", fontsize=7, color=WARNING if comparison.warning else SOFT
            )
            figure.savefig(buffer, format="png", dpi=200)
        pictures[f"{chart.name}.png"] = buffer.getvalue()
    return pictures


def to_svg(chart: Chart) -> str:
    """Return a chart as an element for a page that defines the colours --ink, --soft, --line and --c0 to --c7."""
    buffer = io.StringIO()
    with rc_context(STYLE | {"svg.hashsalt": chart.name}):  # ids that are the same each time, and unlike in two charts
        chart.figure.savefig(buffer, format="svg", transparent=True)
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>|<!--.*?-->", "", buffer.getvalue(), flags=re.DOTALL)
    box, parts = re.search(r'<svg[^>]*(viewBox="[^"]*")[^>]*>(.*)', svg, flags=re.DOTALL).groups()
    start = f'<svg class="{chart.name}" role="img" aria-label="{escape(chart.description)}" {box}{_scales(chart)}>'
    return start + re.sub("<[^>]*>", _for_page, parts)


def _scales(chart: Chart) -> str:
    """Return where the axes lie, in parts of the picture, and what they reach, for the page to tell values by."""
    if not chart.lines:
        return ""
    [axes] = chart.figure.axes
    place = axes.get_position()
    numbers = [place.x0, place.x1, 1 - place.y0, 1 - place.y1, *axes.get_xlim(), *axes.get_ylim()]
    facts = {"scale": axes.get_yscale(), "unit": axes.get_xlabel(), "lines": list(chart.lines)}
    facts["digits"] = 3 if chart.title == "Training loss" else 2
    facts["axes"] = [float(f"{number:.6g}") for number in numbers]
    return f' data-chart="{escape(json.dumps(facts, ensure_ascii=False))}"'


def _for_page(tag: re.Match) -> str:
    """Return a tag of Matplotlib's in the page's colours and font, without needless digits and numbered ids."""
    text = re.sub(r"(\.\d\d)\d+", r"\1", re.sub(r' id="[\w.]+_\d+"', "", tag.group()))
    text = re.sub("'DejaVu Sans'[^;\"]*", "system-ui, sans-serif", text)
    return re.sub("|".join(VARIABLES), lambda colour: f"var(--{VARIABLES[colour.group()]})", text)


def smooth(x: list[float], y: list[float], half_life: float) -> list[float]:
    """Return the exponential moving average of `y`, whose weights halve every `half_life` of `x`."""
    if not half_life:
        return y
    times = pd.to_datetime(pd.Series(x) / half_life, unit="s")
    return pd.Series(y).ewm(halflife="1s", times=times).mean().tolist()


def find_curves(rows: list[Row], name: str, over: str) -> tuple[list[Curve], str]:
    """Return a curve for each run that has points, and what its x axis counts.

    Args:
        rows: Of the comparison.
        name: `losses` or `accuracies`.
        over: `minutes`, which a log does not tell, or `samples`: epochs where a run does not tell these, since a log of
            batches does not tell how many are in one.
    """
    runs = [(number, getattr(run, name)) for number, row in enumerate(rows) for run in row.runs]
    runs = [(number, [point for point in points if math.isfinite(point.value)]) for number, points in runs]
    if over == "samples" and any(point.samples is None for _, points in runs for point in points):
        over = "epochs"
    half_life = HALF_LIFE * max((points[-1].epochs for _, points in runs if points), default=0)
    curves = []
    for number, points in runs:
        if not points or getattr(points[0], over) is None:
            continue
        x, values = [getattr(point, over) for point in points], [point.value for point in points]
        if name == "losses":
            curves.append(Curve(number, x, values, smooth([point.epochs for point in points], values, half_life)))
        else:
            curves.append(Curve(number, x, [point.train_accuracy for point in points], values))
    return curves, "samples seen" if over == "samples" else over


def _curves(rows: list[Row]) -> Iterator[Chart]:
    """Yield loss and accuracy, over samples and over minutes, as far as they are known."""
    for name, of, scale in (
        ("loss", "losses", "linear"), ("loss_log", "losses", "log"), ("validation", "accuracies", "linear"),
    ):  # fmt: skip
        title, label, caption = CURVES[of]
        for over in ("samples", "minutes"):
            curves, unit = find_curves(rows, of, over)
            if not curves:
                continue
            chart = name + "_minutes" * (over == "minutes")
            figure, axes = _lines(rows, curves, chart)
            axes.set(xlabel=unit, ylabel=label, yscale=scale)
            axes.set_xlim(left=0)
            if scale == "log":
                low, high = axes.get_ylim()
                axes.yaxis.set_major_locator(LogLocator(subs=range(1, 10) if high < 20 * low else (1, 2, 5)))
                axes.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axes.yaxis.set_minor_locator(NullLocator())
            elif of == "losses":
                axes.set_ylim(bottom=0)
            labels = [rows[curve.row].label for curve in curves]
            ends = "; ".join(
                f"{name} ends at {curve.thick[-1]:.4g}" for name, curve in zip(labels, curves, strict=True)
            )
            about = f"Thick lines of {label} against {unit}, {scale} scale: {ends}."
            yield Chart(chart, title, caption, about, figure, labels)


def _lines(rows: list[Row], curves: list[Curve], name: str) -> tuple[Figure, Axes]:
    """Draw the thin lines below the thick ones; a line of few points shows them."""
    figure, axes = _figure(WIDE, 3.3 + 0.06 * len(rows))
    for number, curve in enumerate(curves):
        marker = "o" if len(curve.x) == 1 else ""  # a line of one point is none
        look = {"color": _colour(curve.row), "linewidth": 0.8, "alpha": 0.4, "marker": marker, "markersize": 4}
        axes.plot(curve.x, curve.thin, gid=f"thin-{name}-{number}", **look)
    lines = {}
    for number, curve in enumerate(curves):
        dash = DASHES[(curve.row + curve.row // len(COLOURS)) % len(DASHES)]
        lines[curve.row], *_ = axes.plot(
            curve.x, curve.thick, dash, color=_colour(curve.row), linewidth=1.8,
            marker="o" if len(curve.x) <= FEW else "", markersize=4, gid=f"{name}-{number}",
        )  # fmt: skip
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:,.6g}"))
    axes.grid(axis="y")
    names = [_name(rows, number) for number in lines]
    axes.legend(lines.values(), names, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, handlelength=3)
    return figure, axes


def _bars(rows: list[Row], column: Column, name: str, title: str, caption: str) -> Iterator[Chart]:
    if all(row.mean(column.key) is None for row in rows):
        return
    figure, axes = _figure(NARROW, 0.5 + 0.36 * len(rows))
    texts = []
    for number, row in enumerate(rows):
        mean, spread = row.mean(column.key), row.spread(column.key)
        if mean is not None:
            style = {"color": _colour(number), "ecolor": INK, "capsize": 3, "gid": f"{name}-{number}"}
            axes.barh(number, mean, 0.62, xerr=spread, **style)
        texts.append(cell_text(row, rows[0], column))
        _note(axes, texts[-1], (mean or 0) + (spread or 0), number, 5)
    _name_rows(axes, rows, column.unit)
    yield Chart(name, title, f"{caption} Shorter is better.", _in_words(title, rows, texts), figure)


def _accuracies(rows: list[Row], column: Column) -> Iterator[Chart]:
    if all(row.mean(column.key) is None for row in rows):
        return
    figure, axes = _figure(WIDE, 0.6 + 0.36 * len(rows))
    intervals, texts = [row.interval for row in rows], []
    for number, (row, interval) in enumerate(zip(rows, intervals, strict=True)):
        texts.append(value_text(row, column) + (" ({:.2f} to {:.2f})".format(*interval) if interval else ""))
        _note(axes, texts[-1], 1, number, 8, of_axes=True)
        if (mean := row.mean(column.key)) is None:
            continue
        colour = _colour(number)
        if interval:
            axes.plot(interval, [number, number], "-|", color=colour, markersize=8, gid=f"interval-{number}")
        if len(row.runs) > 1:
            axes.plot(row.values(column.key), [number] * len(row.runs), "D", color=colour, fillstyle="none")
        axes.plot(mean, number, "o", color=colour, markersize=7)
    _name_rows(axes, rows, "test accuracy in %")
    caption = "Percent of the test's samples." if any(intervals) else "Percent."
    caption += " The axis does not start at 0." if axes.get_xlim()[0] > 0 else ""
    caption += " Lines: Wilson's 95 % interval, for the size of the test set." if any(intervals) else ""
    if not all(intervals):
        caption += " Without a line: the number of independent test samples is not known."
    caption += " Diamonds: the single seeds." if any(len(row.runs) > 1 for row in rows) else ""
    yield Chart("accuracy", "Test accuracy", caption, _in_words("Test accuracy", rows, texts), figure)


def _figure(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, figure.add_subplot()


def _colour(number: int) -> str:
    return COLOURS[number % len(COLOURS)]


def _name(rows: list[Row], number: int) -> str:
    return textwrap.fill(f"{number + 1}\u2002{rows[number].label}", 28)


def _name_rows(axes: Axes, rows: list[Row], label: str) -> None:
    axes.set_yticks(range(len(rows)), [_name(rows, number) for number in range(len(rows))])
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.set_xlabel(label)
    axes.grid(axis="x")
    for number, text in enumerate(axes.get_yticklabels()):
        text.set(color=_colour(number), fontweight="bold")


def _note(axes: Axes, text: str, x: float, y: float, offset: int, of_axes: bool = False) -> None:
    """Write a text to the right of a point; `x` in axes' widths instead of units of the data if `of_axes`."""
    units = ("axes fraction", "data") if of_axes else "data"
    axes.annotate(text, (x, y), (offset, 0), xycoords=units, textcoords="offset points", va="center")


def _in_words(title: str, rows: list[Row], texts: list[str]) -> str:
    return f"{title}: {'; '.join(f'{row.label} {text}' for row, text in zip(rows, texts, strict=True))}."
