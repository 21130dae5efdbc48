"""The memory of a run on Apple silicon, predicted with the operations of PyTorch on its GPU."""

from dataclasses import replace

import pytest
from support.planning import case, measured_peak
from torch.nn.attention import SDPBackend, sdpa_kernel

from fabric_ladder.planning.predict import predict_peak


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_the_prediction_agrees_with_real_tensors_computed_as_on_a_mac(tmp_path, precision):
    settings, training, _ = case(tmp_path, "vit", precision=precision)
    with sdpa_kernel(SDPBackend.MATH):
        measured = measured_peak(settings, training, on_mac=True)
    on_mac = predict_peak(replace(settings, accelerator="mps"), training)
    assert on_mac.total == pytest.approx(measured, rel=0.01)
    assert on_mac.activations > 1.2 * predict_peak(settings, training).activations, "attention keeps its matrix"
