"""Check what this machine can run, and print a fix for everything that is missing.

python scripts/doctor.py
python scripts/doctor.py --json

The doctor downloads and writes nothing, and runs without torch. It names the first package to install if it cannot run.
"""

import argparse
import json
import os
import sys
from importlib.util import find_spec
from pathlib import Path


def parse() -> argparse.Namespace:
    """Read the command line, without packages that may be missing."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.error = lambda message: parser.exit(2, f"error: {message} (see --help)\n")
    parser.add_argument("--json", action="store_true", help="print one JSON document")
    parser.add_argument(
        "--steps", nargs="+", metavar="STEP", help="check only these libraries or rungs, with tracebacks"
    )
    return parser.parse_args()


def main(arguments: argparse.Namespace, installed: str | None) -> None:
    """Print each item of the report as it is found."""
    try:
        from fabric_ladder.tools.doctor import print_steps, report
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error}; pip install -r {Path(__file__).resolve().parents[1] / 'requirements.txt'}\n")
        raise SystemExit(2) from None
    if arguments.steps:
        print_steps(arguments.steps)
        return
    found = []
    for section, item in report(installed):
        if not arguments.json:
            if not found or found[-1]["section"] != section:
                print(section)
            fix = f" -> {item.fix}" if item.fix else ""
            print(f"  {item.status:<7}  {item.name:<28}  {item.text}{fix}", flush=True)
        found.append({"section": section, **item._asdict()})
    if arguments.json:
        print(json.dumps({"format": 2, "items": found}, indent=1))
        return
    counts = {status: sum(each["status"] == status for each in found) for status in ("ok", "warn", "slow", "missing")}
    print(", ".join(f"{count} {status}" for status, count in counts.items()))


if __name__ == "__main__":
    arguments = parse()
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}")
    sys.dont_write_bytecode = True
    sys.stdout.reconfigure(errors="backslashreplace")
    installed = find_spec("fabric_ladder")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    try:
        main(arguments, installed and installed.origin)
    except BrokenPipeError:  # the reader has closed the pipe, e.g. `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
