"""Write the comparison as one HTML page, which loads nothing from the network and runs no script."""

from base64 import b64encode
from html import escape
from pathlib import Path
from string import Template

import pandas as pd

from fabric_ladder.comparing.charts import draw_charts
from fabric_ladder.comparing.facts import list_facts, title
from fabric_ladder.comparing.matching import Row
from fabric_ladder.comparing.table import Comparison, figures_table, footnote, seeds_text, settings_table

TEMPLATE = Path(__file__).with_name("page.html")


def to_html(comparison: Comparison) -> str:
    """Return the page."""
    rows = comparison.rows
    parts = [f'<p class="warning">{escape(comparison.warning)}</p>'] if comparison.warning else []
    parts += map(_note, rows[0].first.read)
    facts = list_facts(rows)
    parts += [_table(pd.DataFrame({"": facts.values()}, facts.keys()))] if facts else []
    parts += [_table(figures_table(comparison)), _note(footnote(comparison))]
    parts.append('<div class="charts">')
    for name, content in draw_charts(comparison).items():
        source = f"data:image/svg+xml;base64,{b64encode(content).decode()}"
        parts.append(f'<img src="{source}" alt="{escape(name)}">')
    parts.append("</div>")
    for row in rows:
        if row.confusion is not None:
            parts += _confusion(row)
    if comparison.settings:
        parts += [_heading("Settings that differ"), _table(settings_table(comparison))]
        parts.append(_note("All other known settings are equal."))
    if comparison.notices:
        parts += [
            _heading("Notes"),
            f"<ul>{''.join(f'<li>{escape(notice)}</li>' for notice in comparison.notices)}</ul>",
        ]
    words = {"title": escape(title(rows, facts)), "body": "\n".join(parts)}
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(words)


def _confusion(row: Row) -> list[str]:
    """Return the confusion matrix of a row, with the share of right predictions of each class."""
    counts = row.confusion
    sizes = counts.sum(axis="columns").clip(lower=1)
    counts = counts.assign(correct=[f"{counts.iat[place, place] / size:.1%}" for place, size in enumerate(sizes)])
    note = f"Test samples by true class (rows) and predicted class. Macro-F1 {row.mean('macro_f1'):.2f} %."
    seeds = seeds_text(row).replace("mean", "sum")
    return [_heading(f"Confusion matrix: {row.label}"), _table(counts), _note(f"{note} {seeds}")]


def _heading(text: str) -> str:
    return f"<h2>{escape(text)}</h2>"


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}</p>' if text else ""


def _table(cells: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", None):
        return f'<div class="scroll" tabindex="0">{cells.to_html(border=0)}</div>'
