"""Parts of the pictures: colours, axes, boxes, arrows, stacked bars, memory over time, lanes, bits."""

from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from record import Step

WIDTH, DPI = 6.8, 150  # inches, dots per inch
GB = 1e9
PARTS = ["weights", "optimizer state", "gradients", "activations", "temporary"]
LOOKS = {  # the palette of Okabe and Ito for colour-blind readers
    "light": {
        "back": "#ffffff", "ink": "#1f2328", "soft": "#59636e", "line": "#d1d9e0",
        "weights": "#0072b2", "gradients": "#e69f00", "optimizer state": "#009e73", "activations": "#cc79a7",
        "temporary": "#8c959f", "exponent": "#d55e00", "fraction": "#56b4e9",
    },
    "dark": {
        "back": "#0d1117", "ink": "#e6edf3", "soft": "#9198a1", "line": "#3d444d",
        "weights": "#2f8fd0", "gradients": "#e69f00", "optimizer state": "#14a87e", "activations": "#d684b2",
        "temporary": "#7d8590", "exponent": "#e0701a", "fraction": "#56b4e9",
    },
}  # fmt: skip
Look = dict[str, str]


def panels(
    figure: Figure, look: Look, source: str, columns: int = 1, left: float = 0.6, bottom: float = 0.5,
    legend: list[str] | tuple = (),
) -> list[Axes]:  # fmt: skip
    """Return axes in a row, below a legend of parts and above a line with the source of the data."""
    width, height = figure.get_size_inches()
    figure.text(1 - 0.1 / width, 0.07 / height, source, ha="right", va="bottom", fontsize=9, color=look["soft"])
    if legend:
        patches = [Patch(color=look[part], label=part) for part in legend]
        place = {"loc": "upper left", "bbox_to_anchor": (0.07 / width, 1 - 0.33 / height), "borderaxespad": 0}
        spaces = {"handlelength": 1, "handletextpad": 0.4, "columnspacing": 1.2, "borderpad": 0.2}
        figure.legend(handles=patches, ncols=len(legend), frameon=False, fontsize=9.5, **place, **spaces)
    axes = figure.subplots(1, columns, sharey=True, squeeze=False)[0]
    top = 1 - (0.8 if legend else 0.62) / height
    figure.subplots_adjust(left / width, (bottom + 0.2) / height, 1 - 0.15 / width, top, wspace=0.12)
    return list(axes)


def canvas(figure: Figure, look: Look, source: str, width: float, height: float, **options) -> Axes:
    """Return axes without frame and ticks, for boxes at places from (0, 0), upper left, to (width, height)."""
    [axes] = panels(figure, look, source, left=0.15, bottom=0.15, **options)
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return axes


def box(axes: Axes, x: float, y: float, width: float, height: float, colour: str, text: str = "", **options) -> None:
    """Draw a filled rectangle with a text in its middle."""
    edge = {"edgecolor": axes.get_facecolor(), "linewidth": 1}
    axes.add_patch(Rectangle((x, y), width, height, facecolor=colour, **edge | options))
    dark = np.dot(to_rgb(colour), (0.3, 0.59, 0.11)) < 0.5
    ink = "#ffffff" if dark else "#1f2328"
    axes.text(x + width / 2, y + height / 2, text, ha="center", va="center", color=ink, fontsize=9.5, linespacing=1.3)


def arrow(axes: Axes, look: Look, start: tuple, end: tuple) -> None:
    """Draw an arrow between two places."""
    shape = {"arrowstyle": "-|>", "color": look["soft"], "linewidth": 1.3, "mutation_scale": 12}
    axes.annotate("", end, start, arrowprops=shape | {"shrinkA": 2, "shrinkB": 2})


def bars(axes: Axes, look: Look, rows: dict[str, dict[str, float]], form: str) -> None:
    """Draw a stacked horizontal bar for each row, with its total at the end."""
    for number, parts in enumerate(rows.values()):
        start = 0.0
        for part, length in parts.items():
            axes.barh(number, length, left=start, color=look[part], edgecolor=look["back"], linewidth=0.8, height=0.7)
            start += length
        ground = {"facecolor": look["ground"], "edgecolor": "none", "pad": 1.5}
        axes.annotate(form.format(start), (start, number), (5, 0), textcoords="offset points", va="center", bbox=ground)
    axes.set_yticks(range(len(rows)), list(rows), color=look["ink"])
    axes.invert_yaxis()
    axes.tick_params(length=0)
    axes.spines["left"].set_visible(False)


def over_time(axes: Axes, look: Look, step: Step, parts: list[str], title: str = "") -> None:
    """Stack the bytes of these parts over the operations of a step, with the names of its phases."""
    for part, low, high in stacked(step, parts):
        x = np.linspace(0, 1, len(low))
        shown = np.convolve(high - low > 0.001, [1, 1, 1], "same") > 0  # with a neighbour, or a single peak is no area
        axes.fill_between(x, low, high, where=shown, color=look[part], linewidth=0.7)
    for name, start, end in step.phases:
        axes.axvline(end, color=look["line"], linewidth=1, linestyle=":")
        axes.text((start + end) / 2, 1, name, ha="center", va="bottom", transform=axes.get_xaxis_transform(),
                  fontsize=9, color=look["soft"])  # fmt: skip
    axes.set(xlim=(0, 1), xticks=[], xlabel=title or "one step, operation by operation")
    axes.xaxis.label.set(fontweight="bold" if title else "normal")
    axes.margins(y=0)


def stacked(step: Step, parts: list[str]) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """Return lower and upper edge of each part in GB, at 500 moments: the highest one of every 500th of the step."""
    values = np.array([[sample[part] for part in parts] for sample in step.samples]) / GB
    values = np.array([group[group.sum(1).argmax()] for group in np.array_split(values, 500)])
    edges = np.cumsum(np.pad(values, ((0, 0), (1, 0))), axis=1).T
    return [(part, low, high) for part, (low, high) in zip(parts, pairwise(edges), strict=True)]


def lanes(axes: Axes, look: Look, names: list[str], tasks: list[tuple[str, float, float, str, str]]) -> None:
    """Draw tasks (lane, start, length, part, text) as boxes in lanes over time."""
    end = max(start + length for _, start, length, _, _ in tasks)
    for number, name in enumerate(names):
        axes.plot([0, end], [number + 0.5] * 2, color=look["line"], linewidth=0.8, zorder=0)
        axes.text(-0.15, number + 0.5, name, ha="right", va="center")
    for lane, start, length, part, text in tasks:
        box(axes, start, names.index(lane) + 0.14, length, 0.72, look[part], text)
    axes.annotate("time", (end, len(names) + 0.2), (end - 1, len(names) + 0.2), va="center", ha="right", fontsize=9,
                  color=look["soft"], arrowprops={"arrowstyle": "-|>", "color": look["soft"]})  # fmt: skip


def bits(axes: Axes, look: Look, y: float, name: str, counts: tuple[int, int, int]) -> None:
    """Draw a number format as a row of bits: sign, exponent, fraction."""
    axes.text(-0.4, y + 0.35, name, ha="right", va="center")
    x = 0
    for count, part in zip(counts, ("temporary", "exponent", "fraction"), strict=True):
        for _ in range(count):
            box(axes, x, y, 1, 0.7, look[part])
            x += 1
