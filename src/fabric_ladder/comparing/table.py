"""Write the comparison as a table: in the terminal, in Markdown, CSV and JSON."""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import NamedTuple

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fabric_ladder.comparing.logs import Point
from fabric_ladder.comparing.matching import (
    Row,
    differing_settings,
    find_differences,
    find_unknown,
    find_warnings,
    make_rows,
)
from fabric_ladder.comparing.sources import Found

UNBALANCED = 1.5  # ratio of test samples in the largest and the smallest class


class Column(NamedTuple):
    """A column of the table; `points` compares rows by percentage points instead of a ratio."""

    key: str
    title: str
    unit: str
    digits: int
    points: bool = False


COSTS = (
    Column("minutes", "time", "min", 2),
    Column("samples_per_second", "samples/s", "", 1),
    Column("tokens_per_second", "tokens/s", "", 0),
    Column("memory", "peak memory", "GB", 2),
    Column("predicted_memory", "predicted", "GB", 2),
)
GAINS = (
    Column("train_accuracy", "train acc.", "%", 2, points=True),
    Column("validation_accuracy", "val acc.", "%", 2, points=True),
    Column("test_accuracy", "test acc.", "%", 2, points=True),
    Column("macro_f1", "macro-F1", "%", 2, points=True),
    Column("test_loss", "test loss", "", 4),
    Column("test_perplexity", "perplexity", "", 2),
)
OPTIONAL = ("predicted_memory", "macro_f1", "test_loss", "test_perplexity")  # shown only if a run has the figure


@dataclass
class Comparison:
    """The compared runs and everything that an output shows about them.

    Attributes:
        rows: The first row is the reference.
        differences: Differences that are not part of the technique.
        notices: Warnings, unknown facts, skipped lines and left out runs.
        settings: Settings that differ, with each row's value.
        columns: Columns of the table.
    """

    rows: list[Row]
    differences: list[str]
    notices: list[str]
    settings: list[tuple[str, list[str]]]
    columns: list[Column]

    @property
    def warning(self) -> str:
        """One line about the differences; empty if there are no differences."""
        if not self.differences:
            return ""
        return f"Not comparable without care: these runs differ in {'; '.join(self.differences)}."


def compare(found: Found, rungs: Mapping[str, dict]) -> Comparison:
    """Compare the finished runs; the first of them is the reference.

    Args:
        found: The runs.
        rungs: Settings that each rung sets itself, by the rung's name. They are part of its technique.
    """
    rows = make_rows([run for run in found.runs if run.unfinished is None])
    left_out = [f"Left out: {run.name} ({run.source}): {run.unfinished}." for run in found.runs if run.unfinished]
    known = {key for row in rows for run in row.runs for key in run.figures}
    if not any(_needs_f1(row) for row in rows):
        known.discard("macro_f1")
    facts = [*find_unknown(rows), *compiling_paid(rows), *_one_seed(rows)]
    return Comparison(
        rows=rows,
        differences=find_differences(rows, rungs),
        notices=[*find_warnings(rows, rungs), *left_out, *found.notices, *facts],
        settings=differing_settings(rows),
        columns=[column for column in COSTS + GAINS if column.key not in OPTIONAL or column.key in known],
    )


def _needs_f1(row: Row) -> bool:
    """Return whether accuracy alone may hide the results of single classes."""
    if row.confusion is None:
        return bool(row.values("macro_f1"))  # a log has it only then
    sizes = row.confusion.sum(axis="columns")
    return len(sizes) > 2 or sizes.max() > UNBALANCED * sizes.min()


def _one_seed(rows: list[Row]) -> list[str]:
    if len(rows) < 2 or any(len(row.runs) > 1 for row in rows) or not any(row.values("test_accuracy") for row in rows):
        return []
    return ["There is one run of each rung. One seed cannot show whether a small difference in accuracy is chance."]


def compiling_paid(rows: list[Row]) -> list[str]:
    """Return, for each compiled row, the number of effective batches after which compiling has paid for itself.

    The reference is the first row without compiling, by the samples/s of both rows.
    """
    plain = next((row for row in rows if not row.values("compile_minutes") and row.mean("samples_per_second")), None)
    notices = []
    for row in rows if plain else ():
        minutes, rate = row.mean("compile_minutes"), row.mean("samples_per_second")
        size = row.first.settings.get("batch_size")
        if not minutes or not rate or not size:
            continue
        saved = size / plain.mean("samples_per_second") - size / rate  # seconds per effective batch
        if saved > 0:
            end = f"paid for after {math.ceil(minutes * 60 / saved):,} batches of {size} samples, against {plain.label}"
        else:
            end = f"never paid for: a batch takes as long as with {plain.label}"
        notices.append(f"{row.label}: compiling took {minutes * 60:.0f} s, {end}.")
    return notices


def compare_figure(row: Row, first: Row, column: Column) -> dict[str, float | bool | None]:
    """Return `mean` and `spread` of a figure, or None if unknown, and its comparison with the first row's mean.

    The comparison is a `ratio`, or `points` in percent. With several seeds, `within_spread` is whether the points are
    at most the larger spread of both rows.
    """
    mean = row.mean(column.key)
    reference = first.mean(column.key)
    spreads = [row.spread(column.key), first.spread(column.key)]
    found = {"mean": mean, "spread": spreads[0], "points" if column.points else "ratio": None}
    if mean is None or reference is None:
        return found
    if not column.points:
        ratio = mean / reference if reference else math.inf
        return found | {"ratio": ratio if math.isfinite(ratio) else None}
    found["points"] = mean - reference
    spreads = [spread for spread in spreads if spread is not None]
    return found | ({"within_spread": abs(mean - reference) <= max(spreads)} if spreads else {})


def cell_parts(row: Row, first: Row, column: Column) -> list[str]:
    """Return a figure, its spread over the seeds, and its comparison with the first row's; unknown parts are empty."""
    found = compare_figure(row, first, column)
    digits = column.digits
    against = found.get("points", found.get("ratio"))
    compared = ""
    if against is not None and row is not first and column.points:
        compared = f"{against:+.{digits}f}" + " ≈" * found.get("within_spread", False)
    elif against is not None and row is not first:
        compared = f"{against:.2f} x" if against >= 0.1 else f"{against:.2g} x"
    value = "–" if found["mean"] is None else f"{found['mean']:.{digits}f}"
    return [value, "" if found["spread"] is None else f"± {found['spread']:.{digits}f}", compared]


def value_text(row: Row, column: Column) -> str:
    """Return a row's figure, with its spread over the seeds and its unit; a dash if it is unknown."""
    value, spread, _ = cell_parts(row, row, column)
    return value if value == "–" else " ".join(filter(None, [value, spread, column.unit]))


def cell_text(row: Row, first: Row, column: Column) -> str:
    """Return a row's figure, and in brackets its comparison with the first row's."""
    against = cell_parts(row, first, column)[-1]
    return value_text(row, column) + (f" ({against})" if against else "")


def seeds_text(row: Row) -> str:
    """Return the number of seeds of a row and their values, or an empty text for a single run."""
    return f"mean of seeds {', '.join(row.seeds)} (n = {len(row.runs)})" if len(row.runs) > 1 else ""


def footnote(comparison: Comparison) -> str:
    """Explain the ratios, points and spreads."""
    if len(comparison.rows) < 2:
        return ""
    text = f"x: ratio to the first run, {comparison.rows[0].label}; + and -: percentage points from it."
    if any(len(row.runs) > 1 for row in comparison.rows):
        text += " ±: sample standard deviation over the seeds; ≈: the difference is within it, for either rung."
    return text


def print_table(comparison: Comparison, console: Console) -> None:
    """Print costs and results as two tables of 80 columns, then the notices."""
    rows, first = comparison.rows, comparison.rows[0]
    known = [column for column in comparison.columns if any(row.values(column.key) for row in rows)]
    groups = [columns for group in (COSTS, GAINS) if (columns := [column for column in known if column in group])]
    if comparison.warning:
        console.print(escape(comparison.warning), style="bold red", highlight=False)
    for columns in groups:
        whole = columns is groups[0]
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, leading=len(rows) > 1)
        table.add_column("rung\nwhat changed" if whole else "rung", overflow="fold", min_width=12)
        for column in columns:
            words = [*column.title.split(), *[column.unit] * bool(column.unit)]
            table.add_column("\n".join(words), justify="right", no_wrap=True)
        for row in rows:
            names = [row.label, *([seeds_text(row), row.changed] if whole else [])]
            cells = ["\n".join(filter(None, cell_parts(row, first, column))) for column in columns]
            table.add_row(escape("\n".join(filter(None, names))), *cells)
        console.print(table)
    for line in filter(None, (footnote(comparison), *comparison.notices)):
        console.print(escape(line), highlight=False)


def to_markdown(comparison: Comparison) -> str:
    """Return the table in GitHub's Markdown, and the settings that differ."""
    rows, columns = comparison.rows, comparison.columns
    lines = [f"**{_cell(comparison.warning)}**", ""] if comparison.warning else []
    lines.append(_line(["rung", "what changed", *(column.title for column in columns)]))
    lines.append("|---|---|" + "---:|" * len(columns))
    for row in rows:
        cells = [cell_text(row, rows[0], column) for column in columns]
        lines.append(_line([_cell(", ".join(filter(None, [row.label, seeds_text(row)]))), _cell(row.changed), *cells]))
    if note := footnote(comparison):
        lines += ["", _cell(note)]
    if comparison.settings:
        lines += ["", _line(["setting", *(_cell(row.label) for row in rows)]), "|---|" + "---|" * len(rows)]
        lines += [_line([name, *map(_cell, values)]) for name, values in comparison.settings]
    if comparison.notices:
        lines += ["", *(f"- {_cell(notice)}" for notice in comparison.notices)]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", text)


def to_csv(comparison: Comparison) -> str:
    """Return one line per row; differences beyond the technique come first, in lines that start with #."""
    records = []
    for row in comparison.rows:
        record = {"rung": row.label, "sources": " ".join(run.source for run in row.runs), "what_changed": row.changed}
        record |= {"seeds": " ".join(row.seeds), "n": len(row.runs)}
        for column in comparison.columns:
            figure = compare_figure(row, comparison.rows[0], column)
            record[column.key] = figure.pop("mean")
            record |= {f"{column.key}_{name}": value for name, value in figure.items()}
        records.append(record)
    above = "".join(f"# differs: {' '.join(difference.split())}\n" for difference in comparison.differences)
    return above + pd.DataFrame(records).to_csv(index=False, lineterminator="\n", float_format="%.12g")


def to_json(comparison: Comparison) -> str:
    """Return everything as JSON: differences first, then each row with its figures and runs."""
    rows = [
        {
            "rung": row.label,
            "what_changed": row.changed,
            "n": len(row.runs),
            "figures": {
                column.key: compare_figure(row, comparison.rows[0], column)
                for column in comparison.columns
                if row.values(column.key)
            },
            "runs": [asdict(run) for run in row.runs],
        }
        for row in comparison.rows
    ]
    record = {
        "format": 2,
        "differences": comparison.differences,
        "notices": comparison.notices,
        "units": {column.key: column.unit for column in comparison.columns if column.unit},
        "point": Point._fields,
        "rows": rows,
    }
    return pd.Series(record).to_json(indent=1, force_ascii=False, double_precision=12, default_handler=str) + "\n"
