"""Code in a model's folder is never run: not after an answer, and by no entry point."""

import json
import subprocess
import sys

import pytest
from support.helpers import ROOT, SRC, run_script, tiny_model

from fabric_ladder import UserError
from fabric_ladder.data.hub import load_config
from fabric_ladder.data.tokens import load_tokenizer

LINE = "needs code of its own, which is never run here: choose a model that transformers knows"


@pytest.fixture
def remote(tmp_path):
    """Return the folder of a model whose config and tokenizer name code that writes a file."""
    folder = tmp_path / "remote"
    tiny_model("llama-lm").save_pretrained(folder)
    for name, key in (("config", "AutoConfig"), ("tokenizer_config", "AutoTokenizer")):
        path = folder / f"{name}.json"
        values = json.loads(path.read_text()) if path.exists() else {}
        owned = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None]}[key]
        path.write_text(json.dumps(values | {"model_type": "own", "tokenizer_class": "Own", "auto_map": {key: owned}}))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "own.py").write_text(f"open({str(tmp_path / 'executed')!r}, 'w')\nclass Own: pass\n")
    return folder


@pytest.mark.parametrize(
    "words", [["scripts/plan_memory.py", "--gpu", "T4", "--rungs", "2"], ["scripts/generate.py", "--prompt", "x"]]
)
def test_a_script_refuses_a_model_with_code_without_a_question(remote, words):
    process = run_script(ROOT / words[0], *words[1:], "--model", remote, cwd=remote.parent)
    assert process.returncode == 2
    assert "y/N" not in process.stdout + process.stderr
    assert not (remote.parent / "executed").exists()
    assert LINE in process.stderr


def test_an_answer_on_stdin_runs_nothing(remote):
    command = [sys.executable, SRC / "2_grad_accum.py", "--model", remote]
    process = subprocess.run(command, cwd=remote.parent, input="y\n", capture_output=True, text=True, check=False)
    assert process.returncode == 2
    assert LINE in process.stderr
    assert "y/N" not in process.stdout + process.stderr
    assert not (remote.parent / "executed").exists()


@pytest.mark.parametrize("load", [load_config, load_tokenizer])
def test_the_line_names_the_model(remote, load):
    with pytest.raises(UserError, match=f"remote {LINE}"):
        load(str(remote))
    assert not (remote.parent / "executed").exists()
