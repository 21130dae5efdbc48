"""A rung that is pasted into a notebook runs in a kernel."""

import nbformat
import pytest
from nbclient import NotebookClient
from support.helpers import SMALL, SRC

WRONG = "from fabric_ladder import parse_settings\nparse_settings(batch_size=2, micro_batch_size=3)"


def rung(name, arguments):
    source = (SRC / f"{name}.py").read_text(encoding="utf-8")
    return source.replace("parse_settings(", f"parse_settings(args={list(arguments)}, ")


@pytest.mark.slow
def test_a_pasted_rung_runs_a_script_has_ranks_of_its_own_and_an_error_prints_one_line(tmp_path):
    command = f"[sys.executable, {str(SRC / '9_ddp.py')!r}, *{list(SMALL)}, '--devices', '2']"
    start = f"import subprocess, sys\nprint(subprocess.run({command}, capture_output=True, text=True).stdout)"
    cells = [rung("10_fsdp", SMALL), start, rung("9_ddp", ["--devices", "2"]), WRONG]
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells])
    client = NotebookClient(document, timeout=500, resources={"metadata": {"path": str(tmp_path)}}, allow_errors=True)
    client.execute()
    assert not [output for cell in document.cells for output in cell.outputs if output.output_type == "error"]
    printed = ["".join(output.get("text", "") for output in cell.outputs) for cell in document.cells]
    for text, name in zip(printed, ("10_fsdp", "9_ddp"), strict=False):
        assert f"{name} · synthetic" in text
        assert "Test accuracy" in text
        assert (tmp_path / "runs" / name / "1" / "run.json").exists()
    assert printed[2].endswith("in a cell of its own: !python src/9_ddp.py --devices 2\n")
    assert len([*(tmp_path / "runs").glob("*/*")]) == 2
    assert printed[3].splitlines()[-1].startswith("error: --micro_batch_size 3 is above --batch_size 2")
