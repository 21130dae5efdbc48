"""Predictions for a file are those of the run's test, and a stopped prediction goes on where it stopped."""

import json
import random
import re

import datasets as hf
import numpy as np
import pandas as pd
import pytest
import torch
from PIL import Image
from support.devices import ONE_THREAD
from support.export import run_here, tiny, words_tokenizer
from support.helpers import MODELS, ROOT, SRC, finished, run_script

from fabric_ladder.data.rows import read_file
from fabric_ladder.errors import UserError
from fabric_ladder.tools import inference

PREDICT = ROOT / "scripts" / "predict.py"
WORDS = {"B-PER": ["Ann", "Ben"], "B-LOC": ["Ulm", "Rom"], "O": ["went", "to", "saw", "and"]}
TOPICS = {"billing": ["invoice", "price"], "login": ["password", "account"], "other": ["cat", "music"]}


def draw_rows(kind, count):
    """Return rows of a kind of labels; many are hard, so that no figure is 0 or 1."""
    draw = random.Random(count)
    rows = []
    for _ in range(count):
        topic = draw.choice([*TOPICS])
        text = " ".join(draw.choices([*TOPICS[topic], *draw.choice([*TOPICS.values()])], k=draw.randint(1, 12)))
        tags = draw.choices([*WORDS], k=draw.randint(2, 9))
        rows.append({
            "single": {"text": text, "label": topic},
            "several": {"text": text, "label": [name for name, words in TOPICS.items() if words[0] in text]},
            "number": {"text": text, "label": text.count("price") - text.count("cat") / 2},
            "words": {"tokens": [draw.choice(WORDS[tag]) for tag in tags], "ner_tags": tags},
        }[kind])  # fmt: skip
    return rows


OPTIONS = {
    "single": [],
    "several": ["--problem_type", "multi_label_classification"],
    "number": ["--problem_type", "regression"],
    "words": ["--task", "token-classification"],
}


def train(folder, *options, **environment):
    """Train in `folder`, and return the results of the run."""
    model = ["--from_scratch", "true", "--learning_rate", "3e-3", "--save", "consolidated", "--batch_size", "8"]
    finished(run_script(SRC / "2_grad_accum.py", *model, *options, cwd=folder, **ONE_THREAD))
    return json.loads((folder / "runs" / "2_grad_accum" / "1" / "run.json").read_text())["results"]


@pytest.mark.parametrize("kind", OPTIONS)
def test_the_scores_are_those_of_the_runs_test(tmp_path, kind):
    (tmp_path / "rows").mkdir()
    for split, count in (("train", 96), ("validation", 16), ("test", 60)):
        lines = "".join(json.dumps(row) + "\n" for row in draw_rows(kind, count))
        (tmp_path / "rows" / f"{split}.jsonl").write_text(lines)
    found = train(tmp_path, "--dataset", "rows", "--max_length", "32", *OPTIONS[kind])
    printed = finished(run_script(PREDICT, "runs/2_grad_accum/1", "rows/test.jsonl", cwd=tmp_path, **ONE_THREAD))
    if kind == "number":
        expected = [f"MSE {found['test_mse']:.4f} of 60 rows", f"Pearson {found['test_pearson']:.4f}"]
    else:
        unit = f"{found['test_words']} words" if kind == "words" else "60 rows"
        expected = [f"Accuracy {found['test_accuracy']:.2%} of {unit}"]
    if kind == "single":
        expected += [f"Macro-F1 {found['classes']['macro_f1']:.2%}"]
        rows = zip(TOPICS, found["classes"]["confusion"], strict=True)
        expected += [f"'{name}' +{' +'.join(map(str, row))} .*%" for name, row in rows]
    if kind == "several":
        expected += [f"micro-F1 {found['classes']['micro_f1']:.2%}", f"macro-F1 {found['classes']['macro_f1']:.2%}"]
    if kind == "words":
        expected += [f"entity F1 {found['entities']['micro_f1']:.2%}"]
    for line in expected:
        assert re.search(f"^{line}", printed, re.MULTILINE), printed
    rows = [row for _, row in read_file(tmp_path / "test.predicted.jsonl").rows]
    given = draw_rows(kind, 60)
    assert [{name: row[name] for name in given[0]} for row in rows] == given, "every row, in its order"
    again = run_script(PREDICT, "runs/2_grad_accum/1", "rows/test.jsonl", cwd=tmp_path, **ONE_THREAD)
    assert (again.returncode, again.stderr.count("\n")) == (2, 1)
    assert "test.predicted.jsonl exists" in again.stderr


def test_a_stopped_prediction_goes_on_and_texts_are_chosen_as_in_the_training(tmp_path, monkeypatch, capsys):
    table = pd.DataFrame(draw_rows("single", 60)).rename(columns={"text": "body", "label": "topic"})
    table.to_csv(tmp_path / "tickets.csv", index=False)
    train(tmp_path, "--dataset", "tickets.csv", "--text_column", "body", "--label_column", "topic", "--max_length", 32)
    monkeypatch.chdir(tmp_path)
    words = [PREDICT, "runs/2_grad_accum/1", "tickets.csv", "--all_probabilities", "--output"]
    run_here(monkeypatch, *words, "whole.csv")
    predict, calls = inference.Predictor.predict, []

    def stopped(self, rows):
        calls.append(rows)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return predict(self, rows)

    monkeypatch.setattr(inference, "CHUNK", 16)
    monkeypatch.setattr(inference.Predictor, "predict", stopped)
    with pytest.raises(KeyboardInterrupt):
        run_here(monkeypatch, *words, "parts.csv")
    assert not (tmp_path / "parts.csv").exists()
    part = tmp_path / ".parts.csv.part"
    assert len(part.read_text().splitlines()) == 32
    with part.open("a") as file:
        file.write("half a row")
    run_here(monkeypatch, *words, "parts.csv")
    assert sum(map(len, calls)) == 60 + 16, "only the chunk in which it stopped is predicted again"
    parts, whole = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("parts", "whole"))
    pd.testing.assert_frame_equal(parts, whole)  # batches differ, so probabilities do in the last digits
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".parts")]
    shares = whole[[f"probability {name}" for name in TOPICS]]
    assert (shares.sum(axis=1) - 1).abs().max() < 1e-5
    assert (shares.idxmax(axis=1) == "probability " + whole["predicted"]).all()
    for text, line in (
        ("body,topic\n,billing\n", r"row 1 \(no body\)"),
        ("text\nhello\n", "no column 'body', only text"),
        ("body,predicted\na,b\n", r"bad\.csv has a column 'predicted' already: rename it"),
    ):
        (tmp_path / "bad.csv").write_text(text)
        with pytest.raises(UserError, match=line):
            run_here(monkeypatch, *words[:2], "bad.csv", "--output", "bad.out.csv")
        assert not (tmp_path / ".bad.out.csv.part").exists()
    (tmp_path / "new.csv").write_text("body,topic\ncat,weather\ncat,login\ncat,\n")
    capsys.readouterr()
    run_here(monkeypatch, *words[:2], "new.csv")
    printed = capsys.readouterr().out
    assert "1 rows have labels that the model lacks and do not count ('weather': 1)" in printed
    assert "% of 1 rows (" in printed


def test_images_of_a_folder_are_predicted_as_in_the_test(tmp_path):
    draw = random.Random(0)
    for split, count in (("train", 32), ("validation", 8), ("test", 24)):
        for number in range(count):
            name = ("blue", "red")[number % 2]
            colour = (draw.randint(60, 200), draw.randint(60, 200), draw.randint(60, 200))
            path = tmp_path / "colours" / split / name / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40 if number % 3 else 20, 32), colour).save(path)
    options = ["--task", "image-classification", "--dataset", "colours", "--model", MODELS / "vit-small.json"]
    (tmp_path / "none.yaml").write_text("{}")
    found = train(tmp_path, *options, "--image_size", "32", "--config", "none.yaml")
    printed = finished(run_script(PREDICT, "runs/2_grad_accum/1", "colours/test", cwd=tmp_path, **ONE_THREAD))
    assert f"Accuracy {found['test_accuracy']:.2%} of 24 rows" in printed
    rows = [json.loads(line) for line in (tmp_path / "test.predicted.jsonl").read_text().splitlines()]
    assert {row["label"] for row in rows} == {"blue", "red"}
    (tmp_path / "dark").mkdir()
    Image.fromarray(np.full((32, 32), 4095, np.uint16)).save(tmp_path / "dark" / "12_bits.png")
    process = run_script(PREDICT, "runs/2_grad_accum/1", "dark", cwd=tmp_path, **ONE_THREAD)
    assert process.returncode == 0
    assert "read as nearly black: the images of 16 bits (1) use less than half" in process.stdout


def test_a_language_model_is_refused_in_one_line(tmp_path):
    tiny("llama-lm").save_pretrained(tmp_path / "model")
    words_tokenizer().save_pretrained(tmp_path / "model")
    with pytest.raises(UserError, match=r"holds no classifier \(LlamaForCausalLM\): try scripts/generate\.py$"):
        inference.load_predictor(str(tmp_path / "model"), "cpu", torch.float32, 64, False, {})


def test_odd_rows_keep_their_columns_and_their_scores(tmp_path):
    """Keys in another order, keys that come later, class labels of Parquet, and a changed model or data."""
    names = ["a,b", "c|d"]
    rows = [{"text": f"cat {number}" if number % 2 else "music", "label": names[number % 2]} for number in range(64)]
    lines = [json.dumps(row) for row in rows]
    lines[1:3] = [json.dumps({"label": names[1], "note": "x,y", "text": "cat"}), json.dumps({"text": "two\nlines"})]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    train(tmp_path, "--dataset", "rows.jsonl", "--max_length", "16", "--epochs", "2")
    (tmp_path / "odd.jsonl").write_text("\n".join(lines) + "\n")
    words = ["runs/2_grad_accum/1", "odd.jsonl", "--output"]
    printed = {end: finished(run_script(PREDICT, *words, f"out.{end}", cwd=tmp_path)) for end in ("csv", "jsonl")}
    csv, jsonl = (text.split("\n", 1)[1] for text in printed.values())
    assert csv == jsonl
    assert "% of 63 rows (" in csv
    table = pd.read_csv(tmp_path / "out.csv", keep_default_na=False)
    assert [*table.columns] == ["text", "label", "predicted", "probability", "note"]
    assert table.loc[1].tolist()[:2] == ["cat", "c|d"]
    assert table["note"].tolist() == ["", "x,y", *[""] * 62]
    assert table["text"][2] == "two\nlines"
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    dataset = hf.Dataset.from_dict(columns).cast_column("label", hf.ClassLabel(names=names))
    dataset.to_parquet(tmp_path / "classes.parquet")
    found = finished(run_script(PREDICT, words[0], "classes.parquet", cwd=tmp_path))
    assert "% of 64 rows (" in found
    (tmp_path / "pictures").mkdir()
    process = run_script(PREDICT, words[0], "pictures", cwd=tmp_path)
    assert process.stderr.endswith("classifies texts: give a CSV, JSON or Parquet file, not pictures\n")
    found = finished(run_script(PREDICT, words[0], "rows.jsonl", cwd=tmp_path))
    assert "The model was trained on a file rows.jsonl" in found
    for mistake, line in (
        (["odd.jsonl", words[0]], "odd.jsonl is a file: give the folder of the model first, then the data"),
        ([words[0], "od.jsonl"], "there is no file or folder od.jsonl; did you mean odd.jsonl?"),
        ([words[0], "odd.jsonl", "--text_colum", "a"], "--text_colum a (did you mean --text_column?)"),
        ([words[0], "odd.jsonl", "--column_names", "text"], "--column_names is for CSV and TSV files without a header"),
    ):
        process = run_script(PREDICT, *mistake, cwd=tmp_path)
        assert (process.returncode, process.stderr.count("\n")) == (2, 1)
        assert line in process.stderr
    (tmp_path / "bare.csv").write_text("good great,pos\nbad, really awful,neg\n")
    bare = [words[0], "bare.csv", "--column_names", "text,label"]
    process = run_script(PREDICT, *bare, cwd=tmp_path)
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert process.stderr.startswith("error: bare.csv, row 2 (more fields than column names")
    assert "Saved 1 predictions in" in finished(run_script(PREDICT, *bare, "--bad_samples", "skip", cwd=tmp_path))


def test_numbers_keep_their_names_and_bad_rows_their_place(tmp_path):
    """An exported model, a header where the training had none, columns without a name, and rows that cannot be read."""
    rows = [f"{row['text']},{row['label']},{len(row['text'])}" for row in draw_rows("number", 64)]
    (tmp_path / "rows.csv").write_text("\n".join(rows) + "\n")
    names = ["--column_names", "text,price,size", "--label_column", "price,size", "--max_length", "16"]
    train(tmp_path, "--dataset", "rows.csv", "--problem_type", "regression", *names)
    finished(run_script(ROOT / "scripts" / "export_model.py", "runs/2_grad_accum/1", "--output", "out", cwd=tmp_path))

    def predict(model, text, *options):
        (tmp_path / "new.csv").write_text(text)
        (tmp_path / "new.predicted.csv").unlink(missing_ok=True)
        process = run_script(PREDICT, model, "new.csv", *options, cwd=tmp_path, **ONE_THREAD)
        found = tmp_path / "new.predicted.csv"
        return process, pd.read_csv(found) if found.exists() else None

    run, table = predict("runs/2_grad_accum/1", ",text,\n7,cat,x\n8,an invoice,y\n")
    headless = predict("runs/2_grad_accum/1", "cat,1,2\nan invoice,3,4\n")[1]
    exported, twin = predict("out", "size,text,price\n2,cat,1\n4,an invoice,3\n")
    named = predict("out", "cat\nan invoice\n", "--column_names", "text")[1]
    new = ["predicted price", "predicted size"]
    assert [*table.columns] == ["text", *new]
    for other in (headless, twin, named):
        pd.testing.assert_frame_equal(other[["text", *new]], table)
    assert "MSE" not in run.stdout
    assert re.search(r"MSE .* of 2 rows", exported.stdout)
    spoilt = "text,size\ncat,1\n,2\nmusic,3,4\nan invoice,5\n"
    process, _ = predict("out", spoilt)
    assert (process.returncode, process.stderr.count("\n")) == (2, 1)
    assert "row 2 (no text): fix or remove it, or leave its prediction empty by --bad_samples skip" in process.stderr
    process, found = predict("out", spoilt, "--bad_samples", "skip")
    assert "2 of 4 rows have no prediction (new.csv, row 2 (no text); new.csv, row 3 (more fields" in process.stdout
    assert found[new].isna().all(axis=1).tolist() == [False, True, True, False]
    pd.testing.assert_frame_equal(found.loc[[0, 3], new].reset_index(drop=True), table[new])
    process, _ = predict("out", "text\n\n ,\n", "--bad_samples", "skip")
    assert process.returncode == 2
    assert "1 of 1 rows have no prediction" in process.stderr
