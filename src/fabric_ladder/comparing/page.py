"""The comparison as one HTML page: nothing beside it, no request to any host, and all there without its script."""

import hashlib
import math
import re
from base64 import b64encode
from html import escape
from pathlib import Path
from string import Template

import pandas as pd

from fabric_ladder.comparing.charts import COLOURS, Chart, draw_charts, find_curves, to_svg
from fabric_ladder.comparing.matching import Row
from fabric_ladder.comparing.table import Comparison, cell_parts, footnote, seeds_text

TEMPLATE = Path(__file__).with_name("page.html")
MOST_LINES = 40  # of the table of losses
DARKEST = 45  # percent of the row's colour in a cell of a confusion matrix: its text stays readable


def to_html(comparison: Comparison) -> str:
    """Return the page."""
    rows, charts = comparison.rows, {chart.name: chart for chart in draw_charts(comparison)}
    parts = [_runs(comparison)]
    for kind, names, table in (
        ("loss", ("loss", "loss_log", "loss_minutes", "loss_log_minutes"), _loss_table),
        ("validation", ("validation", "validation_minutes"), lambda rows: ""),
    ):
        if kind in charts:
            shown = [charts[name] for name in names if name in charts]
            choices = [_choice(kind, "Scale", ("linear", "logarithmic"))] * (kind == "loss")
            choices += [_choice(kind, "Over", ("samples", "minutes"))] * (names[-1] in charts)
            parts.append(_card(shown[0].title, "".join(choices) + _figure(*shown) + table(rows)))
    pair = [_card(charts[name].title, _figure(charts[name])) for name in ("time", "memory") if name in charts]
    parts.append(f'<div class="pair">{"".join(pair)}</div>' if pair else "")
    if "accuracy" in charts:
        parts.append(_card("Test accuracy", _figure(charts["accuracy"])))
    parts += [_confusions(rows), _settings(comparison)]
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
    template = TEMPLATE.read_text(encoding="utf-8")
    [script] = re.findall("<script>(.*?)</script>", template, flags=re.DOTALL)
    digest = b64encode(hashlib.sha256(script.replace("$$", "$").encode()).digest()).decode()
    return Template(template).substitute(
        title=escape(title), lead=escape(lead), warning=warning, body="\n".join(filter(None, parts)), script=digest
    )


def _card(title: str, content: str) -> str:
    name = title.lower().replace(" ", "-")
    return f'<section class="card {name}"><h2>{escape(title)}</h2>{content}</section>'


def _choice(kind: str, legend: str, values: tuple[str, ...]) -> str:
    start = f'<label><input type="radio" name="{legend}-{kind}"'
    buttons = [f'{start} value="{value}"{" checked" * (value == values[0])}>{value}</label>' for value in values]
    return f"<fieldset><legend>{legend}</legend>{''.join(buttons)}</fieldset>"


def _figure(*charts: Chart) -> str:
    """Return charts that share a caption; one that is wider than the page scrolls."""
    plots = "".join(_scroll(to_svg(chart), chart.title, f" chart {chart.name}") for chart in charts)
    return f"<figure>{plots}<figcaption>{escape(charts[0].caption)}</figcaption></figure>"


def _scroll(content: str, name: str, classes: str = "") -> str:
    """Return a part that scrolls, by keys too, where it is wider than the page."""
    return f'<div class="scroll{classes}" role="group" aria-label="{escape(name)}" tabindex="0">{content}</div>'


def _items(texts: list[str]) -> str:
    return "".join(f"<li>{escape(text)}</li>" for text in texts)


def _name(number: int, label: str, more: str = "") -> str:
    """Return a row's number on its colour, and its name, which may break after an underscore or a slash."""
    badge = f'<span class="badge r{number % len(COLOURS)}">{number + 1}</span>'
    return f'<span class="name">{badge}<span>{_breakable(label)}{more}</span></span>'


def _breakable(text: str) -> str:
    return escape(text).replace("_", "_<wbr>").replace("/", "/<wbr>")


def _runs(comparison: Comparison) -> str:
    first = comparison.rows[0]
    head = "".join(f'<th scope="col" class="figure">{escape(column.title)}</th>' for column in comparison.columns)
    lines = []
    for number, row in enumerate(comparison.rows):
        cells = ""
        for column in comparison.columns:
            value, *more = cell_parts(row, first, column)
            unknown = " unknown" * (row.mean(column.key) is None)
            cells += f'<td class="figure{unknown}" data-title="{escape(column.title)}">'
            cells += f'<span class="value">{value} {"" if unknown else column.unit}</span>'
            cells += "".join(f'<span class="against">{part}</span>' for part in more if part) + "</td>"
        seeds = f'<span class="seeds">{seeds_text(row).replace("n = ", "n&nbsp;=&nbsp;")}</span>'
        heading = f'<th scope="row">{_name(number, row.label, seeds)}</th>'
        lines.append(f'<tr>{heading}<td class="changed">{_breakable(row.changed)}</td>{cells}</tr>')
    caption = footnote(comparison) or "The figures of the run."
    table = f"""<table><caption>{escape(caption)}</caption>
<thead><tr><th scope="col">rung</th><th scope="col">what changed</th>{head}</tr></thead>
<tbody>{"".join(lines)}</tbody></table>"""
    return _card("Runs", _scroll(table, "Figures of the runs"))


def _loss_table(rows: list[Row]) -> str:
    """Return the printed losses as a table, for those who do not see the curves."""
    curves, unit = find_curves(rows, "losses", "samples")
    losses = pd.DataFrame({number: dict(zip(curve.x, curve.thin, strict=True)) for number, curve in enumerate(curves)})
    losses = losses.sort_index()
    step = math.ceil(len(losses) / MOST_LINES)
    kept = losses[(len(losses) - 1) % step :: step]
    kept.index = kept.index.map("{:.6g}".format)
    kept.columns = pd.Index([_name(curve.row, rows[curve.row].label) for curve in curves], name=unit)
    table = _table(kept, f"Loss as printed, {len(kept)} of {len(losses)} places.")
    return f"<details><summary>The losses as a table</summary>{table}</details>"


def _confusions(rows: list[Row]) -> str:
    """Return each rung's predictions of the test by class, shaded by their share of the true class."""
    parts = []
    for number, row in enumerate(rows):
        counts, lines = row.confusion, []
        if counts is None:
            continue
        names = [_breakable(str(name)) for name in counts.index]
        for place, line in enumerate(counts.to_numpy().tolist()):
            size = max(sum(line), 1)
            shades = [
                f'<span class="share" style="--share:{count / size * DARKEST:.0f}%">{count}</span>' for count in line
            ]
            lines.append([*shades, f"{line[place] / size:.1%}"])
        columns = pd.Index([*names, "correct"], name="true class")
        over = seeds_text(row).replace("mean", ", sum")
        caption = f"Test samples by true class (rows) and predicted class (columns){over}. "
        caption += f"Macro-F1 {row.mean('macro_f1'):.2f} %."
        table = _table(pd.DataFrame(lines, names, columns), caption)
        parts.append(f"<details{' open' * (not parts)}><summary>{_name(number, row.label)}</summary>{table}</details>")
    return _card("Confusion", "".join(parts)) if parts else ""


def _settings(comparison: Comparison) -> str:
    if not comparison.settings:
        return ""
    table = pd.DataFrame(
        [[escape(value) for value in values] for _, values in comparison.settings],
        index=[_breakable(setting) for setting, _ in comparison.settings],
        columns=pd.Index([_name(number, row.label) for number, row in enumerate(comparison.rows)], name="setting"),
    )
    return _card("Settings that differ", _table(table, "All other settings that are known are alike."))


def _table(cells: pd.DataFrame, caption: str) -> str:
    """Return a table that scrolls where it is wider than the page; its texts are HTML."""
    table = cells.to_html(escape=False, float_format="{:.4f}".format, na_rep="–", border=0, justify="left")
    table = table.replace("<thead>", f"<caption>{caption}</caption><thead>").replace("<th>", '<th scope="col">')
    table = re.sub(r'(<tr>\s*)<th scope="col">', r'\1<th scope="row">', table)
    return _scroll(table, caption)
