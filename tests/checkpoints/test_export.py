"""A saved model equals the trained model, whether whole, sharded, an adapter, merged or loaded by transformers."""

import json
import re

import pytest
import torch
from peft import PeftModel
from PIL import Image
from safetensors.torch import load_file
from support.devices import SIZES
from support.export import run_here, tiny, with_adapter, words_tokenizer
from support.helpers import MODELS, ROOT, SRC, VOCABULARY, settings_for, token_datasets
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BitsAndBytesConfig,
    LlamaConfig,
    LlamaForSequenceClassification,
    pipeline,
)

from fabric_ladder import UserError, build_dataloaders
from fabric_ladder.checkpoints.export import find_result, load_result, new_folder, write_plain
from fabric_ladder.checkpoints.save import read_state, save
from fabric_ladder.models.configs import as_in_training

EXPORT = ROOT / "scripts" / "export_model.py"


def inputs_for(kind):
    torch.manual_seed(1)
    if kind == "vit":
        return {"pixel_values": torch.randn(4, 3, 16, 16), "labels": torch.tensor([0, 1, 1, 0])}
    ids = torch.randint(3, VOCABULARY, (4, 12))
    return {"input_ids": ids, "labels": ids if kind.endswith("-lm") else torch.tensor([0, 1, 1, 0])}


@pytest.fixture
def trained(tmp_path, fabric):
    """Train a model for some steps and save it; return the run's folder, the model and its logits."""

    def trained(model, kind, how="consolidated", from_scratch=True, tokenizer=None):
        settings = settings_for(tmp_path)
        datasets = token_datasets()
        datasets.tokenizer = tokenizer or words_tokenizer()
        data = build_dataloaders(fabric, datasets, settings)[0].dataset
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model = fabric.setup(model)
        optimizer = fabric.setup_optimizers(torch.optim.Adam(weights, lr=3e-2))
        inputs = inputs_for(kind)
        for _ in range(3):
            fabric.backward(model(**inputs).loss)
            optimizer.step()
            optimizer.zero_grad()
        folder = tmp_path / f"run-{how}"
        folder.mkdir()
        save(fabric, how, folder, model, optimizer, data, from_scratch)
        return folder, model, logits(model.module, kind)

    return trained


@torch.no_grad()
def logits(model, kind):
    inputs = inputs_for(kind)
    del inputs["labels"]
    return model.eval()(**inputs).logits


def close(first, second, atol=1e-5):
    torch.testing.assert_close(second, first, atol=atol, rtol=0)


@pytest.mark.parametrize(("kind", "how"), [("bert", "sharded"), ("llama-lm", "sharded"), ("gpt2-lm", "consolidated")])
def test_a_whole_model_is_loaded_unchanged(trained, tmp_path, kind, how):
    folder, model, expected = trained(tiny(kind), kind, how)
    again = load_result(find_result(folder))
    assert type(again) is type(model.module)
    assert torch.equal(logits(again, kind), expected)
    write_plain(again, tmp_path / "plain", find_result(folder).folder)
    auto = AutoModelForCausalLM if kind.endswith("-lm") else AutoModelForSequenceClassification
    plain = auto.from_pretrained(tmp_path / "plain")
    assert torch.equal(logits(plain, kind), expected)
    assert plain.config.use_cache
    if kind.endswith("-lm"):
        assert plain.generation_config.eos_token_id == [1], "the tokenizer's end token, not the 2 of the config"
    else:
        assert plain.config.id2label == {0: "bad", 1: "good"}
    assert AutoTokenizer.from_pretrained(tmp_path / "plain")("word7")["input_ids"] == [7]


@pytest.mark.parametrize(
    ("kind", "more", "how"),
    [
        ("bloom", {"use_dora": True}, "sharded"),
        ("llama", {"use_rslora": True}, "consolidated"),
        ("llama-lm", {}, "sharded"),
        ("gpt2-lm", {"fan_in_fan_out": True}, "consolidated"),  # its head is tied
    ],
)
def test_an_adapter_is_loaded_and_merged(trained, tmp_path, kind, more, how):
    folder, _, expected = trained(with_adapter(tiny(kind), kind, **more), kind, how)
    result = find_result(folder)
    assert result.folder.name == {"sharded": "checkpoint", "consolidated": "adapter"}[how]
    model = load_result(result)
    assert isinstance(model, PeftModel)
    close(logits(model, kind), expected, atol=1e-6)
    assert not torch.allclose(logits(load_result(find_result(folder / "base")), kind), expected, atol=1e-3)
    write_plain(model, tmp_path / "merged", result.folder)
    auto = AutoModelForCausalLM if kind.endswith("-lm") else AutoModelForSequenceClassification
    merged = auto.from_pretrained(tmp_path / "merged")
    close(logits(merged, kind), expected)
    assert not [name for name in merged.state_dict() if "lora" in name or "base_layer" in name]


def test_an_adapter_on_4_bit_weights_is_loaded_and_merged(trained, tmp_path, monkeypatch, capsys):
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = LlamaConfig(**sizes, intermediate_size=64, vocab_size=VOCABULARY, pad_token_id=0, num_labels=2)
    torch.manual_seed(0)
    LlamaForSequenceClassification(config).save_pretrained(tmp_path / "whole")
    bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                              bnb_4bit_compute_dtype=torch.float32)  # fmt: skip
    options = {"quantization_config": bits, "dtype": torch.float32}
    quantised = as_in_training(AutoModelForSequenceClassification.from_pretrained(tmp_path / "whole", **options))
    quantised.config.id2label = {0: "bad", 1: "good"}
    folder, _, expected = trained(with_adapter(quantised, "llama"), "llama")
    base = load_file(folder / "base" / "model.safetensors")
    assert base["model.layers.0.self_attn.q_proj.weight"].dtype == torch.uint8, "the base model must stay in 4 bits"
    assert "quantization_config" in json.loads((folder / "base" / "config.json").read_text())
    result = find_result(folder)
    close(logits(load_result(result), "llama"), expected, atol=1e-6)
    whole = load_result(result, quantization="no")
    unmerged = logits(whole, "llama")
    close(unmerged, expected, atol=1e-2)
    write_plain(whole, tmp_path / "merged", result.folder)
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged")
    assert not hasattr(merged.config, "quantization_config")
    close(logits(merged, "llama"), unmerged)

    # merge the adapter into the unquantized weights
    run_here(monkeypatch, EXPORT, folder, "--base", tmp_path / "whole", "--output", tmp_path / "onto-whole")
    assert "trained on 4-bit weights and is merged into whole ones: outputs differ" in capsys.readouterr().out
    onto_whole = AutoModelForSequenceClassification.from_pretrained(tmp_path / "onto-whole")
    close(logits(onto_whole, "llama"), logits(load_result(result, str(tmp_path / "whole"), quantization="no"), "llama"))


def test_the_adapters_file_has_only_the_trained_weights(trained):
    folder, model, _ = trained(with_adapter(tiny("bloom"), "bloom", use_dora=True), "bloom")
    weights = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert all(re.search(r"\.lora_(A|B)\.weight|lora_magnitude_vector|\.score\.weight", name) for name in weights)
    trainable = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    assert sum(tensor.numel() for tensor in weights.values()) == trainable


def test_an_adapter_names_its_base_so_that_it_is_found_from_anywhere(trained, tmp_path, monkeypatch):
    tiny("bloom").save_pretrained(tmp_path / "pretrained")
    monkeypatch.chdir(tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained("pretrained")
    folder, _, expected = trained(with_adapter(model, "bloom"), "bloom", from_scratch=False)
    assert not (folder / "base").exists()
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "pretrained")
    monkeypatch.chdir("/")
    close(logits(load_result(find_result(folder)), "bloom"), expected, atol=1e-6)
    # for a base model from the Hub, the config names the commit
    model = tiny("bloom")
    model.name_or_path = "some/bloom"
    model.config._commit_hash = "0123abc"
    folder.rename(tmp_path / "before")
    folder, _, _ = trained(with_adapter(model, "bloom"), "bloom", from_scratch=False)
    config = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    assert (config["base_model_name_or_path"], config["revision"]) == ("some/bloom", "0123abc")


def test_training_continues_with_a_sharded_adapter(trained, fabric):
    folder, _, expected = trained(with_adapter(tiny("bloom"), "bloom"), "bloom", "sharded")

    def fresh(**more):
        model = with_adapter(tiny("bloom"), "bloom", **more)
        weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
        model = fabric.setup(model)
        return model, fabric.setup_optimizers(torch.optim.Adam(weights, lr=1e-2))

    model, optimizer = fresh()
    read_state("--load", folder / "checkpoint", model, optimizer)
    close(logits(model.module, "bloom"), expected, atol=1e-6)
    assert {int(state["step"]) for state in optimizer.optimizer.state.values()} == {3}
    with pytest.raises(UserError, match="made with another model or optimizer \\(use_rslora False, not True\\)"):
        read_state("--load", folder / "checkpoint", *fresh(use_rslora=True))
    whole = fabric.setup(tiny("bloom"))
    adam = fabric.setup_optimizers(torch.optim.Adam(whole.parameters()))
    with pytest.raises(UserError, match="made with another model or optimizer"):
        read_state("--load", folder / "checkpoint", whole, adam)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("bert", {}, r"adapter is an adapter for \S+base, and does not fit \S+other: a bloom and a bert"),
        ("bloom", {"hidden_size": 32}, r"does not fit \S+other \(.*size mismatch for"),
        ("bloom", {"n_layer": 3}, r"does not fit \S+other: only one of them has \S+h\.2\."),
    ],
)
def test_an_adapter_for_another_base_is_refused(trained, tmp_path, kind, sizes, message):
    folder, _, _ = trained(with_adapter(tiny("bloom"), "bloom"), "bloom")
    other = tiny(kind)
    type(other)(type(other.config)(**(other.config.to_dict() | sizes))).save_pretrained(tmp_path / "other")
    with pytest.raises(UserError, match=message) as error:
        load_result(find_result(folder), str(tmp_path / "other"))
    assert "\n" not in str(error.value)


def test_an_adapter_of_a_moved_run_finds_the_base_beside_it(trained, tmp_path):
    adapter, _, _ = trained(with_adapter(tiny("bloom"), "bloom"), "bloom")
    wanted = load_result(find_result(adapter)).state_dict()
    moved = adapter.rename(tmp_path / "moved")
    found = load_result(find_result(moved)).state_dict()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)
    (moved / "adapter" / "adapter_config.json").write_text("")
    with pytest.raises(UserError, match=r"^cannot read \S+adapter_config.json"):
        load_result(find_result(moved))


def test_the_scripts_refuse_bad_input_in_one_line_and_leave_nothing(trained, tmp_path, monkeypatch, capsys):
    whole, _, _ = trained(tiny("bloom"), "bloom")
    whole = whole.rename(tmp_path / "whole")
    adapter, _, _ = trained(with_adapter(tiny("bloom"), "bloom"), "bloom")
    (adapter / "base").rename(tmp_path / "moved")
    (tmp_path / "runs" / "1").mkdir(parents=True)
    (tmp_path / "runs" / "1" / "run.json").write_text("{}")
    (tmp_path / "stopped" / "checkpoints").mkdir(parents=True)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    before = sorted(tmp_path.rglob("*"))
    for name, message in (
        ("nowhere", "the folder nowhere does not exist: give the folder of a run"),
        (tmp_path / "full", "full holds no saved model"),
        (tmp_path / "runs", r"runs holds runs: give one of them, e.g. \S+runs/1"),
        (tmp_path / "stopped", r"only checkpoints: train on with --resume \S+stopped --save consolidated"),
    ):
        with pytest.raises(UserError, match=message):
            find_result(name)
    with pytest.raises(UserError, match=r"is an adapter for \S+base, which does not exist: give --base FOLDER"):
        load_result(find_result(adapter))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for arguments, message in (
        (["whole", "--base", "moved"], "model is a whole model, not an adapter; leave it out"),
        (["run-consolidated", "--base", "no/such"], "cannot load the base model 'no/such'"),
        (["whole", "--output", "full"], "full already exists; choose another --output"),
    ):
        with pytest.raises(UserError, match=message) as error:
            run_here(monkeypatch, EXPORT, *arguments)
        assert "\n" not in str(error.value)
    with pytest.raises(UserError, match="cannot write"), new_folder(tmp_path / "full" / "mine" / "model"):
        pass
    assert sorted(tmp_path.rglob("*")) == before
    run_here(monkeypatch, EXPORT, adapter, "--base", "moved", "--precision", "bf16-true")
    assert f"Saved {adapter / 'export'}" in capsys.readouterr().out
    assert AutoModelForSequenceClassification.from_pretrained(adapter / "export").dtype == torch.bfloat16


def test_pipelines_load_an_exported_model(tmp_path, monkeypatch):
    """`pipeline` loads the exported folder without further arguments and has the names of the classes."""
    monkeypatch.chdir(tmp_path)
    for number in range(40):
        for name, colour in (("red", (200, number, 0)), ("blue", (0, number, 200))):
            (tmp_path / "colours" / name).mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (40, 32), colour).save(tmp_path / "colours" / name / f"{number}.png")
    arguments = ("--task", "image-classification", "--dataset", "colours", "--model", MODELS / "vit-small.json")
    arguments += ("--from_scratch", "true", "--learning_rate", "1e-3", "--batch_size", "8", "--epochs", "2")
    config = tmp_path / "none.yaml"
    config.write_text("{}")
    arguments += ("--config", config, "--save", "sharded", "--image_size", "32")
    run_here(monkeypatch, SRC / "2_grad_accum.py", *arguments, "--micro_batch_size", "8")
    run_here(monkeypatch, EXPORT, "runs/2_grad_accum/1")
    classify = pipeline("image-classification", model=str(tmp_path / "runs" / "2_grad_accum" / "1" / "export"))
    for name, colour in (("red", (210, 5, 0)), ("blue", (0, 5, 210))):
        assert classify(Image.new("RGB", (50, 50), colour))[0]["label"] == name

    run_here(monkeypatch, SRC / "2_grad_accum.py", *SIZES, "--save", "consolidated")
    run_here(monkeypatch, EXPORT, "runs/2_grad_accum/2", "--output", "plain")
    classify = pipeline("text-classification", model=str(tmp_path / "plain"), truncation=True)
    assert {row["label"] for row in classify("A film.", top_k=None)} == {"negative", "positive"}
    assert classify("A film. " * 500) == classify("A film. " * 1000), "cut as in the training"
    (tmp_path / "own").touch()
    folders = (tmp_path / "plain", tmp_path / "runs" / "2_grad_accum" / "2" / "model")
    assert {path.stat().st_mode for folder in folders for path in folder.iterdir()} == {
        (tmp_path / "own").stat().st_mode
    }
