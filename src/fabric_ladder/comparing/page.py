"""The comparison as one HTML page: no script, no file beside it, no request to any host.

Curves are SVG that stretches with the page while its labels, which are HTML, keep their size; bars are HTML.
"""

from html import escape
from pathlib import Path
from string import Template

from fabric_ladder.comparing.plots import accuracy_chart, bar_chart, loss_chart, name, row_heading
from fabric_ladder.comparing.table import Comparison, against_text, footnote, value_text

TEMPLATE = Path(__file__).with_name("page.html")


def to_html(comparison: Comparison) -> str:
    """Return the page."""
    rows, columns = comparison.rows, {column.key: column for column in comparison.columns}
    parts = [_runs(comparison), loss_chart(rows)]
    bars = [bar_chart(rows, columns["minutes"], "Time", "Minutes of training with its validation")]
    bars.append(bar_chart(rows, columns["memory"], "Peak memory", "GB (10⁹ bytes) while training and validating"))
    if pair := "".join(bars):
        parts.append(f'<div class="pair">{pair}</div>')
    parts += [accuracy_chart(rows), _settings(comparison), _notices(comparison)]
    count = sum(len(row.runs) for row in rows)
    title = " against ".join(row.label for row in rows)
    if len(rows) > 2:
        title = f"{rows[0].label} and {len(rows) - 1} more"
    lead = f"{count} run{'s' * (count > 1)}, laid side by side by Fabric Ladder's scripts/compare_runs.py"
    return Template(TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=escape(title), lead=escape(lead), warning=_warning(comparison), body="\n".join(filter(None, parts))
    )


def _warning(comparison: Comparison) -> str:
    if not comparison.differences:
        return ""
    items = "".join(f"<li>{escape(difference)}</li>" for difference in comparison.differences)
    return f"""<div class="warning" role="note"><strong>Not comparable without care.</strong>
These runs differ in more than their technique:<ul>{items}</ul></div>"""


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
        lines.append(f'<tr>{row_heading(number, row)}<td class="changed">{escape(row.changed)}</td>{cells}</tr>')
    return f"""<section class="card runs-card"><h2>Runs</h2><div class="scroll"><table class="runs">
<caption>{escape(footnote(comparison) or "The figures of the run.")}</caption>
<thead><tr><th scope="col">rung</th><th scope="col">what changed</th>{head}</tr></thead>
<tbody>{"".join(lines)}</tbody></table></div></section>"""


def _settings(comparison: Comparison) -> str:
    if not comparison.settings:
        return ""
    head = "".join(f'<th scope="col">{name(number, row.label)}</th>' for number, row in enumerate(comparison.rows))
    lines = ""
    for setting, values in comparison.settings:
        cells = "".join(f"<td>{escape(value)}</td>" for value in values)
        lines += f'<tr><th scope="row">{escape(setting).replace("_", "_<wbr>")}</th>{cells}</tr>'
    return f"""<section class="card settings-card"><h2>Settings that differ</h2>
<div class="scroll" role="region" aria-label="Settings that differ" tabindex="0"><table class="settings">
<caption>All other settings that are known are alike.</caption>
<thead><tr><th scope="col">setting</th>{head}</tr></thead><tbody>{lines}</tbody></table></div></section>"""


def _notices(comparison: Comparison) -> str:
    if not comparison.notices:
        return ""
    items = "".join(f"<li>{escape(notice)}</li>" for notice in comparison.notices)
    return f'<section class="card"><h2>Good to know</h2><ul class="note">{items}</ul></section>'
