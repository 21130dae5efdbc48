"""The project's own attention function, compared with transformers' function."""

import pytest
import torch
from support.helpers import MODELS, settings_for, token_datasets
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fabric_ladder import build_model
from fabric_ladder.models.attention import ATTENTION


def test_transformers_own_functions_stay_as_they_are(tmp_path):
    model = build_model(
        settings_for(tmp_path, model=str(MODELS / "llama-tiny.json"), from_scratch=True, packing=True), token_datasets()
    )
    assert model.config._attn_implementation == ATTENTION
    assert AttentionInterface()["sdpa"] is sdpa_attention_forward
    assert AttentionMaskInterface()["sdpa"] is masking_utils.sdpa_mask
    assert masking_utils.find_packed_sequence_indices.__module__ == "transformers.masking_utils"


@pytest.mark.parametrize("name", ["llama-tiny", "qwen3-tiny"])
def test_both_functions_compute_the_same_bits(tmp_path, name):
    settings = settings_for(tmp_path, model=str(MODELS / f"{name}.json"), from_scratch=True)
    model = build_model(settings, token_datasets()).eval()
    ids = torch.randint(1, 60, (2, 20))
    inputs = {"input_ids": ids, "attention_mask": (torch.arange(20) < torch.tensor([[20], [13]])).long()}
    with torch.no_grad():
        ours = model(**inputs).logits
        model.config._attn_implementation = "sdpa"
        assert ours.equal(model(**inputs).logits)
