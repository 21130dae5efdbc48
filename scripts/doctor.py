"""Say what this machine can run, and what it lacks for the rest: a line for each thing, with the fix.

python scripts/doctor.py
python scripts/doctor.py --json

It downloads nothing and writes nothing. Where nothing is installed yet it runs all the same, by the standard library of
any Python from 3.8 on.
"""

import argparse
import json
import os
import sys
import warnings
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.error = lambda message: parser.exit(2, f"error: {message} (see --help)\n")
    parser.add_argument("--json", action="store_true", help="print one JSON document instead")
    as_json = parser.parse_args().json
    warnings.simplefilter("ignore")
    sys.dont_write_bytecode = True
    with suppress(AttributeError):  # a notebook's stdout; others cannot print all names of folders
        sys.stdout.reconfigure(errors="backslashreplace")
    installed = find_spec("fabric_ladder")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))
    from fabric_ladder.tools.doctor import report

    found = []
    try:
        for section, (name, status, text, fix) in report(installed):
            if not as_json:
                if not found or found[-1]["section"] != section:
                    print(section)
                print(f"  {status:<7}  {name:<28}  {text}" + (f" -> {fix}" if fix else ""), flush=True)
            found.append({"section": section, "name": name, "status": status, "text": text, "fix": fix})
        if as_json:
            print(json.dumps({"format": 2, "items": found}, indent=1))
        else:
            counts = {status: sum(one["status"] == status for one in found) for status in ("ok", "warn", "missing")}
            print(", ".join(f"{count} {status}" for status, count in counts.items()))
    except BrokenPipeError:  # who reads has read enough: `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
