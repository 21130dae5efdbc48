"""The predicted peak memory: against real tensors under PyTorch's own tracker, and against arithmetic."""

import json

import pytest
import torch
import torch.distributed as dist
from helpers import MODELS, settings_for
from lightning import Fabric
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import fully_shard

from fabric_ladder import Settings, build_model, build_optimizer
from fabric_ladder.fsdp import fsdp_strategy, sharding_policy, transformer_blocks
from fabric_ladder.gradients import accumulate_gradients
from fabric_ladder.memory import blank_datasets, largest_batches, predict_peak
from fabric_ladder.metrics import Meter
from fabric_ladder.tracker import PeakTracker

VIT = {"model_type": "vit", "image_size": 64, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 2,
       "num_attention_heads": 4, "intermediate_size": 256}  # fmt: skip
BERT = {"model_type": "bert", "vocab_size": 1024, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "hidden_dropout_prob": 0.0}  # fmt: skip
TECHNIQUES = {
    "32-true": {},
    "clipped": {"max_grad_norm": 1.0},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "sgd": {"precision": "bf16-true", "optimizer": "sgd"},
    "adafactor": {"precision": "bf16-true", "optimizer": "adafactor"},
    "eager": {"attention": "eager"},
    "eager-mixed": {"attention": "eager", "precision": "bf16-mixed"},
    "checkpointing": {"activation_checkpointing": True},
    "checkpointing-mixed": {"precision": "bf16-mixed", "activation_checkpointing": True},
    "cut": {"micro_batch_size": 2},
    "cut-sgd": {"micro_batch_size": 1, "optimizer": "sgd"},
    "lora": {"lora": True, "lora_dropout": 0.0},
    "lora-mixed": {"lora": True, "precision": "bf16-mixed", "micro_batch_size": 2},
    "lora-true": {"lora": True, "precision": "bf16-true", "activation_checkpointing": True, "dora": True},
}
OF_TOKENS = ("32-true", "bf16-mixed", "bf16-true", "checkpointing", "cut", "lora", "lora-mixed", "lora-true")


def case(tmp_path, kind, **values):
    """Settings of a small model, how to build it, and what it is fed."""
    path = MODELS / "bloom-quickstart.json"
    if kind == "vit":
        path = tmp_path / "vit.json"
        path.write_text(json.dumps(VIT))
        values["task"] = "image-classification"
    if kind == "bloom-lm":
        values |= {"task": "instruction-tuning", "loss_chunk": 64}
    settings = settings_for(tmp_path, **({"batch_size": 8, "model": str(path), "from_scratch": True} | values))
    datasets = blank_datasets(2, 64 if kind == "vit" else None)
    batches = largest_batches(settings, 65, 64) if kind == "vit" else largest_batches(settings, 96)
    return settings, lambda: build_model(settings, datasets), *batches


class Unmoved:
    """An input that takes no memory before it is moved to the device."""

    def __init__(self, tensor):
        self.tensor = tensor

    def to(self, device, **_):
        return torch.zeros_like(self.tensor, device=device)


def real(micro_batch):
    """Real tensors of these shapes."""
    return micro_batch._replace(inputs={name: Unmoved(tensor) for name, tensor in micro_batch.inputs.items()})


def measured_peak(settings, build, micro_batches):
    """Bytes that real tensors hold at the peak of the second step, under PyTorch's own tracker.

    Which dies of frozen parameters: those of adapters are counted by ours.
    """
    fabric = Fabric(accelerator="cpu", devices=1, precision=settings.precision)
    model = fabric.setup(build())
    optimizer = fabric.setup_optimizers(build_optimizer(settings, model))
    tracker = PeakTracker() if settings.lora else MemTracker()

    def step():
        for micro_batch in micro_batches:
            if not settings.lora:
                tracker.reset_mod_stats()  # or it refuses a second pass
            accumulate_gradients(fabric, model, [real(micro_batch)], Meter(fabric), ("", []))
        if settings.max_grad_norm:
            fabric.clip_gradients(model, optimizer, max_norm=settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    step()
    if settings.lora:
        for parameter in model.parameters():
            tracker.watch(parameter)
        for state in optimizer.optimizer.state.values():
            for tensor in state.values():
                tracker.hold(tensor, "optimizer_state")
        with tracker:
            step()
        return tracker.peak().total
    tracker.track_external(model, optimizer.optimizer)
    with tracker:
        step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


@pytest.mark.filterwarnings("ignore:Module is None")  # of the other tracker
@pytest.mark.parametrize(
    ("kind", "technique"),
    [(kind, technique) for kind in ("bloom", "vit") for technique in TECHNIQUES]
    + [("bloom-lm", technique) for technique in OF_TOKENS],
)
def test_the_prediction_agrees_with_real_tensors(tmp_path, kind, technique):
    settings, build, micro_batches, _ = case(tmp_path, kind, **TECHNIQUES[technique])
    predicted = predict_peak(build, settings, micro_batches).total
    assert predicted == pytest.approx(measured_peak(settings, build, micro_batches), rel=0.01)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_the_prediction_agrees_with_real_tensors_under_fsdp(tmp_path, precision, offload):
    """Over gloo, with one rank; PyTorch's own tracker for FSDP follows one pass only, so it is ours on real tensors."""
    settings, build, micro_batches, _ = case(
        tmp_path, "bloom", precision=precision, offload=offload, optimizer="sgd", micro_batch_size=4
    )
    predicted = predict_peak(build, settings, micro_batches, ranks=1)

    def shard(model, mesh):
        how = sharding_policy(settings, mesh)
        for block in transformer_blocks(model):
            fully_shard(block, **how)
        return fully_shard(model, **how)

    fabric = Fabric(accelerator="cpu", devices=1, precision=precision, strategy=fsdp_strategy(settings, shard))
    fabric.launch()
    try:
        model = fabric.setup(build())
        optimizer = fabric.setup_optimizers(build_optimizer(settings, model))
        tracker, micro_batches = PeakTracker(), [real(micro_batch) for micro_batch in micro_batches]
        with tracker:
            for _ in range(2):
                for parameter in model.parameters():
                    tracker.watch(parameter, parked=offload)
                tracker.forget_peak()
                with tracker.at("training", gathering=True):
                    accumulate_gradients(fabric, model, micro_batches, Meter(fabric), ("", []))
                with tracker.at("optimizer", on_host=offload):
                    optimizer.step()
                    optimizer.zero_grad()
    finally:
        dist.destroy_process_group()
    assert predicted.total == pytest.approx(tracker.peak().total, rel=0.01)
    assert predicted.host == pytest.approx(tracker.peak().host, rel=0.01)


PER_PARAMETER = [("32-true", "adam", 4, 4, 8), ("bf16-mixed", "adam", 4, 4, 8), ("bf16-true", "adamw", 2, 2, 4),
                 ("bf16-true", "sgd", 2, 2, 0), ("32-true", "sgd", 4, 4, 0), ("64-true", "adam", 8, 8, 16)]  # fmt: skip


@pytest.mark.parametrize(("precision", "optimizer", "weights", "gradients", "state"), PER_PARAMETER)
def test_bytes_per_parameter(tmp_path, precision, optimizer, weights, gradients, state):
    values = {"precision": precision, "optimizer": optimizer, "micro_batch_size": 4}
    settings, build, micro_batches, _ = case(tmp_path, "bloom", **values)
    count = sum(parameter.numel() for parameter in build().parameters())
    peak = predict_peak(build, settings, micro_batches)
    assert peak.parameters == weights * count
    assert peak.gradients == gradients * count
    assert peak.optimizer_state == pytest.approx(state * count, rel=0.01, abs=1)  # and a count of steps each
    assert peak.total == peak.parameters + peak.gradients + peak.optimizer_state + peak.activations + peak.other
    assert peak.total == sum(count * storage.bytes for count, storage in peak.tensors)


@pytest.mark.parametrize("fused", [True, False])
def test_adam_needs_a_fifth_copy_while_it_steps_unless_it_is_fused(tmp_path, fused):
    settings, build, _, _ = case(tmp_path, "vit", precision="16-mixed", max_grad_norm=None if fused else 1.0)
    tiny, _ = largest_batches(Settings(batch_size=1, micro_batch_size=1, eval_batch_tokens=1), 65, 64)
    count = sum(parameter.numel() for parameter in build().parameters())
    peak = predict_peak(build, settings, tiny)
    if fused:
        assert peak.phase == "training"
        assert peak.total < 19 * count
    else:
        assert peak.phase == "optimizer"
        assert peak.total == pytest.approx(20 * count, rel=0.02)


def test_adafactor_keeps_a_row_and_a_column(tmp_path):
    settings, build, micro_batches, _ = case(tmp_path, "bloom", optimizer="adafactor")
    state = sum(sum(parameter.shape) for parameter in build().parameters())
    assert predict_peak(build, settings, micro_batches).optimizer_state == pytest.approx(4 * state, rel=0.05)


def test_recomputing_and_smaller_micro_batches_save_activations(tmp_path):
    peaks, ways = {}, {"whole": {}, "again": {"activation_checkpointing": True}, "cut": {"micro_batch_size": 2}}
    for name, values in ways.items():
        settings, build, micro_batches, _ = case(tmp_path, "vit", **values)
        peaks[name] = predict_peak(build, settings, micro_batches)
    assert peaks["again"].activations < 0.6 * peaks["whole"].activations
    assert peaks["cut"].activations == pytest.approx(peaks["whole"].activations / 4, rel=0.05)
    assert peaks["whole"].gradients < 0.01 * peaks["whole"].parameters, "highest when the backward pass begins"


def test_attention_by_sdpa_keeps_no_matrix_of_tokens_by_tokens(tmp_path):
    def matrices(kind, tokens, **values):
        settings, build, micro_batches, _ = case(tmp_path, kind, **values)
        return [s for _, s in predict_peak(build, settings, micro_batches).tensors if s.shape[-2:] == (tokens, tokens)]

    for kind, tokens in (("vit", 65), ("bloom", 96)):
        assert not matrices(kind, tokens)
        assert matrices(kind, tokens, attention="eager")


def test_dropout_in_attention_keeps_no_matrix_either(tmp_path):
    peaks = []
    for dropout in (0.0, 0.1):
        path = tmp_path / "bert.json"
        path.write_text(json.dumps({**BERT, "attention_probs_dropout_prob": dropout}))
        settings, build, micro_batches, _ = case(tmp_path, "bert", model=str(path))
        peaks.append(predict_peak(build, settings, micro_batches))
    assert peaks[0] == peaks[1]


def test_an_evaluation_may_be_the_peak(tmp_path):
    settings, build, micro_batches, evaluation = case(
        tmp_path, "bloom", micro_batch_size=1, optimizer="sgd", eval_batch_tokens=96 * 64
    )
    assert evaluation.inputs["input_ids"].shape == (64, 96)
    assert predict_peak(build, settings, micro_batches).phase == "training"
    assert predict_peak(build, settings, micro_batches, evaluation).phase == "evaluation"


def test_ranks_share_what_is_sharded(tmp_path):
    settings, build, micro_batches, _ = case(tmp_path, "vit", micro_batch_size=1)
    count = sum(parameter.numel() for parameter in build().parameters())
    alone, shared = (predict_peak(build, settings, micro_batches[:1], ranks=ranks) for ranks in (1, 4))
    assert alone.optimizer_state == pytest.approx(8 * count, rel=0.01)
    assert shared.optimizer_state == pytest.approx(2 * count, rel=0.15)  # what has one row is not shared
    assert not dist.is_initialized()
    settings.offload = True
    parked = predict_peak(build, settings, micro_batches[:1], ranks=4)
    assert parked.optimizer_state == 0
    assert parked.total < shared.total < alone.total
    assert parked.host >= 3 * count, "shards of weights and state"


def test_nothing_is_allocated(tmp_path):
    config = json.loads((MODELS / "bloom-560m.json").read_text()) | {"hidden_size": 65536, "n_layer": 2, "n_head": 512}
    path = tmp_path / "huge.json"
    path.write_text(json.dumps(config))
    settings, build, micro_batches, _ = case(tmp_path, "bloom", model=str(path))
    assert predict_peak(build, settings, micro_batches).total > 1e12


@pytest.mark.parametrize("values", [{"compile": True}, {"deepspeed": "zero2"}, {"optimizer": "adam-8bit"}])
def test_what_cannot_be_predicted_is_said(tmp_path, values):
    settings, build, micro_batches, _ = case(tmp_path, "bloom", **values)
    with pytest.raises(ValueError, match="cannot be predicted"):
        predict_peak(build, settings, micro_batches)


def test_largest_batches_are_cut_as_the_loader_cuts_them(tmp_path):
    def shapes(ranks=1, image_size=None, **values):
        training, evaluation = largest_batches(settings_for(tmp_path, **values), 100, image_size, ranks)
        name = "pixel_values" if image_size else "input_ids"
        return [tuple(batch.inputs[name].shape) for batch in training], tuple(evaluation.inputs[name].shape)

    assert shapes(batch_size=5, micro_batch_size=2) == ([(2, 100), (2, 100), (1, 100)], (10, 100))
    assert shapes(batch_size=5, micro_batch_tokens=330, pad_to_multiple_of=8)[0] == [(3, 104), (2, 104)]
    assert shapes(batch_size=16, micro_batch_size=4, ranks=4)[0] == [(4, 100)]
    assert shapes(batch_size=2, image_size=32, pad_to_multiple_of=8, eval_batch_tokens=300) == (
        [(2, 3, 32, 32)],
        (3, 3, 32, 32),
    )
