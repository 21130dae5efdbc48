"""The page's charts: curves of the loss, bars, and accuracies with their intervals."""

import math
from html import escape

from fabric_ladder.comparing.chart_data import (
    HALF_LIFE,
    Curve,
    accuracy_interval,
    log_ticks,
    loss_curves,
    short,
    thin,
    ticks,
)
from fabric_ladder.comparing.matching import Row
from fabric_ladder.comparing.table import Column, against_text, value_text

DASHES = ("", "9 5", "2 5", "12 4 2 4")  # with 8 colours, 32 lines that are unlike
COLOURS = 8
LABEL = 4.5  # percent of a chart's height that a number beside a curve takes
MOST_LINES = 40  # of the table below the curves


def badge(number: int) -> str:
    """Return a row's number on its colour."""
    return f'<span class="badge r{number % COLOURS}">{number + 1}</span>'


def name(number: int, label: str, more: str = "") -> str:
    """Return a row's number and its name, which may break after an underscore or a slash."""
    text = escape(label).replace("_", "_<wbr>").replace("/", "/<wbr>")
    return f'<span class="name">{badge(number)}<span>{text}{more}</span></span>'


def row_heading(number: int, row: Row) -> str:
    """Return the cell that heads a row of a table."""
    seeds = ", ".join(str(run.settings["seed"]) for run in row.runs if "seed" in run.settings)
    more = f'<span class="seeds">mean of seeds {seeds} (n = {len(row.runs)})</span>' if len(row.runs) > 1 else ""
    return f'<th scope="row">{name(number, row.label, more)}</th>'


def loss_chart(rows: list[Row]) -> str:
    """Return the losses on a linear and a logarithmic scale, of which the page shows one; empty without losses."""
    curves, unit = loss_curves(rows)
    if not curves:
        return ""
    line = '<svg aria-hidden="true" viewBox="0 0 36 12"><line x2="36" y1="6" y2="6" stroke-dasharray="{}"/></svg>'
    legend = "".join(
        f'<li class="r{number % COLOURS}">{line.format(_dash(number))}{name(number, rows[number].label)}</li>'
        for number in dict.fromkeys(curve.row for curve in curves)
    )
    ends = "; ".join(f"{rows[curve.row].label} ends at {curve.smoothed[-1]:.4f}" for curve in curves)
    about = f"Smoothed training loss against {unit}: {ends}."
    plots = "".join(_plot(curves, unit, scale, about) for scale in ("linear", "log"))
    return f"""<section class="card"><h2>Training loss</h2><figure>
<fieldset><legend>Scale</legend><label><input type="radio" name="scale" id="linear" checked>linear</label>
<label><input type="radio" name="scale" id="log">logarithmic</label></fieldset>
<ul class="legend">{legend}</ul>{plots}
<figcaption>Thin: as printed. Thick: moving average whose weights halve every {HALF_LIFE:.0%} of the longest curve.
</figcaption></figure>{_loss_table(rows, curves, unit)}</section>"""


def _dash(number: int) -> str:
    return DASHES[(number + number // COLOURS) % len(DASHES)]


def _plot(curves: list[Curve], unit: str, scale: str, about: str) -> str:
    values = [value for curve in curves for value in curve.raw if value > 0 or scale == "linear"]
    right = max(curve.x[-1] for curve in curves)
    if scale == "linear":
        low, high = 0.0, max([*values, 1e-9]) * 1.04
        marks = ticks(low, high)
    else:
        low, high = (min(values) / 1.1, max(values) * 1.1) if values else (0.1, 1)
        marks = log_ticks(low, high) or [low, high]

    def down(value: float) -> float:  # percent from the top
        if scale == "log":
            return 100 * (1 - math.log(max(value, low) / low) / math.log(high / low))
        return 100 * (1 - value / high)

    def line(curve: Curve, values: list[float], kind: str) -> str:
        places = [(x, y) for x, y in thin(curve.x, values) if y > 0 or scale == "linear"]
        if len(places) == 1:
            places *= 2
        points = " ".join(f"{x / right * 1000:.1f},{down(y) * 10:.1f}" for x, y in places)
        dash = f' stroke-dasharray="{_dash(curve.row)}"' if kind == "smooth" and _dash(curve.row) else ""
        return f'<polyline class="{kind} r{curve.row % COLOURS}" points="{points}"{dash}/>'

    grid = "".join(
        f'<line class="grid" x1="0" x2="1000" y1="{down(y) * 10:.1f}" y2="{down(y) * 10:.1f}"/>' for y in marks
    )
    lines = "".join(line(curve, curve.raw, "raw") for curve in curves)
    lines += "".join(line(curve, curve.smoothed, "smooth") for curve in curves)
    labels = "".join(f'<span class="y" style="top:{down(y):.2f}%">{short(y)}</span>' for y in marks)
    labels += "".join(
        f'<span class="x" style="left:{x / right * 100:.2f}%">{short(x)}</span>' for x in ticks(0, right, 4)
    )
    last = {curve.row: curve for curve in curves}  # one number for all seeds of a row
    tops = {row: [down(curve.smoothed[-1]) for curve in curves if curve.row == row] for row in last}
    places = _spread_out([sum(each) / len(each) for each in tops.values()])
    for (row, curve), top in zip(last.items(), places, strict=True):
        place = f"left:{curve.x[-1] / right * 100:.2f}%;top:{top:.2f}%"
        labels += f'<span class="end r{row % COLOURS}" style="{place}">{row + 1}</span>'
    return f"""<div class="plot {scale}" role="img" aria-label="{escape(about)} {scale} scale.">
<svg viewBox="0 0 1000 1000" preserveAspectRatio="none" aria-hidden="true">{grid}{lines}</svg>
{labels}<span class="title">{unit}</span></div>"""


def _spread_out(tops: list[float]) -> list[float]:
    """Move labels apart so that none covers another; those that would touch keep order and middle."""
    clusters: list[list[int]] = []
    for index in sorted(range(len(tops)), key=lambda index: tops[index]):
        clusters.append([index])
        while len(clusters) > 1 and _first(clusters[-2], tops) + len(clusters[-2]) * LABEL > _first(clusters[-1], tops):
            clusters[-2:] = [clusters[-2] + clusters[-1]]
    places = {index: _first(cluster, tops) + rank * LABEL for cluster in clusters for rank, index in enumerate(cluster)}
    return [places[index] for index in range(len(tops))]


def _first(cluster: list[int], tops: list[float]) -> float:
    """Return the place of a cluster's first label, between the chart's edges."""
    length = (len(cluster) - 1) * LABEL
    middle = sum(tops[index] for index in cluster) / len(cluster)
    return max(0.0, min(middle - length / 2, 100 - length))


def _loss_table(rows: list[Row], curves: list[Curve], unit: str) -> str:
    """Return the printed losses as a table, for those who do not see the curves."""
    places = sorted({x for curve in curves for x in curve.x})
    step = math.ceil(len(places) / MOST_LINES)
    kept = [*places[step - 1 :: step]]
    if kept[-1:] != places[-1:]:
        kept.append(places[-1])
    losses = [dict(zip(curve.x, curve.raw, strict=True)) for curve in curves]
    head = "".join(
        f'<th scope="col" class="figure">{badge(curve.row)}{escape(rows[curve.row].label)}</th>' for curve in curves
    )
    lines = "".join(
        f'<tr><th scope="row">{place:.6g}</th>'
        + "".join(f"<td>{f'{loss[place]:.4f}' if place in loss else '–'}</td>" for loss in losses)
        + "</tr>"
        for place in kept
    )
    return f"""<details><summary>The losses as a table</summary><div class="scroll" tabindex="0" role="region"
aria-label="Losses as printed"><table><caption>Loss as printed, {len(kept)} of {len(places)} places.</caption>
<thead><tr><th scope="col">{unit}</th>{head}</tr></thead><tbody>{lines}</tbody></table></div></details>"""


def bar_chart(rows: list[Row], column: Column, title: str, caption: str) -> str:
    """Return a table whose rows are bars from 0; empty if no row has the figure."""
    means = [row.mean(column.key) for row in rows]
    if all(mean is None for mean in means):
        return ""
    longest = max((mean or 0) + (row.spread(column.key) or 0) for row, mean in zip(rows, means, strict=True)) or 1
    lines = []
    for number, (row, mean) in enumerate(zip(rows, means, strict=True)):
        bar = ""
        if mean is not None:
            bar = f'<i class="r{number % COLOURS}" style="width:{mean / longest * 100:.2f}%"></i>'
            if spread := row.spread(column.key):
                left, width = max(0, mean - spread) / longest * 100, min(2 * spread, mean + spread) / longest * 100
                bar += f'<b style="left:{left:.2f}%;width:{width:.2f}%"></b>'
            bar = f'<div class="bar" aria-hidden="true">{bar}</div>'
        against = against_text(row, rows[0], column)
        against = f'<span class="against">{escape(against)}</span>' if against else ""
        number_cell = f'<td class="number">{escape(value_text(row, column))}{against}</td>'
        lines.append(f'<tr>{row_heading(number, row)}<td class="chart">{bar}</td>{number_cell}</tr>')
    return f"""<section class="card"><h2>{escape(title)}</h2><table class="bars">
<caption>{escape(caption)}. Shorter is better.</caption><tbody>{"".join(lines)}</tbody></table></section>"""


def accuracy_chart(rows: list[Row]) -> str:
    """Return test accuracies with their 95 % intervals where they are known; empty if no row has one."""
    means = [row.mean("test_accuracy") for row in rows]
    if all(mean is None for mean in means):
        return ""
    intervals = [accuracy_interval(row) for row in rows]
    values = [value for row in rows for value in row.values("test_accuracy")]
    values += [value for interval in intervals if interval for value in interval]
    room = max(0.5, (max(values) - min(values)) * 0.08)
    low, high = max(0, min(values) - room), min(100, max(values) + room)

    def place(value: float) -> str:
        return f"{(value - low) / (high - low) * 100:.2f}%"

    marks = ticks(low, high, 4)
    axis = "".join(f'<span style="left:{place(mark)}">{mark:g} %</span>' for mark in marks)
    axis = f'<td class="chart"><div class="axis">{axis}</div></td>'
    lines = [f'<tr class="scale" aria-hidden="true"><th></th>{axis}<td class="number"></td></tr>']
    grid = "".join(f'<u style="left:{place(mark)}"></u>' for mark in marks)
    column = Column("test_accuracy", "test acc.", "%", 2, points=True)
    for number, (row, mean, interval) in enumerate(zip(rows, means, intervals, strict=True)):
        drawn, told = grid, ""
        if mean is not None:
            if interval:
                width = (interval[1] - interval[0]) / (high - low) * 100
                drawn += f'<b style="left:{place(interval[0])};width:{width:.2f}%"></b>'
                told = f'<span class="against">{interval[0]:.2f} to {interval[1]:.2f}</span>'
            drawn += f'<i style="left:{place(mean)}"></i>'
            if len(row.runs) > 1:
                drawn += "".join(f'<s style="left:{place(value)}"></s>' for value in row.values("test_accuracy"))
        chart = f'<div class="range r{number % COLOURS}" aria-hidden="true">{drawn}</div>'
        cell = f'<td class="number">{escape(value_text(row, column))}{told}</td>'
        lines.append(f'<tr>{row_heading(number, row)}<td class="chart">{chart}</td>{cell}</tr>')
    caption = "Percent of the test's samples" if any(intervals) else "Percent"
    caption += ". The axis does not start at 0." if low > 0 else "."
    if any(intervals):
        caption += " Lines: Wilson's 95 % interval, for the size of the test set."
    if not all(intervals):
        caption += " Without a line: the number of independent test samples is not known."
    if any(len(row.runs) > 1 for row in rows):
        caption += " Diamonds: the single seeds."
    return f"""<section class="card"><h2>Test accuracy</h2><table class="bars">
<caption>{escape(caption)}</caption><tbody>{"".join(lines)}</tbody></table></section>"""
