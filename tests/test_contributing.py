"""In copies of the project the rung of CONTRIBUTING.md is added, which trains and plans, and float8 is deleted."""

import json
import os
import re
import shutil
import subprocess
import sys

import pytest
from support.helpers import MODELS, ROOT, finished, run_script

SMALL = ["--accelerator", "cpu", "--dataset", "synthetic", "--model", MODELS / "bloom-quickstart.json"]
SMALL += ["--from_scratch", "true", "--max_length", "32", "--train_samples", "12", "--batch_size", "4"]


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Copy the project, write a new rung into it, and fill in the example."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("src", "scripts", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    left = finished(
        run_script(folder / "scripts" / "new_rung.py", "30", "bitfit", "2_grad_accum", cwd=folder, fresh=True)
    )
    assert "tests/rungs/test_rungs.py" in left
    assert (folder / "docs" / "techniques" / "30_bitfit.md").exists()
    mechanism, row = re.findall(
        r"```(?:python|text)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL
    )
    package = folder / "src" / "fabric_ladder"
    (package / "techniques" / "bitfit.py").write_text(mechanism, encoding="utf-8")
    ladder = (package / "ladder.py").read_text(encoding="utf-8")
    written = re.search(r'    Row\(\n        "bitfit",.*?\n    \),\n', ladder, re.DOTALL)
    (package / "ladder.py").write_text(ladder.replace(written[0], row), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    "words", [("2", "bitfit", "1_batch_size_1"), ("30", "bit fit", "2_grad_accum"), ("30", "bitfit", "x")]
)
def test_a_rung_that_cannot_be_written_is_refused_in_one_line(tmp_path, words):
    refused = run_script(ROOT / "scripts" / "new_rung.py", *words, cwd=tmp_path, fresh=True)
    assert refused.returncode == 2
    assert len(refused.stderr.splitlines()) == 1


def run(project, script, *words):
    return run_script(project / script, *words, cwd=project, fresh=True, PYTHONPATH=project / "src")


@pytest.mark.slow
def test_a_new_rung_is_trained_checked_planned_compared_and_listed(project):
    finished(run(project, "src/30_bitfit.py", *SMALL, "--save", "no"))
    finished(run(project, "src/2_grad_accum.py", *SMALL, "--save", "no"))
    trained, whole = (
        json.loads(next((project / "runs").glob(f"{rung}*/**/run.json")).read_text(encoding="utf-8"))
        for rung in ("30_bitfit", "2_grad_accum")
    )
    assert 0 < trained["results"]["trainable_parameters"] < whole["results"]["trainable_parameters"]
    refused = run(project, "src/30_bitfit.py", *SMALL, "--lora", "true")
    assert refused.returncode == 2
    assert "adapters freeze the biases" in refused.stderr
    assert "--bitfit" in finished(run(project, "src/2_grad_accum.py", "--help", "all"))
    planned = ["--gpu", "T4", "--rungs", "30", "--length", "32", "--json", "plan.json", *SMALL[2:8]]
    answer = finished(run(project, "scripts/plan_memory.py", *planned))
    assert "no measured loss of accuracy" not in answer
    assert "30_bitfit checkpointing" in (project / "plan.json").read_text(encoding="utf-8")
    compared = finished(run(project, "scripts/compare_runs.py", "runs"))
    assert "bitfit true" in compared
    assert "garbage" not in compared


OF_FLOAT8 = """src/22_float8.py src/plain/22_float8.py src/fabric_ladder/techniques/float8.py notebooks/22_float8.ipynb
docs/techniques/22_float8.md benchmarks/figures/techniques/22_float8.yaml tests/techniques/test_float8.py""".split()


@pytest.mark.slow
def test_a_technique_is_deleted_with_its_files_its_row_and_its_setting(tmp_path):
    """The tables are written again, and the quick tests that read all techniques pass."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for path in {*listed} - {*OF_FLOAT8}:
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, tmp_path / path)
    for file, pattern in {
        "ladder.py": r'    Row\(\n        "float8",.*?\n    \),\n',
        "settings.py": r"    float8: bool = .*?\n    \)\n",
    }.items():
        path = tmp_path / "src" / "fabric_ladder" / file
        text, found = re.subn(pattern, "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        path.write_text(text, encoding="utf-8")
        assert found == 1
    finished(run_script(tmp_path / "benchmarks" / "rung_tables.py", cwd=tmp_path, fresh=True, PYTHONPATH=""))
    for page in ("README.md", "mkdocs.yml", "docs/index.md"):
        assert "22_float8.md" not in (tmp_path / page).read_text(encoding="utf-8")
    rooms = ["tests/test_house.py", "tests/test_options.py", "tests/techniques/test_advice.py"]
    rooms += ["tests/techniques/test_memory_formulas.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", *rooms]
    command += ["-k", "not missing_package"]  # it needs the installed package
    paths = os.pathsep.join([str(tmp_path / "src"), str(tmp_path)])
    environment = os.environ | {"PYTHONPATH": paths}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
