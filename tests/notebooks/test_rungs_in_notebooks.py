"""A rung that is pasted into a notebook runs in a kernel."""

import nbformat
import pytest
from nbclient import NotebookClient
from support.helpers import SMALL, SRC


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


@pytest.mark.slow
def test_a_pasted_rung_runs_and_an_error_prints_one_line(tmp_path):
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
