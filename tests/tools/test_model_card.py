"""The Hub's own class reads a model's card."""

import json

import pytest
from huggingface_hub import ModelCard
from support.devices import ONE_THREAD, SIZES
from support.export import run_here, tiny
from support.helpers import ROOT, SRC, finished, run_script

from fabric_ladder.data.label_kind import percent
from fabric_ladder.runs.intervals import wilson_interval
from fabric_ladder.tools.model_card import write_card

EXPORT = ROOT / "scripts" / "export_model.py"


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """Return the folder of a run that has saved its model."""
    cwd = tmp_path_factory.mktemp("trained")
    finished(run_script(SRC / "2_grad_accum.py", *SIZES, "--save", "consolidated", cwd=cwd, **ONE_THREAD))
    return cwd / "runs" / "2_grad_accum" / "1"


def test_the_card_describes_the_run(run, tmp_path, monkeypatch):
    output = tmp_path / "films"
    run_here(monkeypatch, EXPORT, run, "--output", output)
    assert {"model.safetensors", "config.json", "tokenizer.json"} <= {path.name for path in output.iterdir()}
    card = ModelCard.load(output / "README.md")
    record = json.loads((run / "run.json").read_text())
    assert card.data.to_dict() == {"library_name": "transformers", "pipeline_tag": "text-classification"}, (
        "no Hub names"
    )
    accuracy = record["results"]["test_accuracy"]
    low, high = wilson_interval(accuracy, 33)
    assert f"Test accuracy {accuracy:.2%} ({low:.2%} to {high:.2%}, 95 % interval of 33 test samples)." in card.text
    started = "Trained by `2_grad_accum` of Fabric Ladder from random weights of bloom-quickstart.json, on synthetic"
    assert f"{started}: 57 training samples,\n1 epochs, seed 123." in card.text
    assert "batch_size: 16" in card.text
    assert f"  torch: {record['versions']['torch']}" in card.text
    assert "runs_dir" not in card.text
    assert 'pipeline("text-classification", "films", truncation=True)' in card.text


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({"model": "bigscience/bloom-560m", "from_scratch": False, "dataset": "imdb"},
         {"base_model": "bigscience/bloom-560m", "datasets": ["stanfordnlp/imdb"]}),
        ({"model": "bigscience/bloom-560m", "from_scratch": True, "dataset": "someone/films"},
         {"datasets": ["someone/films"]}),
        ({"model": "/home/me/secret/base", "from_scratch": False, "dataset": "/home/me/secret/films.csv",
          "test_file": "/home/me/secret/test.csv"}, {}),
        ({"dataset": "reviews/train.csv"}, {}),
        ({"dataset": "nyu-mll/glue:sst2"}, {"datasets": ["nyu-mll/glue"]}),
    ],
)  # fmt: skip
def test_the_card_names_models_on_the_hub_but_no_local_folder(run, tmp_path, settings, facts):
    record = json.loads((run / "run.json").read_text())
    (tmp_path / "run.json").write_text(json.dumps(record | {"settings": record["settings"] | settings}))
    tiny("bloom").save_pretrained(tmp_path)
    write_card(tmp_path, tmp_path, "me/films")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {"library_name": "transformers", "pipeline_tag": "text-classification"} | facts
    assert "secret" not in str(card)


def test_the_card_has_the_scores_of_the_classes_or_of_a_regression_and_the_first_model(run, tmp_path):
    record = json.loads((run / "run.json").read_text())
    tiny("bloom").save_pretrained(tmp_path)
    record["settings"] |= {"model": str(run / "model"), "from_scratch": False}

    def card(results):
        (tmp_path / "run.json").write_text(json.dumps(record | {"results": results}))
        write_card(tmp_path, tmp_path, "me/films")
        return (tmp_path / "README.md").read_text()

    text, classes = card(record["results"]), record["results"]["classes"]
    assert "from random weights of bloom-quickstart.json, which earlier runs had trained, on synthetic" in text
    columns = [classes[key] for key in ("names", "precision", "recall", "f1", "true")]
    for name, *scores, true in zip(*columns, strict=True):
        assert f"| {name} | {' | '.join(map(percent, scores))} | {true} |" in text
    numbers = {key: value for key, value in record["results"].items() if key not in ("classes", "test_accuracy")}
    text = card(numbers | {"test_mse": 0.25, "test_pearson": 0.5})
    assert "Test MSE 0.2500, Pearson's correlation 0.5000." in text


@pytest.mark.parametrize(
    ("kind", "task"),
    [("llama-lm", "text-generation"), ("bert", "text-classification"), ("vit", "image-classification")],
)
def test_without_a_run_the_card_explains_how_to_load_the_model(tmp_path, kind, task):
    tiny(kind).save_pretrained(tmp_path)
    write_card(tmp_path, tmp_path / "nowhere", "me/words")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {"library_name": "transformers", "pipeline_tag": task}
    options = ", truncation=True" * (kind == "bert")
    assert f'pipeline("{task}", "me/words"{options})' in card.text
    assert "Write prompts" not in card.text


def test_the_card_of_a_language_model_has_the_form_of_its_prompts(tmp_path):
    tiny("llama-lm").save_pretrained(tmp_path)
    own = ("Ask: {instruction}\\nTell:", "Ask: {instruction}\nTell:")
    for template, prompt in (own, ("alpaca", "### Instruction:\n{instruction}\n")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"prompt_template": template}))
        write_card(tmp_path, tmp_path / "nowhere", "me/words")
        assert prompt in ModelCard.load(tmp_path / "README.md").text.split("```text\n")[-1]
