"""The table of a comparison: for the terminal, for the page and in Markdown."""

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import pandas as pd
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fabric_ladder.comparing.facts import list_facts
from fabric_ladder.comparing.logs import LoggedRun
from fabric_ladder.comparing.matching import (
    Row,
    differing_settings,
    find_differences,
    find_warnings,
    make_rows,
)

LINE = ("data set", "model", "samples", "device")  # the facts above the table
UNBALANCED = 1.5  # ratio of test samples in the largest and the smallest class


class Column(NamedTuple):
    """A column of the table; `points` compares rows by percentage points instead of a ratio."""

    key: str
    title: str
    unit: str
    digits: int
    points: bool = False
    ratio: bool = True


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
    Column("micro_f1", "micro-F1", "%", 2, points=True),
    Column("macro_f1", "macro-F1", "%", 2, points=True),
    Column("entity_f1", "entity F1", "%", 2, points=True),
    Column("train_mse", "train MSE", "", 4),
    Column("validation_mse", "val MSE", "", 4),
    Column("test_mse", "test MSE", "", 4),
    Column("test_pearson", "Pearson", "", 4, ratio=False),  # it may be 0 or negative
    Column("test_loss", "test loss", "", 4),
    Column("test_perplexity", "perplexity", "", 2),
)
ACCURACIES = ("train_accuracy", "validation_accuracy", "test_accuracy")
OPTIONAL = {column.key for column in GAINS} - {*ACCURACIES} | {"predicted_memory"}  # shown only if a run has the figure


@dataclass
class Comparison:
    """The compared runs and everything that an output shows about them.

    Attributes:
        rows: The first row is the reference.
        differences: Differences that are not part of the technique.
        notices: Warnings, unknown facts and left out runs.
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


def compare(runs: list[LoggedRun], rungs: Mapping[str, dict]) -> Comparison:
    """Compare the finished runs; the first of them is the reference.

    Args:
        runs: From `read_sources`.
        rungs: Settings that each rung sets itself, by the rung's name. They are part of its technique.
    """
    rows = make_rows([run for run in runs if run.unfinished is None])
    notices = [*find_warnings(rows, rungs)]
    notices += [f"Left out: {run.name} ({run.source}): {run.unfinished}." for run in runs if run.unfinished]
    if others := dict.fromkeys(run.source for run in runs if not run.ours and run.unfinished is None):
        notices.append(
            f"Other scripts printed {', '.join(others)}. The blog prints the loss of one micro-batch divided by the "
            "number of accumulated micro-batches, and the memory that PyTorch reserved. This project prints allocated "
            "memory."
        )
    if logs := [row.label for row in rows if row.first.data is None]:
        notices.append(
            f"Logs do not have all facts, for example the content of the data or the learning rate: {', '.join(logs)}. "
            "The comparison assumes the values of the other runs."
        )
    notices += [*compiling_paid(rows), *_one_seed(rows), *_overlap(rows)]
    known = {key for row in rows for run in row.runs for key in run.figures}
    if not any(_needs_f1(row) for row in rows):
        known.discard("macro_f1")
    optional = OPTIONAL | {*ACCURACIES} if "test_mse" in known else OPTIONAL
    columns = [column for column in COSTS + GAINS if column.key not in optional or column.key in known]
    return Comparison(rows, find_differences(rows, rungs), notices, differing_settings(rows), columns)


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


def _overlap(rows: list[Row]) -> list[str]:
    """Return a line if two runs trained at the same time on one machine, by equal hardware to the byte of memory."""
    runs = [run for row in rows for run in row.runs if run.times]
    if not any(
        one.hardware == other.hardware and one.times[0] < other.times[1] and other.times[0] < one.times[1]
        for one, other in itertools.combinations(runs, 2)
    ):
        return []
    return [
        "These runs overlapped in time on one machine: their times and speeds are not comparable unless each had a GPU "
        "of its own."
    ]


def compiling_paid(rows: list[Row]) -> list[str]:
    """Return, for each compiled row, the number of effective batches after which compiling has paid for itself.

    The reference is the row without compiling that has the same batches and the most similar other settings.
    """
    plain_rows = [row for row in rows if not row.values("compile_minutes") and row.mean("samples_per_second")]
    notices = []
    for row in rows:
        minutes, rate = row.mean("compile_minutes"), row.mean("samples_per_second")
        size = row.first.settings.get("batch_size")
        if not minutes or not rate or not size:
            continue
        differences = [({name for name, _ in differing_settings([row, other])}, other) for other in plain_rows]
        alike = [each for each in differences if not each[0] & {"batch_size", "micro_batch_size"}]
        if not alike:
            continue
        plain = min(alike, key=lambda each: len(each[0]))[1]
        saved = size / plain.mean("samples_per_second") - size / rate  # seconds per effective batch
        if saved > 0:
            end = f"paid for after {math.ceil(minutes * 60 / saved):,} batches of {size} samples, against {plain.label}"
        else:
            end = f"never paid for: a batch takes as long as with {plain.label}"
        notices.append(f"{row.label}: compiling took {minutes * 60:.0f} s, {end}.")
    return notices


def cell_parts(row: Row, first: Row, column: Column) -> list[str]:
    """Return a figure, its spread over the seeds, and its comparison with the first row's; unknown parts are empty.

    The comparison is a ratio or a difference in percentage points. `≈` marks points that are at most the larger spread
    of both rows.
    """
    digits = column.digits
    mean, reference = row.mean(column.key), first.mean(column.key)
    if mean is None:
        return ["–", "", ""]
    spread = row.spread(column.key)
    compared = ""
    if row is not first and reference is not None and column.points:
        spreads = [each for each in (spread, first.spread(column.key)) if each is not None]
        within = bool(spreads) and abs(mean - reference) <= max(spreads)
        compared = f"{mean - reference:+.{digits}f}" + " ≈" * within
    elif row is not first and column.ratio and reference and math.isfinite(ratio := mean / reference):
        compared = f"{ratio:.2f} x" if ratio >= 0.1 else f"{ratio:.2g} x"
    return [f"{mean:.{digits}f}", "" if spread is None else f"± {spread:.{digits}f}", compared]


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
    if len(row.runs) < 2:
        return ""
    known = row.seeds
    if len(known) > 2 and known == [str(int(known[0]) + place) for place in range(len(known))]:
        known = [f"{known[0]} to {known[-1]}"]
    return f"mean of seeds {', '.join(known)} (n = {len(row.runs)})"


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
    facts = list_facts(rows)
    console.print(escape(" · ".join(facts[each] for each in LINE if each in facts)), highlight=False)
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


def figures_table(comparison: Comparison) -> pd.DataFrame:
    """Return the figures as texts: a line for each row, a column for each figure."""
    lines = {}
    for row in comparison.rows:
        cells = {column.title: cell_text(row, comparison.rows[0], column) for column in comparison.columns}
        lines[", ".join(filter(None, [row.label, seeds_text(row)]))] = {"what changed": row.changed} | cells
    return pd.DataFrame.from_dict(lines, orient="index")


def settings_table(comparison: Comparison) -> pd.DataFrame:
    """Return the settings that differ: a line for each setting, a column for each row."""
    columns = [row.label for row in comparison.rows]
    return pd.DataFrame.from_dict(dict(comparison.settings), orient="index", columns=columns)


def to_markdown(comparison: Comparison) -> str:
    """Return the figures and the settings that differ in GitHub's Markdown."""
    parts = [
        f"**{_escape(comparison.warning)}**" if comparison.warning else "",
        markdown_table(figures_table(comparison), "rung"),
        _escape(footnote(comparison)),
        markdown_table(settings_table(comparison), "setting") if comparison.settings else "",
        "\n".join(f"- {_escape(notice)}" for notice in comparison.notices),
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def markdown_table(table: pd.DataFrame, name: str) -> str:
    """Return a table of texts in GitHub's Markdown; `name` is the heading of its index."""
    lines = [[name, *table.columns], ["---"] * (1 + len(table.columns)), *table.reset_index().to_numpy().tolist()]
    return "\n".join(f"| {' | '.join(map(_escape, line))} |" for line in lines)


def _escape(text: str) -> str:
    return re.sub(r"([\\`*_|<>\[\]])", r"\\\1", " ".join(text.splitlines()))
