"""The comparison as a table: on the terminal, in Markdown, CSV and JSON."""

import json
import math
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fabric_ladder.comparing.matching import Row, differing_settings, find_differences, find_unknown, make_rows
from fabric_ladder.comparing.sources import Found


class Column(NamedTuple):
    """A figure of the table: key, heading, unit, decimals, and whether rows differ by points, not by a ratio."""

    key: str
    title: str
    unit: str
    digits: int
    points: bool = False

    @property
    def against(self) -> str:
        """What rows are compared by."""
        return "points" if self.points else "ratio"


COLUMNS = (
    Column("minutes", "time", "min", 2),
    Column("samples_per_second", "samples/s", "", 1),
    Column("tokens_per_second", "tokens/s", "", 0),
    Column("memory", "peak memory", "GB", 2),
    Column("predicted_memory", "predicted", "GB", 2),
    Column("train_accuracy", "train acc.", "%", 2, points=True),
    Column("validation_accuracy", "val acc.", "%", 2, points=True),
    Column("test_accuracy", "test acc.", "%", 2, points=True),
)
LANGUAGE_COLUMNS = (
    Column("test_loss", "test loss", "", 4),
    Column("test_perplexity", "perplexity", "", 2),
)


@dataclass
class Comparison:
    """Everything that an output shows.

    Attributes:
        rows: The first is what the others are measured by.
        differences: What differs beyond the technique.
        notices: What the reader should know: unknown facts, skipped lines, runs that were left out.
        settings: Settings that differ, with each row's value.
        columns: Of the table.
    """

    rows: list[Row]
    differences: list[str]
    notices: list[str]
    settings: list[tuple[str, list[str]]]
    columns: tuple[Column, ...]

    @property
    def warning(self) -> str:
        """One line about the differences, empty if there are none."""
        if not self.differences:
            return ""
        return f"Not comparable without care: these runs differ in {'; '.join(self.differences)}."


def compare(found: Found) -> Comparison:
    """Make the comparison of the finished runs; the first of them is what the others are measured by."""
    rows = make_rows([run for run in found.runs if run.unfinished is None])
    left_out = [f"Left out: {run.name} ({run.source}): {run.unfinished}." for run in found.runs if run.unfinished]
    of_language = any(row.values("test_perplexity") for row in rows)
    return Comparison(
        rows=rows,
        differences=find_differences(rows),
        notices=[*left_out, *found.notices, *find_unknown(rows), *compiling_paid(rows)],
        settings=differing_settings(rows),
        columns=COLUMNS + LANGUAGE_COLUMNS * of_language,
    )


def compiling_paid(rows: list[Row]) -> list[str]:
    """Return, for each row that compiled, after how many effective batches it has won back the time that this took.

    Against the first row that did not compile, by the samples/s of both; without it nothing can be said.
    """
    plain = next((row for row in rows if not row.values("compile_minutes") and row.mean("samples_per_second")), None)
    notices = []
    for row in rows if plain else ():
        minutes, rate = row.mean("compile_minutes"), row.mean("samples_per_second")
        size = row.first.settings.get("batch_size")
        if not minutes or not rate or not size:
            continue
        won = size / plain.mean("samples_per_second") - size / rate  # seconds per effective batch
        if won > 0:
            end = f"paid for after {math.ceil(minutes * 60 / won):,} batches of {size} samples, against {plain.label}"
        else:
            end = f"never paid for: a batch takes no less time than with {plain.label}"
        notices.append(f"{row.label}: compiling took {minutes * 60:.0f} s, {end}.")
    return notices


def value_text(row: Row, column: Column, unit: bool = True) -> str:
    """Return a row's figure, with its spread over the seeds and its unit; a dash if it is not known."""
    mean, spread = row.mean(column.key), row.spread(column.key)
    if mean is None:
        return "–"
    text = f"{mean:.{column.digits}f}" + (f" ± {spread:.{column.digits}f}" if spread is not None else "")
    return f"{text} {column.unit}".strip() if unit else text


def against_first(row: Row, first: Row, column: Column) -> float | None:
    """Return the ratio to the first row's mean, or the difference in percentage points; None if either is not known."""
    value, reference = row.mean(column.key), first.mean(column.key)
    if value is None or reference is None:
        return None
    if column.points:
        return value - reference
    ratio = value / reference if reference else math.inf
    return ratio if math.isfinite(ratio) else None


def against_text(row: Row, first: Row, column: Column) -> str:
    """Return `against_first` as text; empty if not known, and for the first row itself."""
    value = against_first(row, first, column)
    if value is None or row is first:
        return ""
    if column.points:
        return f"{value:+.{column.digits}f}"
    return f"{value:.2f} x" if value >= 0.1 else f"{value:.2g} x"


def cell_text(row: Row, first: Row, column: Column) -> str:
    """Return a row's figure, and in brackets how it stands against the first row's."""
    against = against_text(row, first, column)
    return value_text(row, column) + (f" ({against})" if against else "")


def seeds_text(row: Row) -> str:
    """Return how many seeds a row is the mean of, and which."""
    return f"mean of seeds {', '.join(_seeds(row))} (n = {len(row.runs)})"


def label(row: Row) -> str:
    """Return a row's name, with its seeds if there are several."""
    return f"{row.label}, {seeds_text(row)}" if len(row.runs) > 1 else row.label


def _seeds(row: Row) -> list[str]:
    return [str(run.settings["seed"]) for run in row.runs if "seed" in run.settings]


def footnote(comparison: Comparison) -> str:
    """Say what the second figures mean."""
    if len(comparison.rows) < 2:
        return ""
    text = f"x: ratio to the first run, {comparison.rows[0].label}; + and -: percentage points of accuracy from it."
    if any(len(row.runs) > 1 for row in comparison.rows):
        text += " ±: sample standard deviation over the seeds."
    return text


def print_table(comparison: Comparison, console: Console) -> None:
    """Print the table, what stands above it, and what the reader should know."""
    if comparison.warning:
        console.print(escape(comparison.warning), style="bold red", soft_wrap=True)
    wide = console.width >= 120
    table = Table(box=box.HEAVY_HEAD if wide else box.SIMPLE, show_lines=len(comparison.rows) > 1, pad_edge=wide)
    table.add_column("rung", overflow="fold", min_width=8)
    if wide:
        table.add_column("what changed", overflow="fold", min_width=8)
    for column in comparison.columns:
        title = column.title if wide else column.title.replace("/", " /")  # where it may break
        table.add_column(f"{title}\n{column.unit}".strip(), justify="right", no_wrap=wide, overflow="fold")
    for row in comparison.rows:
        cells = [
            f"{value_text(row, column, unit=False)}\n{against_text(row, comparison.rows[0], column)}".strip()
            for column in comparison.columns
        ]
        table.add_row(escape(label(row)), *[escape(row.changed)] * wide, *cells)
    console.print(table)
    for row in comparison.rows[1:] if not wide else ():
        console.print(escape(f"{row.label}: {row.changed}"), soft_wrap=True)
    for line in (footnote(comparison), *comparison.notices):
        if line:
            console.print(escape(line), soft_wrap=True)


def to_markdown(comparison: Comparison) -> str:
    """Return the table in GitHub's Markdown, with the settings that differ."""
    first = comparison.rows[0]
    lines = [f"**{_cell(comparison.warning)}**", ""] if comparison.warning else []
    lines += _markdown_row(["rung", "what changed", *(column.title for column in comparison.columns)])
    lines.append("|---|---|" + "---:|" * len(comparison.columns))
    for row in comparison.rows:
        cells = [cell_text(row, first, column) for column in comparison.columns]
        lines += _markdown_row([_cell(label(row)), _cell(row.changed), *cells])
    if note := footnote(comparison):
        lines += ["", _cell(note)]
    if comparison.settings:
        lines += ["", *_markdown_row(["setting", *(_cell(row.label) for row in comparison.rows)])]
        lines.append("|---|" + "---|" * len(comparison.rows))
        for name, values in comparison.settings:
            lines += _markdown_row([name, *map(_cell, values)])
    if comparison.notices:
        lines += ["", *(f"- {_cell(notice)}" for notice in comparison.notices)]
    return "\n".join(lines) + "\n"


def _markdown_row(cells: list[str]) -> list[str]:
    return [f"| {' | '.join(cells)} |"]


def _cell(text: str) -> str:
    for mark in "\\`*_|<>[]":
        text = text.replace(mark, f"\\{mark}")
    return text


def to_csv(comparison: Comparison) -> str:
    """Return a line for each row; lines that start with # stand above it where runs differ beyond their technique."""
    records = []
    for row in comparison.rows:
        record = {"rung": row.label, "sources": " ".join(run.source for run in row.runs), "what_changed": row.changed}
        record |= {"seeds": " ".join(_seeds(row)), "n": len(row.runs)}
        for column in comparison.columns:
            record[column.key] = _rounded(row.mean(column.key))
            record[f"{column.key}_spread"] = _rounded(row.spread(column.key))
            record[f"{column.key}_{column.against}"] = _rounded(against_first(row, comparison.rows[0], column))
        records.append(record)
    above = "".join(f"# differs: {' '.join(difference.split())}\n" for difference in comparison.differences)
    return above + pd.DataFrame(records).to_csv(index=False, lineterminator="\n")


def to_json(comparison: Comparison) -> str:
    """Return everything as JSON: differences first, then each row with its figures, settings and losses."""
    record = {
        "format": 1,
        "differences": comparison.differences,
        "notices": comparison.notices,
        "units": {column.key: column.unit for column in comparison.columns if column.unit},
        "loss_columns": ["epochs", "samples", "loss"],
        "rows": [_row_record(row, comparison) for row in comparison.rows],
    }
    return json.dumps(record, indent=1, ensure_ascii=False, allow_nan=False, default=str) + "\n"


def _row_record(row: Row, comparison: Comparison) -> dict:
    keys = dict.fromkeys(key for run in row.runs for key in run.figures)
    figures = {key: {"mean": _finite(row.mean(key)), "spread": _finite(row.spread(key))} for key in keys}
    for column in comparison.columns:
        if column.key in figures:
            figures[column.key][column.against] = _finite(against_first(row, comparison.rows[0], column))
    runs = [
        {
            "source": run.source,
            "seed": run.settings.get("seed"),
            "figures": {key: _finite(value) for key, value in run.figures.items()},
            "test_samples": run.test_samples,
            "losses": [[point.epochs, point.samples, _finite(point.loss)] for point in run.losses],
        }
        for run in row.runs
    ]
    shared = {key: value for key, value in row.first.settings.items() if key != "seed"}
    record = {"rung": row.label, "what_changed": row.changed, "n": len(runs), "figures": figures, "runs": runs}
    return record | {"settings": shared} | {name: getattr(row.first, name) for name in ("versions", "hardware", "data")}


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.12g}")  # no tails such as 69.97000000000001


def _finite(value: float | None) -> float | None:
    return _rounded(value) if value is not None and math.isfinite(value) else None
