"""Write the comparison as one HTML page, which loads nothing from the network and runs no script."""

from base64 import b64encode
from html import escape
from pathlib import Path
from string import Template

import pandas as pd

from fabric_ladder.comparing.charts import DARK_STYLE, STYLE, Chart, to_svg
from fabric_ladder.comparing.table import Comparison, cell_text, footnote, seeds_text

TEMPLATE = Path(__file__).with_name("page.html")


def to_html(comparison: Comparison) -> str:
    """Return the page."""
    rows = comparison.rows
    parts = []
    if comparison.differences:
        text = "<strong>Not comparable without care.</strong> These runs differ in more than their technique:"
        parts.append(f'<div class="warning" role="note">{text}{_list(comparison.differences)}</div>')
    parts.append(_section("Runs", _table(_figures(comparison)) + _note(footnote(comparison))))
    dark = to_svg(comparison, DARK_STYLE)
    for name, (chart, svg) in to_svg(comparison, STYLE).items():
        parts.append(_section(chart.title, _picture(chart, svg, dark[name][1]) + _note(chart.caption)))
    for row in rows:
        if row.confusion is not None:
            counts = row.confusion.assign(correct=_shares(row.confusion))
            note = f"Test samples by true class (rows) and predicted class. Macro-F1 {row.mean('macro_f1'):.2f} %."
            seeds = seeds_text(row).replace("mean", "sum")
            parts.append(_section(f"Confusion matrix: {row.label}", _table(counts) + _note(f"{note} {seeds}")))
    if comparison.settings:
        names, values = zip(*comparison.settings, strict=True)
        table = pd.DataFrame(values, index=names, columns=[row.label for row in rows])
        parts.append(_section("Settings that differ", _table(table) + _note("All other known settings are equal.")))
    if comparison.notices:
        parts.append(_section("Notes", _list(comparison.notices)))
    title = " against ".join(row.label for row in rows)
    if len(rows) > 2:
        title = f"{rows[0].label} and {len(rows) - 1} more"
    count = sum(len(row.runs) for row in rows)
    lead = f"{count} run{'s' * (count > 1)}, compared by Fabric Ladder's scripts/compare_runs.py"
    template = Template(TEMPLATE.read_text(encoding="utf-8"))
    return template.substitute(title=escape(title), lead=escape(lead), body="\n".join(parts))


def _figures(comparison: Comparison) -> pd.DataFrame:
    """Return the table of figures as texts."""
    lines = {}
    for number, row in enumerate(comparison.rows, start=1):
        cells = {column.title: cell_text(row, comparison.rows[0], column) for column in comparison.columns}
        name = " · ".join(filter(None, [f"{number} {row.label}", seeds_text(row)]))
        lines[name] = {"what changed": row.changed, **cells}
    return pd.DataFrame.from_dict(lines, orient="index")


def _shares(confusion: pd.DataFrame) -> list[str]:
    """Return the share of right predictions of each true class."""
    sizes = confusion.sum(axis="columns").clip(lower=1)
    return [f"{confusion.iat[place, place] / size:.1%}" for place, size in enumerate(sizes)]


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def _list(texts: list[str]) -> str:
    return f"<ul>{''.join(f'<li>{escape(text)}</li>' for text in texts)}</ul>"


def _table(cells: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        return f'<div class="scroll" tabindex="0">{cells.to_html(border=0)}</div>'


def _picture(chart: Chart, light: str, dark: str) -> str:
    """Return a chart that follows the browser's colour scheme."""
    light, dark = (f"data:image/svg+xml;base64,{b64encode(svg.encode()).decode()}" for svg in (light, dark))
    source = f'<source media="(prefers-color-scheme: dark)" srcset="{dark}">'
    image = f'<img src="{light}" alt="{escape(chart.description)}">'
    return f'<div class="scroll" tabindex="0"><picture>{source}{image}</picture></div>'
