"""Turn a plain script into a notebook: its docstring, then a cell for each section and function."""

import ast
import json
import re

from fabric_ladder.errors import UserError

METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "toc_visible": True},
    "kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"},
    "language_info": {"name": "python"},
}


def notebook(script: str) -> str:
    """Return the text of a script's notebook (nbformat 4.5), with a text cell before each code cell.

    Raises:
        UserError: The script does not parse, or has no docstring.
    """
    try:
        tree = ast.parse(script)
    except SyntaxError as error:
        raise UserError(f"line {error.lineno} is not Python ({error.msg})") from error
    docstring = ast.get_docstring(tree)
    if not docstring:
        raise UserError("the script has no docstring; a notebook starts with it")
    title, _, text = docstring.partition("\n")
    cells = [_cell("markdown", f"# {title}\n{text}")]
    for heading, code in sections(script.splitlines()[tree.body[0].end_lineno :]):
        if code:
            cells.append(_cell("markdown", f"## {heading}"))
            cells.append(_cell("code", code) | {"execution_count": None, "outputs": []})
    for number, cell in enumerate(cells):
        cell["id"] = f"cell-{number}"
    document = {"nbformat": 4, "nbformat_minor": 5, "metadata": METADATA, "cells": cells}
    return json.dumps(document, ensure_ascii=False, indent=1) + "\n"


def sections(lines: list[str]) -> list[tuple[str, str]]:
    """Return heading and code of each section.

    A section starts at a top-level `def` or `class`, at `if __name__ == "__main__":` and at a `### Title` line. Code
    under `if __name__` loses its indentation, since a notebook is always `__main__`.
    """
    found = [("Imports and settings", [])]
    guarded = False
    decorated = False
    for line in lines:
        if line.startswith("if __name__"):
            guarded = True
            found.append(("Run", []))
            continue
        if guarded:
            line = line.removeprefix("    ")
        definition = re.match(r"(?:def|class) (\w+)", line)
        if title := re.match(r"### (.*)", line):
            found.append((title[1], []))
            continue
        if not guarded and not decorated and (definition or line.startswith("@")):
            found.append(("", []))
        if definition and not found[-1][0]:
            found[-1] = (f"`{definition[1]}`", found[-1][1])
        decorated = line.startswith("@")
        found[-1][1].append(line)
    return [(heading, "\n".join(code).strip("\n")) for heading, code in found]


def _cell(kind: str, source: str) -> dict:
    return {"cell_type": kind, "metadata": {}, "source": source.strip("\n").splitlines(keepends=True)}
