"""The predicted peak of what checkpointing keeps, and where: against real tensors and against arithmetic."""

import json

import pytest
import torch
from lightning import Fabric
from support.helpers import MODELS
from support.planning import PATCHES, VIT, build, case, measured_peak, real

from fabric_ladder import build_optimizer
from fabric_ladder.planning.predict import predict_peak
from fabric_ladder.planning.tracker import PeakTracker
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.techniques.checkpointing import host_memory_within
from fabric_ladder.training.gradients import accumulate_gradients

LAYERS = 6
TECHNIQUES = {"5": {}, "7": {"activation_checkpointing": True}}
TECHNIQUES |= {"20": TECHNIQUES["7"] | {"activation_offload": True}}
TECHNIQUES |= {"21": TECHNIQUES["7"] | {"selective_checkpointing": True}}


def deep_case(tmp_path, family, rung, **values):
    """The settings and micro-batches of a rung, on a model of six blocks."""
    name, config = "num_hidden_layers", VIT
    if family != "vit":
        name, config = "n_layer", json.loads((MODELS / "bloom-quickstart.json").read_text())
    path = tmp_path / f"{family}-{LAYERS}.json"
    path.write_text(json.dumps(config | {name: LAYERS}))
    settings, training, _ = case(tmp_path, family, **(TECHNIQUES[rung] | values))
    settings = type(settings)(**(vars(settings) | {"model": str(path)}))
    return settings, training


def offloaded_peak(settings, micro_batches):
    """The peak of real tensors, of which those in the host's memory are told apart."""
    fabric = Fabric(accelerator="cpu", devices=1, precision=settings.precision)
    model = fabric.setup(build(settings))
    optimizer = fabric.setup_optimizers(build_optimizer(settings, model))
    tracker = PeakTracker()

    def step():
        for micro_batch in micro_batches:
            accumulate_gradients(fabric, model, [real(micro_batch)], Meter(fabric))
        optimizer.step()
        optimizer.zero_grad()

    step()
    for parameter in model.parameters():
        tracker.watch(parameter)
    for state in optimizer.optimizer.state.values():
        for tensor in state.values():
            tracker.hold(tensor, "optimizer_state")
    with tracker, host_memory_within(lambda: tracker.at("training", on_host=True)):
        step()
    return tracker.peak()


QUICK = [("bloom", "bf16-mixed"), ("vit", "32-true"), ("bloom-lm", "bf16-true")]
ALL = [(family, precision) for family, _ in QUICK for _, precision in QUICK]


@pytest.mark.parametrize(
    ("family", "precision"), [pytest.param(*pair, marks=[] if pair in QUICK else [pytest.mark.slow]) for pair in ALL]
)
def test_the_prediction_agrees_with_real_tensors(tmp_path, family, precision):
    selective = deep_case(tmp_path, family, "21", precision=precision)
    assert predict_peak(*selective).total == pytest.approx(measured_peak(*selective), rel=0.01)
    offloaded = deep_case(tmp_path, family, "20", precision=precision, micro_batch_size=4)
    predicted, measured = predict_peak(*offloaded), offloaded_peak(*offloaded)
    assert predicted.total == pytest.approx(measured.total, rel=0.01)
    assert predicted.host == measured.host > 0


@pytest.mark.parametrize(("precision", "size"), [("32-true", 4), ("bf16-true", 2)])
def test_all_inputs_but_two_leave_the_device(tmp_path, precision, size):
    """The one that is computed on, and the one on its way; two micro-batches, so that all gradients are there."""
    values = {"precision": precision, "micro_batch_size": 4}
    peaks = {rung: predict_peak(*deep_case(tmp_path, "vit", rung, **values)) for rung in TECHNIQUES}
    each = 4 * PATCHES * VIT["hidden_size"] * size
    assert peaks["20"].host == LAYERS * each
    assert peaks["7"].host == 0
    assert peaks["7"].total - peaks["20"].total == (LAYERS - 2) * each
    assert peaks["7"].total < peaks["21"].total < peaks["5"].total


def test_the_host_holds_the_inputs_of_one_micro_batch(tmp_path):
    whole, halves = (predict_peak(*deep_case(tmp_path, "vit", "20", micro_batch_size=size)) for size in (8, 4))
    assert halves.host == whole.host // 2


def test_under_fsdp_inputs_are_counted_beside_the_shards(tmp_path):
    (settings, training), (plain, _) = (deep_case(tmp_path, "vit", rung, devices=1) for rung in ("20", "7"))
    assert not torch.distributed.is_initialized()
    offloaded, kept = predict_peak(settings, training, ranks=2), predict_peak(plain, training, ranks=2)
    assert offloaded.total < kept.total
    assert offloaded.host == LAYERS * 8 * PATCHES * VIT["hidden_size"] * 4
