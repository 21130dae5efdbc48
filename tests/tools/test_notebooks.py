"""A plain script becomes a valid notebook with the same code, which runs in a kernel."""

import json

import nbformat
import pytest
from nbclient import NotebookClient
from support.export import run_here
from support.helpers import ROOT, SMALL, SRC

from fabric_ladder import UserError
from fabric_ladder.tools.notebooks import notebook

EXPORT = ROOT / "scripts" / "export_notebook.py"
SCRIPT = '''"""2 · Gradient accumulation: 16 reviews per step.

Prints the same losses as `src/2_grad_accum.py`.
"""

import functools
import math

STEPS = 3  # constants at the top


def train(steps):
    total = 0.0
    for step in range(steps):
        total += math.sqrt(step)
    return total


@functools.cache
def accuracy(total):
    """Return a number."""
    return round(total, 4)


if __name__ == "__main__":
    start = 1

    ### 1 Finetuning
    total = train(STEPS)
    if total:
        print(f"Loss: {total:.4f}")

    ### 2 Evaluation
    print("Test accuracy", accuracy(total))
'''


def test_each_section_and_function_has_a_text_cell_and_a_code_cell(tmp_path):
    document = nbformat.reads(notebook(SCRIPT), as_version=4)
    nbformat.validate(document)
    title, *cells = document.cells
    assert title.source == (
        "# 2 · Gradient accumulation: 16 reviews per step.\n\nPrints the same losses as `src/2_grad_accum.py`."
    )
    assert [cell.cell_type for cell in cells] == ["markdown", "code"] * 6
    headings = [cell.source for cell in cells[::2]]
    assert headings == [
        "## Imports and settings", "## `train`", "## `accuracy`", "## Run", "## 1 Finetuning", "## 2 Evaluation",
    ]  # fmt: skip
    code = [cell.source for cell in cells[1::2]]
    assert code[0].endswith("STEPS = 3  # constants at the top")
    assert code[2].startswith("@functools.cache\ndef accuracy(total):\n")
    assert code[4] == 'total = train(STEPS)\nif total:\n    print(f"Loss: {total:.4f}")'
    NotebookClient(document, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = [output.text for cell in document.cells if cell.cell_type == "code" for output in cell.outputs]
    assert printed == ["Loss: 2.4142\n", "Test accuracy 2.4142\n"]


def test_the_script_writes_notebooks_and_refuses_bad_files_in_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.py").write_text(SCRIPT)
    run_here(monkeypatch, EXPORT, "plain.py")
    assert capsys.readouterr().out == "Saved plain.ipynb\n"
    assert json.loads((tmp_path / "plain.ipynb").read_text())["nbformat"] == 4
    (tmp_path / "bare.py").write_text("x = 1\n")
    (tmp_path / "broken.py").write_text('"""Text."""\nx = (\n')
    for arguments, message in {
        ("plain.py",): "cannot write plain.ipynb (File exists)",
        ("none.py",): "cannot read none.py",
        ("bare.py",): "bare.py: the script has no docstring",
        ("broken.py",): "broken.py: line 2 is not Python",
    }.items():
        with pytest.raises(UserError) as error:
            run_here(monkeypatch, EXPORT, *arguments)
        assert str(error.value).startswith(message)


def execute(folder, *sources):
    """Run cells in one kernel; return the printed text of each cell."""
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = NotebookClient(document, timeout=500, resources={"metadata": {"path": str(folder)}}, allow_errors=True)
    client.execute()
    assert not [output for cell in document.cells for output in cell.outputs if output.output_type == "error"]
    return ["".join(output.get("text", "") for output in cell.outputs) for cell in document.cells]


def rung(name, arguments):
    source = (SRC / f"{name}.py").read_text(encoding="utf-8")
    return source.replace("parse_settings(", f"parse_settings(args={list(arguments)}, ")


def test_a_pasted_rung_runs_and_an_error_is_one_line(tmp_path):
    wrong = "from fabric_ladder import parse_settings\nparse_settings(batch_size=2, micro_batch_size=3)"
    trained, several, invalid = execute(tmp_path, rung("2_grad_accum", SMALL), rung("9_ddp", ["--devices", "2"]), wrong)
    assert "2_grad_accum · synthetic" in trained
    assert "Test accuracy" in trained
    assert (tmp_path / "runs" / "2_grad_accum" / "1" / "run.json").exists()
    assert several.endswith("in a cell of its own: !python src/9_ddp.py --devices 2\n")
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"2_grad_accum"}
    assert invalid.splitlines()[-1].startswith("error: --micro_batch_size 3 is above --batch_size 2")


@pytest.mark.slow
def test_a_script_on_two_devices_does_not_inherit_the_rank_of_the_notebook(tmp_path):
    command = f"[sys.executable, {str(SRC / '9_ddp.py')!r}, *{list(SMALL)}, '--devices', '2']"
    start = f"import subprocess, sys\nprint(subprocess.run({command}, capture_output=True, text=True).stdout)"
    first, second = execute(tmp_path, rung("10_fsdp", SMALL), start)
    assert "Test accuracy" in first
    assert "9_ddp · synthetic" in second
    assert "Test accuracy" in second
