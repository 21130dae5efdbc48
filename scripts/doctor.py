"""Check packages, GPU, compiler, memory, disk and the Hub, and print a fix for everything that is missing.

python scripts/doctor.py

The doctor downloads nothing. If it cannot run itself, it names the package to install.
"""

import sys
from collections import Counter
from pathlib import Path

if __name__ == "__main__":
    if sys.version_info < (3, 11):  # noqa: UP036
        sys.exit(f"Python 3.11 or newer is needed; this is {sys.version.split()[0]}")
    root = Path(__file__).resolve().parents[1]
    sys.path.insert(0, str(root / "src"))
    try:
        from fabric_ladder.tools.arguments import Arguments
        from fabric_ladder.tools.doctor import report
    except ModuleNotFoundError as error:
        sys.stderr.write(f"error: {error}; pip install -r {root / 'requirements.txt'}\n")
        sys.exit(2)
    Arguments(__doc__).parse_args()
    counts = Counter()
    last = ""
    for section, (name, status, text, fix) in report():
        if section != last:
            print(section)
            last = section
        print(f"  {status:<7}  {name:<28}  {text}{f' -> {fix}' if fix else ''}", flush=True)
        counts[status] += 1
    print(", ".join(f"{counts[status]} {status}" for status in ("ok", "warn", "missing")))
