"""Rungs in a real Jupyter kernel: pasted into a cell, as notebooks with and without their modules, as single files."""

import ast
import base64
import bz2
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support.helpers import ROOT, RUNGS, SMALL, SRC, finished, run_script

from fabric_ladder.rungs import check_rung
from fabric_ladder.tools.notebooks import EXTRAS, notebook, script

ON_CPU = [  # Fabric starts DeepSpeed on CUDA GPUs only
    path if path.stem == "2_grad_accum" else pytest.param(path, marks=pytest.mark.slow)
    for path in RUNGS
    if path.stem != "12_deepspeed_zero"
]
LOOP = Path("fabric_ladder", "training", "loop.py")
EXPORT = ROOT / "scripts" / "export_notebook.py"
NAMES = [path.stem for path in RUNGS]


def made(name, **options):
    """The notebook of a rung, made anew and checked."""
    return nbformat.reads(notebook(SRC / f"{name}.py", None, **options), as_version=4)


@pytest.mark.parametrize("name", NAMES)
def test_the_notebook_is_that_of_the_sources(name):
    kept = (ROOT / "notebooks" / f"{name}.ipynb").read_text(encoding="utf-8")
    assert notebook(SRC / f"{name}.py", None) == kept, "older than the sources: make notebooks"


def test_a_notebook_installs_the_library_without_which_its_rung_is_refused(monkeypatch):
    find = importlib.util.find_spec
    hidden = {"bitsandbytes", "torchao"}  # DeepSpeed's rung is refused before, where there is no CUDA GPU
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *more: None if name in hidden else find(name, *more))
    given = list(sys.argv)
    answers = {path.stem: check_rung(path, ["--accelerator", "cpu"]) for path in RUNGS}
    assert sys.argv == given, "advice of a later run would be that of another command line"
    needed = {
        name: re.search(r"needs? (\w+): pip install", answer)
        for name, answer in answers.items()
        if isinstance(answer, str)
    }
    assert {name: found[1] for name, found in needed.items() if found} | {"12_deepspeed_zero": "deepspeed"} == EXTRAS
    assert "[bitsandbytes]" in notebook(SRC / "18_low_bit_optimizer.py", None)


def test_every_rung_has_its_notebook_and_no_other_is_kept():
    assert {path.stem for path in (ROOT / "notebooks").iterdir()} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_opens_with_its_technique_and_is_small(name):
    text = notebook(SRC / f"{name}.py", None)
    assert len(text.encode()) < 60_000
    document = nbformat.reads(text, as_version=4)
    nbformat.validate(document)
    number, *_ = name.split("_")
    opening = [cell for cell in document.cells[:5] if cell.cell_type == "markdown"]
    introduction, *change, figures, _ = [cell.source for cell in opening]
    assert introduction.startswith("[![Open in Colab](https://colab.research.google.com/")
    assert f"/notebooks/{name}.ipynb)\n\n# {number} · " in introduction
    assert re.search(r"^```python\n\S", introduction, re.MULTILINE)
    assert len(change) == (number != "1")
    for source in change:
        lines = re.search(r"```diff\n(.*)```", source, re.DOTALL)[1].splitlines()
        assert lines[1] == f"+++ src/{name}.py"
        assert any("# NEW" in line for line in lines if line.startswith("+"))
        assert len([line for line in lines[2:] if line[:1] in ("+", "-")]) <= 12
    assert re.search(rf"^\| \[{name}\]\(https://\S+/src/{name}\.py\) \|", figures, re.MULTILINE)
    install = next(cell.source for cell in document.cells if cell.cell_type == "code")
    assert "subprocess.run([sys.executable" in install
    assert not [cell for cell in document.cells if len(max(cell.source.splitlines(), key=len)) > 800]


def test_a_notebook_can_carry_its_modules_packed_or_readable():
    carried = packed(made("12_deepspeed_zero", self_contained=True))
    readable = made("12_deepspeed_zero", self_contained=True, readable=True)
    cells = (cell.source.partition("\n") for cell in readable.cells if cell.source.startswith("%%writefile "))
    written = {first.split()[1]: text for first, _, text in cells}
    assert {name: text.strip("\n") for name, text in carried.items()} == written
    assert carried.pop("src/local_dataset_utilities.py") == (ROOT / "local_dataset_utilities.py").read_text()
    for name, text in carried.items():
        assert text == (ROOT / name).read_text(encoding="utf-8")
    rooms = {Path(name).parts[2] for name in carried if name.startswith("src/fabric_ladder/") and name.count("/") > 2}
    assert {"data", "models", "training", "planning"} <= rooms  # a run on a GPU starts the planner
    assert not rooms & {"comparing", "tools"}
    [cell] = [cell for cell in made("2_grad_accum", self_contained=True).cells if "PACKED = " in cell.source]
    assert cell.source.startswith("#@title ")
    assert (cell.metadata.cellView, cell.metadata.jupyter.source_hidden) == ("form", True)
    assert len(cell.source.splitlines()) < 50


@pytest.mark.parametrize("path", ON_CPU, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom_in_an_empty_folder(tmp_path, path):
    document = made(path.stem)
    if path.stem == "3_torch_compile":  # its small model compiles one shape instead of all
        cut_short(document, "--max_length", "16", "--pad_to_multiple_of", "16", "--train_samples", "32")
    else:
        cut_short(document)
    run_all(document, tmp_path)
    stdout = printed(document.cells)
    assert f"{path.stem} · synthetic" in stdout
    assert "Test accuracy" in stdout
    assert "No GPU: the quickstart runs" in stdout
    assert (tmp_path / "runs" / path.stem / "1" / "run.json").exists()
    assert "image/png" in document.cells[-1].outputs[0].data
    assert {found.name for found in tmp_path.iterdir()} == {"runs"}


def run_all(document, folder):
    NotebookClient(document, timeout=500, resources={"metadata": {"path": str(folder)}}).execute()


def test_without_the_package_and_its_address_the_notebook_says_what_to_write(tmp_path):
    install = next(cell.source for cell in made("2_grad_accum").cells if cell.cell_type == "code")
    absent = "import importlib.util as u\nfind = u.find_spec\nu.find_spec = lambda name: name == 'torch' and find(name)"
    command = [sys.executable, "-c", f"{absent}\n{install}"]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert (process.returncode, process.stdout) == (1, "")
    assert process.stderr.startswith("Write the project's address, or the folder of a clone, into REPOSITORY above.")


@pytest.mark.slow
def test_deepspeed_s_notebook_says_what_it_lacks_here(tmp_path):
    document = made("12_deepspeed_zero")
    client = NotebookClient(document, timeout=500, resources={"metadata": {"path": str(tmp_path)}}, allow_errors=True)
    client.execute()
    lines = [line for line in printed(document.cells, "stderr").splitlines() if line.startswith("error: ")]
    assert lines[0] == "error: 12_deepspeed_zero needs a CUDA GPU; src/10_fsdp.py shards a model on CPUs too"


@pytest.mark.slow
def test_a_self_contained_notebook_runs_and_several_devices_go_through_its_script(tmp_path):
    """The script after the rung itself has run in the kernel, whose rank and port it must not inherit."""
    document = made("9_ddp", self_contained=True)
    cut_short(document)
    cell = next(cell for cell in document.cells if "if torch.cuda.device_count() > 1:" in cell.source)
    cell.source = cell.source.replace("torch.cuda.device_count()", "2")  # two processes of the CPU
    document.cells.remove(cell)
    install = next(cell for cell in document.cells if "subprocess.run" in cell.source)
    install.source = install.source.replace('"install",', '"install", "--dry-run", "--no-index",')  # all is here
    where = "import fabric_ladder as a, local_dataset_utilities as b; print(a.__file__, b.__file__)"
    document.cells += [nbformat.v4.new_code_cell(where), cell]
    run_all(document, tmp_path)
    home = tmp_path / "ladder_notebook"
    stdout = printed(document.cells[:-1])
    assert "batch 16 in micro-batches of 1024 tokens" in stdout
    assert stdout.endswith(f"{home}/src/fabric_ladder/__init__.py {home}/src/local_dataset_utilities.py\n")
    assert {found.name for found in tmp_path.iterdir()} == {"ladder_notebook"}
    stdout = printed([cell])
    assert "9_ddp · synthetic" in stdout
    assert "batch 16 in micro-batches of 1024 tokens" in stdout
    assert "cpu: 2 x " in stdout
    assert "Test accuracy" in stdout


@pytest.mark.parametrize("more", [(), pytest.param(("--devices", "2"), marks=pytest.mark.slow)])
def test_a_single_file_runs_by_python(tmp_path, single_files, more):
    """On two devices each process unpacks what the file holds."""
    name = "9_ddp" if more else "2_grad_accum"
    path = tmp_path / "pasted.py"
    path.write_text(single_files[name], encoding="utf-8")
    cache = tmp_path / "cache"
    environment = {"HOME": tmp_path, "FABRIC_LADDER_CACHE": "~/cache"}
    stdout = finished(run_script(path, *SMALL, *more, cwd=tmp_path, **environment))
    assert not (tmp_path / "~").exists()
    assert "pasted · synthetic" in stdout
    assert "Test accuracy" in stdout
    (home,) = (cache / "scripts").iterdir()
    assert (home / "src" / LOOP).read_text() == (SRC / LOOP).read_text()


@pytest.mark.slow
def test_a_single_file_runs_in_one_cell_and_gives_the_same_losses(tmp_path, single_files):
    modules, rung = single_files["2_grad_accum"].split("import Run,")
    source = f"{modules}import Run,{rung.replace('parse_settings(', f'parse_settings(args={list(SMALL)}, ')}"
    (outputs,) = execute(tmp_path, source)
    stdout = "".join(output.text for output in outputs if output.get("name") == "stdout")
    alone = finished(run_script(SRC / "2_grad_accum.py", *SMALL, cwd=tmp_path))
    assert "2_grad_accum · synthetic" in stdout
    assert re.findall("Loss: .*", stdout) == re.findall("Loss: .*", alone) != []


@pytest.fixture(scope="module")
def single_files():
    return {name: script(SRC / f"{name}.py", None) for name in ("2_grad_accum", "9_ddp")}


@pytest.mark.slow
def test_a_config_goes_along_with_the_files_that_it_names(tmp_path):
    (tmp_path / "mine.yaml").write_text(
        "dataset: few.csv\nmodel: models/small.json\nfrom_scratch: true\nbatch_size: 4\n"
    )
    rows = "".join("text,label\n" if not n else f"word{n} word{n % 7} good,{n % 2}\n" for n in range(41))
    (tmp_path / "few.csv").write_text(rows)
    (tmp_path / "models").mkdir()
    small = (ROOT / "configs" / "models" / "bloom-quickstart.json").read_text()
    (tmp_path / "models" / "small.json").write_text(small)
    finished(run_script(EXPORT, "2", "--config", "mine.yaml", cwd=tmp_path))
    document = nbformat.read(tmp_path / "2_grad_accum.ipynb", as_version=4)
    sources = [cell.source for cell in document.cells]
    assert packed(document).keys() == {"configs/mine.yaml", "configs/few.csv", "configs/models/small.json"}
    assert packed(document)["configs/few.csv"] == rows
    assert any("ARGS = ['--config', 'configs/mine.yaml']" in source for source in sources)
    single = finished(run_script(EXPORT, "2", "--config", "mine.yaml", "--script", cwd=tmp_path))
    assert '\n        config="mine.yaml",\n        batch_size=16' in single
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "one.py").write_text(single, encoding="utf-8")
    stdout = finished(run_script(empty / "one.py", cwd=empty, FABRIC_LADDER_CACHE=tmp_path / "c"))
    assert "few.csv · small.json" in stdout


def test_what_a_single_file_carries_is_readable_and_the_same(single_files):
    tree = ast.parse(single_files["2_grad_accum"])
    texts = {
        ast.literal_eval(node.targets[0].slice): ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript)
    }
    assert texts.pop("src/local_dataset_utilities.py") == (ROOT / "local_dataset_utilities.py").read_text()
    for name, text in texts.items():
        assert text == (ROOT / name).read_text(encoding="utf-8")
    assert "def train(" in single_files["2_grad_accum"], "written out, not packed"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["99"], "there is no rung 99: give numbers from 1 to 22, or names"),
        (["2", "3", "--script"], "--script prints one rung: name one"),
        (["2", "--config", "none.yaml"], "there is no config file none.yaml; those that come along: "),
        (["2", "--config", "list.yaml"], "list.yaml must hold lines such as 'batch_size: 16'"),
        (["2", "--config", "large.yaml"], "large.yaml names large.csv, which cannot go along"),
        (["2", "--output_dir", "none"], "2_grad_accum to none/2_grad_accum.ipynb: there is no folder none"),
        (["1"], "1_batch_size_1 to 1_batch_size_1.ipynb exists: choose another name, or remove it"),
        ([], "the following arguments are required: RUNG (see --help)"),
    ],
)
def test_what_cannot_be_exported_is_one_line(tmp_path, arguments, says):
    (tmp_path / "list.yaml").write_text("- 1\n")
    (tmp_path / "large.yaml").write_text("dataset: large.csv\n")
    (tmp_path / "large.csv").write_text("x" * 300_000)
    (tmp_path / "1_batch_size_1.ipynb").write_text("mine")
    process = run_script(EXPORT, *arguments, cwd=tmp_path)
    assert process.returncode == 2
    assert process.stderr.startswith(f"error: {says}")
    assert process.stderr.count("\n") == 1
    assert not process.stdout
    assert len(list(tmp_path.iterdir())) == 4
    assert (tmp_path / "1_batch_size_1.ipynb").read_text() == "mine"


@pytest.fixture(scope="module")
def pasted(tmp_path_factory):
    """A folder, and the outputs of cells that one kernel has run in it: a rung, one on two devices, wrong settings."""
    folder = tmp_path_factory.mktemp("pasted")
    rung = (SRC / "2_grad_accum.py").read_text(encoding="utf-8")
    several = (SRC / "9_ddp.py").read_text(encoding="utf-8")
    wrong = "from fabric_ladder import parse_settings\nparse_settings(batch_size=2, micro_batch_size=3)"
    cells = [
        rung.replace("parse_settings(", f"parse_settings(args={list(SMALL)}, "),
        several.replace("parse_settings(", 'parse_settings(args=["--devices", "2"], '),
        wrong,
    ]
    return folder, execute(folder, *cells)


def test_a_pasted_rung_runs(pasted):
    folder, (outputs, _, _) = pasted
    stdout = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert "2_grad_accum · synthetic" in stdout
    assert "Test accuracy" in stdout
    assert (folder / "runs" / "2_grad_accum" / "1" / "run.json").exists()


@pytest.mark.slow
def test_a_script_on_two_devices_starts_from_a_notebook_that_ran_a_rung(tmp_path):
    """It must not inherit the rank and the port of the notebook's own run."""
    source = (SRC / "10_fsdp.py").read_text(encoding="utf-8")
    source = source.replace("parse_settings(", f"parse_settings(args={list(SMALL)}, ")
    source += f"""
    import subprocess, sys
    command = [sys.executable, {str(SRC / "9_ddp.py")!r}, *{list(SMALL)}, "--devices", "2"]
    print(subprocess.run(command, capture_output=True, text=True, timeout=200).stdout)
"""
    (outputs,) = execute(tmp_path, source)
    stdout = "".join(output.text for output in outputs if output.get("name") == "stdout")
    assert stdout.count("Test accuracy") == 2, stdout
    assert "9_ddp · synthetic" in stdout


def test_several_devices_in_a_kernel_are_refused(pasted):
    folder, (_, outputs, _) = pasted
    text = "".join(output.get("text", "") for output in outputs)
    assert text.endswith(
        "error: a notebook's kernel runs on one device; on 2, in a cell of its own: !python src/9_ddp.py --devices 2\n"
    )
    assert {path.name for path in (folder / "runs").iterdir()} == {"2_grad_accum"}


def test_the_kernel_s_own_arguments_are_ignored_and_an_error_is_one_line(pasted):
    _, (_, _, outputs) = pasted
    text = "".join(output.get("text", "") for output in outputs)
    assert text.splitlines()[-1].startswith("error: --micro_batch_size 3 is above --batch_size 2")
    assert "Traceback" not in text
    assert not [output for output in outputs if output.output_type == "error"]


def cut_short(document, *more):
    (cell,) = [cell for cell in document.cells if "\nARGS = []" in cell.source]
    cell.source = cell.source.replace("ARGS = []", f"ARGS = {[*SMALL, *more]}")


def packed(document):
    """The files that the notebook's packed cell holds."""
    (source,) = (cell.source for cell in document.cells if "PACKED = " in cell.source)
    text = source.split('"""')[1].replace("\n", "")
    return json.loads(bz2.decompress(base64.b85decode(text)))


def printed(cells, name="stdout"):
    outputs = (output for cell in cells for output in cell.get("outputs", ()))
    return "".join(output.text for output in outputs if output.get("name") == name)


def execute(folder, *sources):
    """Run cells in one kernel and return the outputs of each."""
    document = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = NotebookClient(document, timeout=500, resources={"metadata": {"path": str(folder)}}, allow_errors=True)
    client.execute()
    return [cell.outputs for cell in document.cells]
