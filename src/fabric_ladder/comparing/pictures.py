"""The page's charts as PNG files, by Matplotlib."""

import io
import textwrap

from fabric_ladder.comparing.chart_data import accuracy_interval, log_ticks, loss_curves
from fabric_ladder.comparing.matching import Row
from fabric_ladder.comparing.table import Comparison

COLOURS = ("#0b67b2", "#c2490a", "#007a55", "#a8388a", "#7d6200", "#5b4bc4", "#4a5568", "#b3263a")
LINES = ("-", "--", ":", "-.")


def draw(comparison: Comparison) -> dict[str, bytes]:
    """Return PNG files by name: the loss on both scales, time, memory, and test accuracy, as far as they are known."""
    from matplotlib import rc_context  # late: it takes a second, and few ask for pictures
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = comparison.rows
    pictures = {}

    def add(name: str, plot, height: float) -> None:
        figure = Figure(figsize=(8, height), dpi=150, layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        axes.spines[["top", "right"]].set_visible(False)
        if plot(axes):
            if comparison.differences:
                figure.suptitle(textwrap.fill(comparison.warning, 130), fontsize=7, color="#8a3b00")
            buffer = io.BytesIO()
            figure.savefig(buffer, format="png")
            pictures[f"{name}.png"] = buffer.getvalue()

    bars = 1.4 + 0.45 * len(rows)
    with rc_context({"text.parse_math": False}):  # a name may hold dollar signs
        add("loss", lambda axes: _losses(axes, rows, "linear"), 4.5)
        add("loss_log", lambda axes: _losses(axes, rows, "log"), 4.5)
        add("time", lambda axes: _bars(axes, rows, "minutes", "minutes of training with its validation"), bars)
        add("memory", lambda axes: _bars(axes, rows, "memory", "peak memory in GB"), bars)
        add("accuracy", lambda axes: _accuracies(axes, rows), bars)
    return pictures


def _losses(axes, rows: list[Row], scale: str) -> bool:
    curves, unit = loss_curves(rows)
    named: set[int] = set()
    for curve in curves:
        colour, dash = COLOURS[curve.row % len(COLOURS)], LINES[(curve.row + curve.row // len(COLOURS)) % len(LINES)]
        axes.plot(curve.x, curve.raw, color=colour, linewidth=0.8, alpha=0.35)
        name = None if curve.row in named else f"{curve.row + 1} {rows[curve.row].label}"
        axes.plot(curve.x, curve.smoothed, dash, color=colour, linewidth=2, label=name)
        named.add(curve.row)
    if curves:
        axes.set_yscale(scale)
        if scale == "log":
            low, high = axes.get_ylim()
            axes.set_yticks(log_ticks(low, high), [f"{mark:g}" for mark in log_ticks(low, high)])
            axes.set_yticks([], minor=True)
        axes.set(xlabel=unit, ylabel="training loss")
        axes.legend(frameon=False, fontsize="small")
        axes.grid(axis="y", alpha=0.3)
    return bool(curves)


def _bars(axes, rows: list[Row], figure: str, title: str) -> bool:
    means = [row.mean(figure) for row in rows]
    if all(mean is None for mean in means):
        return False
    for number, (row, mean) in enumerate(zip(rows, means, strict=True)):
        spread = row.spread(figure)
        axes.barh(number, mean or 0, xerr=spread, color=COLOURS[number % len(COLOURS)], height=0.6, capsize=3)
        text = " not known" if mean is None else f" {mean:.2f}" + (f" ± {spread:.2f}" if spread is not None else "")
        axes.text((mean or 0) + (spread or 0), number, text, va="center", fontsize="small")
    _name_rows(axes, rows)
    axes.margins(x=0.15)
    axes.set_xlabel(title)
    return True


def _accuracies(axes, rows: list[Row]) -> bool:
    means = [row.mean("test_accuracy") for row in rows]
    if all(mean is None for mean in means):
        return False
    for number, (row, mean) in enumerate(zip(rows, means, strict=True)):
        if mean is None:
            continue
        colour, interval = COLOURS[number % len(COLOURS)], accuracy_interval(row)
        around = [[mean - interval[0]], [interval[1] - mean]] if interval else None
        axes.errorbar(mean, number, xerr=around, fmt="o", color=colour, capsize=4, markersize=7)
        text = f"{mean:.2f} %"
        axes.annotate(text, (mean, number), (0, 7), textcoords="offset points", ha="center", fontsize="small")
        if len(row.runs) > 1:
            axes.plot(row.values("test_accuracy"), [number] * len(row.runs), "D", color=colour, fillstyle="none")
    _name_rows(axes, rows)
    known = any(accuracy_interval(row) for row in rows)
    axes.set_xlabel("test accuracy in percent" + (", with Wilson's 95 % interval" if known else ""))
    axes.grid(axis="x", alpha=0.3)
    return True


def _name_rows(axes, rows: list[Row]) -> None:
    axes.set_yticks(range(len(rows)), [f"{number + 1} {row.label}" for number, row in enumerate(rows)])
    axes.set_ylim(len(rows) - 0.4, -0.6)
