"""Replayed passes change no bit; tapes of operations take the place of CUDA graphs on a CPU."""

import re
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lightning import Fabric
from support.helpers import (
    MODELS,
    SMALL,
    SRC,
    finished,
    relative_error,
    run_script,
    settings_for,
    tiny_model,
    token_datasets,
)
from support.tape import Copies, Tape, TapeRecorder
from support.training import column, losses, run_training
from transformers import AutoConfig, AutoModelForSequenceClassification, BloomConfig
from transformers.utils import import_utils

from fabric_ladder.data.cutting import MicroBatchPlan
from fabric_ladder.data.loaders import MicroBatch, TextCollator
from fabric_ladder.errors import NotFiniteError, UserError
from fabric_ladder.models.activations import fuse_gelu
from fabric_ladder.models.configs import MODELS as CLASSES
from fabric_ladder.models.probe import VOCABULARY, small_copy
from fabric_ladder.planning.run_memory import predict_memory
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import check_together, technique_of
from fabric_ladder.techniques.build import build_optimizer
from fabric_ladder.techniques.checkpointing import RANDOM_ONLY_IN_DROPOUT
from fabric_ladder.techniques.embedding_rows import add_rows
from fabric_ladder.techniques.fused_attention import fuse_attention
from fabric_ladder.techniques.packing import TESTED, support_packing
from fabric_ladder.training import fitting, graphs, loop
from fabric_ladder.training.gradients import accumulate_gradients, forget_gradients
from fabric_ladder.training.graphs import Graphs

TASK = "text-classification"
CLAIMED = sorted(
    {kind for kind in TESTED & RANDOM_ONLY_IN_DROPOUT if kind in CLASSES[TASK]._model_mapping._model_mapping}
)
DTYPES = {torch.float64: "64-true", torch.float32: "32-true", torch.bfloat16: "bf16-true"}
KINDS = [*((kind, torch.float32) for kind in CLAIMED), ("bloom", torch.float64), ("bloom", torch.bfloat16)]
OTHER_DTYPES = [
    pytest.param(kind, (torch.float64, torch.bfloat16)[place % 2], marks=pytest.mark.slow)
    for place, kind in enumerate(CLAIMED)
    if kind != "bloom"
]
ROWS, WIDTH, DOCUMENTS = 2, 32, 8
TAPED = SRC.parent / "tests" / "support" / "taped_script.py"


@pytest.fixture
def taped(monkeypatch):
    """Record tapes on the CPU where a GPU records graphs; return the graphs of each training."""
    made = []

    class Watched(Graphs):
        def __init__(self, device):
            super().__init__(device)
            made.append(self)

    monkeypatch.setattr(graphs, "CudaRecorder", TapeRecorder)
    monkeypatch.setattr(graphs, "RATE", torch.float64)  # as the CPU's fused kernels read a rate
    monkeypatch.setattr(Settings, "replays", property(lambda settings: settings.cuda_graphs))
    monkeypatch.setattr("fabric_ladder.training.state.Graphs", Watched)
    return made


def changed(model, width, documents=None):
    """Apply what `build_model` applies."""
    for change in (fuse_attention, fuse_gelu, add_rows):
        change(model)
    support_packing(model, width, documents)
    return model


def packed(seed):
    """Return a micro-batch of random documents, with fillers."""
    rng = np.random.default_rng(seed)
    spans, positions, labels = [], torch.zeros(ROWS, WIDTH, dtype=torch.long), []
    for row in range(ROWS):
        start = 0
        while start < WIDTH - 4 and len(spans) < (row + 1) * 3:
            end = min(WIDTH, start + int(rng.integers(4, 14)))
            spans.append((row * WIDTH + start, row * WIDTH + end))
            positions[row, start:end] = torch.arange(end - start)
            labels.append(int(rng.integers(2)))
            start = end
        positions[row, start:] = torch.arange(WIDTH - start)
    missing, last = DOCUMENTS - len(spans), ROWS * WIDTH
    inputs = {
        "input_ids": torch.from_numpy(rng.integers(6, VOCABULARY, (ROWS, WIDTH))),
        "position_ids": positions,
        "spans": torch.tensor(spans + [(last - 1, last)] * missing),
        "labels": torch.tensor(labels + [-100] * missing),
    }
    return MicroBatch(inputs, len(labels), float(rng.random()), last, last)


@pytest.mark.parametrize(("kind", "dtype"), [*KINDS, *OTHER_DTYPES])
def test_a_replayed_pass_equals_an_eager_one_bit_by_bit_and_waits_for_nothing(taped, kind, dtype):
    assert_replays_change_nothing(kind, dtype)


@pytest.mark.parametrize(("kind", "dtype"), [("bloom", torch.bfloat16), ("qwen3", torch.float32)])
def test_so_does_a_replayed_pass_with_varlen(taped, kind, dtype):
    assert_replays_change_nothing(kind, dtype, DOCUMENTS)


def assert_replays_change_nothing(kind, dtype, documents=None):
    """The recorder fails at an operation that waits. The gradients stay where they are."""
    config = AutoConfig.for_model(kind)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)
    torch.manual_seed(0)
    fabric = Fabric(accelerator="cpu", devices=1, precision=DTYPES[dtype])
    model = fabric.setup(changed(small_copy(config, TASK, torch.float32), WIDTH, documents).train())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), 0.1))
    recorded, places, found = Graphs(torch.device("cpu")), [], {}
    for replays in (recorded, None):
        for seed in range(3):
            meter = Meter(fabric)
            accumulate_gradients(fabric, model, [packed(seed), packed(seed + 9)], meter, graphs=replays)
            gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
            places.append([gradient.data_ptr() for gradient in gradients])
            found[replays is None, seed] = meter.pending_losses(), *(gradient.clone() for gradient in gradients)
            forget_gradients(fabric, optimizer, recorded)
    assert recorded.replayed == 5
    assert all(place == places[0] for place in places)
    for seed in range(3):
        assert all(map(torch.equal, found[False, seed], found[True, seed]))
    assert found[True, 0][1].dtype == dtype


CASES = {
    "bf16 with Kahan summation": {"precision": "bf16-true", "kahan_summation": True},
    "bf16-mixed, not packed": {"precision": "bf16-mixed", "packing": False, "micro_batch_size": 4},
    "AdamW, clipped, class weights": {
        "max_grad_norm": 1.0,
        "optimizer": "adamw",
        "schedule": "cosine",
        "class_weights": "balanced",
    },
}
SLOW_CASES = {"32-true": {}, "bf16-mixed": {"precision": "bf16-mixed"}, "not packed": {"packing": False}}


@pytest.mark.parametrize(
    "values", [*CASES.values(), *(pytest.param(values, marks=pytest.mark.slow) for values in SLOW_CASES.values())],
    ids=[*CASES, *SLOW_CASES],
)  # fmt: skip
def test_a_training_with_replayed_passes_equals_one_without(tmp_path, monkeypatch, taped, values):
    """Each has the trial of the heaviest batches, and documents padded to the same number."""
    monkeypatch.setattr(fitting, "HARD_LIMITS", ("cpu",))
    found = []
    for replays in (True, False):
        if not replays:
            monkeypatch.setattr("fabric_ladder.training.state.Graphs", lambda _: None)
        values = {"packing": True, "micro_batch_size": 2, "pad_to_multiple_of": 16} | values
        values |= {"max_length": 64, "epochs": 2, "cuda_graphs": True}
        run, model = run_training(tmp_path, changed(tiny_model(), 64), token_datasets(train=90), **values)
        found.append((losses(run), [weight.detach().clone() for weight in model.parameters()]))
    (first, weights), (second, others) = found
    assert first == second
    assert all(map(torch.equal, weights, others))
    assert taped[0].replayed > taped[0].passes / 2 > taped[0].recorded
    assert f"CUDA graphs: {taped[0].recorded} recorded" in (run.folder.parent / "1" / "log.txt").read_text()


@pytest.mark.parametrize(
    ("values", "recorded"),
    [({}, True), ({"optimizer": "adamw", "max_grad_norm": 0.5}, True), ({"kahan_summation": True}, True),
     ({"kahan_summation": "8-bit"}, True),
     ({"kahan_summation": True, "optimizer": "adamw"}, False), ({"optimizer": "sgd"}, False)], ids=str,
)  # fmt: skip
def test_replayed_updates_follow_the_learning_rate_and_equal_others_bit_by_bit(
    tmp_path, taped, monkeypatch, values, recorded
):
    """A step that reads its rate on the host is not recorded. The rate has 32 bits, as on CUDA, in every update."""
    monkeypatch.setattr(graphs, "RATE", torch.float32)
    settings, rates = settings_for(tmp_path, precision="bf16-true", **values), [1e-3 / step for step in range(1, 7)]
    fabric, found = Fabric(accelerator="cpu", devices=1, precision="bf16-true"), []
    for replays in (Graphs(fabric.device), None):
        model = fabric.setup(tiny_model())
        optimizer = fabric.setup_optimizers(build_optimizer(settings, model))
        training, broken = SimpleNamespace(fabric=fabric, model=model, optimizer=optimizer, settings=settings), []
        training.graphs, weights = replays, [*model.parameters()]
        generator = torch.Generator().manual_seed(0)
        for step in range(6):
            for group in optimizer.param_groups:
                group["lr"] = np.float32(rates[step]).item() if recorded and not replays else rates[step]
            for weight in weights:
                gradient = torch.randn(weight.shape, generator=generator).to(weight)
                weight.grad = gradient if weight.grad is None else weight.grad.copy_(gradient)
            if step == 4:
                weights[0].grad[0] = torch.nan
            broken.append(loop._update_weights(training))
            assert all(weight.grad is None or not weight.grad.any() for weight in weights)
        assert [flag.item() for flag in broken] == [step == 4 for step in range(6)]
        assert {group["lr"] for group in optimizer.param_groups} == {
            np.float32(rates[-1]) if recorded and not replays else rates[-1]
        }
        state = [value for weight in weights for value in optimizer.state[weight].values() if torch.is_tensor(value)]
        found.append([*(weight.detach() for weight in weights), *state])
        if replays:
            assert replays.recorded == recorded
    for replayed, eager in zip(*found, strict=True):
        torch.testing.assert_close(replayed, eager, rtol=0, atol=0, equal_nan=True)


def losses_of(cwd, rung):
    return column(cwd / "runs" / rung / "1", "loss")


def test_the_rung_prints_the_losses_of_its_parent(tmp_path):
    """Tapes take the place of graphs."""
    options = (*SMALL, "--micro_batch_tokens", 128, "--max_length", 64)
    finished(run_script(SRC / "15_packing.py", *options, cwd=tmp_path))
    text = finished(run_script(TAPED, "filled", "27_cuda_graphs", *options, cwd=tmp_path))
    expected, taped = (losses_of(tmp_path, name) for name in ("15_packing", "27_cuda_graphs"))
    assert len(expected) == 6
    # fillers give the head another number of rows, whose product may be rounded otherwise
    assert taped == pytest.approx(expected, rel=1e-3)
    assert re.search(r"CUDA graphs: \d+ recorded in .*, [5-9]\d% of the passes replayed", text)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    ["--activation_checkpointing true", "--activation_checkpointing true --selective_checkpointing true",
     "--mlp_tile 64", "--train_blocks last:1", "--lora true --lora_dropout 0", "--optimizer adafactor",
     "--precision 16-true --optimizer sgd"],
)  # fmt: skip
def test_a_technique_under_replays_changes_no_bit(tmp_path, options):
    found = []
    for replays in ("true", "false"):
        (tmp_path / replays).mkdir()
        more = ["--micro_batch_tokens", 128, "--max_length", 64, "--epochs", 2, "--cuda_graphs", replays]
        command = [TAPED, "exact", "27_cuda_graphs", *SMALL, *more, *options.split()]
        text = finished(run_script(*command, cwd=tmp_path / replays))
        assert bool(re.search(r"CUDA graphs: \d+ recorded in .*, [1-9]\d?% of the passes replayed", text)) == (
            replays == "true"
        )
        found.append(losses_of(tmp_path / replays, "27_cuda_graphs"))
    assert found[0] == found[1]
    assert len(found[0]) == 12


def test_of_too_many_graphs_the_one_not_used_for_the_longest_time_is_dropped(taped, monkeypatch):
    monkeypatch.setattr(graphs, "MOST", 2)
    replays, total = Graphs(torch.device("cpu")), torch.zeros(())

    def work(micro_batch):
        total.add_(micro_batch.inputs["numbers"].sum() * micro_batch.weight)
        return total * 2, total.long()

    expected = 0.0
    for step, length in enumerate((3, 3, 4, 4, 3, 5, 5, 4, 4, 5, 3, 3)):
        numbers = torch.full((length,), float(step))
        expected += step * length * 0.5
        loss, _ = replays.run(work, MicroBatch({"numbers": numbers}, 1, 0.5, length, length))
        assert (total, loss) == (expected, 2 * expected)
    assert (replays.passes, replays.replayed, replays.recorded) == (12, 7, 5)
    replays.forget()
    replays.run(work, MicroBatch({"numbers": numbers}, 1, 0.5, length, length))
    assert replays.replayed == 7


def test_fillers_change_a_gradient_by_rounding_alone(tmp_path, taped):
    settings = settings_for(tmp_path, precision="64-true", packing=True, max_length=64, cuda_graphs=True)
    collator = TextCollator(token_datasets(), "train", settings)
    plan = MicroBatchPlan([3, 4, 5, 6, 7], 5, 0.25, [2, 3])
    filled = collator.micro_batch(plan)
    collator.most = 0
    exact = collator.micro_batch(plan)
    end = exact.inputs["input_ids"].numel()
    assert filled.inputs["spans"][5:].tolist() == [[end - 1, end]] * 11
    assert filled.inputs["labels"][5:].tolist() == [-100] * 11
    assert filled[1:] == exact[1:]
    fabric = Fabric(accelerator="cpu", devices=1, precision="64-true")
    for kind in ("bloom", "llama", "bert"):  # which read the last and the first token of a document
        model = fabric.setup(changed(tiny_model(kind), 64))
        found = []
        for micro_batch in (filled, exact):
            meter = Meter(fabric)
            accumulate_gradients(fabric, model, [micro_batch], meter)
            gradients = [weight.grad.flatten() for weight in model.parameters() if weight.grad is not None]
            found.append([torch.cat(gradients), meter._pending[0][1].double()])
            model.zero_grad()
        assert relative_error(*found) < 1e-12


def test_a_gradient_that_is_not_finite_is_named_under_replays(tmp_path, taped, monkeypatch):
    def spoil(model, optimizer):
        def update(self, *args):
            steps.append(1)
            broken = replayed(self, *args)
            if len(steps) == 5:
                next(model.parameters()).data.fill_(torch.inf)
            return broken

        steps, replayed = [], Graphs.update
        monkeypatch.setattr(Graphs, "update", update)

    values = {"packing": True, "max_length": 64, "micro_batch_size": 2, "cuda_graphs": True, "log_every": 200}
    with pytest.raises(NotFiniteError, match="the loss is nan at epoch 1, batch 6 "):
        run_training(tmp_path, changed(tiny_model(), 64), token_datasets(train=112), prepare=spoil, **values)
    assert taped[0].replayed


def test_after_a_failed_trial_no_graph_is_left(tmp_path, taped, monkeypatch):
    """`auto` halves the tokens where the second pass, which is recorded, runs out of memory."""
    record, sizes = TapeRecorder.record, []

    def limited(self, work):
        sizes.append(work.__closure__)
        if len(sizes) == 1:
            raise MemoryError
        return record(self, work)

    monkeypatch.setattr(TapeRecorder, "record", limited)
    values = {"packing": True, "max_length": 64, "pad_to_multiple_of": 16, "micro_batch_tokens": "auto"}
    run, _ = run_training(tmp_path, changed(tiny_model(), 64), cuda_graphs=True, batch_size=8, **values)
    assert run.record.values["results"]["fitted_micro_batch_tokens"] < 200
    assert taped[0].replayed


@pytest.mark.parametrize("values", [{"strategy": "ddp"}, {"optimizer": "adam-8bit"}, {"compile": True}], ids=str)
def test_what_a_graph_cannot_repeat_is_refused_with_the_remedy(values):
    with pytest.raises(UserError, match=r"^--cuda_graphs true: .*(leave|use)"):
        check_together(Settings(cuda_graphs=True, accelerator="cpu", **values))


def test_models_that_draw_numbers_and_batches_of_many_sizes_are_refused(tmp_path):
    technique, model = technique_of("27_cuda_graphs"), str(MODELS / "gpt2.json")
    reasons = [
        technique.reason_against(settings_for(tmp_path, model=model, **values), None)
        for values in ({}, {"task": "instruction-tuning"}, {"lora": True})
    ]
    assert "draw random numbers" in reasons[0]
    assert "trains another number of words or tokens" in reasons[1]
    assert "--lora_dropout 0" in reasons[2]
    bloom = settings_for(tmp_path, model=str(MODELS / "bloom-560m.json"))
    assert technique.reason_against(bloom, None) is None
    assert "there are no CUDA graphs here" in technique.notice(bloom)


def test_the_prediction_counts_gradients_that_stay_and_the_pool():
    common = {"length": 64, "micro_batch_size": 2, "packing": True, "precision": "bf16-true"}
    without, replayed = (
        predict_memory(str(MODELS / "bloom-quickstart.json"), cuda_graphs=graphs, **common) for graphs in (False, True)
    )
    assert without.tensors.pool == 0
    assert replayed.tensors.pool >= replayed.tensors.activations > 0
    assert replayed.expected - without.expected >= replayed.tensors.pool


def test_the_plain_script_replays_what_it_would_compute(monkeypatch):
    spec = spec_from_file_location("plain_27", SRC / "plain" / "27_cuda_graphs.py")
    spec.loader.exec_module(plain := module_from_spec(spec))

    @contextmanager
    def record(graph, pool):
        with Copies(), Tape() as tape:
            yield
        tape.undo()
        assert not tape.waits
        graph.replay = tape.replay

    def train(pool):
        torch.manual_seed(0)
        config = BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2, pad_token_id=0, num_labels=2)
        model, reviews = AutoModelForSequenceClassification.from_config(config), []
        for length in torch.randint(4, 60, (32,)).tolist():
            ids = torch.cat([torch.randint(1, 64, (1, length)), torch.zeros(1, 64 - length, dtype=torch.long)], 1)
            reviews.append({"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": torch.tensor([length % 2])})
        plain.POOL = pool
        plain.train(Fabric(accelerator="cpu", devices=1), model, torch.optim.Adam(model.parameters()), reviews)
        return [*model.parameters()]

    expected = train(False)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", SimpleNamespace)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    assert all(map(torch.equal, train(True), expected))
