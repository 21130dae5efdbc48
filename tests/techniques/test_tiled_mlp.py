"""Tiled MLP: the gradients of the whole MLP, one gradient for each weight, and what it refuses."""

import pytest
import torch
import torch.distributed as dist
from support.helpers import settings_for
from support.planning import case, real, set_up, strategy_of
from torch import nn
from transformers import AutoConfig, AutoModelForImageClassification, AutoModelForSequenceClassification

from fabric_ladder import Settings
from fabric_ladder.errors import UserError
from fabric_ladder.models.layers import find_blocks, find_mlp
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.techniques import cuda_defaults
from fabric_ladder.techniques.checkpointing import enable_checkpointing, may_draw
from fabric_ladder.techniques.compile import Compile
from fabric_ladder.techniques.lora import add_adapters
from fabric_ladder.techniques.tiled_mlp import TiledMLP, use_tiles
from fabric_ladder.training.gradients import accumulate_gradients

CHECKPOINTED = Settings(activation_checkpointing=True, accelerator="cpu")
ARCHITECTURES = """bert bloom deberta-v2 distilbert gemma2 gemma3_text gpt2 gpt_neox llama mistral modernbert mpt phi
    phi3 qwen2 qwen3 roberta vit""".split()
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
         "intermediate_size": 64, "vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
         "image_size": 32, "patch_size": 8, "max_position_embeddings": 64}  # fmt: skip
OWN_NAMES = {"distilbert": {"dim": 32, "n_heads": 2, "n_layers": 2, "hidden_dim": 64},
             "mpt": {"d_model": 32, "n_heads": 2, "n_layers": 2, "max_seq_len": 64}}  # fmt: skip


def model_of(kind, dropout=0.0):
    """Return a model of two blocks with random weights."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **SIZES | OWN_NAMES.get(kind, {}), use_cache=False)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, dropout)
    auto = AutoModelForImageClassification if kind == "vit" else AutoModelForSequenceClassification
    return auto.from_config(config).train()


def step(model):
    """Return the loss and the gradients of random texts or images."""
    model.double().zero_grad()
    torch.manual_seed(1)
    labels = torch.arange(2)
    if model.main_input_name == "pixel_values":
        loss = model(torch.randn(2, 3, 32, 32, dtype=torch.float64), labels=labels).loss
    else:
        loss = model(torch.randint(3, 64, (2, 7)), labels=labels).loss
    loss.backward()
    return [loss.detach(), *(weight.grad for weight in model.parameters() if weight.grad is not None)]


def record_widths(model):
    """Return a list that gets the number of tokens of each call of a layer of an MLP."""
    tokens = []
    for block in find_blocks(model):
        for layer in (layer for part in find_mlp(block) for layer in part.modules() if layer._parameters):
            layer.register_forward_pre_hook(lambda _, args: tokens.append(args[0].shape[:-1].numel()))
    return tokens


def assert_near(found, expected, limit=1e-13):
    """Compare with the largest gradient, since some gradients are zero except for rounding."""
    largest = max(each.abs().max() for each in expected)
    for one, other in zip(found, expected, strict=True):
        assert (one - other).abs().max() <= limit * largest


@pytest.mark.parametrize("kind", ARCHITECTURES)
def test_tiles_give_the_gradients_of_the_whole_mlp(kind):
    expected = step(model_of(kind))
    for checkpointed in (False, True):
        model = model_of(kind)
        if checkpointed:
            enable_checkpointing(model, CHECKPOINTED)
        tokens = record_widths(model)
        use_tiles(model, 5, draws=False)
        assert_near(step(model), expected)
        assert max(tokens) == 5


def test_an_evaluation_has_tiles_that_nobody_recomputes():
    model, ids = model_of("llama").eval(), torch.arange(3, 17).view(2, 7)
    with torch.no_grad():
        expected = model(ids).logits
        tokens = record_widths(model)
        use_tiles(model, 4, draws=True)
        torch.testing.assert_close(model(ids).logits, expected)
    assert set(tokens) == {4, 2}


@pytest.mark.parametrize("kind", ["bert", "bloom", "gpt2"])
def test_dropout_is_recomputed_with_the_same_random_numbers(kind):
    """The gradient agrees with the change of the loss, and checkpointing changes no bit."""
    model, checkpointed = model_of(kind, dropout=0.2), model_of(kind, dropout=0.2)
    for each in (model, checkpointed):
        use_tiles(each, 4, draws=may_draw(each.config, CHECKPOINTED))
    loss, *gradients = step(model)
    enable_checkpointing(checkpointed, CHECKPOINTED)
    assert all(map(torch.equal, step(checkpointed), [loss, *gradients]))
    trained = [weight for weight in model.parameters() if weight.grad is not None]
    squared = sum((gradient**2).sum() for gradient in gradients).item()
    moved, length = [], 1e-6
    for sign in (1, -2):
        with torch.no_grad():
            for weight, gradient in zip(trained, gradients, strict=True):
                weight += sign * length * gradient
        moved.append(step(model)[0].item())
    assert (moved[0] - moved[1]) / (2 * length) == pytest.approx(squared, rel=1e-4)


@pytest.mark.parametrize("after", [False, True], ids=["tiles first", "adapters first"])
def test_adapters_inside_the_mlp_get_their_gradients(tmp_path, after):
    settings = settings_for(tmp_path, lora=True, lora_dropout=0.0, precision="64-true")

    def adapted(tile):
        model = model_of("llama")
        if tile and not after:
            use_tiles(model, tile, draws=False)
        torch.manual_seed(2)
        model = add_adapters(model, settings)
        if tile and after:
            use_tiles(model, tile, draws=False)
        for name, weight in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(weight)  # otherwise A gets no gradient
        return step(model)

    assert_near(adapted(5), adapted(None), 1e-5)  # adapters stay in 32 bits


def test_tiles_within_checkpoints_follow_the_default_dtype_of_the_forward_pass():
    """Fabric changes it in the forward pass alone. PyTorch 2.11 refused the recomputation without our care."""
    model = model_of("bloom").to(torch.bfloat16)
    enable_checkpointing(model, CHECKPOINTED)
    use_tiles(model, 3, draws=False)
    torch.set_default_dtype(torch.bfloat16)
    try:
        loss = model(torch.randint(3, 64, (2, 7)), labels=torch.arange(2)).loss
    finally:
        torch.set_default_dtype(torch.float32)
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_each_weight_gets_one_gradient():
    """DDP, FSDP2 and an optimizer that steps in the backward pass wait for it."""
    model, calls = model_of("llama"), []
    for weight in model.parameters():
        weight.register_post_accumulate_grad_hook(calls.append)
    use_tiles(model, 4, draws=False)
    enable_checkpointing(model, CHECKPOINTED)
    gradients = step(model)[1:]
    assert len(calls) == len({*calls}) == len(gradients)


@pytest.mark.filterwarnings("error:FSDP2-wrapped module")  # of a view that it would return
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_gets_the_gradients_of_a_run_without_tiles(tmp_path, strategy):
    def gradients(**values):
        more = {"strategy": strategy, "devices": 1, "micro_batch_size": 4}
        settings, training, _ = case(tmp_path, "bloom", activation_checkpointing=True, **more, **values)
        torch.manual_seed(0)
        try:
            fabric, model, optimizer = set_up(settings, strategy=strategy_of(settings))
            accumulate_gradients(fabric, model, list(map(real, training)), Meter(fabric), optimizer=optimizer)
            return [getattr(each.grad, "full_tensor", lambda each=each: each.grad)() for each in model.parameters()]
        finally:
            dist.destroy_process_group()

    assert_near(gradients(mlp_tile=100), gradients(), 1e-5)


def test_float8_does_not_turn_the_compiler_on(tmp_path, monkeypatch):
    monkeypatch.setattr(Compile, "is_installed", lambda self: True)
    switched_on = [cuda_defaults(settings_for(tmp_path, float8=True, mlp_tile=tile), (), (9, 0)) for tile in (None, 8)]
    assert [*switched_on[0]] == ["compile"]
    assert not switched_on[1]


@pytest.mark.parametrize("kind", ["mixtral", "opt"])
def test_models_without_such_an_mlp_are_refused(tmp_path, kind):
    AutoConfig.for_model(kind, **SIZES, word_embed_proj_dim=32, num_local_experts=2).save_pretrained(tmp_path)
    settings = settings_for(tmp_path, mlp_tile=8, model=str(tmp_path))
    with pytest.raises(UserError, match=f"^--mlp_tile 8: the blocks of {kind} have no MLP .*; leave it out$"):
        TiledMLP().check(settings, None)
