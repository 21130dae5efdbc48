"""Each plain script is short and near its parent; `tests/rungs/test_rungs.py` runs it next to its rung."""

import ast
import difflib
import json
import re
import runpy
import tomllib
from importlib import import_module

import pytest
import torch
from support.helpers import ROOT, SRC, VOCABULARY, relative_error, tiny_model
from torch.nn.parallel.replicate import replicate

from fabric_ladder.rungs import RUNGS, parent

PLAIN = SRC / "plain"
BUILD = runpy.run_path(str(ROOT / "notebooks" / "build.py"))
NAMES = [rung.stem for rung in RUNGS]
SEVERAL_GPUS = (9, 10, 11, 12)  # their peaks depend on the number of GPUs
WIDE = (10, 11, 12, 13, 14, 15, 17, 19, 25, 27, 28, 29)  # techniques that need up to 25 lines, the others 15


def number(name):
    return int(name.split("_")[0])


def code(name):
    """Return the lines of a plain script without its docstring and its peak of memory, which each script has."""
    text = (PLAIN / f"{name}.py").read_text(encoding="utf-8")
    lines = text.splitlines()[ast.parse(text).body[0].end_lineno :]
    return [line for line in lines if not line.startswith(("MODEL, ", '    fabric.print(f"Peak GPU memory'))]


@pytest.mark.parametrize("name", ["0_pytorch", "9_dp", *NAMES])
def test_a_plain_script_is_short_and_marks_its_new_lines(name):
    text = (PLAIN / f"{name}.py").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert len(lines) <= 100 + 4, "and the packages"
    assert max(map(len, lines)) <= 120
    assert "fabric_ladder" not in text
    docstring = ast.get_docstring(ast.parse(text))
    assert docstring.startswith(f"{number(name)} · ")
    assert f"# NEW in {number(name)}" in text or number(name) < 2


@pytest.mark.parametrize("name", ["0_pytorch", "9_dp", *NAMES])
def test_a_plain_script_begins_with_its_packages_for_uv(name):
    """The form is that of https://peps.python.org/pep-0723."""
    text = (PLAIN / f"{name}.py").read_text(encoding="utf-8")
    head = tomllib.loads(re.match(r"# /// script\n((?:# .*\n)+?)# ///\n", text)[1].replace("# ", ""))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert head["requires-python"] == project["requires-python"]
    own = {name for word, names in BUILD["EXTRAS"].items() if word in text.lower() for name in names.split()}
    fabric = {BUILD["LIGHTNING"]} if "from lightning" in text else set()
    assert set(head["dependencies"]) == {"pandas", "torch", "transformers>=5.23", *fabric, *own}


@pytest.mark.parametrize("name", ["0_pytorch", "9_dp", *NAMES])
def test_a_plain_script_ends_with_the_peak_of_gpu_memory_and_the_predicted_one(name):
    text = (PLAIN / f"{name}.py").read_text(encoding="utf-8")
    here = 'print(f"Peak GPU memory: {torch.cuda.max_memory_allocated() / 1e9:.2f} GB here'
    *_, last = text.splitlines()
    if number(name) in SEVERAL_GPUS:
        assert last.strip() == f'fabric.{here}")'
        assert "PREDICTED" not in text
        return
    assert last.strip().removeprefix("fabric.") == f'{here}, {{PREDICTED}} GB predicted")'
    results = json.loads((ROOT / "benchmarks" / "results" / "memory_ladder.json").read_text(encoding="utf-8"))
    predicted = [
        f"{entry['predicted']['total'] / 1e9:.2f}"
        for entry in results["bloom-560m"]["entries"]
        if entry["rung"] == name.replace("0_pytorch", "1_batch_size_1")
        and entry["options"].startswith("--attention eager")  # as in the plain scripts
    ]
    row = f"bloom-560m,{name},--attention eager,,1"
    assert predicted, f"add {row} to benchmarks/memory_ladder.csv and run benchmarks/memory_ladder.py --new"
    assert re.findall(r"^MODEL, MAX_LENGTH, PREDICTED = .*, ([\d.]+)  #", text, re.MULTILINE) == predicted


@pytest.mark.parametrize("rung", [rung for rung in RUNGS if parent(rung)], ids=lambda rung: rung.stem)
def test_a_plain_script_differs_from_its_parent_by_the_technique(rung):
    before = parent(PLAIN / rung.name).stem
    assert before == ("4_mixed_precision" if number(rung.stem) == 27 else parent(rung).stem)  # 27 and 15 are too long
    matcher = difflib.SequenceMatcher(None, code(before), code(rung.stem), autojunk=False)
    changed = sum(
        max(
            sum(line != "" for line in matcher.a[first:last]),
            sum(line != "" for line in matcher.b[start:end]),
        )
        for kind, first, last, start, end in matcher.get_opcodes()
        if kind != "equal"
    )
    assert changed <= (25 if number(rung.stem) in WIDE else 15)


def test_unequal_shares_of_data_parallel_have_the_gradients_of_the_whole_batch(monkeypatch):
    """PyTorch's own replicas compute 2, 2 and 1 rows; only the copies from GPU to GPU are replaced."""
    script = runpy.run_path(str(PLAIN / "9_dp.py"))
    script["Logits"].forward.__globals__["DTYPE"] = torch.float32  # autocast has no effect with it
    model = script["Logits"](tiny_model())
    ids = torch.randint(2, VOCABULARY, (5, 12), generator=torch.manual_seed(0))
    ids[1, 7:] = ids[4, 3:] = model.model.config.pad_token_id
    labels = torch.tensor([0, 1, 1, 0, 1])

    def copies(tensors, devices, detach=False):
        return [[tensor.view_as(tensor) for tensor in tensors] for _ in devices]

    monkeypatch.setattr(import_module("torch.nn.parallel.replicate"), "_broadcast_coalesced_reshape", copies)
    parts = ids.chunk(3)
    assert [len(part) for part in parts] == [2, 2, 1]
    gradients = []
    for replicas in ([model], replicate(model, [0, 1, 2])):
        shares = parts if len(replicas) > 1 else [ids]
        logits = torch.cat([replica(share) for replica, share in zip(replicas, shares, strict=True)])
        loss = torch.nn.functional.cross_entropy(logits.float(), labels)
        gradients.append(torch.autograd.grad(loss, list(model.parameters())))
    assert relative_error(*gradients) < 1e-5
