"""4 bits leave out the layers whose weights a model reads itself, which a small copy shows, and the logits."""

import sys

import pytest
import torch
from support.helpers import ROOT, Tokenizer, settings_for
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from fabric_ladder import build_model
from fabric_ladder.data.splits import TextDatasets

sys.path.append(str(ROOT / "benchmarks"))
import tiny_models

LAYERS = {  # in 32 bits, and in 4
    "git": ({"output"}, {"query", "dense"}),
    "layoutlmv3": ({"rel_pos_bias", "rel_pos_x_bias", "out_proj"}, {"query", "dense"}),
    "modernvbert": ({"dense", "classifier"}, {"Wqkv", "Wi"}),  # the image part has a `head`, too
    "rwkv": ({"head", "output"}, {"key", "receptance"}),
    "trocr": ({"output_projection"}, {"q_proj", "fc1"}),
}


@pytest.mark.parametrize("name", LAYERS)
def test_weights_that_a_model_reads_itself_stay_out_of_4_bits(tmp_path, name):
    task, kind = "instruction-tuning", AutoModelForCausalLM
    if name in ("layoutlmv3", "modernvbert"):
        task, kind = "text-classification", AutoModelForSequenceClassification
    tiny_models.draw(name, kind, "input_ids")[0].save_pretrained(tmp_path / name)
    options = {"lora": True, "lora_dropout": 0.0, "quantization": "nf4", "precision": "32-true", "max_length": 32}
    settings = settings_for(tmp_path, model=str(tmp_path / name), task=task, **options)
    model = build_model(settings, TextDatasets(None, ["bad", "good"], Tokenizer(), ""))
    in_4_bits = [place for place, module in model.named_modules() if type(module).__name__ == "Linear4bit"]
    in_4_bits = {place.removesuffix(".base_layer").split(".")[-1] for place in in_4_bits}
    kept, others = LAYERS[name]
    assert others <= in_4_bits
    assert not kept & in_4_bits
    ids = torch.randint(5, 60, (2, 9))
    answers = {"labels": ids, "predicting": torch.arange(16)}
    answers = {"labels": torch.tensor([0, 1])} if task == "text-classification" else answers
    model.eval()(input_ids=ids, **answers)  # where RWKV divides its weights
    model.train()(input_ids=ids, **answers).loss.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)
