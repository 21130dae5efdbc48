"""Compare runs: what each technique costs and what it reaches, as a table and as a page with charts.

python scripts/compare_runs.py runs/                                   # all finished runs
python scripts/compare_runs.py runs/2_grad_accum/1 runs/4_mixed_precision/1 --html report.html
python scripts/compare_runs.py blog.txt --markdown blog.md

SOURCE is the folder of a run, a folder of runs, or a log that was copied from a terminal, Colab or the blog; - reads
standard input. The first run is the reference. The script refuses runs that differ in more than their technique.
"""

import argparse

from fabric_ladder.errors import UserError, show_errors
from fabric_ladder.tools.arguments import Arguments, new_path, write_new


def parse() -> argparse.Namespace:
    """Read the command line."""
    parser = Arguments(__doc__)
    parser.add_argument("sources", nargs="+", metavar="SOURCE", help="folder of a run or of runs, a log, or -")
    parser.add_argument("--markdown", metavar="FILE", type=new_path, help="write the table as Markdown")
    parser.add_argument("--html", metavar="FILE", type=new_path, help="write a page with charts that needs no network")
    parser.add_argument("--anyway", action="store_true", help="compare runs that differ in more than their technique")
    return parser.parse_args()


def main(arguments: argparse.Namespace) -> None:
    """Compare, print and write."""
    from rich.console import Console

    from fabric_ladder.comparing.page import to_html
    from fabric_ladder.comparing.sources import read_sources
    from fabric_ladder.comparing.table import compare, print_table, to_markdown
    from fabric_ladder.options import script_defaults
    from fabric_ladder.rungs import RUNGS

    comparison = compare(read_sources(arguments.sources), {rung.stem: script_defaults(rung.stem) for rung in RUNGS})
    if comparison.differences and not arguments.anyway:
        raise UserError(
            f"these runs differ in more than their technique: {'; '.join(comparison.differences)}; "
            "--anyway compares them"
        )
    print_table(comparison, Console())
    if arguments.markdown:
        write_new(arguments.markdown, to_markdown(comparison))
    if arguments.html:
        write_new(arguments.html, to_html(comparison))
    for path in filter(None, (arguments.markdown, arguments.html)):
        print(f"Saved {path}")


if __name__ == "__main__":
    show_errors()
    main(parse())
