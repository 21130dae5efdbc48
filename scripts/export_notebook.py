"""Write a rung as a notebook, or as a single file.

python scripts/export_notebook.py 2                                    # 2_grad_accum.ipynb: Colab, Kaggle, Jupyter
python scripts/export_notebook.py 13 --config configs/cifar10_vit_small.yaml
python scripts/export_notebook.py 2 --self_contained                   # needs no repository: twelve times the size
python scripts/export_notebook.py 2 --script > grad_accum.py           # to paste into one cell, or to run
python scripts/export_notebook.py all --output_dir notebooks           # one for each rung

A notebook installs the shared modules from the repository whose address stands in pyproject.toml, unless they travel
in it. A --config that is not one of the project's goes along, with the small files that it names.
"""

from pathlib import Path

from fabric_ladder.advice import show_errors
from fabric_ladder.checkpoints.export import Arguments
from fabric_ladder.errors import UserError
from fabric_ladder.rungs import RUNGS, choose_rungs
from fabric_ladder.tools.notebooks import notebook, script
from fabric_ladder.tools.outputs import check_outputs, write_outputs

if __name__ == "__main__":
    show_errors()
    parser = Arguments(description=__doc__.split("\n\n")[0])
    parser.add_argument("rungs", nargs="+", metavar="RUNG", help="number or name of a rung, or `all`")
    parser.add_argument("--config", metavar="FILE", help="YAML file of settings that is used")
    parser.add_argument("--output_dir", default=".", metavar="FOLDER", help="where to write; default: here")
    parser.add_argument("--self_contained", action="store_true", help="pack the shared modules into a cell")
    parser.add_argument("--readable", action="store_true", help="give each of them a cell of its own instead")
    parser.add_argument("--script", action="store_true", help="print one rung as a single file instead")
    arguments = parser.parse_args()
    rungs = RUNGS if arguments.rungs == ["all"] else choose_rungs(arguments.rungs)
    if arguments.script:
        if len(rungs) > 1:
            raise UserError("--script prints one rung: name one")
        print(script(rungs[0], arguments.config), end="")
    else:
        outputs = {str(Path(arguments.output_dir) / f"{rung.stem}.ipynb"): rung for rung in rungs}
        check_outputs({f"{rung.stem} to": name for name, rung in outputs.items()})
        carries = {"self_contained": arguments.self_contained or arguments.readable, "readable": arguments.readable}
        write_outputs({name: notebook(rung, arguments.config, **carries) for name, rung in outputs.items()})
        for name in outputs:
            print(f"Saved {name}")
