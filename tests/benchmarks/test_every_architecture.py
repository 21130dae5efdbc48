"""The table of architectures: some of its rows run again, and the page shows all of them."""

import json
import re
import sys

import pytest
import transformers
from support.helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import architectures
import common

EVERY = 47  # about 10 rows, of all tasks
COMMAND = "`make architectures` writes the table again"


@pytest.fixture(scope="module")
def results():
    return common.read_results(architectures.OUT)


def test_the_page_shows_the_results(results):
    text = (ROOT / "docs" / "tables" / "architectures.csv").read_text(encoding="utf-8")
    assert architectures.fill_page(check=True) == [], f"{COMMAND}, or `python benchmarks/architectures.py --page`"
    shown = [line.split(",")[:2] for line in text.splitlines()[1:]]
    assert shown == [[task, name] for task in architectures.TASKS for name in results[task]["rows"]]


def test_the_table_has_every_architecture_of_its_version_of_transformers(results):
    versions = {part["versions"]["transformers"] for part in results.values()}
    if versions != {transformers.__version__}:
        pytest.skip(f"the table is of transformers {versions}; {COMMAND}")
    assert [(task, name) for task in architectures.TASKS for name in results[task]["rows"]] == architectures.all_rows()


@pytest.mark.slow
def test_some_rows_run_as_they_are_written(results):
    """A difference may have another size on another machine."""
    script = str(ROOT / "benchmarks" / "architectures.py")
    printed = common.run_child([script, "--every", str(EVERY), "--jobs", "1"], threads=1)
    found = [json.loads(line) for line in printed.splitlines() if line.startswith('["')]
    assert len(found) == len(architectures.all_rows()[::EVERY])
    written = {(task, name): row for task, part in results.items() for name, row in part["rows"].items()}
    changed = [
        f"{name} ({task}): {written.get((task, name))}, now {row}"
        for task, name, row in found
        if rounded(written.get((task, name))) != rounded(row)
    ]
    assert not changed, "\n".join([*changed, COMMAND])


def rounded(row):
    return re.sub(r"\d[\d.e+-]*", "N", json.dumps(row))
