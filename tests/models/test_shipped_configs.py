"""The shipped configs have the published numbers of parameters, and are found by the models' names on the Hub.

The values of the configs are from MLC LLM (`model/model_preset.py`), LitGPT (`litgpt/config.py`), nanoGPT (`model.py`),
the READMEs of BERT and Pythia, the OPT paper (arXiv:2205.01068, table 1), the models' files on the Hub, and the
defaults of transformers' config classes. Keys with a default's value may be left out.
"""

import pytest
import torch
from support.helpers import MODELS
from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageClassification

from fabric_ladder.data.hub import find_shipped_config, load_config

OWN = {"bloom-quickstart", "llama-tiny", "qwen3-tiny", "vit-small"}  # shapes of this project
ENCODERS = ("bert", "roberta", "distilbert", "modernbert", "deberta-v2")  # counted with their pooler, without a head

# Whole numbers are exact. Other numbers are rounded, or count another head: they agree within 0.5 %.
KERAS_HUB = {  # keras-team/keras-hub, `src/models/*/*_presets.py`: "params"
    "bert-base-cased": 108_310_272, "bert-base-uncased": 109_482_240, "bert-large-cased": 333_579_264,
    "bert-large-uncased": 335_141_888, "distilbert-base-cased": 65_190_912, "distilbert-base-uncased": 66_362_880,
    "deberta-v3-base": 183_831_552, "roberta-base": 124_052_736.0, "roberta-large": 354_307_072.0,
    "vit-base-16": 85_798_656.0, "vit-large-16": 303_301_632.0, "opt-1.3b": 1_315_753_984.0,
    "bloom-560m": 559_214_592, "bloom-1b1": 1_065_314_304, "bloom-1b7": 1_722_408_960, "bloom-3b": 3_002_557_440,
    "gpt2": 124_439_808, "gpt2-medium": 354_823_168, "gpt2-large": 774_030_080, "gpt2-xl": 1_557_611_200,
    "llama-2-7b": 6_738_415_616, "mistral-7b-v0.1": 7_241_732_096, "phi-3-mini-4k": 3_821_079_552,
    "gemma-2-2b": 2_614_341_888, "gemma-2-9b": 9_241_705_984, "gemma-3-1b": 999_885_952,
    "qwen2.5-0.5b": 494_032_768, "qwen2.5-1.5b": 1_543_714_304, "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512, "qwen3-0.6b": 596_049_920, "qwen3-1.7b": 1_720_574_976, "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360, "qwen3-14b": 14_768_307_200, "qwen3-32b": 32_762_123_264,
}  # fmt: skip
PAPERS = {
    "llama-3.2-1b": 1_235_814_400, "llama-3.2-3b": 3_212_749_824,  # arXiv:2502.00706, table 4
    "tinyllama-1.1b-chat-v1.0": 1_100_048_384,  # the same table
    "modernbert-base": 149e6, "modernbert-large": 395e6,  # arXiv:2412.13663
}  # fmt: skip
HUB = {  # the model card, or the number of weights on the model's page
    "bloom-7b1": 7_069_016_064, "pythia-160m": 162_322_944, "pythia-410m": 405_334_016, "pythia-1b": 1_011_781_632,
    "pythia-1.4b": 1_414_647_808, "pythia-2.8b": 2_775_208_960, "pythia-6.9b": 6_857_302_016,
    "llama-3.1-8b": 8_030_261_248, "llama-3.1-70b": 70_553_706_496, "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-14b": 14_770_033_664, "phi-1_5": 1_418_270_720, "opt-350m": 331_196_416, "smollm2-135m": 134_515_008,
    "smollm2-360m": 361_821_120, "smollm2-1.7b": 1_711_376_384,
}  # fmt: skip
PUBLISHED = KERAS_HUB | PAPERS | HUB


def test_every_shipped_config_has_a_published_number():
    assert {path.stem for path in MODELS.glob("*.json")} == PUBLISHED.keys() | OWN


def count_parameters(config, layers):
    """Return the number of parameters of a model with this number of layers."""
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    kind = AutoModel if config.model_type in ENCODERS else AutoModelForCausalLM
    with torch.device("meta"):
        model = (AutoModelForImageClassification if config.model_type == "vit" else kind).from_config(config)
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_number_of_parameters_is_the_published_number(name):
    """All layers after the first are equal, so two models of few layers give the number."""
    config = load_config(str(MODELS / f"{name}.json"))
    layers = config.num_hidden_layers
    two, one = (count_parameters(config, few) for few in (2, 1))
    published = PUBLISHED[name]
    count = one + (layers - 1) * (two - one)
    assert count == pytest.approx(published, rel=0 if isinstance(published, int) else 0.005, abs=0)


def test_names_on_the_hub_give_the_file():
    for name, stem in {
        "meta-llama/Llama-3.1-8B": "llama-3.1-8b", "unsloth/Meta-Llama-3.1-8B-Instruct": "llama-3.1-8b",
        "meta-llama/Llama-2-7b-chat-hf": "llama-2-7b", "Qwen/Qwen3-8B-Base": "qwen3-8b", "gpt2-xl": "gpt2-xl",
        "mistralai/Mistral-7B-Instruct-v0.3": "mistral-7b-v0.3", "google/gemma-3-1b-pt": "gemma-3-1b",
        "microsoft/Phi-3-mini-4k-instruct": "phi-3-mini-4k", "bigscience/bloomz-7b1-mt": "bloom-7b1",
        "google-bert/bert-base-uncased": "bert-base-uncased", "FacebookAI/roberta-base": "roberta-base",
        "google/vit-base-patch16-224-in21k": "vit-base-16", "google/vit-large-patch16-224": "vit-large-16",
        "EleutherAI/pythia-1.4b-deduped": "pythia-1.4b", "HuggingFaceTB/SmolLM2-360M-Instruct": "smollm2-360m",
    }.items():  # fmt: skip
        assert find_shipped_config(name) == MODELS / f"{stem}.json"
    for other in ("Qwen3-8B", "Qwen/Qwen3-30B-A3B", "google/vit-base-patch16-384", "unsloth/Qwen3-8B-bnb-4bit"):
        assert find_shipped_config(other) is None
