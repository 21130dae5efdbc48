"""The project's own attention function, compared with transformers' function."""

import pytest
import torch
from support.helpers import MODELS, settings_for, token_datasets
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, masking_utils
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from fabric_ladder import build_model
from fabric_ladder.models.attention import ATTENTION
from fabric_ladder.models.kernels import use_kernels
from fabric_ladder.models.masks import declare_padding


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


@pytest.mark.parametrize(
    ("dtype", "kernels", "heads"),
    [
        (torch.float32, ("flash", "memory-efficient", "math"), 4),
        (torch.bfloat16, ("flash", "memory-efficient", "math"), 2),
        (torch.bfloat16, ("memory-efficient", "math"), 4),
    ],
)
def test_heads_of_keys_are_repeated_for_kernels_that_take_no_groups(tmp_path, dtype, kernels, heads):
    seen = []

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is scaled_dot_product_attention:
                seen.append((args[0].shape[1], args[1].shape[1], args[2].shape[1]))
            return function(*args, **(kwargs or {}))

    settings = settings_for(tmp_path, model=str(MODELS / "llama-tiny.json"), from_scratch=True, attention="fused")
    model = build_model(settings, token_datasets()).to(dtype)
    rows = torch.randint(1, 60, (2, 20))
    use_kernels(kernels)
    try:
        with Watch(), declare_padding(False):
            fused = model(rows).logits
    finally:
        use_kernels(("flash", "memory-efficient", "math"))
    assert seen == [(4, heads, heads)] * 2
    model.config._attn_implementation = "eager"
    torch.testing.assert_close(fused, model(rows).logits, rtol=0, atol=1e-6 if dtype == torch.float32 else 1e-2)
