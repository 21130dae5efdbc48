"""Loading a model, with the traps of transformers."""

import pytest
import torch
from lightning import Fabric
from support.helpers import MODELS, Tokenizer, settings_for, tiny_model
from transformers import AutoModelForSequenceClassification

from fabric_ladder import UserError, build_model
from fabric_ladder.data.splits import TextDatasets


def datasets(names=("bad", "good"), size=64):
    return TextDatasets(None, list(names), Tokenizer(size), "")


@pytest.fixture
def half_checkpoint(tmp_path):
    """Save a BLOOM in float16, the dtype of the Hub's bloom-560m."""
    tiny_model("bloom").half().save_pretrained(tmp_path / "half")
    return str(tmp_path / "half")


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_half_precision_checkpoint_trains_in_32_bit(tmp_path, half_checkpoint, precision):
    assert AutoModelForSequenceClassification.from_pretrained(half_checkpoint).dtype == torch.float16, (
        "transformers no longer has this trap"
    )
    model = build_model(settings_for(tmp_path, model=half_checkpoint, precision=precision), datasets())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    model = Fabric(accelerator="cpu", devices=1, precision=precision).setup(model)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


def test_every_precision_starts_from_the_same_weights(tmp_path, half_checkpoint):
    """The new head is also drawn in 32-bit and then rounded."""
    tiny_model("bloom", classes=5).save_pretrained(tmp_path / "five")
    heads = []
    for precision in ("32-true", "bf16-true"):
        torch.manual_seed(0)
        model = build_model(settings_for(tmp_path, model=str(tmp_path / "five"), precision=precision), datasets())
        model = Fabric(accelerator="cpu", devices=1, precision=precision).setup(model)
        heads.append(model.score.weight)
    assert heads[1].dtype == torch.bfloat16
    assert torch.equal(heads[0].bfloat16(), heads[1])


@pytest.mark.parametrize("task", ["text-classification", "instruction-tuning"])
def test_a_folder_that_lacks_weights_of_the_body_is_refused(tmp_path, task):
    """transformers draws them without an error. A classifier's head may be new."""
    model = tiny_model("llama")
    weights = {name: weight for name, weight in model.state_dict().items() if not name.startswith("model.layers.1.")}
    model.save_pretrained(tmp_path / "half", state_dict=weights)
    with pytest.raises(UserError, match=r"half lacks \d+ weights of a Llama\w+, e.g. [\w.]+: the files are incomplete"):
        build_model(settings_for(tmp_path, model=str(tmp_path / "half"), task=task), datasets())
    body = {name: weight for name, weight in model.state_dict().items() if name.startswith("model.")}
    model.save_pretrained(tmp_path / "body", state_dict=body)
    settings = settings_for(tmp_path, model=str(tmp_path / "body"), task=task)
    if task == "text-classification":
        build_model(settings, datasets())
    else:
        with pytest.raises(UserError, match=r"body lacks 1 weights of a LlamaForCausalLM, e.g. lm_head.weight"):
            build_model(settings, datasets())


def test_class_names_and_padding_reach_the_config(tmp_path, half_checkpoint):
    config = build_model(settings_for(tmp_path, model=half_checkpoint), datasets(["a", "b", "c"])).config
    assert config.id2label == {0: "a", 1: "b", 2: "c"}
    assert config.label2id == {"a": 0, "b": 1, "c": 2}
    assert config.pad_token_id == 0
    assert config.num_labels == 3


@pytest.mark.parametrize("task", ["text-classification", "instruction-tuning"])
def test_an_end_token_that_pads_is_trained(tmp_path, task):
    """The model's config has no padding token, and the tokenizer pads with its end token."""
    data = datasets()
    data.tokenizer.pad_token_id = data.tokenizer.eos_token_id = 5
    values = {"model": str(MODELS / "llama-tiny.json"), "from_scratch": True, "task": task}
    model = build_model(settings_for(tmp_path, **values), data)
    assert model.config.pad_token_id == 5
    table = model.get_input_embeddings()
    assert table.padding_idx is None
    assert table.weight[5].any()


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path):
    settings = settings_for(tmp_path, model=str(MODELS / "bloom-quickstart.json"), from_scratch=True)
    with pytest.raises(UserError, match=r"2,000 entries, .* only 1,024"):
        build_model(settings, datasets(size=2000))


def test_half_precision_converts_weights_of_modules_with_buffers(tmp_path):
    """BERT's embeddings have a buffer of position numbers, which is not part of a checkpoint."""
    tiny_model("bert").save_pretrained(tmp_path / "bert")
    settings = settings_for(tmp_path, model=str(tmp_path / "bert"), precision="bf16-true")
    model = Fabric(accelerator="cpu", devices=1, precision="bf16-true").setup(build_model(settings, datasets()))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    ones = torch.ones(2, 5, dtype=torch.long)
    assert model(input_ids=ones, labels=torch.tensor([0, 1])).loss.isfinite()
