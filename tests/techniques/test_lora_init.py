"""The start of adapters and LoRA+ equal PEFT's own."""

import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.optimizers import create_loraplus_optimizer
from support.export import words_tokenizer
from support.helpers import VOCABULARY, settings_for, token_datasets
from support.training import losses, printed, run_training

from fabric_ladder import UserError, build_model, build_optimizer
from fabric_ladder.models.optimizer import set_learning_rate
from fabric_ladder.techniques.lora import LoRA

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCABULARY}
CONFIGS = {
    "bloom": SIZES | {"model_type": "bloom", "pad_token_id": 0},
    "llama": SIZES | {"model_type": "llama", "intermediate_size": 32, "pad_token_id": 0},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": VOCABULARY},
}
LANGUAGE = {"task": "instruction-tuning", "loss_chunk": 16}


def settings_of(tmp_path, kind="llama", **values):
    path = tmp_path / f"{kind}.json"
    path.write_text(json.dumps(CONFIGS[kind]))
    chosen = {"model": str(path), "from_scratch": True, "lora": True, "lora_rank": 4, "lora_dropout": 0.0}
    chosen |= {"lora_targets": "attention"}  # PEFT's own choice
    return settings_for(tmp_path, **(chosen | LANGUAGE | values))


def made(settings):
    """Return the model of the settings, with the same random weights each time."""
    torch.manual_seed(0)
    return build_model(settings, token_datasets(per_token=True))


def by_peft(tmp_path, kind="llama", **options):
    """Return the same model with PEFT's adapters."""
    model = made(settings_of(tmp_path, kind, lora=False))
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, fan_in_fan_out=kind == "gpt2", **options)
    return get_peft_model(model, config)


def trained(tmp_path, model, **values):
    datasets = token_datasets(per_token=True)
    datasets.tokenizer = words_tokenizer()
    return run_training(tmp_path, model, datasets, lora=True, **(LANGUAGE | values))


@pytest.mark.parametrize(("start", "kind"), [("default", "gpt2"), ("gaussian", "bloom"), ("orthogonal", "llama")])
def test_weights_and_losses_are_those_of_peft(tmp_path, start, kind):
    model = made(settings_of(tmp_path, kind, lora_init=start))
    reference = by_peft(tmp_path, kind, init_lora_weights=True if start == "default" else start)
    assert all(map(torch.equal, model.state_dict().values(), reference.state_dict().values()))
    found, expected = (trained(tmp_path, each)[0] for each in (model, reference))
    assert losses(found) == losses(expected)
    assert losses(found)[0] != losses(found)[-1]


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"lora_init": "orthogonal", "quantization": "nf4"}, "orthogonal: not on weights of 4 bits; use gaussian"),
        ({"lora_init": "orthogonal", "lora_rank": 3}, "orthogonal needs an even --lora_rank, not 3"),
        ({"lora_plus_ratio": 16.0, "strategy": "deepspeed", "name": "12_deepspeed_zero"},
         "--lora_plus_ratio 16: not with 12_deepspeed_zero, whose engine has one learning rate; use src/10_fsdp.py"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, values, reason):
    with pytest.raises(UserError, match=reason):
        LoRA().check(settings_of(tmp_path, **values), None)


# LoRA+


def test_the_losses_are_those_of_pefts_optimizer(tmp_path):
    values = {"lora_plus_ratio": 16.0, "learning_rate": 1e-3, "epochs": 2}
    run, _ = trained(tmp_path, made(settings_of(tmp_path, **values)), **values)
    reference = by_peft(tmp_path)

    def use_peft(model, optimizer):
        own = create_loraplus_optimizer(model, torch.optim.Adam, lr=1e-3, loraplus_lr_ratio=16)
        factors = {id(weight): group["lr"] / 1e-3 for group in own.param_groups for weight in group["params"]}
        for group in optimizer.param_groups:
            assert {factors[id(weight)] for weight in group["params"]} == {group["rate_factor"]}

    other, _ = trained(tmp_path, reference, **values, prepare=use_peft)
    assert losses(run) == losses(other)
    plain, _ = trained(tmp_path, by_peft(tmp_path), **values | {"lora_plus_ratio": 1.0})
    assert losses(run) != losses(plain)


def test_the_schedule_keeps_the_ratio_and_the_printed_rate_is_the_runs(tmp_path):
    values = {"lora_plus_ratio": 8.0, "learning_rate": 1e-3, "schedule": "cosine", "warmup_steps": 2}
    settings = settings_of(tmp_path, **values)
    model = made(settings)
    optimizer = build_optimizer(settings, model)
    for done in range(10):
        set_learning_rate(settings, optimizer, done, 10)
        first, second = (group["lr"] for group in optimizer.param_groups)
        assert second == pytest.approx(8 * first)
        assert first <= 1e-3
    run, _ = trained(tmp_path, model, **values)
    assert max(printed(run, "learning_rate")) <= 1e-3


@pytest.mark.parametrize("way", ["step_in_backward", "optimizer_offload"])
def test_steps_of_single_weights_keep_the_ratio(tmp_path, way):
    values = {"lora_plus_ratio": 16.0}
    run, _ = trained(tmp_path, made(settings_of(tmp_path, **values)), **values)
    other, _ = trained(tmp_path, made(settings_of(tmp_path, **values)), **values, **{way: True})
    assert losses(other) == pytest.approx(losses(run), rel=1e-6)
