"""Matrix multiplications in 8 bits: the layers, their gradients, other techniques, and refusals."""

import importlib.util
import json

import pytest
import torch
from lightning import Fabric
from support.helpers import SRC, run_script, settings_for, token_datasets, without_package
from torch import nn

from fabric_ladder import UserError, build_dataloaders, build_model
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.techniques.float8 import Float8
from fabric_ladder.training.gradients import accumulate_gradients

pytestmark = pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="needs torchao")
RUNG = SRC / "22_float8.py"
TINY = {"vocab_size": 64, "pad_token_id": 0, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
CONFIGS = {
    "bloom": {"model_type": "bloom", **TINY},
    "llama": {"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 64, **TINY},
    "bert": {"model_type": "bert", "intermediate_size": 64, "hidden_dropout_prob": 0.0,
             "attention_probs_dropout_prob": 0.0, **TINY},
    "narrow": {"model_type": "bert", "intermediate_size": 24, **TINY, "hidden_size": 24},
    "gpt2": {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "vocab_size": 64, "bos_token_id": 0,
             "eos_token_id": 0},
}  # fmt: skip
LM = {"task": "instruction-tuning"}
PACKED = {"packing": True, "max_length": 32}
LORA = {"lora": True, "lora_dropout": 0.0, "lora_rank": 16}


def small(tmp_path, kind="llama", **values):
    path = tmp_path / f"{kind}.json"
    path.write_text(json.dumps(CONFIGS[kind]))
    defaults = {"model": str(path), "from_scratch": True, "batch_size": 8, "loss_chunk": 16, "precision": "bf16-mixed"}
    return settings_for(tmp_path, **(defaults | {"float8": True} | values))


def set_up(settings):
    fabric = Fabric(accelerator="cpu", devices=1, precision=settings.precision)
    fabric.seed_everything(1, verbose=False)
    datasets = token_datasets(train=24, validation=4, test=4, per_token=settings.task == "instruction-tuning")
    loader = build_dataloaders(fabric, datasets, settings)[0]
    return fabric, fabric.setup(build_model(settings, datasets)), next(iter(loader)).micro_batches


def gradient(settings):
    """Return all gradients of the first effective batch as one vector."""
    fabric, model, micro_batches = set_up(settings)
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # a zero would hide the other gradients
            if "lora_B" in name:
                parameter.normal_(0, 0.1)
    accumulate_gradients(fabric, model, micro_batches, Meter(fabric))
    return torch.cat([each.grad.flatten().float() for each in model.parameters() if each.grad is not None])


def converted(model):
    return {name for name, module in model.named_modules() if type(module).__name__ == "Float8Linear"}


@pytest.mark.parametrize(
    ("kind", "ways"),
    [("llama", {"precision": "bf16-true"}), ("bloom", LM | PACKED), ("bert", {"activation_checkpointing": True}),
     ("bert", LORA | {"dora": True, "precision": "bf16-true"}),
     pytest.param("bert", {"compile": True, **LORA}, marks=pytest.mark.slow)],
)  # fmt: skip
def test_gradients_are_near_those_of_16_bits(tmp_path, kind, ways):
    """e4m3 has 3 bits of mantissa and e5m2 has 2, so a factor has a rounding error of up to 6 or 12 %."""
    eight, sixteen = (gradient(small(tmp_path, kind, **{"float8": float8} | ways)) for float8 in (True, False))
    difference = (eight - sixteen).norm() / sixteen.norm()
    assert 0.001 < difference < 0.1


def test_heads_and_trained_adapters_are_not_converted(tmp_path):
    """The heads stay as they are, and with adapters only the frozen layers are converted."""

    def names(**values):
        return converted(build_model(small(tmp_path, **values), token_datasets(per_token="task" in values)))

    for ways, head in ({}, "score"), (LM, "lm_head"):
        assert len(names(**ways)) == 14
        assert not any(head in name for name in names(**ways))
    adapted = names(**LORA)
    assert len(adapted) == 14
    assert all(name.endswith("base_layer") for name in adapted)
    assert not names(float8=False)


def test_weights_and_their_names_stay(tmp_path):
    """A checkpoint is the same with and without float8."""
    states = []
    for float8 in (True, False):
        torch.manual_seed(1)
        model = build_model(small(tmp_path, float8=float8), token_datasets())
        states.append(model.state_dict())
        assert all(type(each) is nn.Parameter for each in model.parameters())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_gpu_multiplies_8_bits(tmp_path):
    """A rehearsal has the shapes of the GPU's kernel, without its emulation."""
    with torch.device("meta"):
        model = build_model(small(tmp_path), token_datasets())
    configs = [module.linear_mm_config.output for module in model.modules() if hasattr(module, "linear_mm_config")]
    assert len(configs) == 14
    assert not any(config.emulate for config in configs)
    assert all(config.pad_inner_dim for config in configs)


@pytest.mark.parametrize(
    ("values", "capability", "message"),
    [
        ({}, (8, 0), r"it needs a GPU of compute capability 8.9 .* and this GPU has 8.0; run src/4_mixed_precision.py"),
        ({"strategy": "deepspeed", "deepspeed": "zero2"}, None, r"not with .*; use src/10_fsdp.py"),
    ],
)
def test_contradictions_are_refused(tmp_path, values, capability, message):
    with pytest.raises(UserError, match=f"^--float8 true: {message}$"):
        Float8().check(small(tmp_path, **values), capability)
    Float8().check(small(tmp_path, **values, float8=False), capability)


@pytest.mark.parametrize("kind", ["narrow", "gpt2"])
def test_a_model_without_such_layers_is_refused(tmp_path, kind):
    """GPT-2 has its own class instead of linear layers."""
    with pytest.raises(UserError, match=r"json has no linear layer whose sides are multiples of 16; leave it out$"):
        Float8().check(small(tmp_path, kind), None)


@pytest.mark.slow
def test_without_torchao_it_is_refused(tmp_path):
    process = run_script(RUNG, cwd=tmp_path, **without_package(tmp_path, "torchao"))
    assert process.returncode == 2
    assert process.stderr.splitlines()[-1] == "error: --float8 true: it needs torchao: pip install torchao==0.18.0"
