"""The numbered scripts, for tools that run or check them."""

import ast
import re
import runpy
import sys
from pathlib import Path

from fabric_ladder.errors import Checked, UserError
from fabric_ladder.places import SRC
from fabric_ladder.settings import Settings

RUNGS = sorted(SRC.glob("[0-9]*.py"), key=lambda path: int(path.name.split("_")[0]))


def choose_rungs(names: list[str]) -> list[Path]:
    """Return rungs in the order of the ladder, from numbers or names (2, 2_grad_accum, src/2_grad_accum.py).

    Raises:
        UserError: A name matches none of the rungs.
    """
    known = {name: path for path in RUNGS for name in (path.stem.split("_")[0], path.stem, path.name)}
    names = [Path(name.strip()).name for name in names]
    for name in names:
        if name not in known:
            raise UserError(f"there is no rung {name}: give numbers from 1 to {RUNGS[-1].stem.split('_')[0]}, or names")
    return [path for path in RUNGS if path in {known[name] for name in names}]


def parent(rung: Path) -> Path | None:
    """Return the rung that a rung's docstring names as its parent, None for the first."""
    found = re.search(r"Builds on (\w+)\.py", ast.get_docstring(ast.parse(rung.read_text(encoding="utf-8"))))
    return SRC / f"{found[1]}.py" if found else None


def check_rung(rung: Path, words: list[str]) -> Settings | str:
    """Return the settings of a rung on this machine, or one line with the reason why it cannot run here.

    This runs the rung with `--check_only` in this process, where the libraries are loaded already.
    """
    from fabric_ladder.techniques.advice import explain, explain_errors  # needs torch, which finding the rungs does not

    given, sys.argv = sys.argv, [str(rung), *words, "--check_only"]
    try:
        runpy.run_path(str(rung), run_name="__main__")
    except Checked as checked:
        return checked.settings
    except Exception as error:
        if line := explain(error):
            return " ".join(line.split())
        raise
    finally:
        sys.argv = given
        explain_errors()  # the rung has installed its own settings for errors
    raise AssertionError(f"{rung} went on after its check")
