"""Each rung pasted into one cell of a real Jupyter kernel."""

import nbformat
import pytest
from helpers import RUNGS, SMALL, SRC
from nbclient import NotebookClient

ON_CPU = [path for path in RUNGS if path.stem != "12_deepspeed_zero"]  # Fabric starts DeepSpeed on CUDA GPUs only


@pytest.mark.parametrize("path", ON_CPU, ids=[path.stem for path in ON_CPU])
def test_a_pasted_rung_runs(tmp_path, path):
    source = path.read_text(encoding="utf-8")
    small = source.replace("parse_settings(", f"parse_settings(args={list(SMALL)}, ")
    assert small != source
    stdout = "".join(output.text for output in execute(tmp_path, small) if output.get("name") == "stdout")
    assert f"{path.stem} · synthetic" in stdout
    assert "Test accuracy" in stdout
    assert (tmp_path / "runs" / path.stem / "1" / "run.json").exists()


def test_a_script_on_two_devices_starts_from_a_notebook_that_ran_a_rung(tmp_path):
    """It must not inherit the rank and the port of the notebook's own run."""
    source = (SRC / "10_fsdp.py").read_text(encoding="utf-8")
    source = source.replace("parse_settings(", f"parse_settings(args={list(SMALL)}, ")
    source += f"""
    import subprocess, sys
    command = [sys.executable, {str(SRC / "9_ddp.py")!r}, *{list(SMALL)}, "--devices", "2"]
    print(subprocess.run(command, capture_output=True, text=True, timeout=200).stdout)
"""
    stdout = "".join(output.text for output in execute(tmp_path, source) if output.get("name") == "stdout")
    assert stdout.count("Test accuracy") == 2, stdout
    assert "9_ddp · synthetic" in stdout


def test_the_kernel_s_own_arguments_are_ignored_and_an_error_is_one_line(tmp_path):
    source = "from fabric_ladder import parse_settings\nparse_settings(batch_size=2, micro_batch_size=3)"
    outputs = execute(tmp_path, source)
    text = "".join(output.get("text", "") for output in outputs)
    assert text.splitlines()[-1].startswith("error: --micro_batch_size 3 is above --batch_size 2")
    assert "Traceback" not in text
    assert not [output for output in outputs if output.output_type == "error"]


def execute(folder, source):
    """Run one cell and return its outputs."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    client = NotebookClient(notebook, timeout=500, resources={"metadata": {"path": str(folder)}}, allow_errors=True)
    client.execute()
    return notebook.cells[0].outputs
