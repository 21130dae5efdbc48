"""The picture of the ladder in docs/results.md, in light and dark."""

import io

import common  # noqa: F401  first of all: it makes the project importable without an installation
from matplotlib import rc_context
from matplotlib.figure import Figure

from fabric_ladder.comparing.charts import STYLE
from fabric_ladder.comparing.matching import Row

COLOURS = {
    "light": {"ink": "#1b2230", "soft": "#566072", "line": "#dfe3ea", "first": "#0b67b2", "second": "#c2490a"},
    "dark": {"ink": "#e6e9ef", "soft": "#a4adbd", "line": "#39414f", "first": "#5fb0f0", "second": "#f0905a"},
}


def draw(memory: dict[str, float], own: dict[str, Row], best: dict[str, Row]) -> dict[str, bytes]:
    """Return pictures of the ladder, light and dark: memory as bars, and test accuracy with its seeds beside it.

    Args:
        memory: Of each rung, in GB, in the ladder's order.
        own: What rungs reach at their own learning rates.
        best: What they reach at the best that was found.
    """
    return {look: _draw(memory, own, best, colours) for look, colours in COLOURS.items()}


def _draw(memory: dict[str, float], own: dict[str, Row], best: dict[str, Row], colours: dict[str, str]) -> bytes:
    names, values = list(memory), list(memory.values())
    style = STYLE | {"text.color": colours["ink"], "axes.edgecolor": colours["line"], "grid.color": colours["line"]}
    style |= {"xtick.color": colours["soft"], "ytick.color": colours["ink"], "axes.labelcolor": colours["soft"]}
    with rc_context(style):
        figure = Figure(figsize=(8.4, 5.2), layout="constrained")
        bars, accuracy = figure.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        bars.barh(names, values, color=colours["first"], height=0.6)
        for number, value in enumerate(values):
            bars.text(value + 0.1, number, f"{value:.2f}", va="center", fontsize=7, color=colours["soft"])
        bars.set(xlabel="peak of one GPU, GB, predicted\n(BLOOM-560m, micro-batch 1, 1,024 tokens)")
        bars.invert_yaxis()
        for rows, aside, colour in ((own, -0.17, "second"), (best, 0.17, "first")):
            for name, row in rows.items():
                seeds = row.values("test_accuracy")
                at, look = names.index(name) + aside, {"color": colours[colour]}
                accuracy.plot(seeds, [at] * len(seeds), "o", markersize=3, alpha=0.5, **look)
                accuracy.plot(row.mean("test_accuracy"), at, "|", markersize=7, **look)
                accuracy.plot(row.interval, [at, at], linewidth=1, alpha=0.6, **look)
        said = "MiniLM, 2,000 reviews; dots: seeds;\nupper: own learning rate, lower: the best"
        accuracy.set(xlabel=f"test accuracy, %, with 95 % intervals\n({said})")
        for axes in (bars, accuracy):
            axes.grid(axis="x")
            axes.tick_params(length=0)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=160, transparent=True, metadata={"Software": None})
    return buffer.getvalue()
