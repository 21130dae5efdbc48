"""A new rung is written into a copy of the project, which trains and plans with the technique of CONTRIBUTING.md."""

import json
import re
import shutil

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
    assert "tests/plain/test_plain.py" in left
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
    finished(run(project, "scripts/plan_memory.py", *planned))
    assert "30_bitfit checkpointing" in (project / "plan.json").read_text(encoding="utf-8")
    compared = finished(run(project, "scripts/compare_runs.py", "runs"))
    assert "bitfit true" in compared
    assert "garbage" not in compared
