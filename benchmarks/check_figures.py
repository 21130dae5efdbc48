"""Check that every figure in the README and docs/ stands in a file of measurements, below benchmarks/results/.

    python benchmarks/check_figures.py [PAGE …]        default: README.md and all of docs/

A figure is a number with a unit (%, GB, samples/s, minutes, x, …), and beside such numbers or in a table one with
decimals. After a paragraph, list, table or block of code with figures stand comments, which no reader sees, one for
each source:

    <!-- figures: against_peers.json minilm.medians bloom.ratios -->   a file, and parts of it
    <!-- figures: against_peers.json "=minilm.a / bloom.b" -->         of two numbers: also a - b, a * b
    <!-- figures: published 26.84 GB, 18.21: https://… -->             measured by others, there
    <!-- figures: computed 24 GB: the size of a GPU -->                a condition, a bound or arithmetic: which
    <!-- figures: unfiled 92.7 % -->                                   in no file; naming none: all in the block

The last is for the journal, whose dated entries are of code that is no more.

Parts are named by their keys with dots between, and `*` for anything; the entries of a list by their place, or by what
they say for `rung` or `name` and for `options`. `+` in the place of a key stands for repeats, which are taken together:
mean, or mean ± sample standard deviation. Figures are named as they are written, or by their unit. A file is JSON, a
log or another text, or a folder of runs, whose run.json are taken together. It must name the command that made it.

A figure agrees if a number of these parts, rounded to the digits that are shown, is the same: bytes are GB, seconds are
minutes, shares are %, and +12 % is a ratio of 1.12. What a script writes between marks, such as
benchmarks/gpu_figures.py, is left out.

Exit status 1: a figure has no source, or its source does not have it; or a comment names what is not there.
"""

import argparse
import json
import operator
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

from page_figures import NUMBER, Figure, as_number, blocks_of, figures_of, united, without_units

ROOT = Path(__file__).resolve().parents[1]
OPERATIONS = {"*": operator.mul, "/": operator.truediv, "-": operator.sub}
COMMAND = re.compile(r"python[\d.]* \S*?((?:src|scripts|benchmarks)/\w+\.py)")
LABELS = ("rung", "name", "options")


class Value(NamedTuple):
    """A number of a file, by its keys; `plain`: its unit is not known. Of repeats: their mean and deviation."""

    path: str
    number: float
    plain: bool = False
    spread: float | None = None


class Findings(NamedTuple):
    """What a page lacks, what it says itself that it lacks, and the number of its figures; lists of lines."""

    errors: list[str]
    unfiled: list[str]
    count: int


class SourceError(ValueError):
    """A comment names what is not there."""


# Files


@cache
def read(path: Path) -> list[Value]:
    """Return all numbers of a JSON file, a text, or the run.json of all runs in a folder.

    Raises:
        SourceError: There is none, it cannot be read, or it does not say by which command it was made.
    """
    try:
        if path.is_dir():
            files = sorted(path.rglob("run.json"))
            parts = [(".".join(file.parent.relative_to(path).parts), file.read_text("utf-8")) for file in files]
        else:
            parts = [("", path.read_text(encoding="utf-8"))]
        trees = [
            (prefix, json.loads(text) if path.is_dir() or path.suffix == ".json" else text) for prefix, text in parts
        ]
    except (OSError, ValueError) as error:
        raise SourceError(f"no such file of measurements ({error})") from error
    made = [found[1] for _, text in parts for found in COMMAND.finditer(text)]
    if not made and not (path.parent / "run.json").is_file():
        raise SourceError("does not say by which command it was made")
    if gone := [script for script in made if not (ROOT / script).is_file()]:
        raise SourceError(f"was made by {gone[0]}, which is not there")
    return [value for prefix, tree in trees for value in numbers(tree, prefix)]


def numbers(tree: object, path: str) -> Iterator[Value]:
    """Yield the numbers of a tree of dicts and lists, those in texts included."""
    if isinstance(tree, dict):
        for key, branch in tree.items():
            inner = f"{path}.{key}".lstrip(".")
            yield from (Value(inner, as_number(each.number) * each.factors[0]) for each in united(key, 0))
            yield from numbers(branch, inner)
    elif isinstance(tree, list):
        for place, branch in enumerate(tree):
            names = [branch.get(label, "") for label in LABELS] if isinstance(branch, dict) else []
            yield from numbers(branch, f"{path}.{' '.join(str(name) for name in names if name) or place}")
    elif isinstance(tree, str):
        for line in tree.splitlines():
            yield from (Value(path, as_number(each.number) * each.factors[0]) for each in united(line, 0))
            yield from (Value(path, as_number(found[0]), True) for found in re.finditer(NUMBER, without_units(line)))
    elif isinstance(tree, int | float) and not isinstance(tree, bool):
        yield Value(path, tree * (1e9 if path.endswith(".GB") else 1))


@cache
def select(path: Path, key: str) -> list[Value]:
    """Return the numbers of a part of a file, or what is computed of two of them.

    Raises:
        SourceError: There are none, or not one on each side.
    """
    if key.startswith("="):
        first, sign, second = (*re.split(r" ([*/-]) ", key[1:], maxsplit=1), "", "")[:3]
        sides = [select(path, side.strip()) for side in (first, second) if side]
        if [len(side) for side in sides] != [1, 1]:
            raise SourceError(f"has {' and '.join(str(len(side)) for side in sides)} numbers for {key}")
        if sign == "/" and not sides[1][0].number:
            raise SourceError(f"has 0 below the line of {key}")
        return [Value(key, OPERATIONS[sign](*(side[0].number for side in sides)))]
    pattern = re.escape(key).replace(r"\*", ".*").replace(r"\+\.", r"([^.]+)\.")
    found = [(re.fullmatch(rf"{pattern}(\..*)?", value.path), value) for value in read(path)]
    found = [(match, value) for match, value in found if match]
    if not found:
        raise SourceError(f"has no {key}")
    if "+" not in key.split("."):
        return [value for _, value in found]

    def without_repeat(item: tuple[re.Match, Value]) -> str:
        start, end = item[0].span(1)
        return item[1].path[:start] + "+" + item[1].path[end:]

    groups = groupby(sorted(found, key=without_repeat), without_repeat)
    kept = [(path, [value.number for _, value in group]) for path, group in groups]
    return [Value(path, mean(each), spread=stdev(each) if len(each) > 1 else None) for path, each in kept]


# Agreement


def agree(figure: Figure, value: Value) -> bool:
    """Tell whether a figure is a file's number, rounded."""
    if figure.spread and (value.spread is None or not close(figure, figure.spread, value.spread)):
        return False
    if value.plain:
        return close(figure._replace(factors=(1,)), figure.number, value.number)
    ratio = figure.unit == "%" and figure.number[0] in "+-−"
    return any(close(figure, figure.number, value.number - start) for start in ((0, 1) if ratio else (0,)))


def close(figure: Figure, number: str, value: float) -> bool:
    """Tell whether a value rounded to the digits of a number of the figure is that number."""
    half = 0.5000001 * 10.0 ** -len(number.partition(".")[2])
    return any(abs(value - as_number(number) * factor) <= half * factor for factor in figure.factors)


def named(figures: list[Figure], items: str | None) -> list[Figure]:
    """Return the figures that a comment names, as they are written or by their unit; all, where it names none.

    Raises:
        SourceError: One is not there.
    """
    if items is None:
        return figures
    found = []
    for item in re.split(r",\s+", items):
        those = [each for each in figures if item in (each.text, each.number, each.unit)]
        if not those:
            raise SourceError(f"{item} is not in the block above")
        found += those
    return found


def covered(figures: list[Figure], comment: str, results: Path) -> tuple[str, list[Figure]]:
    """Return what kind of source a comment names (`file`, `published`, `computed`, `unfiled`), and the figures of it.

    Raises:
        SourceError: It names what is not there, or not what it must.
    """
    found = re.fullmatch(r"(published|computed|unfiled)(?: (?!\s)(.+?))?(?:: (.+))?", comment)
    if found:
        kind, items, reason = found.groups()
        if kind != "unfiled" and not (items and reason and (kind == "computed" or "https://" in reason)):
            raise SourceError(f"{kind}: which figures, and after a colon {'why' if kind == 'computed' else 'where'}?")
        return kind, named(figures, items)
    name, *keys = shlex.split(comment)
    try:
        parts = [select(results / name, key) for key in keys or ["*"]]
    except SourceError as error:
        raise SourceError(f"{name} {error}") from error
    fitting = [[figure for figure in figures if any(agree(figure, value) for value in part)] for part in parts]
    for key, those in zip(keys or ["*"], fitting, strict=True):
        if not those:
            raise SourceError(f"{name}: no figure of the block above is in {key}")
    return "file", [figure for those in fitting for figure in those]


def check(page: str, name: str, results: Path) -> Findings:
    """Check a page: its text, its name for messages, and the folder of the files."""
    errors, unfiled, count = [], [], 0
    for block in blocks_of(page):
        figures, sources, without = figures_of(block), set(), set()
        count += len(figures)
        comments = [(line, re.fullmatch(r"<!-- figures:\s*(.*?)\s*-->", text)) for line, text in block.comments]
        for line, comment in comments:
            try:
                if not comment:
                    raise SourceError("not one comment on lines of its own")
                kind, those = covered(figures, comment[1], results)
                if not those:
                    raise SourceError("there is no figure above")
                (without if kind == "unfiled" else sources).update(those)
            except ValueError as error:
                errors.append((line, str(error)))
        for figure in sorted(set(figures) - sources, key=lambda each: each.line):
            where = f"{name}:{figure.line}: {figure.text}"
            if figure in without:
                unfiled.append(where)
            else:
                files = ", ".join(comment[1] for _, comment in comments if comment)
                errors.append((figure.line, f"{figure.text}: " + (f"not in {files}" if files else "no file is named")))
    return Findings([f"{name}:{line}: {text}" for line, text in sorted(errors)], unfiled, count)


def main() -> int:
    """Check the pages, and print what is wrong and what is missing, one line each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("pages", type=Path, nargs="*", metavar="PAGE")
    pages = parser.parse_args().pages or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    findings = []
    for page in pages:
        try:
            text = page.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            parser.error(f"{page} cannot be read ({error})")
        name = page.resolve().relative_to(ROOT) if page.resolve().is_relative_to(ROOT) else page
        findings.append(check(text, str(name), ROOT / "benchmarks" / "results"))
    for finding in findings:
        for line in (*(f"{line}: in no file yet" for line in finding.unfiled), *finding.errors):
            print(line)
    counts = [sum(len(each.errors) for each in findings), sum(len(each.unfiled) for each in findings)]
    print(f"{sum(each.count for each in findings)} figures, {counts[1]} of them in no file yet; {counts[0]} errors")
    return 1 if counts[0] else 0


if __name__ == "__main__":
    sys.exit(main())
