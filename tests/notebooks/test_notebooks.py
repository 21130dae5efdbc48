"""Each plain script with Fabric has a notebook with the same code, which is up to date, small, and runs in a kernel."""

import ast
import os
import re
import runpy
import sys
import tomllib
from itertools import pairwise
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from nbclient import NotebookClient
from support.helpers import MODELS, ROOT, SRC, real_file

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


def test_there_is_a_notebook_for_each_plain_script_with_fabric_and_one_about_the_limit_of_memory():
    assert {path.stem for path in NOTEBOOKS.glob("*.ipynb")} == {path.stem for path in PLAIN} | {BUILD["LIMIT"]}


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
    [lightning] = [each for each in (ROOT / "requirements.txt").read_text().split() if each.startswith("lightning==")]
    assert start == f'%pip install -q {lightning} "{transformers}" datasets '
    imports = {name for name in ("bitsandbytes", "torchao", "deepspeed") if name in script.read_text().lower()}
    assert set(extras[0].split()) - {"accelerate"} == imports
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    printed = "".join(output.get("text", "") for output in outputs)
    if not script.stem.startswith("12_"):
        assert len(re.findall(r"Samples \d+/00640 \| Loss: [\d.]+", printed)) == 10
        assert re.search(r"Test accuracy [\d.]+%.*^0: \d+%\n1: \d+%$", printed, re.DOTALL | re.MULTILINE)
        assert sum("image/png" in output.get("data", {}) for output in outputs) >= 1


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


def test_a_notebook_names_a_gpu_that_is_large_enough_and_links_to_its_neighbours():
    first = {script.stem: stored(script).cells[0].source.split("\n\n") for script in PLAIN}
    for _, gpu, links, *_ in first.values():
        assert gpu.startswith(("A GPU with", "A T4 is too small", "It is meant for several GPUs"))
        targets = re.findall(r"\]\(([^)#]+)", links)
        assert [target for target in targets if not (NOTEBOOKS / target).exists()] == []
    assert "predicted peak is 12.3 GB. It computes in 32-bit" in first["2_grad_accum"][1]
    assert re.search(
        r"7_grad.*\.md\).*5_low_precision\.ipynb.*8_init_on_device\.ipynb", first["7_grad_checkpointing"][2]
    )
    large = BUILD["gpu_of"]("17_step_in_backward", "bfloat16")
    assert large[0] == "A100"
    assert large[1].startswith(
        "A T4 is too small, and a GPU with 80 GB is large enough: the predicted peak is 57.4 GB."
    )
    needs = {name: stored(NOTEBOOKS / name).metadata.colab.gpuType for name in ("2_grad_accum", "5_low_precision")}
    assert needs == {"2_grad_accum": "T4", "5_low_precision": "L4"}  # a T4 emulates bfloat16


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("1_batch_size_1", '{"1_batch_size_1, predicted": PREDICTED}'),
        ("7_grad_checkpointing", '{"5_low_precision, predicted": 7.78, "7_grad_checkpointing, predicted": PREDICTED}'),
        ("10_fsdp", '{"4_mixed_precision, predicted": 12.95}'),  # 9_ddp, its parent, has no prediction
    ],
)
def test_the_memory_cell_draws_the_predicted_peaks_of_the_script_and_its_parent(name, known):
    [cell] = [cell for cell in stored(NOTEBOOKS / name).cells if cell.source.startswith(BUILD["PEAK"])]
    assert f"\nbars = {known}  # GB\n" in cell.source
    assert len(cell.source.splitlines()) <= 12


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
    assert re.search(r"^0: \d+%\n1: \d+%$", printed, re.MULTILINE)


@pytest.mark.slow
def test_the_data_cell_makes_a_test_split_where_none_is_given_and_keeps_labels_of_words(tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    rows = pd.DataFrame({"text": [f"text {row}" for row in range(20)], "label": ["red", "NA"] * 10})
    rows.to_csv(folder / "train.csv", index=False)
    cell = BUILD["TEXTS"]["data"].replace('SOURCE = "imdb"', 'SOURCE = "folder"')
    cell = re.sub('FOLDER = "[^"]*"', f'FOLDER = "{folder}"', cell)
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell)])
    options = {"resources": {"metadata": {"path": str(tmp_path)}}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", **options).execute()
    read = [pd.read_csv(tmp_path / f"{name}.csv", na_filter=False) for name in ("test", "train")]
    assert [len(split) for split in read] == [2, 18]
    assert pd.concat(read).sort_values("text", ignore_index=True).equals(rows.sort_values("text", ignore_index=True))


@pytest.mark.slow
def test_the_notebook_about_the_limit_proves_that_no_loss_changes(tmp_path, monkeypatch):
    """A tiny model and made-up reviews take the place of Qwen3 and IMDb."""
    notebook = BUILD["limit_notebook"]()
    assert notebook == nbformat.read(NOTEBOOKS / f"{BUILD['LIMIT']}.ipynb", as_version=4)
    small = f'OPTIONS = OPTIONS.replace("Qwen/Qwen3-0.6B", "{MODELS / "llama-tiny.json"}") + " --dataset synthetic"'
    notebook.cells[1].source = "pass"
    notebook.cells[3].source += f"\n{small}"
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    options = {"resources": {"metadata": {"path": str(tmp_path)}}}
    NotebookClient(notebook, timeout=300, kernel_name="python3", **options).execute()
    printed = [output.text for output in notebook.cells[-1].outputs]
    assert re.search(r"4 losses are equal to the last bit: [\d., ]+\nPredicted peak: 0.00 GB of tensors", printed[0])
    assert "GPU memory at most 4GiB" in (tmp_path / "runs" / "24_streamed_layers" / "1" / "log.txt").read_text()
