"""torch.compile by layers: all compiling happens before the first step, once for all layers."""

import os
from functools import partialmethod

import pytest
import torch
from lightning import Fabric
from support.helpers import settings_for, tiny_model, token_datasets
from support.training import losses
from torch import nn

from fabric_ladder import Run, build_dataloaders, build_optimizer, evaluate, train
from fabric_ladder.cli import resolve
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.compile import CompileClock, compile_blocks
from fabric_ladder.techniques.fused_attention import fuse_attention
from fabric_ladder.techniques.packing import support_packing
from fabric_ladder.training import compiling

# graphs: one for micro-batches of one row, and one for several rows
IN_FOURS = ("bert", {"micro_batch_size": 4}, 1)
IN_FIVES_WHICH_LEAVES_ONE = ("llama", {"micro_batch_size": 5, "activation_checkpointing": True}, 2)
INSTRUCTIONS = ("llama-lm", {"micro_batch_tokens": 40, "task": "instruction-tuning"}, 2)
NEVER_ONE_ROW = ("llama", {"micro_batch_tokens": 512, "packing": True, "max_length": 32}, 1)


def compiled_run(tmp_path, monkeypatch, kind, compiled=True, **values):
    """Train in this process with only the compiler's front end, which decides when to recompile.

    Returns:
        The graphs at each printed line, and the losses.
    """
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    torch._dynamo.reset()
    settings = settings_for(tmp_path, compile=compiled, **({"pad_to_multiple_of": 4, "epochs": 2} | values))
    fabric = Fabric(accelerator="cpu", devices=1)
    run = Run(fabric, settings)
    loaders = build_dataloaders(fabric, token_datasets(per_token=kind.endswith("-lm")), settings)
    model = tiny_model(kind)
    fuse_attention(model)
    support_packing(model, settings.max_length)
    if settings.activation_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if compiled:
        compile_blocks(model, str(tmp_path), "cpu")
    model = fabric.setup(model)
    counts, log_loss = [], run.log_loss
    run.log_loss = lambda *figures: (counts.append(run.throughput.state_dict()["compiled"][1]), log_loss(*figures))
    training = train(run, model, fabric.setup_optimizers(build_optimizer(settings, model)), *loaders[:2])
    evaluate(training, loaders[2])
    return counts, losses(run)


@pytest.mark.parametrize(
    ("kind", "values", "expected"),
    [
        pytest.param(*IN_FOURS, marks=pytest.mark.slow),
        IN_FIVES_WHICH_LEAVES_ONE,
        pytest.param(*INSTRUCTIONS, marks=pytest.mark.slow),
        NEVER_ONE_ROW,
    ],
)
def test_nothing_is_compiled_after_the_first_step(tmp_path, monkeypatch, kind, values, expected):
    """Two epochs have different lengths, with padding and without, and a last batch of eight samples."""
    counts, found = compiled_run(tmp_path, monkeypatch, kind, **values)
    assert counts == [expected] * 6, "there is one graph for each kind of micro-batch, for any number of layers"
    _, plain = compiled_run(tmp_path, monkeypatch, kind, compiled=False, **values)
    assert found == pytest.approx(plain, abs=1e-5)


def test_of_many_batches_only_the_first_are_planned(tmp_path, monkeypatch):
    monkeypatch.setattr(compiling, "PLANNED", 16)
    kind, values, _ = NEVER_ONE_ROW
    counts, _ = compiled_run(tmp_path, monkeypatch, kind, **values)
    assert counts == [2] * 6, "a later batch could have one row"


@pytest.mark.parametrize("different", [False, True], ids=["equal layers", "different numbers"])
def test_lengths_and_layers_share_a_graph(tmp_path, monkeypatch, different):
    """The tiny models are 16 wide, and by default the compiler merges equal sizes. `drop_path` differs by layer."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    torch._dynamo.reset()
    model, made = tiny_model("llama"), []
    if different:
        model.model.layers[1].input_layernorm.variance_epsilon *= 2
    compile_blocks(model, str(tmp_path), "cpu")
    torch._dynamo.on_compile_end(made.append)
    try:
        for length in (16, 20, 32):
            model(input_ids=torch.ones(2, length, dtype=torch.long))
    finally:
        torch._dynamo.callback_handler.remove_end_callback(made.append)
    assert len(made) == 1
    assert torch._dynamo.config.specialize_float != different


def test_a_resumed_run_goes_on_counting():
    clock = CompileClock(1.5, 7)
    try:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
        assert clock.graphs == 8
        assert clock.seconds > 1.5
    finally:
        clock.stop()


def test_the_cache_folder_keeps_compiled_code(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/mine")
    compile_blocks(tiny_model(), str(tmp_path), "cpu")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == "/mine"
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    compile_blocks(tiny_model(), str(tmp_path), "cpu")
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "kernels")


def test_lengths_are_rounded_up_for_the_compiler_unless_the_user_says_otherwise():
    def multiple(**values):
        return resolve(Settings(accelerator="cpu", **values)).pad_to_multiple_of

    assert multiple() == 1
    assert multiple(compile=True) == 16
    assert multiple(compile=True, pad_to_multiple_of=1) == 1
    assert multiple(compile=True, max_length=77) == 1, "a model may have fewer than 80 positions"


@pytest.mark.slow
def test_on_a_cpu_compiled_dropout_drops_the_same_values(tmp_path):
    """The compiled forward and backward passes draw the same dropout, so rungs 2 and 3 print equal losses."""
    torch._dynamo.reset()
    inputs = {"input_ids": torch.arange(1, 33).reshape(2, 16), "labels": torch.tensor([0, 1])}

    def gradients(compiled):
        model = tiny_model("bert", dropout=0.5).train()
        if compiled:
            compile_blocks(model, str(tmp_path), "cpu")
        torch.manual_seed(0)
        loss = model(**inputs).loss
        loss.backward()
        return loss, [weight.grad for weight in model.parameters() if weight.grad is not None]

    (plain, wanted), (loss, found) = gradients(False), gradients(True)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(found, wanted)
