"""Frozen blocks keep every bit, and neither gradients, optimizer state nor activations; the others train as by hand."""

import json
from dataclasses import replace

import pytest
import torch
from lightning import Fabric
from support.helpers import VOCABULARY, settings_for, token_datasets
from support.planning import PIXELS, build, case
from support.training import losses, run_training
from torch.autograd.graph import saved_tensors_hooks

from fabric_ladder import build_model, build_optimizer
from fabric_ladder.checks import check
from fabric_ladder.errors import UserError
from fabric_ladder.planning.predict import blank_datasets
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.techniques.checkpointing import _Offload
from fabric_ladder.training.gradients import accumulate_gradients

SIZES = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0}
BERT_LIKE = SIZES | TEXT | {"type_vocab_size": 2}
CONFIGS = {
    "bloom": TEXT | {"model_type": "bloom", "hidden_size": 16, "n_layer": 3, "n_head": 2},
    "bert": BERT_LIKE | {"model_type": "bert"},
    "deberta": BERT_LIKE | {"model_type": "deberta-v2", "relative_attention": True, "norm_rel_ebd": "layer_norm",
                            "pos_att_type": ["p2c", "c2p"]},
    "distilbert": TEXT | {"model_type": "distilbert", "dim": 16, "n_layers": 3, "n_heads": 2, "hidden_dim": 32},
    "llama": SIZES | TEXT | {"model_type": "llama", "num_key_value_heads": 1},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 3, "n_head": 2, "vocab_size": VOCABULARY},
    "opt": {"model_type": "opt", "vocab_size": VOCABULARY, "hidden_size": 16, "word_embed_proj_dim": 16, "ffn_dim": 32,
            "num_hidden_layers": 3, "num_attention_heads": 2, "pad_token_id": 0},
    "vit": SIZES | {"model_type": "vit", "image_size": PIXELS, "patch_size": 32},
    "resnet": {"model_type": "resnet", "depths": [1], "hidden_sizes": [8], "embedding_size": 8},
}  # fmt: skip
LANGUAGE = {"task": "instruction-tuning", "loss_chunk": 16}
IMAGES = {"task": "image-classification"}


def settings_of(tmp_path, kind="bloom", changes=(), **values):
    path = tmp_path / f"{kind}.json"
    path.write_text(json.dumps(CONFIGS[kind] | dict(changes)))
    return settings_for(tmp_path, **({"model": str(path), "from_scratch": True, "max_length": 64} | values))


def made(settings):
    """Return the model of the settings, with the same random weights each time."""
    torch.manual_seed(0)
    datasets = token_datasets(per_token=settings.task == "instruction-tuning")
    image_size = PIXELS if settings.task == "image-classification" else None
    return build_model(settings, blank_datasets(2, image_size) if image_size else datasets)


def trained(model):
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("kind", "values", "blocks", "after"),
    [
        ("bloom", {}, "transformer.h.", {"transformer.ln_f", "score"}),
        ("bert", {}, "bert.encoder.layer.", {"bert.pooler.dense", "classifier"}),
        ("deberta", {}, "deberta.encoder.layer.", {"pooler.dense", "classifier"}),
        ("distilbert", {}, "distilbert.transformer.layer.", {"pre_classifier", "classifier"}),
        ("llama", {}, "model.layers.", {"model.norm", "score"}),
        ("llama", LANGUAGE, "model.layers.", {"model.norm", "lm_head"}),
        ("gpt2", LANGUAGE, "transformer.h.", {"transformer.ln_f"}),  # the head shares the embedding table
        ("vit", IMAGES, "vit.layers.", {"vit.layernorm", "classifier"}),
    ],
)
def test_the_last_blocks_and_the_modules_after_them_are_trained(tmp_path, kind, values, blocks, after):
    for count, chosen in enumerate(("none", "last:1")):
        model = made(settings_of(tmp_path, kind, train_blocks=chosen, **values))
        names = {name.rpartition(".")[0] for name in trained(model)}
        assert {name for name in names if not name.startswith(blocks)} == after
        for number in range(3):
            parameters = model.get_submodule(f"{blocks}{number}").parameters()
            assert {parameter.requires_grad for parameter in parameters} == {number >= 3 - count}
    whole = made(settings_of(tmp_path, kind, **values))
    assert trained(whole) == {name for name, _ in whole.named_parameters()}


WAYS = {
    "32-true": {},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "checkpointing": {"activation_checkpointing": True},
    "offload": {"activation_checkpointing": True, "activation_offload": True},
    "packing": {"packing": True, "micro_batch_size": 2},
    "kahan": {"precision": "bf16-true", "kahan_summation": True},
    "step in backward": {"step_in_backward": True},
    "float8": {"float8": True, "precision": "bf16-mixed"},
}
FAMILIES = (("bloom", {}), ("llama", LANGUAGE), ("gpt2", LANGUAGE))


@pytest.mark.parametrize(
    ("way", "kind", "task"),
    [
        # float8 finds no linear layers of PyTorch in GPT-2
        (way, *FAMILIES[(way != "float8") * number % len(FAMILIES)])
        for number, way in enumerate(WAYS)
    ],
)
def test_the_losses_are_those_of_a_model_frozen_by_hand(tmp_path, way, kind, task):
    values = task | WAYS[way]
    settings = settings_of(tmp_path, kind, train_blocks="last:1", **values)
    data = token_datasets(per_token=task == LANGUAGE)
    model = made(settings)
    before = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    by_hand = made(replace(settings, train_blocks="all"))
    for name, weight in by_hand.named_parameters():
        weight.requires_grad_(name in trained(model))
    found, expected = (run_training(tmp_path, each, data, **values)[0] for each in (model, by_hand))
    assert losses(found) == losses(expected)
    assert len(losses(found)) == 3
    for (name, weight), reference in zip(model.named_parameters(), by_hand.parameters(), strict=True):
        assert torch.equal(weight, reference)
        assert torch.equal(weight.float(), before[name].to(weight.dtype).float()) != (name in trained(model)), name


def step(settings, training):
    """Return the model after an effective batch, its optimizer, and the bytes of the tensors that autograd kept."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=settings.precision)
    model = fabric.setup(build(settings))
    optimizer = fabric.setup_optimizers(build_optimizer(settings, model))
    weights = {weight.untyped_storage().data_ptr() for weight in model.parameters()}
    kept = {}

    def keep(tensor):
        kept.setdefault(tensor.untyped_storage().data_ptr(), tensor)  # alive, so that no other tensor gets its place
        return tensor

    with saved_tensors_hooks(keep, lambda tensor: tensor):
        for batch in training:
            inputs = {name: torch.ones_like(tensor, device="cpu") for name, tensor in batch.inputs.items()}
            accumulate_gradients(fabric, model, [batch._replace(inputs=inputs)], Meter(fabric))
    optimizer.step()
    return model, optimizer, sum(kept[place].untyped_storage().nbytes() for place in kept.keys() - weights)


def deep(tmp_path, layers, **values):
    """Return the settings of a BLOOM with this many blocks, and one micro-batch."""
    path = tmp_path / f"{layers}.json"
    path.write_text(json.dumps(CONFIGS["bloom"] | {"n_layer": layers}))
    return case(tmp_path, "bloom", model=str(path), **values)[:2]


@pytest.mark.parametrize("way", ["bf16-mixed", "packing", "checkpointing"])
def test_frozen_blocks_keep_no_activations(tmp_path, way):
    values = WAYS[way] | ({"max_length": 256} if way == "packing" else {})
    kept = {
        (layers, chosen): step(*deep(tmp_path, layers, train_blocks=chosen, **values))[2]
        for layers, chosen in ((3, "last:1"), (6, "last:1"), (6, "last:2"), (6, "none"), (6, "all"))
    }
    assert kept[6, "none"] < kept[3, "last:1"] == kept[6, "last:1"] < kept[6, "last:2"] < kept[6, "all"]
    block = kept[6, "last:2"] - kept[6, "last:1"]
    assert kept[6, "all"] > kept[6, "last:2"] + 3 * block


def test_inputs_of_frozen_blocks_are_not_offloaded(tmp_path, monkeypatch):
    packed = []
    pack = _Offload.pack
    monkeypatch.setattr(_Offload, "pack", lambda self, tensor: packed.append(1) or pack(self, tensor))
    step(*deep(tmp_path, 6, train_blocks="last:2", **WAYS["offload"]))
    assert len(packed) == 2


def test_frozen_weights_have_no_gradient_and_no_state(tmp_path):
    model, optimizer, _ = step(*deep(tmp_path, 3, train_blocks="last:1"))
    chosen = {weight for weight in model.parameters() if weight.requires_grad}
    assert {weight for weight in model.parameters() if weight.grad is not None} == chosen
    assert set(optimizer.state) == chosen
    assert 0 < len(chosen) < len([*model.parameters()])


@pytest.mark.parametrize(
    ("kind", "values", "reason"),
    [
        *(("bloom", {"train_blocks": each}, f"--train_blocks {each}: write all, none or last:N, for example last:4")
          for each in ("4", "last:0", "last:٣", "first:2")),
        ("bloom", {"train_blocks": "last:4"}, "bloom.json has 3 blocks; use last:3 or fewer"),
        ("resnet", IMAGES | {"train_blocks": "last:1", "image_size": 32}, "marks no blocks in resnet; use --train_b"),
        ("opt", LANGUAGE | {"train_blocks": "none"}, "the head shares the embedding table; use last:1 or more"),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_refused_in_one_line(tmp_path, kind, values, reason):
    with pytest.raises(UserError, match="--train_blocks") as error:
        check(settings_of(tmp_path, kind, **values))
    assert reason in str(error.value)
    assert "\n" not in str(error.value)
