"""Write the skeleton of a new rung into this checkout, and print what is left to fill in.

    make new-rung NUMBER=30 NAME=bitfit PARENT=2_grad_accum
    python scripts/new_rung.py 30 bitfit 2_grad_accum

CONTRIBUTING.md explains each file.
"""

import argparse
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "src" / "fabric_ladder"
MECHANISM = '''"""TODO: the technique, and its source."""

from torch import nn

from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique


class {kind}(Technique):
    """TODO: what it changes."""

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        """Return the model with the technique applied."""
        return model
'''
SETTING = """    {name}: bool = optimization_setting(
        False,
        "TODO: the help text.",
        role=TECHNIQUE,
        changes_memory=True,
    )
"""
ROW = """    Row(
        "{name}",
        "{rung}",
        group="TODO: what it saves",
        title="TODO: its words in tables",
        mechanism="{name}.{kind}",
        plans=ALONE_OR_CHECKPOINTED,
        tries=(IN_16_BITS,),
    ),
"""
PAGE = """# {number} · {title}

<!-- rungs:{rung} -->
<!-- /rungs -->

## Problem

## Idea

## In code

## Run it

## Memory

TODO: predicted; [on a GPU](../gpu.md)

## Price and limits

## When to use it

## What stays the same

## Sources
"""
LEFT = """Left to do:
 1. src/fabric_ladder/techniques/{name}.py: the mechanism, and its memory where a rehearsal does not show it
 2. src/fabric_ladder/ladder.py: the place of the row, conflicts, plans, what to try next
 3. src/fabric_ladder/settings.py: help, bounds and role of --{name}
 4. src/{rung}.py and src/plain/{rung}.py: docstrings, and in the plain script the technique, with "# NEW in {number}"
 5. tests/rungs/test_rungs.py: the rung in CASES, if it needs options or a bound of its own, and its optimizer
 6. tests/techniques/test_{name}.py: what the technique must not change
 7. docs/techniques/{rung}.md: the page, with a question and the planner's folded answer;
    benchmarks/figures/techniques/{rung}.yaml: the sources of its figures
 8. notebooks/texts.yaml: problem, idea and code; then make notebooks
 9. docs/pictures/draw.py: its picture
10. benchmarks/memory_ladder.csv: its entry, and one with `--attention eager`; python benchmarks/memory_ladder.py --new
    predicts both, and the peak of the second is PREDICTED in the plain script
11. benchmarks/evidence.py: its accuracy; make combinations; make tables
"""


def insert(path: Path, text: str, before: str) -> None:
    """Insert a text before the first place of another one."""
    content = path.read_text(encoding="utf-8")
    if before not in content:
        raise SystemExit(f"error: {path} has no {before!r} any more: write these lines by hand:\n{text}")
    path.write_text(content.replace(before, text + before, 1), encoding="utf-8")


def write_rung(number: int, name: str, parent: str) -> str:
    """Write all files of the rung, and return the list of what is left."""
    rung = f"{number}_{name}"
    kind = "".join(word.capitalize() for word in name.split("_"))
    words = {"number": number, "name": name, "rung": rung, "kind": kind, "parent": parent}
    words["title"] = name.replace("_", " ").capitalize()
    (PACKAGE / "techniques" / f"{name}.py").write_text(MECHANISM.format_map(words), encoding="utf-8")
    insert(PACKAGE / "ladder.py", ROW.format_map(words), '    Row(\n        "lora",\n')
    insert(PACKAGE / "settings.py", SETTING.format_map(words), "    kahan_summation: bool")
    for folder in (ROOT / "src", ROOT / "src" / "plain"):
        text = (folder / f"{parent}.py").read_text(encoding="utf-8")
        text = re.sub(r"(?m) *# NEW.*$", "", text).replace(parent, rung)
        text = re.sub(r"Builds on \w+\.py", f"Builds on {parent}.py", text)
        text = re.sub(r"(PREDICTED = .*, )[\d.]+ ", r"\g<1>float('nan') ", text)  # not the parent's
        text = re.sub(r"In the package: .*", f"In the package: techniques/{name}.py: {kind}", text)
        (folder / f"{rung}.py").write_text(text, encoding="utf-8")
    insert(ROOT / "src" / f"{rung}.py", f"        {name}=True,  # NEW\n", "    )\n\n    ")
    page = ROOT / "docs" / "techniques" / f"{rung}.md"
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(PAGE.format_map(words), encoding="utf-8")
    return LEFT.format_map(words)


def main() -> None:
    """Read the three words and write the rung."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda text: sys.exit(print(f"error: {text}", file=sys.stderr) or 2)
    for name, text in {"number": "30", "name": "bitfit", "parent": "2_grad_accum"}.items():
        parser.add_argument(name, help=f"for example {text}")
    number, name, parent = vars(parser.parse_args()).values()
    taken = [path.stem for path in (ROOT / "src").glob(f"{number}_*.py")]
    problem = None
    if not number.isdecimal() or not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        problem = f"{number} {name}: give a number and a name in lower case, for example 30 bitfit"
    elif taken or (PACKAGE / "techniques" / f"{name}.py").exists():
        problem = f"{number}_{name} exists already: {', '.join(taken) or f'techniques/{name}.py'}"
    elif not (ROOT / "src" / f"{parent}.py").exists() or parent == "1_batch_size_1":  # without a list of settings
        problem = f"a rung cannot build on {parent}: name one of src/, from 2_grad_accum on"
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        raise SystemExit(2)
    print(write_rung(int(number), name, parent), end="")


if __name__ == "__main__":
    main()
