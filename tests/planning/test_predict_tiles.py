"""The predicted peak with a tiled MLP, compared with real tensors and with arithmetic."""

import json

import pytest
from support.helpers import settings_for
from support.planning import measured_peak

from fabric_ladder.planning.predict import largest_batches, predict_peak

LENGTH = 128
LLAMA = {"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2,
         "num_attention_heads": 2, "num_key_value_heads": 2, "intermediate_size": 1024}  # fmt: skip
CHECKPOINTED = {"activation_checkpointing": True}


def long_text(tmp_path, **values):
    """Return the settings and the micro-batches of a long text, for a model with a wide MLP."""
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(LLAMA))
    values = {"max_length": LENGTH, "batch_size": 2, "micro_batch_size": 1} | values
    settings = settings_for(tmp_path, model=str(path), from_scratch=True, task="instruction-tuning", **values)
    return settings, largest_batches(settings, LENGTH)[0]


@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize(
    "values", [CHECKPOINTED | {"precision": "bf16-mixed"}, {"lora": True, "precision": "bf16-true"}], ids=str
)
def test_the_prediction_agrees_with_real_tensors(tmp_path, values):
    peaks = []
    for tile in (None, 50):
        settings, micro_batches = long_text(tmp_path, mlp_tile=tile, **values)
        peaks.append(predict_peak(settings, micro_batches).total)
        assert peaks[-1] == pytest.approx(measured_peak(settings, micro_batches), rel=0.01)
    assert peaks[1] < peaks[0]
