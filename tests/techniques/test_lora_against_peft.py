"""Adapters start and train as PEFT's own."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from support.export import words_tokenizer
from support.helpers import VOCABULARY, settings_for, token_datasets
from support.training import losses, run_training

from fabric_ladder import build_model

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY}
CONFIGS = {
    "bloom": SIZES | {"model_type": "bloom", "pad_token_id": 0},
    "llama": SIZES | {"model_type": "llama", "intermediate_size": 32, "pad_token_id": 0},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY},
}
LANGUAGE = {"task": "instruction-tuning", "loss_chunk": 16}


def settings_of(tmp_path, kind, **values):
    path = tmp_path / f"{kind}.json"
    path.write_text(json.dumps(CONFIGS[kind]))
    chosen = {"model": str(path), "from_scratch": True, "lora": True, "lora_rank": 4, "lora_dropout": 0.0}
    chosen |= {"lora_targets": "attention"}  # PEFT's own choice
    return settings_for(tmp_path, **(chosen | LANGUAGE | values))


def made(settings):
    """Return the model of the settings, with the same random weights each time."""
    torch.manual_seed(0)
    return build_model(settings, token_datasets(per_token=True))


def by_peft(tmp_path, kind):
    """Return the same model with PEFT's adapters."""
    model = made(settings_of(tmp_path, kind, lora=False))
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, fan_in_fan_out=kind == "gpt2")
    return get_peft_model(model, config)


def trained(tmp_path, model, **values):
    datasets = token_datasets(per_token=True)
    datasets.tokenizer = words_tokenizer()
    return run_training(tmp_path, model, datasets, lora=True, **(LANGUAGE | values))


@pytest.mark.parametrize("kind", CONFIGS)
def test_weights_and_losses_are_those_of_peft(tmp_path, kind):
    model = made(settings_of(tmp_path, kind))
    reference = by_peft(tmp_path, kind)
    assert all(map(torch.equal, model.state_dict().values(), reference.state_dict().values()))
    found, expected = (trained(tmp_path, each)[0] for each in (model, reference))
    assert losses(found) == losses(expected)
    assert losses(found)[0] != losses(found)[-1]
