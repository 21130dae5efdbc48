"""Check that every figure in the README and docs/ occurs in a file of benchmarks/results/.

    python benchmarks/check_figures.py [PAGE …]        default: README.md and all pages of docs/

A figure is a number with a unit (%, GB, samples/s, minutes, x, …). Next to such a number, or in a table, numbers with
decimals are figures too. One comment for each source follows the paragraph, list, table or block of code:

    <!-- figures: against_peers.json minilm.medians bloom.ratios -->   a file or a folder of runs, and parts of it
    <!-- figures: against_peers.json "=minilm.a / bloom.b" -->         computed from two numbers: also a - b, a * b
    <!-- figures: published 26.84 GB, 18.21: https://… -->             measured by others; without names: all of them
    <!-- figures: computed 24 GB: the size of a GPU -->                a condition, a bound or arithmetic
    <!-- figures: unfiled 92.7 % -->                                   in no file: old entries of the journal

Keys are joined by dots, and `*` matches any text. A list's entries are named by number, or by their `rung` or `name`
and their `options`. `+` in place of a key stands for repeats: the mean and the sample standard deviation are compared.
A figure agrees with a file's number that equals it when rounded to the figure's digits.

The exit status is 1 if a figure has no source, or its source does not contain it.
"""

import json
import operator
import re
import shlex
import sys
from collections import defaultdict
from functools import cache
from pathlib import Path
from statistics import mean, stdev
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
UNITS = {
    "%": 0.01, "points": 0.01, "x": 1, "times": 1, "GB/s": 1e9, "GB": 1e9, "GiB": 2**30, "MB": 1e6, "kB": 1e3,
    "bytes": 1, "samples/s": 1, "tokens/s": 1, "hours": 3600, "minutes": 60, "min": 60, "seconds": 1, "ms": 1e-3,
    "s": 1, "M": 1e6,
}  # fmt: skip
UNIT = rf"(?:{'|'.join(UNITS)})(?![\w/]|(?<=x)\s?\d)"  # "4 x 512" is a shape
NUMBER = r"(?<![\w.,/:^+−-])[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w-]|[.,:/]\d)"
LIST = re.compile(rf"({NUMBER}(?:(?:,|\s(?:and|to|or|of|±))\s+{NUMBER})*)(?:\s+|(?=%))({UNIT})")
VERSION = re.compile(r"(?:capability|CUDA|DeepSpeed|Llama|Python|PyTorch|torch|torchao|transformers|PCIe)\s\(?$")
GENERATED = re.compile(r"<!-- (\w+):\w+ -->.*?<!-- /\1 -->", re.DOTALL)  # tables that scripts write
MASKED = re.compile(r"`[^`\n]*`|\]\([^)\n]*\)")
BLOCK = re.compile(r"(?:(```)[^\n]*\n.*?^```|(?:^(?!#|<!--|```)[^\n]*\S[^\n]*$\n?)+?(?=^\s*<!--|^\s*$|^```|\Z))"
                   r"((?:\s*<!-- figures:.*?-->)*)", re.DOTALL | re.MULTILINE)  # fmt: skip
OPERATIONS = {"*": operator.mul, "/": operator.truediv, "-": operator.sub}


class Figure(NamedTuple):
    """A number as written, its unit or "", and the factors that may convert it to a file's unit."""

    line: int
    number: str
    unit: str
    factors: tuple[float, ...]

    def agrees(self, value: float) -> bool:
        """Return whether a value rounded to this number's digits equals it. +12 % is also a ratio of 1.12."""
        half = 0.5000001 * 10.0 ** -len(self.number.partition(".")[2])
        shifts = (0, 1) if self.unit == "%" and self.number[0] in "+-−" else (0,)
        mine = as_number(self.number)
        return any(abs(value - shift - mine * by) <= half * by for by in self.factors for shift in shifts)


def as_number(text: str) -> float:
    """Return the number of a text such as −1,024.5."""
    return float(text.replace(",", "").replace("−", "-"))


def figures_of(text: str, line: int, code: bool, commented: bool) -> list[Figure]:
    """Return the figures of a block that begins at a line of its page."""
    text = text if code else MASKED.sub(lambda found: re.sub(r"\S", "`", found[0]), text)
    found = []
    for numbers in LIST.finditer(text):
        several = list(re.finditer(NUMBER, text[: numbers.end(1)]))
        last = several[-1][0]
        for each in several:
            same_kind = ("." in each[0], "," in each[0]) == ("." in last, "," in last)  # "1,024 and 2.5 times" differ
            if each.start() >= numbers.start() and same_kind:
                found.append((each, numbers[2], (UNITS[numbers[2]],)))
    table = text.lstrip().startswith("|")
    if not code and (table or found or commented):
        seen = {each.start() for each, *_ in found}
        header = {UNITS[unit] for unit in re.findall(rf"[\s(]({UNIT})(?=[\s,):|])", text.partition("\n")[0])}
        factors = tuple(header | {1, 0.01, 1e9} if table else {1} | {by for *_, (by,) in found})
        for each in re.finditer(NUMBER, text):
            if "." in each[0] and each.start() not in seen and not VERSION.search(text[: each.start()]):
                found.append((each, "", factors))
    return [Figure(line + text.count("\n", 0, each.start()), each[0], *rest) for each, *rest in found]


def numbers(tree: object, path: str = "") -> list[tuple[str, float]]:
    """Return all numbers of a tree of dicts, lists and texts with their paths."""
    if isinstance(tree, dict):
        return [each for key, branch in tree.items() for each in numbers(branch, f"{path}.{key}".lstrip("."))]
    if isinstance(tree, list):
        found = []
        for place, branch in enumerate(tree):
            names = [branch.get(label) for label in ("rung", "name", "options")] if isinstance(branch, dict) else []
            found += numbers(branch, f"{path}.{' '.join(filter(None, names)) or place}")
        return found
    if isinstance(tree, str):
        units = {"GB": 1e9, "%": 0.01, "min": 60} | {each[2]: UNITS[each[2]] for each in LIST.finditer(tree)}
        found = re.findall(NUMBER, tree)  # a text's columns have their units in its header
        return [(path, as_number(each) * factor) for each in found for factor in {1, *units.values()}]
    return [(path, tree * (1e9 if path.endswith(".GB") else 1))] if isinstance(tree, int | float) else []


@cache
def read(path: Path) -> list[tuple[str, float]]:
    """Return the numbers of a JSON file, of a text, or of every run.json below a folder."""
    if path.is_dir():
        runs = sorted(path.rglob("run.json"))
        return [each for run in runs for each in numbers(json.loads(run.read_text(encoding="utf-8")),
                                                         ".".join(run.parent.relative_to(path).parts))]  # fmt: skip
    text = path.read_text(encoding="utf-8")
    return numbers(json.loads(text) if path.suffix == ".json" else text)


@cache
def select(path: Path, key: str) -> list[float]:
    """Return the numbers that a key names.

    Raises:
        ValueError: The key names no number, or a computation has more than one number on a side.
    """
    if key.startswith("="):
        first, sign, second = re.split(r" ([*/-]) ", key[1:], maxsplit=1)
        sides = [set(select(path, side)[:1] if "+" in side else select(path, side)) for side in (first, second)]
        if [len(side) for side in sides] != [1, 1]:
            raise ValueError(f"has {len(sides[0])} and {len(sides[1])} numbers for {key}")
        return [OPERATIONS[sign](*(side.pop() for side in sides))]
    pattern = re.compile(re.escape(key).replace(r"\*", ".*").replace(r"\+\.", r"([^.]+)\.") + r"(?:\..*)?")
    groups = defaultdict(list)
    for name, value in read(path):
        if found := pattern.fullmatch(name):
            repeats = "+" in key.split(".")
            groups[name.replace(f".{found[1]}.", ".+.", 1) if repeats else len(groups)].append(value)
    if not groups:
        raise ValueError(f"has no {key}")
    return [each for group in groups.values() for each in (mean(group), *([stdev(group)] if len(group) > 1 else []))]


def covered(figures: list[Figure], comment: str, results: Path) -> list[Figure]:
    """Return the figures of a block that a comment is the source of.

    Raises:
        ValueError: The comment names something that does not exist, or no figure of the block.
        OSError: The file cannot be read.
    """
    if found := re.fullmatch(r"(published|computed|unfiled)(?: (?!\s)(.+?))?(?:: (.+))?", comment):
        kind, items, reason = found.groups()
        if kind != "unfiled" and not (reason and (items if kind == "computed" else "https://" in reason)):
            raise ValueError(f"{kind} needs the figures and, after a colon, the source or the reason")
        names = re.split(r",\s+", items) if items else [""]
        groups = [[each for each in figures if not name or name in (f"{each.number} {each.unit}".strip(), each.number,
                                                                    each.unit)] for name in names]  # fmt: skip
    else:
        file, *names = shlex.split(comment)
        names = names or ["*"]
        groups = [[each for each in figures if any(map(each.agrees, select(results / file, key)))] for key in names]
    for name, group in zip(names, groups, strict=True):
        if not group:
            raise ValueError(f"no figure of the block above is {name}".strip())
    return [each for group in groups for each in group]


def check(page: str, name: str, results: Path = RESULTS) -> tuple[list[str], int]:
    """Return one line for each error of a page, and the number of its figures."""
    page = GENERATED.sub(lambda found: "\n" * found[0].count("\n"), page)
    errors, count = [], 0
    for block in BLOCK.finditer(page):
        line = page.count("\n", 0, block.start()) + 1
        body, comments = (
            block[0][: block.start(2) - block.start()],
            re.findall(r"figures:\s*(.*?)\s*-->", block[2], re.S),
        )
        figures = figures_of(body, line, bool(block[1]), bool(comments))
        count += len(figures)
        filed = set()
        for comment in comments:
            try:
                filed.update(covered(figures, " ".join(comment.split()), results))
            except (ValueError, OSError) as error:
                errors.append(f"{name}:{line}: {' '.join(comment.split())}: {error}")
        errors += [f"{name}:{each.line}: {each.number} {each.unit}: not in {comments or 'a file: name one'}"
                   for each in dict.fromkeys(figures) if each not in filed]  # fmt: skip
    return errors, count


def main() -> int:
    """Check the pages, print each error in a line, and return the exit status."""
    pages = [Path(page) for page in sys.argv[1:]] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [check(page.read_text(encoding="utf-8"), str(page)) for page in pages]
    errors = [error for each, _ in found for error in each]
    print(*errors, f"{sum(count for _, count in found)} figures, {len(errors)} errors", sep="\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
