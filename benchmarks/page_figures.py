"""The figures of a page of Markdown, block by block, with the comments that name their sources.

A figure is a number with a unit, such as %, GB, samples/s, minutes or x; and in a table, or beside such a number, one
with decimals. In a column of a table whose header names a unit, whole numbers are figures too.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

UNITS = {  # in bytes, seconds, shares
    "%": 0.01, "points": 0.01, "x": 1, "times": 1, "GB/s": 1e9, "GB": 1e9, "GiB": 2**30, "MB": 1e6, "kB": 1e3,
    "bytes": 1, "samples/s": 1, "tokens/s": 1, "hours": 3600, "minutes": 60, "min": 60, "seconds": 1, "ms": 1e-3,
    "s": 1, "M": 1e6,
}  # fmt: skip
UNKNOWN = (1, 0.01, 1e9)  # what a number without a unit may be multiplied by
UNIT = rf"(?:{'|'.join(UNITS)})(?![\w/]|(?<=x)\s?\d)"  # "4 x 512" is no ratio
WHOLE = r"(?<![\w.,/:^+−-])[-+−]?\d+(?:,\d{3})*"
END = r"(?![\w-]|[.,:/]\d)"
NUMBER = rf"{WHOLE}(?:\.\d+)?{END}"
SPREAD = rf"(?:\s+±\s+{NUMBER})?"
AND = r"(?:,|\s(?:and|to|or|of))\s+"
WITH_UNIT = re.compile(rf"({NUMBER}{SPREAD}(?:{AND}{NUMBER}{SPREAD})*)(?:\s+|(?=%))({UNIT})")
WITH_SPREAD = re.compile(rf"({NUMBER})(?:\s+±\s+({NUMBER}))?")
DECIMAL = rf"{WHOLE}\.\d+{END}"
ONLY_NUMBERS = re.compile(rf"\s*{NUMBER}{SPREAD}(?:,\s{NUMBER}{SPREAD})*\s*")
NO_FIGURE = re.compile(
    r"(?:capability|CUDA|DeepSpeed|Llama|Python|PyTorch|torch|torchao|transformers|PCIe)\s\(?$"
)  # before it
MASKED = re.compile(r"`[^`]*`|\]\([^)]*\)")
MARK = re.compile(r"<!-- \w+:\w+ -->")
IN_HEADER = re.compile(rf"(?:^|[\s(])({UNIT})(?=$|[\s,):])")


class Figure(NamedTuple):
    """A number as it is written, its deviation, its unit, and what it may be multiplied by for a file's unit."""

    line: int
    number: str
    spread: str
    unit: str
    factors: tuple[float, ...]

    @property
    def text(self) -> str:
        """How messages and comments name it."""
        return f"{self.number}{self.spread and ' ± '}{self.spread} {self.unit}".strip()


class Block(NamedTuple):
    """The lines of a paragraph, list, table or block of code, from number `start` on, and the comments after them."""

    start: int
    lines: list[str]
    code: bool
    comments: list[tuple[int, str]]


def blocks_of(page: str) -> Iterator[Block]:
    """Cut a page into blocks; headings, and what scripts write between marks such as gpu_figures.py's, are in none."""
    block, inside = Block(0, [], False, []), ""  # for comments before all else; in what the line stands
    for number, line in enumerate(page.splitlines(), 1):
        if inside in ("code", "mark", "comment"):
            if inside == "code" and not line.startswith("```"):
                block.lines.append(line)
            if inside == "comment":
                block.comments[-1] = (block.comments[-1][0], f"{block.comments[-1][1]} {line.strip()}")
            if {"code": line.startswith("```"), "mark": line.startswith("<!-- /"), "comment": "-->" in line}[inside]:
                inside = ""
        elif line.lstrip().startswith("<!-- figures:"):
            block.comments.append((number, line.strip()))
            inside = "" if "-->" in line else "comment"
        elif line.startswith("```"):
            yield block
            block, inside = Block(number + 1, [], True, []), "code"
        elif not line.strip() or line.startswith(("#", "<!--")):
            inside = "mark" if MARK.match(line) else ""
        elif inside == "text":
            block.lines.append(line)
        else:
            yield block
            block, inside = Block(number, [line], False, []), "text"
    yield block


def figures_of(block: Block) -> list[Figure]:
    """Return the figures of a block."""
    text = "\n".join(block.lines)
    if block.code:
        return list(united(text, block.start))
    text = MASKED.sub(lambda found: re.sub(r"\S", "`", found[0]), text)
    if not text.startswith("|"):
        figures = list(united(text, block.start))
        factors = tuple({figure.factors[0] for figure in figures} | {1})
        return figures + list(bare(without_units(text), block.start, "", factors) if figures or block.comments else [])
    rows = [line.strip().strip("|").split("|") for line in text.split("\n")]
    units = [IN_HEADER.findall(cell) for cell in rows[0]]
    figures = []
    for line, row in enumerate(rows, block.start):
        for column, cell in enumerate(row):
            figures += united(cell, line)
            if column and line > block.start:
                own = units[column] if column < len(units) else []
                factors = tuple(UNITS[unit] for unit in own) or UNKNOWN
                integers = own and ONLY_NUMBERS.fullmatch(cell)
                figures += bare(without_units(cell), line, own[0] if own else "", factors, integers)
    return figures


def lists(text: str) -> Iterator[tuple[list[re.Match], str]]:
    """Yield the numbers that share a unit, and the unit; of "1,024 and 2.5 times" the last alone, as they differ."""
    for found in WITH_UNIT.finditer(text):
        numbers = list(WITH_SPREAD.finditer(text, found.start(1), found.end(1)))
        kinds = [("." in each[1], "," in each[1]) for each in numbers]
        yield [each for each, kind in zip(numbers, kinds, strict=True) if kind == kinds[-1]], found[2]


def united(text: str, line: int) -> Iterator[Figure]:
    """Yield the numbers that have a unit, or are in a list that ends with one; `line` is the text's first."""
    for numbers, unit in lists(text):
        for number in numbers:
            at = line + text.count("\n", 0, number.start())
            yield Figure(at, number[1], number[2] or "", unit, (UNITS[unit],))


def without_units(text: str) -> str:
    """Return a text without the numbers of `united`."""
    for start, end in [each.span() for numbers, _ in lists(text) for each in numbers]:
        text = text[:start] + re.sub(r"\S", "`", text[start:end]) + text[end:]
    return text


def bare(text: str, line: int, unit: str, factors: tuple[float, ...], integers: object = None) -> Iterator[Figure]:
    """Yield the numbers without a unit of their own: those with decimals, or all."""
    for found in re.finditer(rf"({NUMBER if integers else DECIMAL})(?:\s+±\s+({NUMBER}))?", text):
        if not NO_FIGURE.search(text[: found.start()]):
            at = line + text.count("\n", 0, found.start())
            yield Figure(at, found[1], found[2] or "", unit, factors)


def as_number(text: str) -> float:
    """Return the number that a text says."""
    return float(text.replace(",", "").replace("−", "-"))
