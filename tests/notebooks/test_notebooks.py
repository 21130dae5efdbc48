"""Each plain script with Fabric has a notebook with the same code, which is up to date, small, and runs in a kernel."""

import ast
import re
import runpy
import tomllib
from itertools import pairwise
from pathlib import Path

import nbformat
import pytest
from support.helpers import ROOT, SRC, real_file

NOTEBOOKS = ROOT / "notebooks"
PLAIN = sorted((SRC / "plain").glob("[1-9]*.py"))  # 0_pytorch has no Fabric, which the cells use
IMPORT = "from local_dataset_utilities import"
BUILD = runpy.run_path(str(NOTEBOOKS / "build.py"))
LARGEST = 60_000  # bytes

every_script = pytest.mark.parametrize("script", PLAIN, ids=lambda script: script.stem)


def stored(script: Path):
    return nbformat.read(NOTEBOOKS / f"{script.stem}.ipynb", as_version=4)


def code_of(notebook) -> str:
    return "\n".join(cell.source for cell in notebook.cells if cell.cell_type == "code")


def test_there_is_a_notebook_for_each_plain_script_with_fabric_and_no_other():
    assert [path.stem for path in sorted(NOTEBOOKS.glob("*.ipynb"))] == [path.stem for path in PLAIN]


@every_script
def test_a_notebook_is_small_explained_and_run_and_names_no_local_path(script):
    path = NOTEBOOKS / f"{script.stem}.ipynb"
    text, notebook = path.read_text(encoding="utf-8"), stored(script)
    nbformat.validate(notebook)
    assert len(text.encode()) < LARGEST
    assert not re.search(r"OWNER|REPOSITORY|/(work|tmp|home|root|usr)/|local_dataset_utilities|FABRIC_LADDER", text)
    for before, cell in pairwise(notebook.cells):
        if cell.cell_type == "code":
            assert before.cell_type == "markdown" or cell.source.startswith("import gc\n"), cell.source
    [install] = [cell.source for cell in notebook.cells if cell.source.startswith("%pip")]
    start, *extras = install.partition("matplotlib")[::2]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    [transformers] = [each.split(",")[0] for each in project["dependencies"] if each.startswith("transformers")]
    assert start == f'%pip install -q lightning "{transformers}" datasets '
    imports = {name for name in ("bitsandbytes", "torchao", "deepspeed") if name in script.read_text().lower()}
    assert set(extras[0].split()) - {"accelerate"} == imports
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    if not script.stem.startswith("12_"):
        assert len(re.findall(r"Samples \d+/00640 \| Loss: [\d.]+", printed)) == 10
        assert re.search(r"Test accuracy [\d.]+%.*negative \d+%, positive \d+%", printed, re.DOTALL)
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 1


@every_script
def test_a_notebook_has_the_lines_of_its_script(script):
    text = script.read_text(encoding="utf-8")
    lines = text.splitlines()[ast.parse(text).body[0].end_lineno :]
    main = lines.index('if __name__ == "__main__":')
    lines = lines[:main] + [line.removeprefix("    ") for line in lines[main + 1 :]]
    expected = [line for line in lines if line and not line.startswith("###") and IMPORT not in line]
    assert len(expected) > 40
    found = iter(code_of(stored(script)).splitlines())
    assert [line for line in expected if line not in found] == []  # `in` reads on: the order is that of the script
    # `make notebooks` brings it up to date; building it again keeps the outputs
    built = nbformat.writes(BUILD["notebook_of"](script.stem)) + "\n"
    assert built == (NOTEBOOKS / f"{script.stem}.ipynb").read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_notebook_runs_in_a_kernel(tmp_path, monkeypatch):
    """The notebook of DDP has the cells of the others, and one more that launches a process for each GPU."""
    real_file("aclImdb_v1.tar.gz", "reviews")
    BUILD["prepare"](tmp_path, reviews_of_the_model=100)
    execute = BUILD["execute"]
    few = execute.__globals__["SMALL_SETTINGS"].replace("128", "32").replace("640", "64").replace("200", "20")
    monkeypatch.setitem(execute.__globals__, "SMALL_SETTINGS", few.replace("LEARNING_RATE, 64", "LEARNING_RATE, 8"))
    for variable in ("HF_HOME", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(variable, "1")  # restored after the test
    notebook = BUILD["notebook_of"]("9_ddp")
    for cell in notebook.cells:
        cell.outputs = []
    execute(notebook, tmp_path)
    outputs = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    assert all(output.output_type in ("stream", "display_data") for cell in outputs for output in cell)
    printed = "".join(output.get("text", "") for cell in outputs for output in cell)
    assert printed.count("Loss: ") == 4
    assert re.search(r"negative \d+%, positive \d+%", printed)
