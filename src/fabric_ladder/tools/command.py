"""Run the rungs and scripts by short names in any folder: the command `fabric-ladder`.

`fabric-ladder run 2` runs src/2_grad_accum.py, and `fabric-ladder doctor` runs scripts/doctor.py. The options are the
same.
"""

import argparse
import ast
import importlib.util
import runpy
import sys

from fabric_ladder.errors import UserError
from fabric_ladder.options import kinds_of, settings_parser
from fabric_ladder.places import SCRIPTS
from fabric_ladder.rungs import RUNGS, choose_rungs
from fabric_ladder.settings import FACTS

COMMANDS = {
    "plan": "plan_memory",
    "scaling": "plan_scaling",
    "ladder": "run_ladder",
    "compare": "compare_runs",
    "generate": "generate",
    "merge": "merge_lora",
    "export": "export_model",
    "doctor": "doctor",
}


def main() -> None:
    """Run the rung or the script that the command line names, in this process."""
    name, *rest = sys.argv[1:] or ["--help"]
    try:
        if name in COMMANDS:
            path = SCRIPTS / f"{COMMANDS[name]}.py"
        elif name == "run" and rest and not rest[0].startswith("-"):
            [path] = choose_rungs([rest.pop(0)])
        elif name.startswith("-") or rest:
            parser().parse_args([name, *rest])
            return
        else:
            raise UserError(f"give a command: run RUNG, {', '.join(COMMANDS)} (see --help)")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    sys.argv = [str(path), *rest]
    runpy.run_path(str(path), run_name="__main__")


def parser() -> argparse.ArgumentParser:
    """Return the parser for `--help` and for completion in a shell; rungs and scripts parse their own options."""
    whole = argparse.ArgumentParser(prog="fabric-ladder", description=__doc__)
    if importlib.util.find_spec("shtab"):
        import shtab

        shtab.add_argument_to(whole, "--print_completion", help="Print the completion of a shell, and exit")
    commands = whole.add_subparsers()
    settings = settings_parser()
    for action in settings._actions:
        if action.dest in FACTS and not action.const:
            action.choices = kinds_of(action.dest)[1] or None  # for completion
    run = commands.add_parser("run", help="Run a rung, by its number or name", parents=[settings], add_help=False)
    run.add_argument("rung", choices=[name for path in RUNGS for name in (path.stem.split("_")[0], path.stem)])
    for name, script in COMMANDS.items():
        doc = ast.get_docstring(ast.parse((SCRIPTS / f"{script}.py").read_text(encoding="utf-8")))
        commands.add_parser(name, help=doc.split("\n")[0].replace("%", "%%"))
    return whole
