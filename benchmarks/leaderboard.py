"""The leaderboard of docs/leaderboard.md: does a run keep its rules, and the tables of those that do.

    python benchmarks/leaderboard.py check FOLDER      a finished run's folder, such as runs/2_grad_accum/1
    python benchmarks/leaderboard.py table             writes the tables

`check` prints each broken rule in one line and ends with exit status 1 if there is one. An entry is a folder
benchmarks/results/leaderboard/CATEGORY/NAME/ with the run's run.json and log.txt, and entry.json, which names what
run.json does not know: `commit` (of the code) and `by` (whose run it is). What others have published is in
published.json beside the entries; it is shown with its source, and not checked.
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import common  # first of all: it makes the project importable without an installation
import pages
from leaderboard_rules import CATEGORIES, Category, Entry, broken_rules, number, text_at

from fabric_ladder.advice import show_errors
from fabric_ladder.errors import UserError, read_outside

ENTRIES = common.RESULTS / "leaderboard"
PAGE = common.ROOT / "docs" / "leaderboard.md"
HEADER = ["rank, entry", "minutes", "test accuracy, %", "peak memory, GB", "hardware", "date", "by"]


def read_entry(folder: Path) -> Entry:
    """Return what a folder holds: run.json, log.txt, and entry.json if it is there.

    Raises:
        UserError: There is no run in it, or a file that cannot be read.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}: give one of a run, such as runs/2_grad_accum/1")
    record = read_outside(folder / "run.json")
    if not isinstance(record, dict):
        raise UserError(f"{folder / 'run.json'} must hold one JSON object, {{...}}")
    origin = read_outside(folder / "entry.json") if (folder / "entry.json").exists() else {}
    if not isinstance(origin, dict):
        raise UserError(f"{folder / 'entry.json'} must hold one JSON object, {{...}}")
    return Entry(record, read_outside(folder / "log.txt", str, "text"), origin)


def figures_of(entry: Entry) -> dict[str, float | None]:
    """Return the minutes, the test accuracy in percent and the peak in GB (10^9 bytes) of a run."""
    named = {
        "minutes": ("elapsed_seconds", 1 / 60),
        "accuracy": ("test_accuracy", 100),
        "memory": ("peak_reserved_bytes", 1e-9),
    }
    found = {name: (number(entry.record, "results", key), factor) for name, (key, factor) in named.items()}
    return {name: None if value is None else value * factor for name, (value, factor) in found.items()}


def check(folder: Path) -> int:
    """Print whether the run in a folder keeps the rules of its category; return the exit status."""
    entry = read_entry(folder)
    name = "memory" if text_at(entry.record, "settings", "task") == CATEGORIES["memory"].task else "minutes"
    broken = list(broken_rules(entry, CATEGORIES[name]))
    for line in broken:
        print(line)
    if not broken:
        figures = figures_of(entry)
        print(
            f"{folder} keeps the rules of {name}: {figures['minutes']:.2f} min, test accuracy "
            f"{figures['accuracy']:.2f} %, {figures['memory']:.2f} GB"
        )
    return 1 if broken else 0


def own_rows(name: str, category: Category) -> Iterator[dict]:
    """Yield the row of each entry of this project in a category.

    Raises:
        UserError: One breaks a rule.
    """
    for path in sorted((ENTRIES / name).glob("*/run.json")):
        entry = read_entry(path.parent)
        for line in broken_rules(entry, category):
            raise UserError(f"{path.parent.relative_to(common.ROOT)} breaks a rule: {line}")
        ranks = int(number(entry.record, "ranks") or 1)
        yield figures_of(entry) | {
            "name": f"`{path.parent.relative_to(common.ROOT)}/`",
            "hardware": f"{ranks} x " * (ranks > 1) + text_at(entry.record, "hardware", "gpu"),
            "date": text_at(entry.record, "begun")[:10],
            "by": f"{entry.origin['by']}, commit {entry.origin['commit'][:7]}",
        }


def published_rows(name: str) -> list[dict]:
    """Return the rows of what others have published in a category."""
    rows = read_outside(ENTRIES / "published.json")[name]
    return [row | {"by": f"published: [{row['by']}]({row['source']})"} for row in rows]


def rows_of(name: str, rows: list[dict]) -> list[list[str]]:
    """Return the cells of rows, the best first; what misses the accuracy has no rank, and comes last."""
    least = CATEGORIES[name].accuracy * 100
    cells, rank = [], 0
    for row in sorted(rows, key=lambda row: (row["accuracy"] < least, row[name])):
        figures = [f"{row[key]:.2f}" if row.get(key) is not None else "–" for key in ("minutes", "accuracy", "memory")]
        rank += row["accuracy"] >= least
        place = f"{rank}." if row["accuracy"] >= least else "–"
        cells.append([f"{place} {row['name']}", *figures, *(row.get(key, "–") for key in ("hardware", "date", "by"))])
    return cells


def lines_of(name: str) -> list[str]:
    """Return the lines of a category's table."""
    own = list(own_rows(name, CATEGORIES[name]))
    lines = [] if own else ["This project: no entry yet.", ""]
    return [*lines, *pages.table(HEADER, rows_of(name, [*own, *published_rows(name)]))]


def fill(text: str) -> str:
    """Return the page with its tables."""
    return pages.fill(text, "leaderboard", lines_of)


def main() -> None:
    """Check a run, or write the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    actions = parser.add_subparsers(dest="action", required=True)
    actions.add_parser("check", help="does a run keep the rules?").add_argument("folder", type=Path, metavar="FOLDER")
    actions.add_parser("table", help="write the tables of docs/leaderboard.md")
    args = parser.parse_args()
    show_errors()
    if args.action == "check":
        sys.exit(check(args.folder))
    pages.rewrite(PAGE, fill)


if __name__ == "__main__":
    main()
