"""Tables of figures in pages, each between `<!-- KIND:NAME -->` and `<!-- /KIND -->`, by the script that knows them."""

import re
import sys
from collections.abc import Callable
from pathlib import Path

import common  # first of all: it makes the project importable without an installation

from fabric_ladder.environment import write_whole

README = common.ROOT / "README.md"
PAGES = [README, *sorted((common.ROOT / "docs").rglob("*.md"))]


def table(header: list[str], rows: list[list[str]]) -> list[str]:
    """Return the lines of a table, the first column to the left; none without rows."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return [f"| {' | '.join(cells)} |" for cells in lines] if rows else []


def block(kind: str) -> re.Pattern:
    """Return what matches the blocks of a kind: their opening mark, their name, their closing mark."""
    return re.compile(rf"(<!-- {kind}:(\w+) -->).*?(<!-- /{kind} -->)", re.DOTALL)


def fill(text: str, kind: str, make: Callable[[str], list[str]]) -> str:
    """Return a page whose blocks of a kind hold the lines that `make` returns for their names."""
    return block(kind).sub(lambda found: "\n".join([found[1], *make(found[2]), found[3]]), text)


def rewrite(page: Path, change: Callable[[str], str]) -> None:
    """Write a page anew where `change` makes another text of it, and say so on stderr."""
    before = page.read_text(encoding="utf-8")
    if (after := change(before)) != before:
        write_whole(page, after)
        print(f"filled {page.relative_to(common.ROOT)}", file=sys.stderr)
