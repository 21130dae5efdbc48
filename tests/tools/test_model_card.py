"""A model's card, which the Hub's own classes read, and a push to a server that stands in for the Hub."""

import base64
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from support.devices import ONE_THREAD, SIZES
from support.export import run_here, tiny
from support.helpers import ROOT, SRC, finished, run_script
from transformers import pipeline

from fabric_ladder import UserError
from fabric_ladder.comparing.matching import wilson_interval
from fabric_ladder.tools.model_card import write_card

EXPORT = ROOT / "scripts" / "export_model.py"


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    """A folder in which a run has saved its model."""
    cwd = tmp_path_factory.mktemp("trained")
    finished(run_script(SRC / "2_grad_accum.py", *SIZES, "--save", "consolidated", cwd=cwd, **ONE_THREAD))
    return cwd


@pytest.fixture
def hub(monkeypatch):
    """A Hub on this machine; returns what was asked of it, and the files that were committed."""
    asked, files = [], {}

    class Hub(BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append((self.path, self.headers["Authorization"], body))
            if self.path.endswith("/create"):
                answer = {"url": f"{address}/me/films", "id": "1"}
            elif self.path.endswith("/validate-yaml"):
                answer = {"errors": [], "warnings": []}
            elif "/preupload/" in self.path:
                paths = [file["path"] for file in json.loads(body)["files"]]
                modes = {"uploadMode": "regular", "shouldIgnore": False, "oid": None}
                answer = {"files": [{"path": path, **modes} for path in paths]}
            else:
                lines = [json.loads(line) for line in body.splitlines()]
                added = [line["value"] for line in lines if line["key"] == "file"]
                files.update({file["path"]: base64.b64decode(file["content"]) for file in added})
                answer = {"commitUrl": f"{address}/me/films/commit/1", "commitOid": "1" * 40, "hookOutput": ""}
            self.reply(200 if self.headers["Authorization"] == "Bearer good" else 401, answer)

        def reply(self, status, answer):
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    address = f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", address)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "good")
    yield asked, files
    server.shutdown()
    server.server_close()


def test_the_card_says_what_the_run_was(trained, tmp_path, monkeypatch):
    monkeypatch.chdir(trained)
    run_here(monkeypatch, EXPORT, "runs/2_grad_accum/1", "--output", tmp_path / "films")
    card = ModelCard.load(tmp_path / "films" / "README.md")
    record = json.loads((trained / "runs/2_grad_accum/1/run.json").read_text())
    accuracy = record["results"]["test_accuracy"]
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-classification")
    assert (card.data.base_model, card.data.datasets) == (None, None), "random weights, made-up reviews"
    (result,) = card.data.eval_results
    assert (result.metric_type, result.metric_value) == ("accuracy", round(accuracy, 4))
    assert (result.dataset_name, result.dataset_split) == ("synthetic", "test")
    low, high = wilson_interval(accuracy, 33)
    interval = f"{accuracy:.2%} ({low:.2%} to {high:.2%}, 95 % interval of 33 test samples)"
    assert f"| test accuracy | {interval} |" in card.text
    assert "synthetic: 101 training samples, 1 epochs, seed 123" in card.text
    assert "Trained by `2_grad_accum` of Fabric Ladder, from random weights of bloom-quickstart.json." in card.text
    assert "batch_size: 16" in card.text
    assert f"- torch {record['versions']['torch']}" in card.text
    assert str(trained) not in str(card), "nobody's folders"
    assert "runs_dir" not in card.text
    code = card.text.split("```python\n")[1].split("```")[0].replace('"films"', f'"{tmp_path / "films"}"')
    names = {}
    exec(code, names)
    assert type(names["model"]) is type(pipeline("text-classification", model=str(tmp_path / "films")))


def record_of(trained, **settings):
    record = json.loads((trained / "runs/2_grad_accum/1/run.json").read_text())
    return record | {"settings": record["settings"] | settings}


@pytest.mark.parametrize(
    ("settings", "base_model", "datasets"),
    [
        ({"model": "bigscience/bloom-560m", "from_scratch": False, "dataset": "imdb"}, "bigscience/bloom-560m",
         ["stanfordnlp/imdb"]),
        ({"model": "bigscience/bloom-560m", "from_scratch": True, "dataset": "someone/films"}, None, ["someone/films"]),
        ({"model": "/home/me/secret/base", "from_scratch": False, "dataset": "/home/me/secret/films.csv",
          "test_file": "/home/me/secret/test.csv"}, None, None),
    ],
)  # fmt: skip
def test_the_card_names_what_is_on_the_hub_and_no_folder(trained, tmp_path, settings, base_model, datasets):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "run.json").write_text(json.dumps(record_of(trained, **settings)))
    write_card(tmp_path, tmp_path / "run", "me/films")
    card = ModelCard.load(tmp_path / "README.md")
    assert (card.data.base_model, card.data.datasets) == (base_model, datasets)
    assert "secret" not in str(card)
    assert 'pipeline("text-classification", "me/films")' in card.text


def test_without_a_run_the_card_says_how_to_load_the_model(tmp_path):
    tiny("llama-lm").save_pretrained(tmp_path)
    write_card(tmp_path, tmp_path / "nowhere", "me/words")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {"library_name": "transformers", "pipeline_tag": "text-generation"}
    assert 'pipeline("text-generation", "me/words")' in card.text


def test_a_push_uploads_the_whole_folder(trained, tmp_path, monkeypatch, hub, capsys):
    asked, files = hub
    output = tmp_path / "films"
    run_here(monkeypatch, EXPORT, trained / "runs/2_grad_accum/1", "--output", output, "--push", "me/films")
    assert "\nPushed http://127.0.0.1:" in capsys.readouterr().out
    assert files == {path.name: path.read_bytes() for path in output.iterdir()}
    assert {"README.md", "model.safetensors", "config.json", "tokenizer.json"} <= files.keys()
    created = json.loads(asked[0][2])
    assert asked[0][0] == "/api/repos/create"
    assert (created["organization"], created["name"]) == ("me", "films")
    assert "private" in str(created), "until its owner publishes it"


def test_a_push_that_fails_is_one_line_and_the_folder_stays(trained, tmp_path, monkeypatch, hub):
    monkeypatch.setenv("HF_TOKEN", "stale")
    output = tmp_path / "films"
    said = rf"{output} is written, but --push me/films failed \(.*401.*\); to try again: hf upload me/films {output}"
    with pytest.raises(UserError, match=said) as error:
        run_here(monkeypatch, EXPORT, trained / "runs/2_grad_accum/1", "--output", output, "--push", "me/films")
    assert "\n" not in str(error.value)
    assert (output / "README.md").exists()


@pytest.mark.parametrize(
    ("name", "token", "said"),
    [
        ("me/films", None, "--push me/films: no token of the Hugging Face Hub: hf auth login, or set HF_TOKEN"),
        ("films", "good", "--push films: give USER/NAME"),
        ("me/fil ms", "good", "--push me/fil ms: "),
    ],
)
def test_what_cannot_be_pushed_is_refused_before_any_work(trained, tmp_path, monkeypatch, name, token, said):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(UserError, match=said) as error:
        run_here(monkeypatch, EXPORT, trained / "runs/2_grad_accum/1", "--output", tmp_path / "out", "--push", name)
    assert "\n" not in str(error.value)
    assert not (tmp_path / "out").exists()
