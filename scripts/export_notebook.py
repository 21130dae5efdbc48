"""Turn plain scripts into notebooks for Colab, Kaggle and Jupyter.

python scripts/export_notebook.py my_training.py                       # my_training.ipynb
python scripts/export_notebook.py src/plain/*.py --output_dir notebooks

A plain script has a docstring, functions, and sections that start with `### Title`. The notebook has a cell for each.
"""

import argparse
from pathlib import Path

from fabric_ladder.errors import UserError
from fabric_ladder.tools.arguments import Arguments, show_user_errors, write_new
from fabric_ladder.tools.notebooks import notebook


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = Arguments(__doc__)
    parser.add_argument("scripts", nargs="+", metavar="SCRIPT", type=Path, help="Python file")
    parser.add_argument("--output_dir", default=".", metavar="FOLDER", type=Path, help="default: this folder")
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    """Read all scripts, then write their notebooks."""
    notebooks = {}
    for script in arguments.scripts:
        try:
            text = script.read_text(encoding="utf-8")
            notebooks[arguments.output_dir / f"{script.stem}.ipynb"] = notebook(text)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read {script} ({error})") from error
        except UserError as error:
            raise UserError(f"{script}: {error}") from error
    for path, content in notebooks.items():
        write_new(path, content)
        print(f"Saved {path}")


if __name__ == "__main__":
    show_user_errors()
    main(parse())
