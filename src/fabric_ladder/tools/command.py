"""The command `fabric-ladder`: the rungs and the scripts by short names, in any folder.

Each is run by its own file, with its own options, as `python src/2_grad_accum.py` and `python scripts/doctor.py` would.
"""

import ast
import os
import runpy
import sys

import jsonargparse

from fabric_ladder.errors import UserError
from fabric_ladder.places import SCRIPTS
from fabric_ladder.rungs import RUNGS, choose_rungs
from fabric_ladder.settings import INTERNAL, Settings

COMMANDS = {
    "plan": "plan_memory",
    "scaling": "plan_scaling",
    "ladder": "run_ladder",
    "compare": "compare_runs",
    "generate": "generate",
    "merge": "merge_lora",
    "export": "export_model",
    "notebook": "export_notebook",
    "doctor": "doctor",
}


def main() -> None:
    """Run the rung or the script that the command line names; it ends this process as it would end its own."""
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


def parser() -> jsonargparse.ArgumentParser:
    """Return what `--help` shows and what shells complete; the files themselves read their options."""
    os.environ["JSONARGPARSE_ADD_PRINT_COMPLETION_ARGUMENT"] = "true"  # it offers what shtab, if installed, can write
    whole = jsonargparse.ArgumentParser(prog="fabric-ladder", description=__doc__)
    commands = whole.add_subcommands()
    run = jsonargparse.ArgumentParser(description="Run a rung.")
    run.add_argument("rung", choices=[name for path in RUNGS for name in (path.stem.split("_")[0], path.stem)])
    run.add_argument("--config", help="YAML file of settings.")
    run.add_class_arguments(Settings, as_group=False, skip=set(INTERNAL))
    commands.add_subcommand("run", run, help="Run a rung, by its number or name.")
    for name, script in COMMANDS.items():
        doc = ast.get_docstring(ast.parse((SCRIPTS / f"{script}.py").read_text(encoding="utf-8")))
        commands.add_subcommand(name, jsonargparse.ArgumentParser(), help=doc.split("\n")[0])
    return whole
