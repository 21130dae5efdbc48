"""Selective checkpointing and activation offload: the bits of plain checkpointing, operations, memory and copies."""

import gc
from contextlib import nullcontext
from dataclasses import replace
from functools import partialmethod

import pytest
import torch
from lightning import Fabric
from support.helpers import settings_for, tiny_model, token_datasets
from support.made import Kernels
from support.planning import build, case
from support.training import losses, run_training
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageClassification

from fabric_ladder import Settings, build_optimizer
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.techniques.checkpointing import (
    RANDOM_ONLY_IN_DROPOUT,
    enable_checkpointing,
    may_draw,
)
from fabric_ladder.techniques.chunked_loss import use_chunked_loss
from fabric_ladder.techniques.fused_attention import fuse_attention
from fabric_ladder.techniques.lora import add_adapters
from fabric_ladder.techniques.packing import support_packing
from fabric_ladder.training.gradients import accumulate_gradients

OFFLOAD, SELECTIVE = {"activation_offload": True}, {"selective_checkpointing": True}
CHECKPOINTED = Settings(activation_checkpointing=True, accelerator="cpu")
KINDS = {"offload": OFFLOAD, "selective": SELECTIVE, "both": OFFLOAD | SELECTIVE}
TEXTS = {
    "bloom": ("bloom", {}),
    "bloom, eager": ("bloom", {"attention": "eager"}),
    "bert": ("bert", {}),
    "llama-lm, packed": ("llama-lm", {"task": "instruction-tuning", "packing": True, "max_length": 64}),
    "llama-lm, LoRA": ("llama-lm", {"task": "instruction-tuning", "lora": True}),
}


def trained(tmp_path, name, precision, **values):
    """Return losses and weights of three optimizer steps of several micro-batches, with the model's dropout."""
    kind, more = TEXTS[name]
    model = tiny_model(kind, dropout=0.1)
    values |= more | {"micro_batch_size": 2 if "packing" in more else 8}
    settings = settings_for(tmp_path, precision=precision, activation_checkpointing=True, **values)
    if settings.attention == "fused":
        fuse_attention(model)
    if settings.task == "instruction-tuning":
        use_chunked_loss(model, 16)
    if settings.packing:
        support_packing(model, settings.max_length)
    enable_checkpointing(model, settings)
    if settings.lora:
        model = add_adapters(model, settings)
    data = token_datasets(per_token=kind.endswith("-lm"))
    run, model = run_training(tmp_path, model.train(), data, precision, **values)
    return losses(run), list(model.parameters())


PRECISIONS = ("32-true", "bf16-true", "bf16-mixed", "32-true", "bf16-true")


@pytest.mark.parametrize(("name", "precision"), [*zip(TEXTS, PRECISIONS, strict=True)])
def test_texts_are_trained_to_the_same_bits(tmp_path, name, precision):
    expected, weights = trained(tmp_path, name, precision)
    assert len(expected) == 3
    for values in KINDS.values():
        found, others = trained(tmp_path, name, precision, **values)
        assert found == expected
        assert all(map(torch.equal, others, weights))


def step(settings, training):
    """Return the gradients of an effective batch of random images or tokens, and the number of each operation."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, precision=settings.precision)
    model = fabric.setup(build(settings))
    fabric.setup_optimizers(build_optimizer(settings, model))
    made = {
        "pixel_values": lambda shape: torch.randn(shape),
        "input_ids": lambda shape: torch.randint(1, 64, shape),
        "attention_mask": lambda shape: torch.ones(shape, dtype=torch.long),
        "labels": lambda shape: torch.randint(2, shape),
        "position_ids": lambda shape: torch.arange(shape[1]).expand(shape),
        "spans": lambda shape: torch.arange(2).expand(shape),
    }
    counted = Kernels()
    with nullcontext() if settings.compile else counted:  # the mode would prevent compiling
        for batch in training:
            inputs = {name: made[name](tuple(tensor.shape)) for name, tensor in batch.inputs.items()}
            accumulate_gradients(fabric, model, [batch._replace(inputs=inputs)], Meter(fabric))
    return [each.grad for each in model.parameters() if each.grad is not None], counted.counts


@pytest.mark.parametrize(
    ("family", "precision", "more"),
    [("vit", "32-true", {}), ("bloom", "bf16-true", {}), ("bloom", "bf16-true", {"attention": "varlen"})],
)
def test_matrix_multiplications_and_attention_are_computed_once(tmp_path, family, precision, more):
    name = "torch_attn::_varlen_attn" if more else "_scaled_dot_product_flash_attention_for_cpu"
    more = more and more | {"packing": True}

    def made(**values):
        return step(*case(tmp_path, family, precision=precision, micro_batch_size=4, **values, **more)[:2])

    def costly(operations):
        return operations["mm"] + operations["addmm"], operations[name]

    gradients, plain = made()
    again, recomputed = made(activation_checkpointing=True)
    chosen, selective = made(activation_checkpointing=True, **SELECTIVE)
    assert all(map(torch.equal, again, gradients))
    assert all(map(torch.equal, chosen, gradients))
    assert costly(selective) == costly(plain)
    assert costly(recomputed)[1] == 2 * costly(plain)[1] > 0
    assert selective["native_layer_norm"] > plain["native_layer_norm"]


def test_no_tensor_outlives_the_backward_pass():
    model = tiny_model("bloom")
    enable_checkpointing(model, replace(CHECKPOINTED, **OFFLOAD))
    offload = model.transformer.h[0]._gradient_checkpointing_func.args[1]
    gc.disable()  # memory must be free before the collector runs
    try:
        output = model.train()(input_ids=torch.ones(2, 5, dtype=torch.long), labels=torch.tensor([0, 1]))
        assert offload._last() is not None
        output.loss.backward()
        assert offload._move is None
        del output
        assert offload._last() is None
        model(input_ids=torch.ones(2, 5, dtype=torch.long))  # a forward pass without a backward pass
        assert offload._last() is None
        assert offload._move is None
    finally:
        gc.enable()


def test_no_tensor_outlives_a_pass_that_fails():
    """A pass may run out of memory in any block, forward or backward."""
    model = tiny_model("bloom").train()
    enable_checkpointing(model, replace(CHECKPOINTED, **OFFLOAD))
    offload = model.transformer.h[0]._gradient_checkpointing_func.args[1]
    gc.freeze()  # the collector then skips the objects of other tests, which take most of its time
    for block in model.transformer.h:
        for fails_at in (1, 2):  # the forward pass, and the recomputation
            passes = []

            def fail(*_, passes=passes, fails_at=fails_at):
                passes.append(None)
                if len(passes) == fails_at:
                    raise MemoryError

            hook = block.mlp.register_forward_pre_hook(fail)
            with pytest.raises(MemoryError):
                model(input_ids=torch.ones(2, 5, dtype=torch.long), labels=torch.tensor([0, 1])).loss.backward()
            hook.remove()
            gc.collect()
            assert offload._move is None
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("family", ["bloom"])
def test_compiled_blocks_recompute_no_matrix_multiplication(tmp_path, monkeypatch, family):
    graphs = []

    def count(graph, _):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend=backend))

    def backward_graph(**values):
        torch._dynamo.reset()
        graphs.clear()
        settings, training, _ = case(tmp_path, family, micro_batch_size=4, activation_checkpointing=True, **values)
        gradients, _ = step(settings, training)
        return gradients, "".join(graphs[-1]) if graphs else ""

    expected, _ = backward_graph()
    found, chosen = backward_graph(compile=True, **SELECTIVE)
    again, recomputed = backward_graph(compile=True)
    assert all(map(torch.equal, found, expected))
    assert all(map(torch.equal, again, expected))
    assert "aten.mm" in chosen
    assert "aten.addmm" not in chosen
    assert "aten.addmm" in recomputed


def gradients(model, settings, checkpointed):
    """Return the gradients of a model that draws its random numbers from a seed."""
    if checkpointed:
        enable_checkpointing(model, settings)
    if settings.lora:
        torch.manual_seed(0)
        model = add_adapters(model, settings)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight)  # otherwise the adapters change nothing
    model.train()
    torch.manual_seed(0)
    model(torch.arange(1, 41).view(2, 20), labels=torch.tensor([0, 1])).loss.backward()
    return [weight.grad for weight in model.parameters() if weight.requires_grad]


@pytest.mark.parametrize(
    ("dropout", "adapters", "saved"),
    [(0.1, {}, True), (0.0, {}, False), (0.0, {"lora": True, "lora_dropout": 0.1}, True)],
)
def test_random_states_are_saved_only_for_dropout(tmp_path, monkeypatch, dropout, adapters, saved):
    calls, get_state = [], torch.get_rng_state
    monkeypatch.setattr(torch, "get_rng_state", lambda: calls.append(1) or get_state())
    settings = settings_for(tmp_path, activation_checkpointing=True, **adapters)
    expected, found = (gradients(tiny_model(dropout=dropout), settings, checkpointed) for checkpointed in (False, True))
    assert all(map(torch.equal, found, expected))
    assert bool(calls) == saved


@pytest.mark.parametrize("kind", sorted(RANDOM_ONLY_IN_DROPOUT))
def test_these_architectures_draw_no_other_random_numbers(kind):
    assert may_draw(AutoConfig.for_model("phimoe"), CHECKPOINTED)
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 32, "vocab_size": 64, "head_dim": 16, "pad_token_id": 0}
    config = AutoConfig.for_model(kind, **sizes)
    for name, value in config.to_dict().items():
        if "drop" in name and value:
            setattr(config, name, 0.0)
    assert not may_draw(config, CHECKPOINTED)
    auto = AutoModelForImageClassification if kind == "vit" else AutoModelForCausalLM
    model = auto.from_config(config).train()
    inputs = torch.zeros(2, 3, 224, 224) if kind == "vit" else torch.arange(1, 41).view(2, 20)
    before = torch.get_rng_state()
    model(inputs)
    assert torch.get_rng_state().equal(before)
