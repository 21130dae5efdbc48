"""Code in a model's folder is never run: not after an answer, and by no entry point."""

import io
import json
import sys

import pytest
from support.helpers import ROOT, run_script, tiny_model

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


@pytest.mark.parametrize("words", [["src/2_grad_accum.py"], ["scripts/generate.py", "--prompt", "x"]])
def test_a_script_refuses_a_model_with_code_without_a_question(remote, words):
    process = run_script(ROOT / words[0], *words[1:], "--model", remote, cwd=remote.parent)
    assert process.returncode == 2
    assert "y/N" not in process.stdout + process.stderr
    assert not (remote.parent / "executed").exists()
    assert LINE in process.stderr


@pytest.mark.parametrize("load", [load_config, load_tokenizer])
def test_an_answer_on_stdin_runs_nothing(remote, load, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(UserError, match=f"remote {LINE}"):
        load(str(remote))
    assert sys.stdin.read() == "y\n"
    assert not (remote.parent / "executed").exists()
