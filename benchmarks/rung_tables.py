"""Write the tables of all rungs from the ladder's rows: README, docs/index.md, mkdocs.yml, and the top of their pages.

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
import stored
from evidence_tables import NONE, PLAIN, PREDICTED, best_row, change, most_seeds, predicted
from evidence_tables import mean as with_spread

from fabric_ladder.errors import UserError, show_errors
from fabric_ladder.ladder import Row, row_of
from fabric_ladder.places import SRC
from fabric_ladder.planning.gpus import card_memory
from fabric_ladder.planning.overhead import ANY_GPU
from fabric_ladder.rungs import RUNGS, parent
from fabric_ladder.techniques.memory import Peak

HEADINGS = {  # groups of rows, and their headings in the README's table
    "base": None,
    "activations": "Saves activations",
    "gradients": "Saves gradients",
    "optimizer state": "Saves optimizer state",
    "weights": "Fewer bits, or fewer trained weights",
    "several GPUs": "Uses several GPUs",
    "time": "Saves time",
}
MEASURED = {  # the rungs of the README's first table, and the options that the H100 measured
    "2_grad_accum": "", "4_mixed_precision": "", "5_low_precision": "", "7_grad_checkpointing": "",
    "13_lora": "--lora_targets attention", "14_qlora": "--lora_targets attention", "16_bf16_that_learns": "",
    "18_low_bit_optimizer": "",
}  # fmt: skip
CARDS, CARD_TASK = (8, 12, 16, 24, 32, 80), "instruction-tuning"
SITE = common.ROOT / "mkdocs.yml"
PAGES = common.ROOT / "docs" / "techniques"
NAV = re.compile(r"(?<=\n  - Techniques:\n).*?(?=      - techniques/options\.md\n)", re.DOTALL)


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
    """Return the accuracy on 2,000 reviews at the best learning rate, or the next rung below that has one."""
    name = f"imdb_2000{'_attention' if MEASURED.get(rung.stem) else ''}"
    if row := best_row(name, rung.stem):
        return with_spread(most_seeds("imdb_2000", row), "test_accuracy")
    below = parent(rung)
    while not best_row("imdb_2000", below.stem):
        below = parent(below)
    return f"as {number(below)}"


def on_h100(rung: str, options: str) -> dict | None:
    """Return the figures of BLOOM-560m's memory, or None if the H100 did not run the rung with these options."""
    entries = common.read_results(common.RESULTS / "gpu.json")["entries"]
    return entries.get(f"memory: bloom-560m, {rung} {options}".strip(), {}).get("figures")


def measured() -> list[str]:
    """Return the README's first table: peaks on an H100, their change, and the accuracy at the best learning rate."""
    rows = []
    for rung in (rung for rung in RUNGS if rung.stem in MEASURED):
        below = parent(rung)
        figures = [on_h100(each, MEASURED.get(each, "")) for each in (rung.stem, below.stem)]
        peak, before = (each["peak_memory_bytes"] / 1e9 for each in figures)
        to_parent = f"{change(peak, before)} ({number(below)})"
        rows.append([*_links(rung.stem), f"{peak:.2f}", to_parent, accuracy(rung)])
    return _table(["rung", "technique", "GB", "change from (rung)", "accuracy, %"], rows, 2)


def ladder() -> list[str]:
    """Return the README's second table: memory of all other rungs, measured where the H100 ran them, and accuracy."""
    rows, paths = [], {rung.stem: rung for rung in RUNGS}
    for group, members in grouped():
        others = [row.rung for row in members if row.rung not in MEASURED]
        rows += [[f"**{HEADINGS[group]}**", *[""] * 4]] if HEADINGS[group] and others else []
        for name in others:
            memory, remark = predicted(name)
            options, gpus, _ = PREDICTED.get(name, PLAIN)
            figures = on_h100(name, options) if gpus == 1 else None
            found = f"{figures['peak_memory_bytes'] / 1e9:.2f}" if figures else NONE
            rows.append([*_links(name), f"{memory:.2f}{remark}", found, accuracy(paths[name])])
    return _table(["rung", "technique", "predicted, GB", "measured, GB", "accuracy, %"], rows, 2)


def _links(rung: str) -> list[str]:
    """Return a rung's script, and its page and notebook."""
    page, notebook = f"docs/techniques/{rung}.md", f"notebooks/{rung}.ipynb"
    return [f"[{rung}](src/{rung}.py)", f"[{row_of(rung).title}]({page}) · [notebook]({notebook})"]


def _table(header: list[str], rows: list[list[str]], texts: int) -> list[str]:
    """Return a table whose first columns are texts, and the others numbers."""
    table = common.markdown_table(header, rows)
    return [table[0], f"|{'---|' * texts}{'---:|' * (len(header) - texts)}", *table[2:]]


def techniques() -> list[str]:
    """Return the table of docs/index.md: each group with its techniques."""
    rows = []
    for group, members in grouped():
        links = [f"[{row.rung}](techniques/{row.rung}.md): {row.title}" for row in members]
        rows.append([HEADINGS[group] or "The base", "<br>".join(links)])
    return _table(["", "rungs"], rows, 2)


def navigation() -> str:
    """Return the pages of techniques for mkdocs.yml, by group."""
    found = {group[0].upper() + group[1:]: [row.rung for row in rows] for group, rows in grouped()}
    found["Base"].insert(0, "0_pytorch")
    lines = []
    for group, names in found.items():
        lines += [f"      - {group}:", *(f"          - techniques/{name}.md" for name in names)]
    return "\n".join(lines) + "\n"


def places(name: str) -> list[str]:
    """Return the top of a rung's page, one line: its files, its code in the package, and its parent."""
    files, found = [f"[plain script](../../src/plain/{name}.py)"], []
    if name in (rung.stem for rung in RUNGS):
        files = [f"[Script](../../src/{name}.py)", *files, f"[notebook](../../notebooks/{name}.ipynb)"]
        code = re.search("In the package: (.*)", (SRC / f"{name}.py").read_text(encoding="utf-8"))[1]
        found = [f"in the package: [`{code}`](../../src/fabric_ladder/{code.partition(':')[0]})"]
        found += [f"builds on [{below.stem}]({below.stem}.md)"] if (below := parent(SRC / f"{name}.py")) else []
    line = " · ".join([*files, *found])
    return [line[0] + line[1].upper() + line[2:]]


def cards() -> list[str]:
    """Return the largest model of "Will it fit?" for each size of a card, by rungs whose losses ran on a GPU."""
    data, entries = stored.read(), common.read_results(common.RESULTS / "gpu.json")["entries"]
    models = {label: model["tasks"][CARD_TASK]["1024"]
              for label, model in data["models"].items() if CARD_TASK in model["tasks"]}  # fmt: skip
    largest_first = sorted(models, key=lambda label: models[label]["0"][0][0], reverse=True)
    kinds = ["all weights", "adapters", "adapters on 4-bit weights", "the same, streamed from CPU memory"]
    of_rung = {"14_qlora": kinds[2], "24_streamed_layers": kinds[3]}

    def answer(label: str, memory: int, kind: str) -> str | None:
        fitting = []
        for row, rung, facts in stored.on_one_gpu(data, models.values()):
            own = kinds[0] if facts["all"] else of_rung.get(rung, kinds[1])
            parts = (megabytes * 10**6 for megabytes in models[label][str(row)][0])
            high = ANY_GPU.bounds(Peak(*parts, host=0, phase="training"))[1]
            host = data["facts"][label][CARD_TASK]["host"][row][0] / 1e3
            ran = "figures" in entries.get(f"losses: {rung}", {})
            if ran and own == kind and high <= memory and host <= data["host_memory"]:
                name = rung.partition("_")[2].replace("_", " ").replace("lora", "LoRA").replace("q", "Q")
                said = f"{label}, [{name} ({number(rung)})](techniques/{rung}.md), {high / 1e9:.1f} GB"
                fitting.append((data["order"][CARD_TASK][0][0][row][0], high, said))
        return min(fitting)[2] if fitting else None

    rows = []
    for size in CARDS:
        memory = card_memory(str(size))
        found = [[answer(label, memory, kind) for label in largest_first] for kind in kinds]
        largest = [next(filter(None, answers), "–") for answers in found]
        rows.append([f"{size} GB ({memory / 1e9:.1f}{'; not a T4' * (size == 16)})", *largest])
    return _table(["card, as sold (10^9 bytes)", *kinds], rows, 5)


BLOCKS = {block.__name__: block for block in (measured, ladder, cards, techniques)}


def fill_pages(check: bool = False) -> list[Path]:
    """Write the tables and the navigation; return the changed files. `check`: write nothing."""
    changed = common.fill_pages("rungs", lambda name: BLOCKS[name]() if name in BLOCKS else places(name), check)
    return [*changed, SITE] if common.update(SITE, lambda text: NAV.sub(navigation(), text), check) else changed


def main() -> int:
    """Write, or with `--check` compare; return the exit status."""
    return common.fill_or_check(__doc__, fill_pages, "make tables")


if __name__ == "__main__":
    show_errors()
    sys.exit(main())
