"""Check that every figure in the README and docs/ occurs in a file of benchmarks/results/.

    python benchmarks/check_figures.py [PAGE …]        default: README.md and all pages of docs/

A figure is a number with a unit, or with decimals in a table or a quoted block. A page's file in benchmarks/figures/
quotes words that the page has once, and lists the sources of their paragraph, list item, table or block of code:

    A step of Adam reads and writes:
      - against_peers.json minilm.medians bloom.ratios     a file or a folder of runs, and parts of it
      - against_peers.json "=minilm.a / bloom.b"           a quotient, difference or product of two parts
      - published 26.84 GB, 18.21: https://…               measured by others; without figures: all of them
      - computed 24 GB: the size of a GPU                  a condition, a bound or arithmetic
      - unfiled 92.7 %                                     in no file: old entries of the journal

A part is a path of keys, joined by dots; `*` matches any text. `+` as a key compares the mean and the standard
deviation over its values. A figure agrees with a number that equals it in some unit, rounded to the figure's digits.
"""

import json
import operator
import re
import shlex
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import mean, stdev

import yaml

ROOT = Path(__file__).resolve().parents[1]
FACTORS = (1, 0.01, 1e-3, 1e3, 1e6, 1e9, 60, 3600)  # %, ms, kB, MB, GB, minutes, hours
UNIT = r"(?:%|points|x|times|GB/s|GB|GiB|MB|kB|bytes|samples/s|tokens/s|hours|minutes|min|seconds|ms|s|M)"
NUMBER = r"(?<![\w.,/:^+−-])[-+−]?\d+(?:,\d{3})*(?:\.\d+)?(?![\w-]|[.,:/]\d)"
FIGURE = re.compile(rf"({NUMBER})(?:\s*({UNIT})(?![\w/]|(?<=x)\s?\d))?")  # "4 x 512" is a shape
VERSION = re.compile(r"(?:capability|CUDA|DeepSpeed|Llama|Python|PyTorch|torch|torchao|transformers|PCIe)\s\(?$")
GENERATED = re.compile(r"<!-- (\w+):\w+\b[^\n]* -->.*?<!-- /\1 -->", re.DOTALL)  # scripts write these tables
MASKED = re.compile(r"`[^`\n]*`|\]\([^)\n]*\)")
SHARED = re.compile(r"memory[:*].*second")  # the harvest measures memory of several runs at the same time
TEXT = r"(?:^(?!#|<!--|```)[^\n]*\S[^\n]*$\n?)+?(?=^ *(?:[-*]|\d+\.) |^\s*$|^#|^<!--|^```|\Z)"
BLOCK = re.compile(rf"```[^\n]*\n.*?^```|{TEXT}", re.DOTALL | re.MULTILINE)
OPERATIONS = {"*": operator.mul, "/": operator.truediv, "-": operator.sub}


def as_number(text: str) -> float:
    """Return the number of a text such as −1,024.5."""
    return float(text.replace(",", "").replace("−", "-"))


def agrees(figure: str, value: float) -> bool:
    """Return whether a value equals a figure such as 8.95 GB when rounded. +12 % is also a ratio of 1.12."""
    written = figure.split()[0]
    half = 0.5000001 * 10.0 ** -len(written.partition(".")[2])
    values = (value, value - 1) if written[0] in "+-−" else (value,)
    return any(abs(each - as_number(written) * by) <= half * by for by in FACTORS for each in values)


def figures_of(block: str, quoted: bool) -> set[str]:
    """Return the figures of a block, each with its unit."""
    is_code = block.startswith("```")
    text = block if is_code else MASKED.sub("`", block)
    decimals_count = not is_code and (quoted or text.lstrip().startswith("|"))
    return {
        f"{found[1]} {found[2] or ''}".strip()
        for found in FIGURE.finditer(text)
        if found[2] or (decimals_count and "." in found[1] and not VERSION.search(text[: found.start()]))
    }


def flatten(tree: object, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield all numbers of a JSON tree with their paths. Entries of a list have a rung's name or a number."""
    if isinstance(tree, dict):
        for key, branch in tree.items():
            yield from flatten(branch, f"{path}.{key}".lstrip("."))
    elif isinstance(tree, list):
        for number, branch in enumerate(tree):
            is_entry = isinstance(branch, dict) and branch.keys() >= {"rung", "options"}
            name = f"{branch['rung']} {branch['options']}".strip() if is_entry else number
            yield from flatten(branch, f"{path}.{name}")
    elif isinstance(tree, str):
        yield from ((path, as_number(number)) for number in re.findall(NUMBER, tree))
    elif isinstance(tree, int | float):
        yield path, tree


@cache
def read(path: Path) -> list[tuple[str, float]]:
    """Return the numbers of a JSON file, of a text, or of every run.json below a folder."""
    if path.is_dir():
        runs = {".".join(run.parent.relative_to(path).parts): run for run in sorted(path.rglob("run.json"))}
        return list(flatten({name: json.loads(run.read_text(encoding="utf-8")) for name, run in runs.items()}))
    text = path.read_text(encoding="utf-8")
    return list(flatten(json.loads(text) if path.suffix == ".json" else text))


@cache
def select(path: Path, part: str) -> list[float]:
    """Return the numbers of a part of a file, or the result that the part computes."""
    if part.startswith("="):
        first, sign, second = re.split(r" ([*/-]) ", part[1:], maxsplit=1)
        return [OPERATIONS[sign](select(path, first)[0], select(path, second)[0])]
    pattern = re.compile(re.escape(part).replace(r"\*", ".*").replace(r"\+\.", r"([^.]+)\.") + r"(?:\..*)?")
    repeats = defaultdict(list)
    for name, value in read(path):
        if found := pattern.fullmatch(name):
            repeats[name.replace(f".{found[1]}.", ".+.", 1) if pattern.groups else len(repeats)].append(value)
    if not repeats:
        raise ValueError(f"{path.name} has no {part}")
    return [each for values in repeats.values() for each in (mean(values), *([stdev(values)] if values[1:] else []))]


def found_in(source: str, figures: set[str], results: Path) -> dict[str, set[str]]:
    """Return the figures that come from each part that a source names."""
    if found := re.match(r"(published|computed|unfiled)(?: ([^:]+?))?(: |$)", source):
        names = re.split(r",\s+", found[2] or "")
        return {name: {figure for figure in figures if name in ("", figure, *figure.split())} for name in names}
    file, *parts = shlex.split(source)
    if timed := [part for part in parts if SHARED.search(part)]:
        raise ValueError(f"{timed[0]} is a time of runs that shared a GPU, so it means nothing")
    numbers = {part: select(results / file, part) for part in parts or ["*"]}
    return {part: {each for each in figures if any(agrees(each, n) for n in numbers[part])} for part in numbers}


def check(page: str, root: Path = ROOT) -> tuple[list[str], int]:
    """Return one line for each error of a page, and the number of its figures."""
    text = GENERATED.sub(lambda found: "\n" * found[0].count("\n"), (root / page).read_text(encoding="utf-8"))
    file = f"benchmarks/figures/{page.removeprefix('docs/').removesuffix('.md')}.yaml"
    quotes = yaml.load((root / file).read_text(encoding="utf-8"), yaml.BaseLoader) if (root / file).exists() else {}
    blocks, sources, errors, count = list(BLOCK.finditer(text)), defaultdict(list), [], 0
    for quote, named in quotes.items():
        places = [block.start() for block in blocks for _ in range(" ".join(block[0].split()).count(quote))]
        if len(places) != 1:
            errors.append(f'{page}: "{quote}" occurs {len(places)} times, not once: change the quote in {file}')
        for start in places:  # YAML reads "computed 24 GB: a GPU" as a mapping
            sources[start] += [": ".join(*each.items()) if isinstance(each, dict) else each for each in named]
    for block in [] if errors else blocks:
        place = f"{page}:{text.count(chr(10), 0, block.start()) + 1}"
        figures = missing = figures_of(block[0], bool(sources[block.start()]))
        count += len(figures)
        for source in sources[block.start()]:
            try:
                found = found_in(source, figures, root / "benchmarks" / "results")
            except (ValueError, OSError) as error:
                errors.append(f"{place}: {source} in {file}: {error}")
                continue
            missing = missing.difference(*found.values())
            errors += [f"{place}: no figure is {part}, of {source} in {file}" for part in found if not found[part]]
        errors += [f"{place}: {figure} has no source in {file}" for figure in sorted(missing)]
    return errors, count


def main() -> int:
    """Check the pages, print each error in a line, and return the exit status."""
    pages = [*map(Path, sys.argv[1:])] or [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    found = [check(page.resolve().relative_to(ROOT).as_posix()) for page in pages]
    errors = [error for each, _ in found for error in each]
    print(*errors, f"{sum(count for _, count in found)} figures, {len(errors)} errors", sep="\n")
    return int(bool(errors))


if __name__ == "__main__":
    sys.exit(main())
