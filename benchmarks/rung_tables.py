"""Write the tables of all rungs from the ladder's rows: the README's table and graph, docs/index.md, mkdocs.yml.

    python benchmarks/rung_tables.py            writes them; `make tables` does it with all other generated tables
    python benchmarks/rung_tables.py --check    lists stale files and writes nothing; exit status 1 if there are any

Names, groups and titles are those of `ladder.py`, parents those of the scripts' docstrings. Memory and accuracy are
those of evidence_tables.py. A rung without an accuracy of its own has that of the next rung below it.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import common  # first import: it makes the project importable
from evidence_tables import mean as with_spread
from evidence_tables import most_seeds, own, predicted

from fabric_ladder.errors import UserError, show_errors
from fabric_ladder.ladder import Row, row_of
from fabric_ladder.rungs import RUNGS, parent

HEADINGS = {  # groups of rows, and their headings in the README's table
    "base": None,
    "activations": "Saves activations",
    "gradients": "Saves gradients",
    "optimizer state": "Saves optimizer state",
    "weights": "Fewer bits, or fewer trained weights",
    "several GPUs": "Uses several GPUs",
    "time": "Saves time",
}
SITE = common.ROOT / "mkdocs.yml"
PAGES = common.ROOT / "docs" / "techniques"
NAV = re.compile(r"(?<=\n  - Techniques:\n).*?(?=      - combinations\.md\n)", re.DOTALL)


def grouped() -> Iterator[tuple[str, list[Row]]]:
    """Yield each group with its rows, in the order of the rungs' numbers."""
    rows = [row_of(rung.stem) for rung in RUNGS]
    if strange := [row.rung for row in rows if row.group not in HEADINGS]:
        raise UserError(f"the group of {', '.join(strange)} in ladder.py must be one of {', '.join(HEADINGS)}")
    for group in HEADINGS:
        yield group, [row for row in rows if row.group == group]


def number(rung: Path | str) -> str:
    """Return the number of a rung."""
    return Path(rung).stem.split("_")[0]


def accuracy(rung: Path) -> str:
    """Return the accuracy on 2,000 reviews at the rung's own learning rate, or the next rung below that has one."""
    if row := own("imdb_2000").get(rung.stem):
        return with_spread(most_seeds("imdb_2000", row), "test_accuracy")
    below = parent(rung)
    while below.stem not in own("imdb_2000"):
        below = parent(below)
    return f"as {number(below)}"


def ladder() -> list[str]:
    """Return the README's table: what each rung does, its memory and its accuracy."""
    rows, paths = [], {rung.stem: rung for rung in RUNGS}
    for group, members in grouped():
        rows += [[f"**{HEADINGS[group]}**", "", "", ""]] if HEADINGS[group] else []
        for name, title in ((row.rung, row.title) for row in members):
            memory, remark = predicted(name)
            links = f"[{name}](src/{name}.py)", f"[{title}](docs/techniques/{name}.md)"
            rows.append([*links, f"{memory:.2f}{remark}", accuracy(paths[name])])
    table = common.markdown_table(["rung", "technique", "BLOOM-560m, GB", "MiniLM, accuracy, %"], rows)
    return [table[0], "|---|---|---:|---:|", *table[2:]]


def graph() -> list[str]:
    """Return the README's graph: an arrow from each rung to the rungs that build on it."""
    lines, left = ["```mermaid", "graph LR", f"  1[{RUNGS[0].stem.replace('_', ' ')}]"], [RUNGS[0]]
    while left:
        rung = left.pop(0)
        above = [each for each in RUNGS if parent(each) == rung]
        left = above + left
        names = " & ".join(f"{number(each)}[{each.stem.replace('_', ' ')}]" for each in above)
        lines += [f"  {number(rung)} --> {names}"] if above else []
    return [*lines, "```"]


def techniques() -> list[str]:
    """Return the table of docs/index.md."""
    rows = [["[0_pytorch](techniques/0_pytorch.md)", "base", "rung 1 without Fabric, as a plain script only"]]
    for rung in RUNGS:
        row = row_of(rung.stem)
        rows.append([f"[{row.rung}](techniques/{row.rung}.md)", row.group, row.title])
    return ["| rung | group | technique |", "|---|---|---|", *(f"| {' | '.join(row)} |" for row in rows)]


def navigation() -> str:
    """Return the pages of techniques for mkdocs.yml: the groups, and the options of every rung."""
    found = {group[0].upper() + group[1:]: [row.rung for row in rows] for group, rows in grouped()}
    found["Base"].insert(0, "0_pytorch")
    found["Options of every rung"] = sorted(page.stem for page in PAGES.glob("[a-z]*.md"))
    lines = []
    for group, names in found.items():
        lines += [f"      - {group}:", *(f"          - techniques/{name}.md" for name in names)]
    return "\n".join(lines) + "\n"


BLOCKS = {block.__name__: block for block in (ladder, graph, techniques)}


def fill_pages(check: bool = False) -> list[Path]:
    """Write the tables and the navigation; return the changed files. `check`: write nothing."""
    changed = common.fill_pages("rungs", lambda name: BLOCKS[name](), check)
    return [*changed, SITE] if common.update(SITE, lambda text: NAV.sub(navigation(), text), check) else changed


def main() -> int:
    """Write, or with `--check` compare; return the exit status."""
    return common.fill_or_check(__doc__, fill_pages, "make tables")


if __name__ == "__main__":
    show_errors()
    sys.exit(main())
