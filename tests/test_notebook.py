"""Each rung pasted into one cell of a real Jupyter kernel."""

import nbformat
import pytest
from helpers import RUNGS, SMALL
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
