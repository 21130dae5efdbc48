"""A small copy shows whether a model sees later tokens, what padding changes, and which token its head reads."""

from contextlib import nullcontext

import pytest
import torch
from support.helpers import MODELS, settings_for
from transformers import (
    BartConfig,
    BertConfig,
    BigBirdConfig,
    BloomConfig,
    FalconConfig,
    FNetConfig,
    FunnelConfig,
    Gemma3TextConfig,
    GPTNeoXConfig,
    MambaConfig,
    ModernBertConfig,
    NystromformerConfig,
    Phi3Config,
    ProphetNetConfig,
    RecurrentGemmaConfig,
    ReformerConfig,
    XLNetConfig,
    YosoConfig,
)

from fabric_ladder import UserError
from fabric_ladder.models.configs import check_model
from fabric_ladder.models.probe import TOLERANCE, _measure, answers_alone, check_probed, padding_notice, probe

CLASSIFICATION, INSTRUCTIONS = "text-classification", "instruction-tuning"
ROPE = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 48, "long_factor": [9.0] * 48}
GEMMA = {"num_hidden_layers": 2, "hidden_size": 128, "num_attention_heads": 4, "head_dim": 32}


def longrope():
    rope = ROPE | {"original_max_position_embeddings": 512}
    return Phi3Config(original_max_position_embeddings=512, rope_parameters=rope)


@pytest.mark.parametrize(
    ("config", "sees_later"),
    [
        (BertConfig(), True),
        (BertConfig(is_decoder=True), False),
        (Gemma3TextConfig(use_bidirectional_attention=True, **GEMMA), True),
        (Gemma3TextConfig(**GEMMA), False),
        pytest.param(MambaConfig(hidden_size=64, num_hidden_layers=2), False, marks=pytest.mark.slow),
    ],
)
def test_a_language_model_that_sees_later_tokens_is_refused(tmp_path, config, sees_later):
    assert probe(config, INSTRUCTIONS, 512).sees_later == sees_later
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    settings = settings_for(tmp_path, task=INSTRUCTIONS, model=str(tmp_path / "config.json"), from_scratch=True)
    if not sees_later:
        return check_probed(settings)
    with pytest.raises(UserError, match="sees later tokens: it would learn to copy them"):
        check_probed(settings)


@pytest.mark.parametrize(
    ("config", "pooled"),
    [
        (BertConfig(is_decoder=True), "first"),
        (Gemma3TextConfig(use_bidirectional_attention=True, **GEMMA), "last"),
        (GPTNeoXConfig(eos_token_id=0), "last"),  # the number of the copy's padding
        (ModernBertConfig(classifier_pooling="mean"), "mean"),
        (XLNetConfig(summary_type="attn"), None),
    ],
)
def test_the_token_that_a_head_reads(config, pooled):
    assert getattr(probe(config, CLASSIFICATION, 512), "pooled", None) == pooled


@pytest.mark.parametrize(
    ("config", "longest", "changes"),
    [
        (FNetConfig(), 64, True),
        (NystromformerConfig(), 512, True),
        (BigBirdConfig(), 1024, False),  # `build_model` makes its attention full
        (longrope(), 1024, True),
        (longrope(), 512, False),
        (BertConfig(), 512, False),
    ],
)
def test_padding_that_changes_results_gives_a_line(tmp_path, config, longest, changes):
    assert (probe(config, CLASSIFICATION, longest).padding > TOLERANCE) == changes
    config.to_json_file(tmp_path / "config.json", use_diff=False)
    values = {"model": str(tmp_path / "config.json"), "from_scratch": True, "max_length": longest}
    line = padding_notice(settings_for(tmp_path, **values))
    assert ("Padding changes the results of" in line and "--eval_batch_tokens 1" in line) if changes else not line
    assert not padding_notice(settings_for(tmp_path, micro_batch_size=1, **values | {"eval_batch_tokens": 1}))


def test_a_head_that_reads_the_padding_is_refused(tmp_path):
    XLNetConfig().to_json_file(tmp_path / "xlnet.json", use_diff=False)
    values = {"model": str(tmp_path / "xlnet.json"), "from_scratch": True}
    with pytest.raises(UserError, match=r"reads the padding after a text; --micro_batch_size 1"):
        check_probed(settings_for(tmp_path, **values))
    check_probed(settings_for(tmp_path, micro_batch_size=1, **values | {"eval_batch_tokens": 1}))


def test_a_probe_leaves_random_numbers_and_the_config_as_they_are():
    config, before = YosoConfig(), torch.get_rng_state()
    values = config.to_dict()
    _measure.cache_clear()
    with torch.device("meta"):
        assert probe(config, CLASSIFICATION, 64).padding > TOLERANCE
    assert before.equal(torch.get_rng_state())
    assert config.to_dict() == values


def test_a_model_without_a_copy_is_not_judged_which_a_line_says(tmp_path):
    assert probe(BertConfig(hidden_act="unknown"), CLASSIFICATION, 512) is None
    config = FunnelConfig(block_sizes=[2], d_model=64, n_head=4, d_head=16, d_inner=64)
    config.to_json_file(tmp_path / "funnel.json", use_diff=False)
    settings = settings_for(tmp_path, model=str(tmp_path / "funnel.json"), from_scratch=True)
    check_probed(settings)
    assert "may change the results of" in padding_notice(settings)
    images = settings_for(tmp_path, model=str(MODELS / "vit-small.json"), task="image-classification", image_size=32)
    assert padding_notice(images) is None


@pytest.mark.parametrize(
    ("config", "longest", "alone"),
    [
        (BloomConfig(), 512, False),
        (BartConfig(is_decoder=True, is_encoder_decoder=False), 512, True),  # positions are counted with the padding
        (RecurrentGemmaConfig(num_hidden_layers=3), 512, True),
        (longrope(), 1024, True),
        (longrope(), 512, False),
    ],
)
def test_prompts_that_left_padding_changes_are_answered_alone(config, longest, alone):
    assert answers_alone(config, longest) == alone


def test_falcon_with_alibi_has_no_eager_attention(tmp_path):
    FalconConfig(alibi=True).to_json_file(tmp_path / "falcon.json", use_diff=False)
    settings = settings_for(tmp_path, model=str(tmp_path / "falcon.json"), from_scratch=True, attention="eager")
    with pytest.raises(UserError, match="--attention eager: transformers adds ALiBi twice"):
        check_model(settings)


def test_a_model_that_cannot_process_its_lengths_is_refused(tmp_path):
    """Reformer trains on multiples of its chunks, and ProphetNet has fewer positions than its config names."""
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "feed_forward_size": 32, "axial_pos_embds": False}
    reformer = {**sizes, "attention_head_size": 16, "attn_layers": ["local"], "local_attn_chunk_length": 64}
    small = {"num_encoder_layers": 1, "num_decoder_layers": 1, "is_decoder": True, "is_encoder_decoder": False}
    for config, task, longest, step, refused in (
        (ReformerConfig(**reformer), CLASSIFICATION, 128, 1, True),
        (ReformerConfig(**reformer), CLASSIFICATION, 128, 64, False),
        (ProphetNetConfig(hidden_size=32, **small), INSTRUCTIONS, 512, 1, True),
    ):
        config.to_json_file(tmp_path / "config.json", use_diff=False)
        values = {"model": str(tmp_path / "config.json"), "from_scratch": True, "task": task, "max_length": longest}
        settings = settings_for(tmp_path, **values, pad_to_multiple_of=step)
        line = rf"cannot process all texts of up to {longest} tokens: choose another --max_length or --model \("
        with pytest.raises(UserError, match=line) if refused else nullcontext():
            check_probed(settings)
