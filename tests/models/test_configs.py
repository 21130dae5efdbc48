"""Model configs, folders and DeepSpeed files that are none: one line that names the file, whatever lies in it."""

import json
import shutil

import pytest
import torch
from support.data_files import load_in, table, write_table
from support.helpers import MODELS, ROOT
from transformers import AutoConfig, AutoModelForSequenceClassification

from fabric_ladder import Settings, UserError, build_model
from fabric_ladder.data.tokens import load_tokenizer
from fabric_ladder.distributed.deepspeed_config import read_deepspeed_config
from fabric_ladder.models.configs import check_model, load_config

LLAMA = json.loads((MODELS / "llama-tiny.json").read_text())
BLOOM = json.loads((ROOT / "configs/models/bloom-quickstart.json").read_text())
VALUES = {"list": "[]", "null": "null", "number": "5", "text": '"x"', "deep": "[" * 100_000, "empty": "", "cut": '{"a'}


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """Texts with a tokenizer trained on them."""
    home = tmp_path_factory.mktemp("data")
    return load_in(home, write_table(table(), home / "texts.csv"), model=str(MODELS / "llama-tiny.json"))


@pytest.fixture(scope="module")
def whole(datasets, tmp_path_factory):
    """A model's folder with its tokenizer."""
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
    """The one line that refuses to make a model of a config file."""
    settings = Settings(model=str(path), from_scratch=True, max_length=8)
    with pytest.raises(UserError) as caught:
        make(settings, datasets)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("base", "change", "line"),
    [
        (LLAMA, {"num_attention_heads": 0}, "num_attention_heads is 0; it must be from 1"),
        (LLAMA, {"hidden_size": 0}, "hidden_size is 0"),
        (LLAMA, {"num_key_value_heads": -1}, "num_key_value_heads is -1"),
        (LLAMA, {"attention_dropout": 7}, "attention_dropout is 7; it must be from 0 to 1"),
        (BLOOM, {"hidden_dropout": float("nan")}, "hidden_dropout is nan"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000"),
        (LLAMA, {"vocab_size": -1}, "vocab_size is -1"),
        (LLAMA, {"quantization_config": 0}, "quantization_config must be an object"),
        (LLAMA, {"id2label": [1]}, "id2label must be an object"),
        (LLAMA, {"id2label": {str(number): "x" for number in range(100_001)}}, "more than 100,000 entries of id2label"),
        (LLAMA, {"num_labels": 10**9}, "num_labels is 1000000000"),
        (LLAMA, {"num_labels": "x"}, "is not a model config (TypeError"),
        (LLAMA, {"model_type": []}, "is not a model config (TypeError"),
        (LLAMA, {"hidden_act": "nope"}, "no model can be made of"),
        (LLAMA, {"rope_scaling": {"type": "x"}}, "(KeyError"),
        (LLAMA, {"torch_dtype": "nope"}, "(AttributeError"),
        (LLAMA, {"attn_implementation": "nope"}, "no model can be made of"),
        (BLOOM, {"n_head": 3}, "no model can be made of"),
    ],
)
def test_a_config_that_no_model_can_be_made_of(tmp_path, datasets, base, change, line):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(base | change))
    assert line in refusal(path, datasets)


@pytest.mark.parametrize("value", VALUES)
def test_a_config_may_hold_any_json(tmp_path, datasets, value):
    (tmp_path / "model.json").write_text(VALUES[value])
    refusal(tmp_path / "model.json", datasets)
    (tmp_path / "config.json").write_text(VALUES[value])
    with pytest.raises(UserError, match="config"):
        load_config(str(tmp_path))


@pytest.mark.parametrize("problem", [5, "regression", "multi_label_classification"])
def test_what_a_config_says_of_the_labels_gives_way_to_the_data(tmp_path, datasets, problem):
    (tmp_path / "model.json").write_text(json.dumps(LLAMA | {"problem_type": problem, "return_dict": False}))
    model = build_model(Settings(model=str(tmp_path / "model.json"), from_scratch=True), datasets)
    ids = torch.tensor([[1, 2]])
    assert model(input_ids=ids, labels=torch.tensor([1])).loss.isfinite()


@pytest.mark.parametrize("value", VALUES)
@pytest.mark.parametrize("file", ["tokenizer.json", "tokenizer_config.json"])
def test_a_damaged_tokenizer_is_named(tmp_path, whole, file, value):
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / file).write_text(VALUES[value])
    with pytest.raises(UserError, match=str(folder)):
        load_tokenizer(str(folder))


def test_a_tokenizer_that_cannot_pad_says_so(tmp_path, whole):
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / "tokenizer_config.json").unlink()
    with pytest.raises(UserError, match=r"names no token to pad with: add pad_token to tokenizer_config\.json"):
        load_tokenizer(str(folder))


class Runs:
    """What a pickle may hold: a call, here of something that leaves a trace."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"))


@pytest.mark.parametrize("content", ["a call", "garbage", "a list"])
def test_pickled_weights_are_not_run(tmp_path, whole, datasets, content):
    folder = shutil.copytree(whole, tmp_path / "model")
    (folder / "model.safetensors").unlink()
    values = {"a call": {"weight": Runs(tmp_path / "trace")}, "a list": [1, 2]}
    if content == "garbage":
        (folder / "pytorch_model.bin").write_bytes(b"garbage" * 100)
    else:
        torch.save(values[content], folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="holds no usable weights"):
        build_model(Settings(model=str(folder)), datasets)
    assert not (tmp_path / "trace").exists()


ZERO = {"zero_optimization": {"stage": 1}}
DEEPSPEED = {
    "no section": (ZERO | {"fp16": None}, None),
    "a number of parameters": (ZERO | {"optimizer": {"type": "Adam", "params": 5}}, "optimizer.params must be an obj"),
    "true parameters": (ZERO | {"optimizer": {"type": "Adam", "params": True}}, "optimizer.params must be an object"),
    "a list of parameters": (ZERO | {"optimizer": {"type": "Adam", "params": ["lr"]}}, "optimizer.params must be an"),
    "auto above": ({"auto": "auto"}, "DeepSpeed has no key auto"),
    "auto below": ({"zero_optimization": {"stage": 1, "auto": "auto"}}, None),
    "auto parameters": (ZERO | {"optimizer": {"type": "Adam", "params": {"auto": "auto"}}}, None),
    "a flag": (ZERO | {"bf16": True}, "bf16 must be an object"),
}


@pytest.mark.parametrize("name", DEEPSPEED)
def test_a_deepspeed_file_may_hold_any_json(tmp_path, name):
    config, line = DEEPSPEED[name]
    path = tmp_path / "zero.json"
    path.write_text(json.dumps(config))
    settings = Settings(deepspeed=str(path), devices=1, precision="bf16-mixed", model=str(MODELS / "llama-tiny.json"))
    if line is None:
        assert read_deepspeed_config(settings)[0]["zero_optimization"] == {"stage": 1}
        return
    with pytest.raises(UserError) as caught:
        read_deepspeed_config(settings)
    assert line in str(caught.value)


@pytest.mark.parametrize("value", [*VALUES, "objects"])
def test_a_deepspeed_file_that_is_none(tmp_path, value):
    (tmp_path / "zero.json").write_text((VALUES | {"objects": '{"a":' * 60 + "1" + "}" * 60})[value])
    with pytest.raises(UserError, match="zero"):
        read_deepspeed_config(Settings(deepspeed=str(tmp_path / "zero.json"), devices=1))
