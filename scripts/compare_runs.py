"""Lay runs side by side: a table of what each technique is worth, as text, page and pictures.

python scripts/compare_runs.py runs/                                   # all finished runs
python scripts/compare_runs.py runs/2_grad_accum/1 runs/4_mixed_precision/1 --html report.html
python scripts/compare_runs.py blog.txt --markdown -

SOURCE is the folder of a run, a folder of such, a log.txt, or any text copied from a terminal, Colab or the blog; -
reads what is piped in. The first run is what the others are measured by. Runs that differ in more than their technique
are refused.
"""

import sys

from rich.console import Console

from fabric_ladder.advice import show_errors
from fabric_ladder.checkpoints.export import Arguments
from fabric_ladder.comparing.charts import to_png
from fabric_ladder.comparing.page import to_html
from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.comparing.table import compare, print_table, to_csv, to_json, to_markdown
from fabric_ladder.errors import UserError
from fabric_ladder.rungs import RUNGS, script_defaults
from fabric_ladder.tools.outputs import check_outputs, write_outputs

if __name__ == "__main__":
    show_errors()
    parser = Arguments(description=__doc__.split("\n\n")[0])
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folder of a run or of runs, a text, or -")
    parser.add_argument("--markdown", metavar="FILE", help="write the table as Markdown; - prints it instead")
    parser.add_argument("--csv", metavar="FILE", help="write a line of figures for each row; - prints them")
    parser.add_argument("--json", metavar="FILE", help="write figures, settings and losses; - prints them")
    parser.add_argument("--html", metavar="FILE", help="write a page with charts that needs no network")
    parser.add_argument("--png", metavar="FOLDER", help="write the charts as pictures into a new folder")
    parser.add_argument("--anyway", action="store_true", help="compare runs that differ in more than their technique")
    arguments = parser.parse_args()
    outputs = {option: getattr(arguments, option) for option in ("markdown", "csv", "json", "html", "png")}
    outputs = {option: name for option, name in outputs.items() if name is not None}
    printed = [option for option, name in outputs.items() if name == "-" and option != "png"]
    if len(printed) > 1:
        raise UserError(f"--{printed[0]} - and --{printed[1]} - cannot both be printed: give one a file")
    for option in printed:
        del outputs[option]
    check_outputs({f"--{option}": name for option, name in outputs.items()})

    rungs = {rung.stem: script_defaults(rung.stem) for rung in RUNGS}
    comparison = compare(read_sources(arguments.sources), rungs)
    if comparison.differences and not arguments.anyway:
        raise UserError(
            f"these runs differ in more than their technique: {'; '.join(comparison.differences)}; "
            "--anyway compares them all the same"
        )
    make = {"markdown": to_markdown, "csv": to_csv, "json": to_json, "html": to_html, "png": to_png}
    write_outputs({name: make[option](comparison) for option, name in outputs.items()})
    for option in printed:
        print(make[option](comparison), end="")
    if not printed:
        print_table(comparison, Console())
    for name in outputs.values():
        print(f"Saved {name}", file=sys.stderr if printed else sys.stdout)
