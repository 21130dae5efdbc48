"""The predicted peak with activation checkpointing, compared with real tensors and with arithmetic."""

import json

import pytest
from support.helpers import MODELS
from support.planning import PATCHES, VIT, case, measured_peak, tracked_peak

from fabric_ladder.planning.predict import predict_peak

LAYERS = 4
BERT = {"model_type": "bert", "vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.1}  # fmt: skip
GPT2 = {"model_type": "gpt2", "vocab_size": 1024, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1,
        "eos_token_id": 1, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.1}  # fmt: skip
TECHNIQUES = {"5": {}, "7": {"activation_checkpointing": True}}
TECHNIQUES |= {"20": TECHNIQUES["7"] | {"activation_offload": True}}
TECHNIQUES |= {"21": TECHNIQUES["7"] | {"selective_checkpointing": True}}


def deep_case(tmp_path, family, rung, **values):
    """Return the settings and micro-batches of a rung, for a model of `LAYERS` blocks."""
    name, config = "num_hidden_layers", VIT
    if family != "vit":
        name, config = "n_layer", json.loads((MODELS / "bloom-quickstart.json").read_text())
    path = tmp_path / f"{family}-{LAYERS}.json"
    path.write_text(json.dumps(config | {name: LAYERS}))
    return case(tmp_path, family, model=str(path), **(TECHNIQUES[rung] | values))[:2]


@pytest.mark.parametrize(("family", "precision"), [("vit", "32-true"), ("bloom-lm", "bf16-true")])
def test_the_prediction_agrees_with_real_tensors(tmp_path, family, precision):
    selective = deep_case(tmp_path, family, "21", precision=precision)
    assert predict_peak(*selective).total == pytest.approx(measured_peak(*selective), rel=0.01)
    offloaded = deep_case(tmp_path, family, "20", precision=precision, micro_batch_size=4)
    predicted, measured = predict_peak(*offloaded), tracked_peak(*offloaded)
    assert predicted.total == pytest.approx(measured.total, rel=0.01)
    assert predicted.host == measured.host > 0


@pytest.mark.parametrize(("config", "rung"), [(BERT, "7"), (GPT2, "20"), (BERT, "21")], ids=["7", "20", "21"])
def test_recomputed_attention_drops_out_as_in_the_forward_pass(tmp_path, config, rung):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(config))
    settings, training, _ = case(tmp_path, config["model_type"], model=str(path), **TECHNIQUES[rung])
    assert predict_peak(settings, training).total == pytest.approx(tracked_peak(settings, training).total, rel=0.01)


def test_the_inputs_of_all_blocks_but_two_leave_the_device(tmp_path):
    """One input is in use, the other in transfer. With two micro-batches all gradients exist at the peak."""
    values = {"precision": "bf16-true", "micro_batch_size": 4}
    peaks = {rung: predict_peak(*deep_case(tmp_path, "vit", rung, **values)) for rung in TECHNIQUES}
    each = 4 * PATCHES * VIT["hidden_size"] * 2
    assert peaks["20"].host == LAYERS * each
    assert peaks["7"].host == 0
    assert peaks["7"].total - peaks["20"].total == (LAYERS - 2) * each
    assert peaks["7"].total < peaks["21"].total < peaks["5"].total


def test_under_fsdp_inputs_are_counted_next_to_the_shards(tmp_path):
    values = {"strategy": "fsdp", "devices": 2, "batch_size": 16}
    offloaded, kept = (predict_peak(*deep_case(tmp_path, "vit", rung, **values)) for rung in ("20", "7"))
    assert offloaded.total < kept.total
    assert offloaded.host == LAYERS * 8 * PATCHES * VIT["hidden_size"] * 4
