"""The technique of CONTRIBUTING.md's example is added to a copy of the project, which trains and plans with it."""

import json
import re
import shutil

import pytest
from support.helpers import MODELS, ROOT, SRC, finished, run_script

SMALL = ["--accelerator", "cpu", "--dataset", "synthetic", "--model", MODELS / "bloom-quickstart.json"]
SMALL += ["--from_scratch", "true", "--max_length", "32", "--train_samples", "12", "--batch_size", "4"]


def insert(path, line, before):
    text = path.read_text(encoding="utf-8")
    assert text.count(before) == 1, before
    path.write_text(text.replace(before, line + before), encoding="utf-8")


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Copy the project and add the example's technique."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("src", "scripts", "configs"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    technique, entry, row, field, keyword = re.findall(
        r"```(?:python|text)\n(.*?)```", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"), re.DOTALL
    )
    package = folder / "src" / "fabric_ladder"
    (package / "techniques" / "bitfit.py").write_text(technique, encoding="utf-8")
    registry = package / "techniques" / "__init__.py"
    line = "from fabric_ladder.techniques.bitfit import BitFit\n"
    insert(registry, line, "from fabric_ladder.techniques.checkpointing")
    insert(registry, entry, '    "lora": LoRA,\n')
    insert(package / "ladder.py", row, '    Row(\n        "lora",\n')
    insert(package / "settings.py", field, "    kahan_summation: bool")
    parent = (SRC / "2_grad_accum.py").read_text(encoding="utf-8")
    rung = folder / "src" / "30_bitfit.py"
    rung.write_text(parent.replace("  # NEW", "").replace("2_grad_accum", "30_bitfit"), encoding="utf-8")
    insert(rung, keyword, "    )\n\n    fabric = Fabric(")
    return folder


def run(project, script, *words):
    return run_script(project / script, *words, cwd=project, fresh=True, PYTHONPATH=project / "src")


@pytest.mark.slow
def test_a_technique_of_three_steps_is_trained_checked_planned_compared_and_listed(project):
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
