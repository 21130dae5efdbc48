"""Run the rungs and scripts by short names in any folder: the command `fabric-ladder`.

`fabric-ladder run 2` runs src/2_grad_accum.py, and `fabric-ladder doctor` runs scripts/doctor.py. The options are the
same.
"""

import ast
import runpy
import sys

from fabric_ladder.errors import UserError, show_errors
from fabric_ladder.places import SCRIPTS
from fabric_ladder.rungs import choose_rungs

COMMANDS = {
    "plan": "plan_memory",
    "ladder": "run_ladder",
    "compare": "compare_runs",
    "generate": "generate",
    "predict": "predict",
    "export": "export_model",
    "doctor": "doctor",
}


def main() -> None:
    """Run the rung or the script that the command line names, in this process."""
    show_errors()
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print_help()
        return
    if name in COMMANDS:
        path = SCRIPTS / f"{COMMANDS[name]}.py"
    elif name == "run" and rest and not rest[0].startswith("-"):
        [path] = choose_rungs([rest.pop(0)])
    else:
        raise UserError(f"give a command: run RUNG, {', '.join(COMMANDS)} (see --help)")
    sys.argv = [str(path), *rest]
    runpy.run_path(str(path), run_name="__main__")


def print_help() -> None:
    """Print all commands with the first lines of their scripts."""
    print("usage: fabric-ladder COMMAND [OPTIONS]\n")
    print("  run RUNG  Run a rung by its number or name, e.g. `run 2`.")
    for name, script in COMMANDS.items():
        doc = ast.get_docstring(ast.parse((SCRIPTS / f"{script}.py").read_text(encoding="utf-8")))
        print(f"  {name:<8}  {doc.splitlines()[0]}")
    print("\nOptions of a command: fabric-ladder COMMAND --help")
