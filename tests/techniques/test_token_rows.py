"""Rows of single tokens are trained next to adapters; all other rows stay as they are, also in the exported model."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from support.data_files import load_in
from support.export import words_tokenizer
from support.helpers import MODELS, VOCABULARY, settings_for, tiny_model
from support.resuming import assert_same, checkpoints, copy_until, tensors_of
from support.training import run_training
from transformers import AutoModelForCausalLM, AutoTokenizer, PhiConfig

from fabric_ladder import UserError, build_model, parse_settings
from fabric_ladder.checkpoints.export import find_result, load_result, write_plain

TOKENS, NEW = "word7,<a>, <b>", ["<a>", "<b>"]
ROWS = [7, VOCABULARY, VOCABULARY + 1]
SETTINGS = {"lora": True, "train_tokens": TOKENS, "batch_size": 8, "save": "consolidated", "epochs": 2}
IN_4_BITS = {"quantization": "nf4", "precision": "bf16-true"}
KINDS = {"bloom": (tiny_model, "bloom"), "bert": (tiny_model, "bert"), "untied": (tiny_model, "llama-lm"),
         "tied": (tiny_model, "gpt2-lm")}  # fmt: skip


def case(tmp_path, kind, **values):
    """Save a model with its tokenizer and a data set with the new tokens; return the settings."""
    make, name = KINDS[kind]
    make(name).save_pretrained(tmp_path / "base")
    words_tokenizer().save_pretrained(tmp_path / "base")
    causal = kind in ("tied", "untied")
    texts = [f"word{4 + number % 9} <a> word{20 + number % 7} <b> word7" for number in range(48)]
    rows = [{"instruction": text, "output": "<b> word9"} if causal else {"text": text, "label": len(text) % 2}
            for text in texts]  # fmt: skip
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = {"task": "instruction-tuning", "prompt_template": "{instruction} "} if causal else {}
    folder = {"model": str(tmp_path / "base"), "dataset": str(tmp_path / "rows.jsonl"), "max_length": 64}
    return settings_for(tmp_path, **SETTINGS | folder | task | values)


def load(settings):
    own = ("task", "prompt_template", "model", "train_tokens", "max_length")
    return load_in(Path(settings.dataset).parent, settings.dataset, **{name: getattr(settings, name) for name in own})


def train(folder, settings, **more):
    """Train in a folder; return the run and the model."""
    torch.manual_seed(0)
    datasets = load(settings)
    values = {name: value for name, value in vars(settings).items() if name not in ("model", "runs_dir")} | more
    return run_training(folder, build_model(settings, datasets), datasets, **values)


def tables(model):
    head = model.get_output_embeddings()
    return [table.weight.detach().float() for table in (model.get_input_embeddings(), head) if table is not None]


@pytest.mark.parametrize(
    ("kind", "values"),
    [("bloom", {}), ("bert", {"precision": "bf16-mixed"}), ("untied", {"precision": "bf16-true"}),
     ("untied", IN_4_BITS), ("tied", IN_4_BITS | {"stream_layers": True}), ("untied", {"stream_layers": True}),
     ("tied", {}), ("tied", {"from_scratch": True})],
    ids=str,
)  # fmt: skip
def test_only_the_named_rows_change_and_the_exported_model_has_them(tmp_path, kind, values):
    settings = case(tmp_path, kind, **values)
    run, model = train(tmp_path, settings)
    base = model.module.get_base_model()
    assert base.config.vocab_size == VOCABULARY + 2
    trained = {name for name, each in model.module.named_parameters() if each.requires_grad and "lora_" not in name}
    heads = {name for name in trained if "modules_to_save" in name}
    assert len(trained - heads) == 1 + (kind == "untied"), "one tensor of rows for each table"
    result = find_result(run.folder)
    write_plain(load_result(result), tmp_path / "plain", result.folder)
    plain = type(base).from_pretrained(tmp_path / "plain")
    start = type(base).from_pretrained((run.folder if settings.from_scratch else tmp_path) / "base")
    for after, before in zip(tables(plain), tables(start), strict=True):
        others = [row for row in range(VOCABULARY) if row not in ROWS]
        assert torch.equal(after[others], before[others])
        assert all((after[row] != before[:VOCABULARY].mean(0)).any() for row in ROWS[1:])
        assert (after[7] != before[7]).any()
    ids = AutoTokenizer.from_pretrained(tmp_path / "plain").encode("word7 <a><b>", add_special_tokens=False)
    assert ids == ROWS
    if settings.quantization == "no":  # 4-bit weights are merged into whole ones
        inputs = torch.tensor([[*ROWS, 5, 6]])
        with torch.no_grad():
            both = [each.eval()(input_ids=inputs).logits for each in (load_result(result), plain)]
        torch.testing.assert_close(*both)


def test_new_rows_start_as_the_mean_and_a_line_names_them(tmp_path):
    settings = case(tmp_path, "untied")
    model = build_model(settings, load(settings))
    start = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    for after, before in zip(tables(model.get_base_model()), tables(start), strict=True):
        torch.testing.assert_close(after[VOCABULARY:], before.mean(0).expand(2, -1))
        assert torch.equal(after[:VOCABULARY], before)
    line = "Trained rows of the embedding: 3; new, and starting as the mean of all rows: <a>, <b>"
    assert line in model.get_base_model().notices
    settings = replace(settings, train_tokens="word7,word30")
    notices = build_model(settings, load(settings)).get_base_model().notices
    assert "Trained rows of the embedding: 2; in no training text: word30" in notices


@pytest.mark.parametrize("kind", ["tied", "untied"])
def test_a_stopped_run_resumes_bit_by_bit(tmp_path, kind):
    settings = case(tmp_path, kind, save_every=2, keep=9, save="no")
    whole = train(tmp_path / "whole", settings)[0].folder
    home = copy_until(checkpoints(whole)[0].name, whole, tmp_path / "again")
    train(tmp_path / "again", settings, resume="auto")
    assert_same(home, whole)
    assert sum("trainable_tokens" in name for name in tensors_of(checkpoints(whole)[-1])) >= 1


LLAMA = ["--model", str(MODELS / "llama-tiny.json"), "--from_scratch", "true"]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--train_tokens", "<a>,,<b>"], "--train_tokens <a>,,<b>: a token is empty; separate tokens by single commas"),
        (["--train_tokens", ""], "--train_tokens is empty"),
        (["--train_tokens", "<a> <b>"], "'<a> <b>' splits into several tokens"),
        (["--train_tokens", "<a>", "--lora", "false"], "--train_tokens has no effect without --lora true"),
        (["--train_tokens", "<a>"], "a trained tokenizer learns its tokens from the texts; choose a --tokenizer"),
        (["--train_tokens", "<a>", "--task", "image-classification"], "images have no tokens; leave it out"),
    ],
)
def test_bad_settings_are_refused_in_one_line(words, line):
    model = ["--model", str(MODELS / "vit-small.json")] if "image-classification" in words else LLAMA[:2]
    with pytest.raises(UserError, match=line):
        parse_settings([*model, *LLAMA[2:], "--accelerator", "cpu", *words], lora=True)


def test_bad_tokens_and_models_are_refused_in_one_line(tmp_path):
    with pytest.raises(UserError, match="<pad>: it pads texts, and its row gets no gradient"):
        load(case(tmp_path, "bloom", train_tokens="<pad>"))
    settings = case(tmp_path, "tied")
    datasets = load(settings)
    phi = PhiConfig(vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=1, num_attention_heads=2)
    phi.to_json_file(tmp_path / "phi.json")
    settings = replace(settings, model=str(tmp_path / "phi.json"), from_scratch=True)
    with pytest.raises(UserError, match=r"the head of .*phi\.json has biases, which PEFT would leave out"):
        build_model(settings, datasets)
