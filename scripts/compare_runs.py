"""Compare runs: what each technique costs and what it reaches, as a table and as a page with charts.

python scripts/compare_runs.py runs/                                   # all finished runs
python scripts/compare_runs.py runs/2_grad_accum/1 runs/4_mixed_precision/1 --html report.html
python scripts/compare_runs.py blog.txt --markdown -

SOURCE is the folder of a run, a folder of runs, or a log that was copied from a terminal, Colab or the blog; - reads
standard input. The first run is the reference. The script refuses runs that differ in more than their technique.
"""

import argparse
import sys

from fabric_ladder.errors import UserError
from fabric_ladder.tools.arguments import Arguments, new_path, show_user_errors, write_new

OUTPUTS = ("markdown", "csv", "json", "html")


def output(text: str):
    """Return the path of an output, or - for standard output."""
    return text if text == "-" else new_path(text)


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = Arguments(__doc__)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folder of a run or of runs, a log, or -")
    file = {"metavar": "FILE", "type": output}
    parser.add_argument("--markdown", help="write the table as Markdown; - prints it", **file)
    parser.add_argument("--csv", help="write one line of figures per row; - prints it", **file)
    parser.add_argument("--json", help="write figures, settings and losses; - prints them", **file)
    parser.add_argument("--html", help="write a page with charts that needs no network", **file)
    parser.add_argument("--png", metavar="FOLDER", type=new_path, help="write the charts into a new folder")
    parser.add_argument("--anyway", action="store_true", help="compare runs that differ in more than their technique")
    arguments = parser.parse_args()
    printed = [name for name in OUTPUTS if getattr(arguments, name) == "-"]
    if len(printed) > 1:
        parser.error(f"--{printed[0]} - and --{printed[1]} - both print; give one of them a file")
    return arguments


def main(arguments: argparse.Namespace) -> None:
    """Compare, print and write."""
    from rich.console import Console

    from fabric_ladder.comparing.charts import save_charts
    from fabric_ladder.comparing.page import to_html
    from fabric_ladder.comparing.sources import read_sources
    from fabric_ladder.comparing.table import compare, print_table, to_csv, to_json, to_markdown
    from fabric_ladder.rungs import RUNGS, script_defaults

    comparison = compare(read_sources(arguments.sources), {rung.stem: script_defaults(rung.stem) for rung in RUNGS})
    if comparison.differences and not arguments.anyway:
        raise UserError(
            f"these runs differ in more than their technique: {'; '.join(comparison.differences)}; "
            "--anyway compares them"
        )
    formats = {"markdown": to_markdown, "csv": to_csv, "json": to_json, "html": to_html}
    wanted = {getattr(arguments, name): make for name, make in formats.items() if getattr(arguments, name)}
    if "-" in wanted:
        print(wanted.pop("-")(comparison), end="")
        messages = sys.stderr
    else:
        print_table(comparison, Console())
        messages = sys.stdout
    if arguments.png:
        save_charts(comparison, arguments.png)
        print(f"Saved {arguments.png}", file=messages)
    for path, make in wanted.items():
        write_new(path, make(comparison))
        print(f"Saved {path}", file=messages)


if __name__ == "__main__":
    show_user_errors()
    main(parse())
