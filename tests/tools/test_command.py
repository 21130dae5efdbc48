"""The command `fabric-ladder` runs the scripts by short names, from the repository and from a wheel."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest
from support.helpers import ROOT, SMALL, without_package

from fabric_ladder.options import GONE
from fabric_ladder.tools.command import COMMANDS

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
COMMAND = [sys.executable, "-c", "from fabric_ladder.tools.command import main; main()"]


def test_every_script_has_its_command():
    assert sorted(COMMANDS.values()) == sorted(
        path.stem
        for path in (ROOT / "scripts").glob("*.py")
        if path.stem != "new_rung"  # for a checkout
    )


def test_the_changes_name_the_version_of_the_citation_and_every_setting_that_is_gone():
    changes, citation = (ROOT / "CHANGELOG.md").read_text(), (ROOT / "CITATION.cff").read_text()
    version, date = re.search(r"^## (\S+) \((\S+)\)$", changes, re.MULTILINE).groups()
    assert version == VERSION
    assert f"\nversion: {version}\ndate-released: {date}\n" in citation
    assert {names.split()[0] for names in GONE} <= {*re.findall(r"`(\w+)`", changes)}


def test_the_help_names_all_commands_without_waiting_for_torch(tmp_path):
    environment = os.environ | without_package(tmp_path, "torch")
    environment["PYTHONPATH"] += os.pathsep + str(ROOT / "src")
    process = subprocess.run([*COMMAND, "--help"], env=environment, capture_output=True, text=True, timeout=60)
    assert process.returncode == 0, process.stderr
    assert re.findall(r"^  (\w+) .*\.$", process.stdout, re.MULTILINE) == ["run", *COMMANDS]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "99"], "there is no rung 99: give numbers from 1 to "),
        (["run"], "give a command: run RUNG, plan, "),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(tmp_path, arguments, message):
    process = subprocess.run([*COMMAND, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith(f"error: {message}")
    assert process.stderr.count("\n") == 1


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """Copy the repository, since building writes into it."""
    folder = tmp_path_factory.mktemp("clone") / "fabric-ladder"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in ("src", "scripts", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE", "local_dataset_utilities.py", "local_utilities.py"):
        shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def environment():
    """Return variables that let pip build with the installed packages and without downloads."""
    left_out = ("PYTHONPATH", "FABRIC_LADDER_DATA")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return kept | {"PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_INDEX": "1", "HF_HUB_OFFLINE": "1"}


def fresh_python(folder):
    """Make an environment that has this one's packages, except an editable installation of the project."""
    venv.create(folder, with_pip=False)
    packages = folder / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}" / "site-packages"
    (packages / "these.pth").write_text(str(Path(pytest.__file__).parents[1]))
    return folder / "bin" / "python"


@pytest.mark.slow
def test_a_wheel_from_the_source_distribution_runs_in_an_empty_folder(tmp_path, clone, environment):
    def run(*command, cwd=tmp_path):
        process = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=500)
        assert process.returncode == 0, process.stderr
        return process.stdout

    python = fresh_python(tmp_path / "venv")
    build = f"from setuptools.build_meta import build_sdist; build_sdist({str(tmp_path)!r})"
    run(python, "-c", build, cwd=clone)
    [sources] = tmp_path.glob("fabric_ladder-*.tar.gz")
    run(python, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", tmp_path, sources)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"fabric_ladder-{VERSION}-")
    run(python, "-m", "pip", "install", "--no-deps", wheel)
    empty = tmp_path / "empty"
    empty.mkdir()
    ladder = tmp_path / "venv" / "bin" / "fabric-ladder"
    packages = Path(run(python, "-c", "import fabric_ladder; print(fabric_ladder.__file__)", cwd=empty).strip()).parent
    assert packages.is_relative_to(tmp_path / "venv")
    modules = {path.relative_to(ROOT / "src") for path in (ROOT / "src" / "fabric_ladder").rglob("*.py")}
    assert modules <= {path.relative_to(packages.parent) for path in packages.rglob("*.py")}
    for name in ("src", "scripts", "configs"):
        ours = {path.relative_to(ROOT) for path in (ROOT / name).rglob("*.*") if "fabric_ladder" not in path.parts}
        ours = {path for path in ours if "__pycache__" not in path.parts}
        assert ours <= {path.relative_to(packages) for path in packages.rglob("*.*")}
    model = ("--model", "configs/models/bloom-quickstart.json")
    options = ("--config", "configs/quickstart.yaml", *model, *SMALL, "--save", "consolidated")
    stdout = run(ladder, "run", "2", *options, cwd=empty)
    assert "2_grad_accum · synthetic · bloom-quickstart.json" in stdout
    assert "Test accuracy" in stdout
    stdout = run(ladder, "run", "9_ddp", "--devices", "2", *SMALL, cwd=empty)
    assert "9_ddp · synthetic · bloom-quickstart.json" in stdout
    assert "· cpu: 2 x " in stdout  # both processes ran
    assert "2_grad_accum" in run(ladder, "compare", "runs", "--anyway", cwd=empty)
    (empty / "texts.csv").write_text("text\nA good film.\nA bad film.\n")
    [folder] = (empty / "runs" / "2_grad_accum").iterdir()
    run(ladder, "predict", folder, "texts.csv", cwd=empty)
    assert len(re.findall("positive|negative", (empty / "texts.predicted.csv").read_text())) >= 2
    assert "2_grad_accum" in run(ladder, "plan", *model, "--gpu_memory", "4GB", "--rungs", "2", cwd=empty)
    lines = [line.split() for line in run(ladder, "doctor", cwd=empty).splitlines()]
    assert {"Python", "torch", "wandb", "Hub"} <= {line[1] for line in lines if len(line) > 1}
