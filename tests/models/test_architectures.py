"""Architectures with parts, experts and buffers of their own: each trains, or is refused in one line."""

import copy

import pytest
import torch
from lightning import Fabric
from support.helpers import VOCABULARY, Tokenizer, settings_for, token_datasets
from support.training import losses, run_training
from transformers import AutoConfig

from fabric_ladder import UserError, build_model
from fabric_ladder.data.splits import TextDatasets
from fabric_ladder.models.configs import check_model
from fabric_ladder.models.layers import check_images, find_blocks, meta_model
from fabric_ladder.planning.predict import blank_datasets
from fabric_ladder.techniques.advice import explain
from fabric_ladder.techniques.checkpointing import ActivationCheckpointing
from fabric_ladder.techniques.chunked_loss import ChunkedLoss
from fabric_ladder.techniques.lora import LoRA, adaptable_layers, add_adapters

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
TEXT = SIZES | {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": VOCABULARY, "max_position_embeddings": 32}
IMAGE = SIZES | {"num_hidden_layers": 1, "image_size": 16, "patch_size": 8}
CONFIGS = {
    "gemma3": {"text_config": TEXT | {"sliding_window": 8}, "vision_config": IMAGE, "mm_tokens_per_image": 4},
    "llama4": {
        "text_config": TEXT | {"num_local_experts": 4, "intermediate_size_mlp": 32, "attention_chunk_size": 16},
        "vision_config": IMAGE | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    },
    "mamba": {"vocab_size": VOCABULARY, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
    "deepseek_v4": {
        **{"vocab_size": VOCABULARY, "hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2},
        **{"num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 8, "qk_rope_head_dim": 8, "q_lora_rank": 8},
        **{"num_experts_per_tok": 2, "n_routed_experts": 4, "n_shared_experts": 1, "sliding_window": 16},
        **{"layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"]},
        **{"mlp_layer_types": ["moe"] * 2},
        **{"o_groups": 4, "o_lora_rank": 8, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 2},
    },
    "openai-gpt": {"vocab_size": VOCABULARY, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 32},
    "deberta": SIZES | {"vocab_size": VOCABULARY, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
}
LANGUAGE = {"task": "instruction-tuning", "from_scratch": True, "max_length": 32, "micro_batch_size": 8}


def settings_of(tmp_path, kind, **values):
    AutoConfig.for_model(kind, pad_token_id=0, **CONFIGS[kind]).to_json_file(tmp_path / "model.json")
    return settings_for(tmp_path, model=str(tmp_path / "model.json"), **({"from_scratch": True} | values))


def built(settings, classes=2):
    torch.manual_seed(0)
    return build_model(settings, TextDatasets(None, [str(label) for label in range(classes)], Tokenizer(), ""))


@pytest.mark.parametrize("kind", ["gemma3", "llama4"])
def test_a_model_with_an_image_part_trains_its_text_part(tmp_path, kind):
    model = built(settings_of(tmp_path, kind, **LANGUAGE), classes=0)
    plain = type(model)(model.config)
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(1, VOCABULARY, (2, 9))
    logits = plain(input_ids=ids).logits[:, :-1].flatten(0, 1)
    expected = torch.nn.functional.cross_entropy(logits, ids[:, 1:].flatten())
    predicting = torch.arange(18).view(2, 9)[:, :-1].flatten()
    loss = model(input_ids=ids, labels=ids, predicting=predicting).loss
    torch.testing.assert_close(loss, expected)
    loss.backward()
    assert all(weight.grad is not None for weight in model.parameters() if weight.requires_grad)


def test_the_positions_of_a_text_part_bound_the_texts(tmp_path):
    with pytest.raises(UserError, match="--max_length 33 is beyond the 32 positions"):
        check_model(settings_of(tmp_path, "gemma3", max_length=33))


@pytest.mark.parametrize("kind", ["gemma3", "llama4", "mamba", "deepseek_v4"])
def test_adapters_stay_out_of_image_parts_routers_and_fused_kernels(tmp_path, kind):
    settings = settings_of(tmp_path, kind, lora=True, **LANGUAGE)
    adapted = [name for name, module in built(settings, 0).named_modules() if hasattr(module, "lora_A")]
    assert [name.removeprefix("base_model.model.") for name in adapted] == adaptable_layers(
        meta_model(settings), settings
    )
    assert not [name for name in adapted if "vision" in name or "router" in name or name.endswith("out_proj")]
    run, model = run_training(tmp_path, built(settings, 0), token_datasets(per_token=True), **LANGUAGE, lora=True)
    unused = [name for name, weight in model.named_parameters() if "lora_B" in name and not weight.any()]
    assert not unused or kind == "deepseek_v4", "its indexer chooses keys, and gets no gradient"
    assert losses(run)


def test_a_mask_in_a_buffer_becomes_16_bits_and_rotary_frequencies_stay_in_32(tmp_path):
    for kind, kept in (("openai-gpt", []), ("gemma3", ["inv_freq"])):
        settings = settings_of(tmp_path, kind, precision="bf16-true")
        model = Fabric(accelerator="cpu", devices=1, precision="bf16-true").setup(built(settings))
        assert model(input_ids=torch.ones(1, 4, dtype=torch.long)).logits.isfinite().all()
        wide = {name.split("_", 2)[-1] for name, buffer in model.named_buffers() if buffer.dtype == torch.float32}
        assert all(name.endswith("inv_freq") for name in wide), wide
        assert bool(wide) == bool(kept)


def test_blocks_that_change_kept_results_are_refused_with_selective_checkpointing(tmp_path):
    options = {"activation_checkpointing": True, "selective_checkpointing": True}
    settings = settings_of(tmp_path, "deberta", **options)
    with pytest.raises(RuntimeError) as caught:
        run_training(tmp_path, built(settings), **options)
    assert "use src/7_grad_checkpointing.py" in explain(caught.value, settings)


IMAGES = {
    "deit": IMAGE,
    "hiera": {"image_size": [32, 32], "embed_dim": 8, "depths": [1, 1], "num_heads": [1, 2], "patch_size": [7, 7]}
    | {"patch_stride": [4, 4], "patch_padding": [3, 3], "masked_unit_size": [4, 4], "query_stride": [2, 2]}
    | {"num_query_pool": 1},
    "clip": {"vision_config": IMAGE, "text_config": TEXT, "projection_dim": 8},
    "convnext": {"image_size": 32, "hidden_sizes": [8, 8], "depths": [1, 1], "num_stages": 2},
    "siglip2": {"vision_config": SIZES | {"num_patches": 16, "patch_size": 8}, "text_config": TEXT},
    "imagegpt": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": 65},
    "pp_lcnet": {},
}


def image_settings(tmp_path, kind, size, **values):
    AutoConfig.for_model(kind, **IMAGES[kind]).to_json_file(tmp_path / "model.json")
    options = {"task": "image-classification", "image_size": size, "model": str(tmp_path / "model.json")}
    return settings_for(tmp_path, **options, **values)


@pytest.mark.parametrize(("kind", "size"), [("deit", 16), ("hiera", 64), ("clip", 32)])
def test_images_of_any_size_train_from_scratch(tmp_path, kind, size):
    settings = image_settings(tmp_path, kind, size, from_scratch=True, activation_checkpointing=True)
    check_images(settings)
    ActivationCheckpointing().check(settings, None)
    model = build_model(settings, blank_datasets(3, size))
    loss = model(pixel_values=torch.randn(2, 3, size, size), labels=torch.tensor([0, 2])).loss
    loss.backward()
    assert loss.isfinite()


def test_a_convolutional_model_takes_images_of_another_size_than_its_own(tmp_path):
    check_images(image_settings(tmp_path, "convnext", 48))
    for kind in ("deit", "clip"):
        with pytest.raises(UserError, match="takes images of 16 pixels, not 48: use --image_size 16"):
            check_images(image_settings(tmp_path, kind, 48))


@pytest.mark.parametrize(
    ("kind", "reason"),
    [("siglip2", "takes no images of 32 pixels: choose another --model or size"),
     ("imagegpt", "takes no images of 32 pixels"), ("pp_lcnet", "computes no loss: choose another --model")],
)  # fmt: skip
def test_a_model_of_images_that_takes_other_inputs_or_has_no_loss_is_refused(tmp_path, kind, reason):
    with pytest.raises(UserError, match=rf"\({kind}\) {reason}"):
        check_images(image_settings(tmp_path, kind, 32, from_scratch=True))


def test_experts_and_a_loss_without_effect_are_named(tmp_path):
    """Experts are stacked weights, which adapters and 4 bits leave as they are."""
    moe = TEXT | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1}
    CONFIGS["qwen3_moe"] = moe | {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    settings = settings_of(tmp_path, "qwen3_moe", lora=True, precision="bf16-true", **LANGUAGE)
    model = meta_model(settings)
    experts = sum(weight.numel() for name, weight in model.named_parameters() if ".experts." in name)
    share = experts / sum(weight.numel() for weight in model.parameters())
    line = f"{share:.0%} of the weights are experts, which get no adapters and stay in 16 bits"
    assert LoRA().notice(settings) == line
    assert ChunkedLoss().notice(settings) == "router_aux_loss_coef 0.5 of the model's config has no effect here"
    dense = settings_of(tmp_path, "gemma3", lora=True, **LANGUAGE)
    assert LoRA().notice(dense) is ChunkedLoss().notice(dense) is None


def test_blocks_are_those_of_the_text_part(tmp_path):
    model = meta_model(settings_of(tmp_path, "llama4", **LANGUAGE))
    assert len(find_blocks(model)) == TEXT["num_hidden_layers"]


def test_adapters_stay_out_of_layers_that_peft_takes_for_experts(tmp_path):
    """PEFT would move those of `gate_proj` to the stacked experts, which refuse the default's dropout."""
    sizes = dict.fromkeys("q_lora_rank kv_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim".split(), 8)
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
    CONFIGS["deepseek_v3"] = TEXT | sizes | experts | {"first_k_dense_replace": 1, "moe_intermediate_size": 32}
    settings = settings_of(tmp_path, "deepseek_v3", lora=True, lora_dropout=0.1, **LANGUAGE)
    model = add_adapters(copy.deepcopy(meta_model(settings)), settings)
    adapted = {name.split(".")[-3] for name, _ in model.named_modules() if name.endswith("lora_A.default")}
    assert {"q_a_proj", "o_proj"} <= adapted
    assert not adapted & {"gate_proj", "up_proj", "down_proj", "experts"}
    names = "nor do other layers called down_proj, gate_proj, up_proj, since PEFT takes these names for experts'"
    assert names in LoRA().notice(settings)
