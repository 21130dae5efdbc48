"""The numbered scripts, for the tools that run, check or copy them."""

import ast
import re
import runpy
import sys
from functools import cache
from pathlib import Path

from fabric_ladder.errors import Checked, UserError
from fabric_ladder.places import SRC
from fabric_ladder.settings import Settings

RUNGS = sorted(SRC.glob("[0-9]*.py"), key=lambda path: int(path.name.split("_")[0]))


def choose_rungs(names: list[str]) -> list[Path]:
    """Return the rungs of these numbers or names (2, 2_grad_accum, src/2_grad_accum.py), in the ladder's order.

    Raises:
        UserError: There is no such rung.
    """
    known = {name: path for path in RUNGS for name in (path.stem.split("_")[0], path.stem, path.name)}
    names = [Path(name.strip()).name for name in names]
    for name in names:
        if name not in known:
            raise UserError(f"there is no rung {name}: give numbers from 1 to {len(RUNGS)}, or names")
    return [path for path in RUNGS if path in {known[name] for name in names}]


def parent(rung: Path) -> Path | None:
    """Return the rung that a rung's docstring says it builds on, None for the first."""
    found = re.search(r"Builds on (\w+)\.py", ast.get_docstring(ast.parse(rung.read_text(encoding="utf-8"))))
    return SRC / f"{found[1]}.py" if found else None


@cache
def script_defaults(rung: str) -> dict:
    """Return what a rung, given by its name, passes to `parse_settings`."""
    tree = ast.parse((SRC / f"{rung}.py").read_text(encoding="utf-8"))
    call = next(
        node for node in ast.walk(tree) if isinstance(node, ast.Call) and ast.unparse(node.func) == "parse_settings"
    )
    return {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.keywords}


def check_rung(rung: Path, options: list[str]) -> Settings | str:
    """Return the settings with which a rung would run here, or in one line why it cannot.

    The rung itself is asked, by `--check_only true`, in this process, where the libraries are loaded already.
    """
    from fabric_ladder.advice import explain, show_errors  # needs torch, which finding the rungs does not

    given, sys.argv = sys.argv, [str(rung), *options, "--check_only", "true"]
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
        show_errors()  # the rung's own settings were named for its errors
    raise AssertionError(f"{rung} went on after its check")
