"""The comparison as one HTML page: no script, no file beside it, no request to any host."""

import math
import re
from html import escape
from pathlib import Path
from string import Template

import pandas as pd

from fabric_ladder.comparing.charts import COLOURS, Chart, draw_charts, loss_curves, to_svg
from fabric_ladder.comparing.matching import Row
from fabric_ladder.comparing.table import Comparison, against_text, footnote, seeds_text, value_text

TEMPLATE = Path(__file__).with_name("page.html")
MOST_LINES = 40  # of the table of losses
SCALES = """<fieldset><legend>Scale</legend><label><input type="radio" name="scale" id="linear" checked>linear</label>
<label><input type="radio" name="scale" id="log">logarithmic</label></fieldset>"""


def to_html(comparison: Comparison) -> str:
    """Return the page."""
    rows, charts = comparison.rows, {chart.name: chart for chart in draw_charts(comparison)}
    parts = [_runs(comparison)]
    if "loss" in charts:
        parts.append(_card("Training loss", SCALES + _figure(charts["loss"], charts["loss_log"]) + _loss_table(rows)))
    pair = [_card(charts[name].title, _figure(charts[name])) for name in ("time", "memory") if name in charts]
    parts.append(f'<div class="pair">{"".join(pair)}</div>' if pair else "")
    if "accuracy" in charts:
        parts.append(_card("Test accuracy", _figure(charts["accuracy"])))
    parts.append(_settings(comparison))
    if comparison.notices:
        parts.append(_card("Good to know", f'<ul class="note">{_items(comparison.notices)}</ul>'))
    warning = ""
    if comparison.differences:
        warning = f"""<div class="warning" role="note"><strong>Not comparable without care.</strong>
These runs differ in more than their technique:<ul>{_items(comparison.differences)}</ul></div>"""
    count = sum(len(row.runs) for row in rows)
    title = " against ".join(row.label for row in rows)
    if len(rows) > 2:
        title = f"{rows[0].label} and {len(rows) - 1} more"
    lead = f"{count} run{'s' * (count > 1)}, laid side by side by Fabric Ladder's scripts/compare_runs.py"
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title), lead=escape(lead), warning=warning, body="\n".join(filter(None, parts))
    )


def _card(title: str, content: str) -> str:
    name = title.lower().replace(" ", "-")
    return f'<section class="card {name}"><h2>{escape(title)}</h2>{content}</section>'


def _figure(*charts: Chart) -> str:
    """Return charts that share a caption; one that is wider than the page scrolls."""
    plots = "".join(f'<div class="scroll" tabindex="0">{to_svg(chart)}</div>' for chart in charts)
    return f"<figure>{plots}<figcaption>{escape(charts[0].caption)}</figcaption></figure>"


def _items(texts: list[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def _name(number: int, label: str, more: str = "") -> str:
    """Return a row's number on its colour, and its name, which may break after an underscore or a slash."""
    badge = f'<span class="badge r{number % len(COLOURS)}">{number + 1}</span>'
    text = escape(label).replace("_", "_<wbr>").replace("/", "/<wbr>")
    return f'<span class="name">{badge}<span>{text}{more}</span></span>'


def _runs(comparison: Comparison) -> str:
    first = comparison.rows[0]
    head = "".join(f'<th scope="col" class="figure">{escape(column.title)}</th>' for column in comparison.columns)
    lines = []
    for number, row in enumerate(comparison.rows):
        cells = ""
        for column in comparison.columns:
            against = against_text(row, first, column)
            against = f'<span class="against">{escape(against)}</span>' if against else ""
            value, _, spread = value_text(row, column).partition(" ± ")
            if spread:  # on a line of its own, or the table gets too wide
                value = f"{value} {column.unit}".strip()
                against = f'<span class="against">± {spread.split()[0]}</span>{against}'
            unknown = " unknown" if row.mean(column.key) is None else ""
            cells += f'<td class="figure{unknown}" data-title="{escape(column.title)}">'
            cells += f'<span class="value">{escape(value)}</span>{against}</td>'
        seeds = (
            f'<span class="seeds">{seeds_text(row).replace("n = ", "n&nbsp;=&nbsp;")}</span>'
            if len(row.runs) > 1
            else ""
        )
        heading = f'<th scope="row">{_name(number, row.label, seeds)}</th>'
        lines.append(f'<tr>{heading}<td class="changed">{escape(row.changed)}</td>{cells}</tr>')
    table = f"""<div class="scroll"><table>
<caption>{escape(footnote(comparison) or "The figures of the run.")}</caption>
<thead><tr><th scope="col">rung</th><th scope="col">what changed</th>{head}</tr></thead>
<tbody>{"".join(lines)}</tbody></table></div>"""
    return _card("Runs", table)


def _loss_table(rows: list[Row]) -> str:
    """Return the printed losses as a table, for those who do not see the curves."""
    curves, unit = loss_curves(rows)
    losses = pd.DataFrame({number: dict(zip(curve.x, curve.raw, strict=True)) for number, curve in enumerate(curves)})
    losses = losses.sort_index()
    step = math.ceil(len(losses) / MOST_LINES)
    kept = losses[(len(losses) - 1) % step :: step]
    kept.index = kept.index.map("{:.6g}".format)
    kept.columns = pd.Index([_name(curve.row, rows[curve.row].label) for curve in curves], name=unit)
    table = _table(kept, f"Loss as printed, {len(kept)} of {len(losses)} places.")
    return f"<details><summary>The losses as a table</summary>{table}</details>"


def _settings(comparison: Comparison) -> str:
    if not comparison.settings:
        return ""
    table = pd.DataFrame(
        [[escape(value) for value in values] for _, values in comparison.settings],
        index=[escape(setting).replace("_", "_<wbr>") for setting, _ in comparison.settings],
        columns=pd.Index([_name(number, row.label) for number, row in enumerate(comparison.rows)], name="setting"),
    )
    return _card("Settings that differ", _table(table, "All other settings that are known are alike."))


def _table(cells: pd.DataFrame, caption: str) -> str:
    """Return a table that scrolls where it is wider than the page; its texts are HTML."""
    table = cells.to_html(escape=False, float_format="{:.4f}".format, na_rep="–", border=0, justify="left")
    table = table.replace("<thead>", f"<caption>{caption}</caption><thead>").replace("<th>", '<th scope="col">')
    table = re.sub(r'(<tr>\s*)<th scope="col">', r'\1<th scope="row">', table)
    return f'<div class="scroll" role="region" aria-label="{caption}" tabindex="0">{table}</div>'
