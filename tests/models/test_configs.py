"""Damaged model configs and folders are refused in one line that names the file."""

import json
import shutil

import pytest
import torch
from support.data_files import load_in, table, write_table
from support.helpers import MODELS, ROOT
from transformers import AutoConfig, AutoModelForSequenceClassification, MusicgenConfig, T5Config

from fabric_ladder import Settings, UserError, build_model
from fabric_ladder.data.hub import reachable
from fabric_ladder.data.tokens import load_tokenizer
from fabric_ladder.models.configs import AS_ROBERTA, check_model, load_config

LLAMA = json.loads((MODELS / "llama-tiny.json").read_text())
BLOOM = json.loads((ROOT / "configs/models/bloom-quickstart.json").read_text())
VALUES = {"list": "[]", "cut": '{"a'}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Return texts and a tokenizer trained on them."""
    home = tmp_path_factory.mktemp("data")
    return load_in(home, write_table(table(), home / "texts.csv"), model=str(MODELS / "llama-tiny.json"))


@pytest.fixture(scope="module")
def whole(datasets, tmp_path_factory):
    """Save a model with its tokenizer and return the folder."""
    folder = tmp_path_factory.mktemp("model") / "whole"
    config = AutoConfig.from_pretrained(MODELS / "llama-tiny.json")
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    datasets.tokenizer.save_pretrained(folder)
    return folder


def make(settings, datasets):
    """Check a model and make it, as a run does."""
    check_model(settings)
    build_model(settings, datasets)


def refusal(path, datasets):
    """Return the one-line error for a config file."""
    settings = Settings(model=str(path), from_scratch=True, max_length=8)
    with pytest.raises(UserError) as caught:
        make(settings, datasets)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("base", "change", "line"),
    [
        (LLAMA, {"num_labels": "x"}, "is not a model config (TypeError"),
        (LLAMA, {"hidden_act": "nope"}, "no model can be made of"),
        (LLAMA, {"rope_scaling": {"type": "x"}}, "(KeyError"),
        (LLAMA, {"attn_implementation": "nope"}, "no model can be made of"),
        (BLOOM, {"n_head": 3}, "no model can be made of"),
        (LLAMA, {"num_key_value_heads": 8}, ": num_key_value_heads 8 does not divide num_attention_heads 4; correct"),
        (LLAMA, {"num_key_value_heads": 0}, ": num_key_value_heads 0 does not divide num_attention_heads 4; correct"),
    ],
)
def test_an_impossible_config_is_refused(tmp_path, datasets, base, change, line):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(base | change))
    assert line in refusal(path, datasets)


def test_the_folder_of_a_run_names_its_model(tmp_path):
    (tmp_path / "model").mkdir()
    with pytest.raises(UserError, match=f"the folder {tmp_path} holds no usable model; give {tmp_path}/model"):
        load_config(str(tmp_path))


def test_a_run_without_a_whole_model_names_the_script_that_makes_one(whole, tmp_path):
    remedy = "; scripts/export_model.py makes a model of it"
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(UserError, match=f"the folder {tmp_path} holds no usable model{remedy}"):
        load_config(str(tmp_path))
    saved = shutil.copytree(whole, tmp_path / "checkpoint")
    (saved / "shard-00001-model-00001-of-00001.safetensors").write_bytes(b"")
    with (
        pytest.raises(UserError, match=rf"holds no usable weights{remedy} \(it is a sharded checkpoint\)"),
        reachable(str(saved), "weights"),
    ):
        pytest.fail("the weights would be loaded")


@pytest.mark.parametrize("kind", [*AS_ROBERTA, "bert", "electra"])
def test_the_longest_text_that_a_model_takes_is_named(tmp_path, kind):
    """Positions of RoBERTa and its relatives start after the padding token's number."""
    sizes = {"hidden_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    sizes |= {"vocab_size": 64, "max_position_embeddings": 34, "entity_vocab_size": 8, "embedding_size": 24}
    sizes |= {"default_language": "en_XX", "attention_window": 8, "pad_token_id": 1, "mask_token_id": 5}
    sizes |= {"coordinate_size": 4, "shape_size": 4, "max_2d_position_embeddings": 64, "visual_embed": False}
    config = AutoConfig.for_model(kind, **sizes)
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config.to_dict()))
    with pytest.raises(UserError) as caught:
        check_model(Settings(model=str(path), from_scratch=True, max_length=35))
    longest = int(str(caught.value).split()[-1])
    model = AutoModelForSequenceClassification.from_config(config).eval()
    model(input_ids=torch.full((1, longest), 7))
    with pytest.raises((IndexError, RuntimeError)):
        model(input_ids=torch.full((1, longest + 1), 7))


@pytest.mark.parametrize("value", VALUES)
def test_damaged_files_of_a_model_are_named(tmp_path, whole, datasets, value):
    (tmp_path / "model.json").write_text(VALUES[value])
    refusal(tmp_path / "model.json", datasets)
    (tmp_path / "config.json").write_text(VALUES[value])
    with pytest.raises(UserError, match=f"the folder {tmp_path} holds no usable model"):
        load_config(str(tmp_path))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        folder = shutil.copytree(whole, tmp_path / file)
        (folder / file).write_text(VALUES[value])
        with pytest.raises(UserError, match=str(folder)):
            load_tokenizer(str(folder))


def test_the_data_override_the_labels_of_a_config(tmp_path, datasets):
    (tmp_path / "model.json").write_text(json.dumps(LLAMA | {"problem_type": "regression", "return_dict": False}))
    model = build_model(Settings(model=str(tmp_path / "model.json"), from_scratch=True), datasets)
    ids = torch.tensor([[1, 2]])
    assert model(input_ids=ids, labels=torch.tensor([1])).loss.isfinite()


def test_a_tokenizer_without_a_padding_token_is_refused(tmp_path, whole):
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"names no token to pad with: add pad_token to tokenizer_config\.json"):
        load_tokenizer(str(folder))


def test_a_model_with_several_parts_that_read_texts_is_refused(tmp_path):
    config = MusicgenConfig(text_encoder=T5Config().to_dict(), audio_encoder={"model_type": "encodec"}, decoder={})
    config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="several parts of a musicgen read texts: choose another --model"):
        check_model(Settings(model=str(tmp_path), task="instruction-tuning", from_scratch=True))
