"""Helpers for tests of saved models: tiny models with labels and adapters, a tokenizer, and scripts in this process."""

import runpy
import sys

import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, ViTConfig, ViTForImageClassification

from support.helpers import VOCABULARY, tiny_model

WORDS = ["<pad>", "<end>", "word2", "<unknown>", *(f"word{number}" for number in range(4, VOCABULARY))]
TARGETS = {"bloom": ["query_key_value"], "bert": ["query", "value"], "gpt2": ["c_attn"]}
HEADS = {"bert": ["classifier"], "bloom": ["score"], "llama": ["score"], "vit": ["classifier"]}


def words_tokenizer(**more):
    """Make a tokenizer of as many words as a tiny model has embeddings."""
    model = models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<unknown>")
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unknown>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special, **more)


def tiny(kind, **values):
    """Make a tiny model, a classifier with named labels."""
    if kind != "vit":
        model = tiny_model(kind, **values)
        model.config.id2label = {0: "bad", 1: "good"}
        return model
    torch.manual_seed(values.get("seed", 0))
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(**sizes, image_size=16, patch_size=8, num_labels=2))


def with_adapter(model, kind, **more):
    """Add an adapter to a model, as PEFT does without this project."""
    kind, causal = kind.removesuffix("-lm"), kind.endswith("-lm")
    task = "CAUSAL_LM" if causal else None if kind == "vit" else "SEQ_CLS"
    heads = None if causal else HEADS[kind]
    targets = TARGETS.get(kind, ["q_proj", "v_proj"])
    config = LoraConfig(task_type=task, r=4, lora_alpha=16, target_modules=targets, modules_to_save=heads, **more)
    return get_peft_model(model, config)


def run_here(monkeypatch, script, *arguments):
    """Run a script in this process, which saves the time to import the libraries."""
    monkeypatch.setattr(sys, "argv", [str(script), *map(str, arguments)])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # the script changes this setting
    runpy.run_path(str(script), run_name="__main__")
