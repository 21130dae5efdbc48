"""Packing: samples that share a row say what they say alone; what cannot keep them apart is refused."""

import copy
import json
import time

import pytest
import torch
import torch.distributed as dist
from support.helpers import MODELS, relative_error, settings_for, token_datasets
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM, BloomConfig, GPT2Config, Lfm2Config, MambaConfig, OPTConfig

from fabric_ladder import UserError, build_dataloaders
from fabric_ladder.data.cutting import MicroBatchPlan
from fabric_ladder.data.loaders import TextCollator
from fabric_ladder.models.bloom import support_packing
from fabric_ladder.models.masks import declare_padding
from fabric_ladder.models.packing import check_packing

SIZES = {"vocab_size": 64, "pad_token_id": 0, "use_cache": False}
SMALL = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0}
CONFIGS = {
    "bloom": lambda: BloomConfig(**SMALL, **SIZES),
    "llama": lambda: AutoConfig.from_pretrained(MODELS / "llama-tiny.json", **SIZES),
    "qwen3": lambda: AutoConfig.from_pretrained(MODELS / "qwen3-tiny.json", **SIZES),
    "gpt2": lambda: GPT2Config(n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, **SIZES),
}
LEAKS = {
    "mamba": MambaConfig(hidden_size=16, num_hidden_layers=2, state_size=4),  # its state runs through the row
    "lfm2": Lfm2Config(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=3, intermediate_size=32,
        layer_types=["full_attention", "full_attention", "conv"],
    ),  # only its last layer leaks
    "opt": OPTConfig(hidden_size=16, word_embed_proj_dim=16, num_attention_heads=2, num_hidden_layers=1, ffn_dim=16),
}  # fmt: skip


def causal_lm(kind="bloom", dtype=torch.float32, apart=True):
    """Make a tiny model whose attention matters: its weights are larger than what training starts from."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind](), dtype=torch.float32).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() == 2:
                weight.normal_(0, 0.3)
    if apart:
        support_packing(model)
    return model


def micro_batches(tmp_path, fabric, **values):
    """The first effective batch, as instruction tuning makes it."""
    settings = settings_for(tmp_path, task="instruction-tuning", max_length=80, **values)
    return next(iter(build_dataloaders(fabric, token_datasets(per_token=True), settings)[0])).micro_batches


def losses(model, inputs):
    """The loss of each trained token, in the model's own dtype."""
    inputs = dict(inputs)
    labels, predicting = inputs.pop("labels").flatten(), inputs.pop("predicting")
    logits = model(**inputs).logits.flatten(0, 1)[predicting]
    return cross_entropy(logits, labels[predicting + 1], reduction="none")


def packed_and_alone(tmp_path):
    """Inputs of a packed micro-batch of two rows, and of its samples one by one."""
    datasets = token_datasets(per_token=True)
    collator = TextCollator(datasets, "train", settings_for(tmp_path, task="instruction-tuning"))
    items = datasets.splits["train"]["items"]
    packed = collator.micro_batch(MicroBatchPlan([0, 1, 2, 3, 4], sum(items[:5]), 1.0, [3, 2])).inputs
    return packed, [collator.micro_batch(MicroBatchPlan([row], items[row], 1.0)).inputs for row in range(5)]


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("padded", [True, False])
def test_masks_made_without_asking_the_device_are_transformers_own(tmp_path, kind, padded):
    packed, alone = packed_and_alone(tmp_path)
    model = causal_lm(kind).eval()
    for inputs in (packed, *alone):
        inputs = {name: inputs[name] for name in ("input_ids", "position_ids") if name in inputs}
        expected = model(**inputs).logits
        with declare_padding(padded):
            assert torch.equal(model(**inputs).logits, expected)


def gradients(model, batches):
    model.zero_grad()
    for batch in batches:
        (losses(model, batch.inputs).mean() * batch.weight).backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("kind", "dtype", "tolerance"),
    [(kind, torch.float32, 1e-5) for kind in CONFIGS]
    # BLOOM's softmax is computed in 32-bit whatever the precision
    + [(kind, torch.float64, 1e-6 if kind == "bloom" else 1e-10) for kind in CONFIGS],
)
def test_packing_changes_no_loss_and_no_gradient(tmp_path, fabric, kind, dtype, tolerance):
    model = causal_lm(kind, dtype)
    packed, alone = packed_and_alone(tmp_path)
    with torch.no_grad():
        expected = torch.cat([losses(model, inputs) for inputs in alone])
        assert relative_error([expected], [losses(model, packed)]) < tolerance
    whole = gradients(model, micro_batches(tmp_path, fabric, micro_batch_size=1))
    kept = [index for index, gradient in enumerate(whole) if gradient.norm() > 1e-4]  # not of a key's bias: it is zero
    for values in ({"micro_batch_size": 2}, {"micro_batch_tokens": 400, "pad_to_multiple_of": 8}):
        batches = micro_batches(tmp_path, fabric, packing=True, **values)
        assert any(len(batch.inputs["input_ids"]) > 1 for batch in batches)
        got = gradients(model, batches)
        assert relative_error([whole[index] for index in kept], [got[index] for index in kept]) < tolerance


def test_bloom_needs_help(tmp_path):
    model = causal_lm(apart=False)
    packed, alone = packed_and_alone(tmp_path)
    expected = torch.cat([losses(model, inputs) for inputs in alone])
    assert relative_error([expected], [losses(model, packed)]) > 1e-2


def test_bloom_computes_the_same_where_nothing_is_packed(tmp_path, fabric):
    plain, helped = causal_lm(apart=False), causal_lm()
    for batch in micro_batches(tmp_path, fabric, micro_batch_size=4):
        assert losses(plain, batch.inputs).equal(losses(helped, batch.inputs))
    ids = torch.arange(1, 9)[None]
    assert plain(input_ids=ids).logits.equal(helped(input_ids=ids).logits)


def compiled(model):
    return torch.compile(model, dynamic=True, backend="eager", fullgraph=True)


def checkpointed(model):
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def inner_alone(model):
    """As a loss that makes the logits itself."""

    def forward(**inputs):
        inner = model.base_model(**inputs)
        inner.logits = model.get_output_embeddings()(inner.last_hidden_state)
        return inner

    return forward


def with_adapters(model):
    peft = pytest.importorskip("peft")
    return peft.get_peft_model(model, peft.LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))


@pytest.mark.parametrize("wrap", [copy.deepcopy, compiled, checkpointed, inner_alone, with_adapters])
def test_what_is_wrapped_around_bloom_keeps_samples_apart(tmp_path, wrap):
    packed, _ = packed_and_alone(tmp_path)
    model = causal_lm()
    expected = losses(model, packed)
    wrapped = wrap(model)
    got = losses(wrapped, packed)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    got.mean().backward()
    if wrap is copy.deepcopy:
        assert all(parameter.grad is None for parameter in model.parameters()), "the copy computes with its own weights"
        assert wrapped.base_model.build_alibi_tensor.__self__ is wrapped.base_model


def test_sharded_bloom_keeps_samples_apart(tmp_path):
    packed, _ = packed_and_alone(tmp_path)
    model = causal_lm()
    expected = losses(model, packed).detach()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = DeviceMesh("cpu", [0])
        for block in model.base_model.h:
            fully_shard(block, mesh=mesh)
        got = losses(fully_shard(model, mesh=mesh), packed)
        torch.testing.assert_close(got.detach(), expected, rtol=1e-5, atol=1e-6)
        got.mean().backward()
    finally:
        dist.destroy_process_group()


def check(tmp_path, model, **values):
    check_packing(
        settings_for(tmp_path, **{"task": "instruction-tuning", "packing": True, "model": str(model)} | values)
    )


@pytest.mark.parametrize("name", ["bloom-quickstart", "bloom-560m", "llama-tiny", "qwen3-tiny"])
def test_what_packs_is_let_through_and_leaves_no_trace(tmp_path, name):
    torch.manual_seed(7)
    before = torch.get_rng_state()
    check(tmp_path, MODELS / f"{name}.json")
    assert torch.get_rng_state().equal(before)


def test_a_large_model_is_tried_in_no_time(tmp_path):
    shape = {"model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
             "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}  # fmt: skip
    (tmp_path / "8b.json").write_text(json.dumps(shape))
    start = time.perf_counter()
    check(tmp_path, tmp_path / "8b.json")
    assert time.perf_counter() - start < 20  # made in full it would take minutes


@pytest.mark.parametrize("kind", LEAKS)
def test_what_lets_samples_see_each_other_is_refused(tmp_path, kind):
    LEAKS[kind].to_json_file(tmp_path / "leaks.json", use_diff=False)
    with pytest.raises(UserError, match=f"packed samples would see each other in .* .{kind}.; leave it out") as error:
        check(tmp_path, tmp_path / "leaks.json")
    assert "\n" not in str(error.value)
    check(tmp_path, tmp_path / "leaks.json", packing=False)


def test_what_cannot_be_tried_is_refused(tmp_path):
    (tmp_path / "odd.json").write_text(json.dumps({"model_type": "gpt2", "n_embd": 30, "n_head": 4}))
    with pytest.raises(UserError, match="could not be tried") as error:
        check(tmp_path, tmp_path / "odd.json")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("task", ["text-classification", "image-classification"])
def test_packing_belongs_to_instruction_tuning(tmp_path, task):
    with pytest.raises(UserError, match="--packing true goes with --task instruction-tuning only"):
        check(tmp_path, MODELS / "llama-tiny.json", task=task)
