"""Adapters train only adapters and head, on 16-bit and 4-bit models, with every way to save memory."""

import json
import sys
from functools import partialmethod

import pytest
import torch
from lightning import Fabric
from lightning.fabric.plugins import MixedPrecision
from peft import LoraConfig, get_peft_model
from support.export import run_here
from support.helpers import MODELS, ROOT, SRC, finished, run_script, settings_for, token_datasets
from support.training import losses, run_training
from torch import nn
from transformers import AutoConfig

from fabric_ladder import Run, UserError, build_dataloaders, build_model, build_optimizer, parse_settings, train
from fabric_ladder.planning.predict import blank_datasets

TINY = {"vocab_size": 64, "pad_token_id": 0, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
CONFIGS = {
    "bloom": {"model_type": "bloom", **TINY},
    "llama": {"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 64, **TINY},
    "bert": {"model_type": "bert", "intermediate_size": 64, **TINY, **NO_DROPOUT},
    "distilbert": {"model_type": "distilbert", "dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64,
                   "vocab_size": 64, "dropout": 0.0, "attention_dropout": 0.0, "seq_classif_dropout": 0.0},
    "vit": {"model_type": "vit", "image_size": 16, "patch_size": 8, "intermediate_size": 64, "hidden_size": 32,
            "num_hidden_layers": 2, "num_attention_heads": 2},
    "gpt2": {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 64},
}  # fmt: skip
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION |= {"image_size": 32, "patch_size": 16}
UNUSUAL = {
    "swinv2": {"depths": [1, 1], "num_heads": [1, 2], "embed_dim": 8, "window_size": 2, "image_size": 32},
    "siglip": {"vision_config": VISION},
    "clip": {"vision_config": VISION},
}
WAYS = {
    "plain": {},
    "checkpointed": {"activation_checkpointing": True},
    "compiled": {"compile": True},
    "bf16-true": {"precision": "bf16-true"},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "16-mixed": {"precision": "16-mixed"},
    "dora": {"dora": True},
    "attention": {"lora_targets": "attention"},
    "4-bit": {"quantization": "nf4", "precision": "bf16-true"},
    "4-bit 16-mixed": {"quantization": "nf4", "precision": "16-mixed"},
}


def lora_settings(tmp_path, kind="bloom", **values):
    path = tmp_path / f"{kind}.json"
    path.write_text(json.dumps(CONFIGS[kind]))
    defaults = {"lora": True, "lora_dropout": 0.0, "from_scratch": True, "model": str(path), "batch_size": 8}
    defaults |= {"learning_rate": 1e-2, "loss_chunk": 16, "threads": 1}
    return settings_for(tmp_path, **(defaults | values))


def data(settings):
    return token_datasets(train=24, validation=4, test=4, per_token=settings.task == "instruction-tuning")


def set_up(settings, datasets=None):
    """Return a run before its first step: run, model, optimizer, loaders."""
    precision = {"precision": settings.precision}
    if settings.precision == "16-mixed":  # Fabric would use bf16-mixed on a CPU
        precision = {"plugins": MixedPrecision("16-mixed", "cpu")}
    fabric = Fabric(accelerator="cpu", devices=1, **precision)
    fabric.seed_everything(settings.seed, verbose=False)
    run = Run(fabric, settings)
    datasets = datasets or data(settings)
    loaders = build_dataloaders(fabric, datasets, settings)
    model = fabric.setup(build_model(settings, datasets))
    return run, model, fabric.setup_optimizers(build_optimizer(settings, model)), loaders


def inner(model):
    return model.module


def snapshot(model):
    return {name: parameter.detach().clone() for name, parameter in inner(model).named_parameters()}


def trained_names(model):
    return {name for name, parameter in inner(model).named_parameters() if parameter.requires_grad}


@pytest.mark.parametrize(
    ("kind", "task", "heads"),
    [
        ("bloom", "text-classification", {"score"}),
        ("bert", "text-classification", {"classifier"}),
        ("distilbert", "text-classification", {"classifier", "pre_classifier"}),
        ("llama", "instruction-tuning", set()),
    ],
)
def test_only_adapters_and_head_change(tmp_path, kind, task, heads):
    settings = lora_settings(tmp_path, kind, task=task)
    run, model, optimizer, (train_loader, val_loader, _) = set_up(settings)
    before, trained = snapshot(model), trained_names(model)
    assert {name.split(".modules_to_save")[0].split(".")[-1] for name in trained if "lora_" not in name} == heads
    assert all("lora_A" in name or "lora_B" in name or "modules_to_save" in name for name in trained)
    train(run, model, optimizer, train_loader, val_loader)
    changed = {name for name, value in snapshot(model).items() if not torch.equal(value, before[name])}
    assert changed == trained


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        pytest.param(way, ("bloom", "llama")[number % 2], marks=[pytest.mark.slow] * (way == "compiled"))
        for number, way in enumerate(WAYS)
    ],
)
def test_every_adapter_learns_in_every_way(tmp_path, monkeypatch, way, kind):
    """After one step every lora_B is finite and not zero. Reentrant checkpointing would train nothing."""
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="eager"))
    settings = lora_settings(tmp_path, kind, task="instruction-tuning", **WAYS[way])
    run, model, optimizer, (train_loader, val_loader, _) = set_up(settings)
    train(run, model, optimizer, train_loader, val_loader)
    lora_b = {name: value for name, value in snapshot(model).items() if "lora_B" in name}
    layers = 2 * {"bloom": 4, "llama": 7}[kind] if way != "attention" else 2 * {"bloom": 1, "llama": 2}[kind]
    assert len(lora_b) == layers
    assert all(value.any() and value.isfinite().all() for value in lora_b.values())
    assert {value.dtype for value in lora_b.values()} == {torch.float32}


@pytest.mark.parametrize("kind", ["bloom", "llama", "gpt2"])
def test_weights_and_losses_are_those_of_peft(tmp_path, kind):
    values = {"task": "instruction-tuning", "lora_targets": "attention", "lora_rank": 4}  # PEFT's own choice
    models, datasets = [], token_datasets(per_token=True)
    for lora in (True, False):  # the reference is last, so PEFT draws its adapters next
        torch.manual_seed(0)
        models.append(build_model(lora_settings(tmp_path, kind, lora=lora, **values), datasets))
    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=32, fan_in_fan_out=kind == "gpt2")
    models[1] = get_peft_model(models[1], config)
    assert all(map(torch.equal, *(each.state_dict().values() for each in models)))
    options = {"lora": True, "loss_chunk": 16, **values}
    found, expected = (losses(run_training(tmp_path, each, datasets, **options)[0]) for each in models)
    assert found == expected
    assert found[0] != found[-1]


@pytest.mark.parametrize(("way", "bound"), [("plain", 1e-6), ("dora", 1e-6), ("bf16-true", 4e-3), ("4-bit", 0.02)])
def test_the_first_loss_equals_the_models_own(tmp_path, way, bound):
    """Model and head get the same weights from the same seed, and a new adapter changes nothing."""
    found = []
    for values in (WAYS[way], {"lora": False, "precision": WAYS[way].get("precision", "32-true")}):
        _, model, _, (train_loader, _, _) = set_up(lora_settings(tmp_path, learning_rate=1e-3, **values))
        batch = next(iter(train_loader)).micro_batches[0]
        found.append(model(**batch.inputs).loss.item())
    assert found[0] == pytest.approx(found[1], rel=bound)


def test_images_get_adapters_too(tmp_path):
    settings = lora_settings(tmp_path, "vit", task="image-classification", image_size=16, quantization="nf4")
    model = Fabric(accelerator="cpu", devices=1).setup(build_model(settings, blank_datasets(3, 16)))
    optimizer = build_optimizer(settings, model)
    before = snapshot(model)
    model(pixel_values=torch.randn(4, 3, 16, 16), labels=torch.tensor([0, 1, 2, 0])).loss.backward()
    optimizer.step()
    changed = {name for name, value in snapshot(model).items() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_B" in name or "modules_to_save" in name for name in changed), "A has no gradient while B is zero"


def test_mixed_precision_keeps_frozen_matrices_in_16_bit_and_changes_no_bit(tmp_path):
    """Autocast would cast the matrices in every pass. Embeddings and norms are not multiplied and stay in 32 bits."""
    found = {}
    for stored in (torch.bfloat16, torch.float32):
        settings = lora_settings(tmp_path, precision="bf16-mixed", task="instruction-tuning")
        run, model, _, (train_loader, _, _) = set_up(settings)
        linear = {name: module for name, module in inner(model).named_modules() if type(module) is nn.Linear}
        frozen = [module for name, module in linear.items() if "lora" not in name and "lm_head" not in name]
        assert len(frozen) == 2 * 4
        assert {module.weight.dtype for module in frozen} == {torch.bfloat16}
        for module in frozen:
            module.weight.data = module.weight.data.bfloat16().to(stored)
        inputs = next(iter(train_loader)).micro_batches[0].inputs
        loss = model(**inputs).loss
        run.fabric.backward(loss)
        found[stored] = [loss, *(parameter.grad for parameter in model.parameters() if parameter.requires_grad)]
        kept = {name: value.dtype for name, value in snapshot(model).items() if "norm" in name or "embed" in name}
        assert set(kept.values()) == {torch.float32}
    assert all(torch.equal(a, b) for a, b in zip(*found.values(), strict=True))


def test_four_bits_are_nf4_doubly_quantised_and_count_as_whole_parameters(tmp_path):
    settings = lora_settings(tmp_path, quantization="nf4", precision="bf16-true")
    run, model, optimizer, (train_loader, val_loader, _) = set_up(settings)
    quantised = [value for value in inner(model).parameters() if hasattr(value, "quant_state")]
    assert len(quantised) == 2 * 4
    assert all(value.quant_state.nested and value.quant_state.quant_type == "nf4" for value in quantised)
    assert {value.quant_state.dtype for value in quantised} <= {torch.bfloat16, torch.float32}
    before = snapshot(model)
    train(run, model, optimizer, train_loader, val_loader)
    assert all(torch.equal(value, before[name]) for name, value in snapshot(model).items() if "quant" in name)
    whole = build_model(lora_settings(tmp_path), data(settings))
    assert run.record.values["results"]["parameters"] == sum(parameter.numel() for parameter in whole.parameters())
    assert run.record.values["results"]["dtypes"] == ["torch.bfloat16", "torch.float32", "torch.uint8"]


BLOOM = ["--model", str(MODELS / "bloom-quickstart.json"), "--from_scratch", "true"]


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--lora_targets q_proj", "no linear layer 'q_proj'.*it has dense, dense_4h_to_h, dense_h_to_4h, query_key_v"),
        ("--lora_targets query_key_value,score", "no linear layer 'score'"),
        ("--lora false --quantization nf4", "4-bit weights cannot be trained; add --lora true"),
    ],
)
def test_bad_settings_are_refused_in_one_line(arguments, line):
    with pytest.raises(UserError, match=line):
        parse_settings([*BLOOM, "--accelerator", "cpu", *arguments.split()], lora=True)


def test_deepspeed_refuses_four_bits():
    words = [*BLOOM, "--accelerator", "cpu", "--lora", "true", "--quantization", "nf4"]
    with pytest.raises(UserError, match=r"nf4: not tried with DeepSpeed; use src/10_fsdp\.py"):
        parse_settings(words, devices="auto", strategy="deepspeed", deepspeed="zero2")


def test_without_bitsandbytes_rung_14_prints_one_line(monkeypatch):
    """bitsandbytes is an optional package."""
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(UserError) as error:
        run_here(monkeypatch, SRC / "14_qlora.py")
    line = "4-bit weights need bitsandbytes: pip install bitsandbytes==0.50.2, or run src/13_lora.py"
    assert str(error.value) == line


@pytest.mark.slow
def test_an_old_torchao_is_refused_in_one_line(tmp_path):
    """PEFT raises an ImportError with versions below 0.16, for instance Colab's."""
    (tmp_path / "torchao").mkdir()
    (tmp_path / "torchao" / "__init__.py").touch()
    (tmp_path / "torchao-0.10.0.dist-info").mkdir()
    (tmp_path / "torchao-0.10.0.dist-info" / "METADATA").write_text("Name: torchao\nVersion: 0.10.0\n")
    process = run_script(SRC / "13_lora.py", cwd=tmp_path, fresh=True, PYTHONPATH=str(tmp_path))
    assert process.returncode == 2
    line = "error: --lora true: PEFT refuses torchao 0.10.0: pip install torchao==0.18.0, or pip uninstall torchao"
    assert process.stderr.splitlines()[-1] == line


def test_attention_means_its_linear_layers_where_peft_has_no_choice(tmp_path):
    """The targets are the attention's linear layers, including fused layers."""
    shape = {"model_type": "phi3", "intermediate_size": 64, "pad_token_id": 0, **TINY}
    (tmp_path / "phi3.json").write_text(json.dumps(shape))
    options = {"model": str(tmp_path / "phi3.json"), "from_scratch": True, "lora": True, "lora_targets": "attention"}
    settings = settings_for(tmp_path, **options)
    with torch.device("meta"):
        model = build_model(settings, blank_datasets(2))
    assert model.peft_config["default"].target_modules == {"o_proj", "qkv_proj"}


@pytest.mark.parametrize(
    ("kind", "targets"), [("swinv2", "all-linear"), ("siglip", "attention"), ("clip", "all-linear")]
)
def test_images_of_unusual_models_get_adapters(tmp_path, kind, targets):
    """Swin V2 has layers whose names are numbers. The classifiers of CLIP and SigLIP name no body."""
    AutoConfig.for_model(kind, **UNUSUAL[kind]).to_json_file(tmp_path / "model.json")
    options = {"task": "image-classification", "image_size": 32, "lora_targets": targets, "lora": True}
    settings = settings_for(tmp_path, model=str(tmp_path / "model.json"), from_scratch=True, **options)
    with torch.device("meta"):
        model = build_model(settings, blank_datasets(3, 32))
    adapted = [name for name, module in model.named_modules() if hasattr(module, "lora_A")]
    assert [name for name in adapted if "attn" in name or "attention" in name]
    assert not [name for name in adapted if "classifier" in name]
    assert model.peft_config["default"].modules_to_save == ["classifier"]


def test_the_adapters_config_has_the_settings(tmp_path):
    settings = lora_settings(tmp_path, lora_rank=4, lora_alpha=12, dora=True, lora_dropout=0.25)
    config = build_model(settings, data(settings)).peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 12, 0.25)
    assert config.use_dora
    assert "score" in config.modules_to_save


@pytest.mark.slow
def test_four_bits_from_training_to_text(tmp_path, monkeypatch, capsys):
    """Rung 14 saves an adapter and its 4-bit base. They generate text, are merged, and generate text again."""
    sizes = ["--train_samples", 64, "--validation_samples", 8, "--test_samples", 8, "--learning_rate", "2e-2"]
    instructions = ["--task", "instruction-tuning", "--epochs", 4]
    stdout = finished(run_script(SRC / "14_qlora.py", *instructions, *sizes, cwd=tmp_path))
    assert "Saved runs/14_qlora/1/adapter" in stdout
    files = list((tmp_path / "runs/14_qlora/1/adapter").iterdir())
    assert sum(path.stat().st_size for path in files if path.suffix == ".safetensors") < 100_000
    review = ["--prompt", "Is this film review positive or negative?", "--input", "A good film.", "--max_new_tokens", 5]
    monkeypatch.chdir(tmp_path)
    for script, more in (
        ("generate", ["--model", "runs/14_qlora/1", *review]),
        ("export_model", ["runs/14_qlora/1"]),
        ("generate", ["--model", "runs/14_qlora/1/export", *review]),
    ):
        run_here(monkeypatch, ROOT / "scripts" / f"{script}.py", *more)
        answer = capsys.readouterr().out.strip()
        assert answer in ("positive", "negative") or script == "export_model"


def test_the_articles_config_gives_the_articles_run():
    shape = ["--model", str(MODELS / "bloom-7b1.json"), "--from_scratch", "true", "--accelerator", "cpu"]
    settings = parse_settings(["--config", "belle_bloomz_7b1_lora.yaml", *shape], precision="bf16-true")
    assert (settings.lora_rank, settings.lora_alpha, settings.lora_dropout) == (8, 32, 0.1)
    assert (settings.lora_targets, settings.learning_rate) == ("query_key_value", 2e-3)  # for random weights
    assert settings.prompt_template == "Human: {instruction}\n{input}\nAssistant: "
