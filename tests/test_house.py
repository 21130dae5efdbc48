"""The structure of the package: allowed imports, lengths of functions, and the names in the rungs' docstrings."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support.helpers import ROOT, RUNGS, SRC

PACKAGE = ROOT / "src" / "fabric_ladder"
MODULES = sorted(PACKAGE.rglob("*.py"))
FUNCTIONS = ast.FunctionDef | ast.AsyncFunctionDef


def test_rooms_import_only_from_the_rooms_below_them_and_without_cycles():
    """The contracts are in pyproject.toml; all of them must be checked, and every room must be in a layer."""
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout
    assert re.search(r"Contracts: 4 kept, 0 broken", process.stdout), process.stdout
    found = re.search(r"Analyzed (\d+) files", process.stdout)
    assert int(found[1]) >= len(MODULES)


def test_planning_comparing_and_tools_are_imported_by_scripts_and_benchmarks_alone():
    """The rungs and the dataset module are not part of the package. They do not import these rooms either."""
    for path in (*RUNGS, ROOT / "local_dataset_utilities.py"):
        names = [node.module or "" for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)]
        assert not [name for name in names if re.match(r"fabric_ladder\.(planning|comparing|tools)", name)], path


def parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def test_bodies_of_functions_are_at_most_50_lines():
    assert len(MODULES) > 50
    for path in MODULES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, FUNCTIONS):
                first = node.body[bool(ast.get_docstring(node)) and len(node.body) > 1]
                assert node.end_lineno - first.lineno < 50, f"{path}: {node.name}"


# lines of Python; whoever needs more raises the number in the same commit, with the reason in its headline
BUDGET = {"src": 26_336, "benchmarks": 4_542, "tests": 22_007}


def test_the_sums_of_lines_stay_within_the_budget():
    """The plain scripts are left out: each rung adds one, of at most 100 lines and its packages."""
    found = {
        "src": [*SRC.glob("*.py"), *MODULES, *(ROOT / "scripts").glob("*.py"), ROOT / "local_dataset_utilities.py"],
        "benchmarks": [*(ROOT / "benchmarks").glob("*.py")],
        "tests": [*(ROOT / "tests").rglob("*.py")],
    }
    sums = {room: sum(len(path.read_bytes().splitlines()) for path in paths) for room, paths in found.items()}
    assert {room: lines for room, lines in sums.items() if lines > BUDGET[room]} == {}


def test_few_files_are_outside_the_rooms():
    assert len(list(PACKAGE.glob("*.py"))) <= 11
    assert len((ROOT / "local_dataset_utilities.py").read_text(encoding="utf-8").splitlines()) <= 250


def test_settings_are_immutable():
    from dataclasses import FrozenInstanceError

    from fabric_ladder import Settings

    with pytest.raises(FrozenInstanceError):
        Settings().batch_size = 2


@pytest.mark.parametrize("path", RUNGS, ids=lambda path: path.stem)
def test_a_rung_and_its_plain_script_name_each_other_and_the_rung_names_its_code(path):
    doc = ast.get_docstring(parsed(path))
    assert f"src/plain/{path.name} shows the whole training in one file." in doc.splitlines()
    assert f"src/{path.name}" in ast.get_docstring(parsed(path.parent / "plain" / path.name)).split()
    assert "\nUnchanged: " in doc or path.stem.startswith("1_")
    file, name = re.search(r"In the package: (\S+\.py): (\w+)$", doc).groups()
    names = [node.name for node in parsed(PACKAGE / file).body if isinstance(node, (*FUNCTIONS.__args__, ast.ClassDef))]
    assert name in names
