"""Streamed layers: the bits of rungs 13 and 17, the order of the copies, what is saved, and the predicted memory."""

import itertools
import json
import resource
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from lightning import Fabric
from support.helpers import MODELS, settings_for, token_datasets
from support.planning import NO_PEAK, case, tracked_peak
from support.training import losses, run_training
from transformers import AutoConfig, AutoModelForSequenceClassification, T5Config, T5EncoderModel

from fabric_ladder import Settings, build_model
from fabric_ladder.errors import UserError
from fabric_ladder.models.layers import find_blocks
from fabric_ladder.planning.predict import predict_peak
from fabric_ladder.planning.tracker import PeakTracker
from fabric_ladder.techniques import TECHNIQUES, check_together, streamed_layers, weight_steps
from fabric_ladder.techniques.memory import Counts, streamed_weights
from fabric_ladder.techniques.qlora import NF4_BYTES
from fabric_ladder.techniques.streamed_layers import BlockStream, StreamedLayers, chosen_blocks, stream_blocks

BLOCKS = 4
TINY = {"vocab_size": 64, "pad_token_id": 0, "hidden_size": 64, "num_hidden_layers": BLOCKS, "num_attention_heads": 2}
CONFIGS = {
    "bloom": {"model_type": "bloom", **TINY},
    "llama": {"model_type": "llama", "intermediate_size": 64, "max_position_embeddings": 64, **TINY},
    "bert": {"model_type": "bert", "intermediate_size": 64, **TINY},
    "tied": {"model_type": "llama", "intermediate_size": 64, "tie_word_embeddings": True, **TINY},
}
CHECKPOINTED = {"activation_checkpointing": True}
PACKED = {"packing": True, "max_length": 64, "micro_batch_size": 2}
WAYS = {
    "bf16-mixed": ("bert", {"precision": "bf16-mixed"}),
    "packed, checkpointed": ("bloom", {"precision": "32-true", **PACKED, **CHECKPOINTED}),
    "4-bit, checkpointed": ("bloom", {"precision": "32-true", "quantization": "nf4", **CHECKPOINTED}),
    "dora": ("llama", {"precision": "bf16-true", "dora": True}),
}
ALL = {"lora": False, "step_in_backward": True, "micro_batch_size": 16, "learning_rate": 1e-2}
STREAMED = {"stream_layers": True, "optimizer_offload": True}
KAHAN = {"precision": "bf16-true", "kahan_summation": True}
ALL_WEIGHTS = {
    "packed, checkpointed": ("bloom", {**KAHAN, **CHECKPOINTED, "packing": True, "max_length": 64}),
    "tied embeddings": ("tied", {**KAHAN, **CHECKPOINTED, "task": "instruction-tuning"}),
    "32-bit": ("bert", {"precision": "32-true"}),
}


def is_in_file(tensor):
    return bool(tensor.untyped_storage().filename)


def in_files(tmp_path):
    return {"stream_from": str(tmp_path / "files")}


def prepared(tmp_path, kind, **values):
    """Return options of a run, its data and its model with adapters on all linear layers."""
    path = tmp_path / f"{kind}.json"
    path.write_text(json.dumps(CONFIGS[kind]))
    values = {"lora": True, "micro_batch_size": 8} | values
    data = token_datasets(train=32, per_token=values.get("task") == "instruction-tuning")
    torch.manual_seed(0)
    return values, data, build_model(settings_for(tmp_path, model=str(path), from_scratch=True, **values), data)


def trained(tmp_path, kind, **values):
    """Return the losses of the steps, the validations and the test, the trained weights, and the state dict."""
    values, data, model = prepared(tmp_path, kind, **values)
    run, model = run_training(tmp_path, model, data, **values)
    results = run.record.values["results"]
    weights = {name: each for name, each in model.named_parameters() if each.requires_grad}
    validations = [epoch["validation_loss"] for epoch in results["epochs"]]
    return [*losses(run), *validations, results["test_loss"]], weights, model.module.state_dict()


class Delayed(BlockStream):
    """Copies arrive when a block waits for them. From the start of a copy until then its buffer holds NaN.

    A staging buffer holds NaN from the end of its copy on.
    """

    def __init__(self, *given):
        super().__init__(*given)
        self.coming = {}

    def _load(self, number):
        buffers, place = self._buffers, number % 2
        content = number, buffers.host[number]._version
        if buffers.held[place] != content:
            buffers.held[place] = content
            buffers.device[place].fill_(255)
            self.coming[place] = self._in_memory(number)

    def use(self, number, direction):
        super().use(number, direction)
        source = self.coming.pop(number % 2, None)
        if source is not None:
            self._buffers.device[number % 2][: len(source)].copy_(source)
            if self._buffers.staging:
                source.fill_(255)


@pytest.mark.parametrize("way", WAYS)
def test_losses_and_weights_are_those_of_rung_13_to_the_last_bit(tmp_path, monkeypatch, way):
    """All blocks come from CPU memory, some of them, or all from files."""
    kind, values = WAYS[way]
    expected, weights, state = trained(tmp_path, kind, **values)
    assert len(set(expected)) == 4
    monkeypatch.setattr(streamed_layers, "BlockStream", Delayed)
    for more in ({"stream_layers": True}, {"stream_layers": 3}, {"stream_layers": True, **in_files(tmp_path)}):
        found, others, streamed = trained(tmp_path, kind, **values, **more)
        assert found == expected, more
        assert weights.keys() == others.keys()
        assert all(torch.equal(others[name], weight) for name, weight in weights.items())
        assert state.keys() == streamed.keys()
        for name, tensor in state.items():  # with the frozen weights, which are not on the device
            assert torch.equal(streamed[name], tensor), name


@pytest.mark.parametrize("values", [{"quantization": "nf4"}, {"precision": "bf16-true"}, {"precision": "bf16-mixed"}])
def test_pretrained_weights_go_to_files_as_they_are_read(tmp_path, monkeypatch, values):
    """The files have no names. Fabric's conversion to 16 bits writes others."""
    path, values = tmp_path / "model", {"lora": True, "stream_layers": True} | values
    configured = AutoConfig.for_model(**CONFIGS["llama"])
    AutoModelForSequenceClassification.from_config(configured, dtype=torch.bfloat16).save_pretrained(path)
    in_memory, largest = 0, 64 * 64 * 4

    def watch(tensor, folder):
        nonlocal in_memory
        in_memory = max(in_memory, 0 if is_in_file(tensor) else tensor.nbytes)
        return in_file(tensor, folder)

    in_file = streamed_layers.in_file
    monkeypatch.setattr(streamed_layers, "in_file", watch)
    states = []
    for more in ({}, in_files(tmp_path)):
        settings = settings_for(tmp_path, model=str(path), **values, **more)
        torch.manual_seed(0)
        model = build_model(settings, token_datasets(train=4))
        model = Fabric(accelerator="cpu", devices=1, precision=settings.precision).setup(model)
        states.append(model.module.state_dict())
        weights = [weight for each in streamed_weights(model.module).values() for weight in each.values()]
        assert all(is_in_file(weight) == bool(more) for weight in weights)
    assert in_memory <= largest
    assert not any((tmp_path / "files").iterdir())
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[1][name], tensor) for name, tensor in states[0].items())


def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match=r"^--stream_from \S+ cannot hold the weights; choose another[^\n]*$"):
            streamed_layers.in_file(torch.ones(1000), str(tmp_path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(("streamed", "expected"), [(True, range(9)), (3, [0, 4, 8]), (4, [0, 2, 5, 8]), (1, [0])])
def test_streamed_blocks_are_as_far_apart_as_possible(streamed, expected):
    assert chosen_blocks(streamed, 9) == [*expected]


@pytest.mark.parametrize(("stream", "count"), [(BlockStream, True), (Delayed, True), (Delayed, 3)])
@pytest.mark.parametrize("way", ALL_WEIGHTS)
def test_training_all_weights_has_the_bits_of_rung_17(tmp_path, monkeypatch, way, stream, count):
    """In the end the run reads its best weights back from a checkpoint."""
    kind, values = ALL_WEIGHTS[way]
    values = ALL | {"epochs": 3, "best_weights": True} | values
    monkeypatch.setattr(streamed_layers, "BlockStream", stream)
    whole, streamed = (tmp_path / name for name in ("whole", "streamed"))
    whole.mkdir()
    streamed.mkdir()
    expected, _, state = trained(whole, kind, **values)
    found, _, others = trained(streamed, kind, **values, **STREAMED | {"stream_layers": count})
    assert found == expected
    assert len(set(found)) > 6
    assert state.keys() == others.keys()
    assert all(torch.equal(others[name], tensor) for name, tensor in state.items())


def test_a_tensor_that_all_blocks_pass_on_brings_no_wrong_block():
    """T5's first block makes a position bias for all of them."""
    config = T5Config(vocab_size=64, d_model=16, d_kv=8, d_ff=16, num_layers=BLOCKS, num_heads=2, dropout_rate=0)
    model = T5EncoderModel(config)
    streamed = deepcopy(model)
    stream_blocks(streamed)
    for each in (model, streamed):
        each(torch.arange(8)[None]).last_hidden_state.sum().backward()
    gradients = [weight.grad for weight in streamed.parameters()]
    assert all(map(torch.equal, gradients, [weight.grad for weight in model.parameters()]))


class Immediately:
    """An executor without a thread."""

    def __init__(self, threads):
        self.submit = lambda function, *args: Done(function(*args))


class Done:
    def __init__(self, found):
        self.result = lambda: found


class Watched(BlockStream):
    """Records the copies, the blocks in use, and what their weights are then."""

    def __init__(self, blocks, folder):
        super().__init__(blocks, folder)
        self.weights = [[weight.detach().clone() for weight in block] for block in blocks]
        self.events = []

    def _load(self, number):
        if self._buffers.held[number % 2] != (number, self._buffers.host[number]._version):
            self.events.append(("copy", number))
        super()._load(number)

    def use(self, number, direction):
        super().use(number, direction)
        self.events.append(("use", number))
        assert all(map(torch.equal, self._blocks[number], self.weights[number]))

    def take(self):
        found, self.events = self.events, []
        return [f"{kind} {number}" for kind, number in found]


@pytest.mark.parametrize(("blocks", "checkpointed"), [(5, True), (4, False)])
def test_each_block_is_copied_one_ahead_of_its_use(tmp_path, monkeypatch, blocks, checkpointed):
    """A step copies all blocks but two in each pass, and an evaluation after it all but two of the first pass."""
    monkeypatch.setattr(streamed_layers, "BlockStream", Watched)
    monkeypatch.setitem(CONFIGS, "deep", CONFIGS["llama"] | {"num_hidden_layers": blocks})
    _, _, model = prepared(tmp_path, "deep", activation_checkpointing=checkpointed)
    stream = stream_blocks(model)
    model = Fabric(accelerator="cpu", devices=1, precision="32-true").setup(model)
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.tensor([0, 1])}

    def pass_of(numbers, copies):
        """Return the events of a pass over these blocks; copies: those started during each block."""
        made = []
        for number in numbers:
            made += [*(f"copy {each}" for each in copies.get(number, ())), f"use {number}"]
        return made

    first, last = {0: (0, 1)}, blocks - 1
    onward = {number: (number + 1,) for number in range(1, last)}
    backward = {number: (number - 1,) for number in range(last - 1, 0, -1)}
    for _ in range(2):
        model(**inputs).loss.backward()
        assert stream.take() == pass_of(range(blocks), first | onward) + pass_of(range(last, -1, -1), backward)
        first = {}
    model.eval()
    with torch.no_grad():
        for _ in range(2):
            model(**inputs)
            ends = {last: (0,)} if last % 2 else {}  # otherwise both would be in one buffer
            assert stream.take() == pass_of(range(blocks), first | onward | ends)
            first = {0: (1,) if ends else (0, 1)}


def test_a_pass_that_fails_does_no_harm(tmp_path):
    _, _, model = prepared(tmp_path, "llama")
    expected = {name: weight.clone() for name, weight in model.named_parameters()}
    stream_blocks(model)
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.tensor([0, 1])}
    loss = model.eval()(**inputs).loss
    hook = find_blocks(model)[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(**inputs)
    hook.remove()
    again = model(**inputs).loss
    again.backward()
    assert torch.equal(again, loss)
    assert torch.equal(model(**inputs).loss, loss)
    model.to(torch.float64)  # the buffers are made again
    assert torch.allclose(model(**inputs).loss.float(), loss)
    model.to(torch.float32)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_cpu_memory_that_runs_out_loses_no_weight(tmp_path, monkeypatch):
    """`--micro_batch_tokens auto` takes such an error for one of the batch, and tries again."""
    _, _, model = prepared(tmp_path, "llama")
    inputs = {"input_ids": torch.ones(2, 8, dtype=torch.long), "labels": torch.tensor([0, 1])}
    expected = model.eval()(**inputs).loss
    stream_blocks(model)
    allocate, calls = streamed_layers._host_bytes, []

    def fail_at_the_third(*given):
        calls.append(given)
        if len(calls) == 3:
            raise MemoryError
        return allocate(*given)

    monkeypatch.setattr(streamed_layers, "_host_bytes", fail_at_the_third)
    with pytest.raises(MemoryError):
        model(**inputs)
    assert torch.equal(model(**inputs).loss, expected)


@pytest.mark.parametrize(
    ("way", "count"), [*itertools.product(["adapters", "all weights"], [True, 1, 2]), ("files", True), ("files", 2)]
)
def test_the_prediction_agrees_with_real_tensors_on_the_device_and_in_cpu_memory(tmp_path, monkeypatch, way, count):
    """Steps of a thread cannot be followed. The prediction adds all gradients, which may be in transfer together."""
    monkeypatch.setattr(weight_steps, "ThreadPoolExecutor", Immediately)
    counts = PeakTracker._counts  # the operating system holds files
    monkeypatch.setattr(PeakTracker, "_counts", lambda *given: counts(*given) and not is_in_file(given[1]))
    path = tmp_path / "deep.json"
    path.write_text(json.dumps(json.loads((MODELS / "bloom-quickstart.json").read_text()) | {"n_layer": 3}))
    values = {"lora": True, "precision": "bf16-mixed", "micro_batch_size": 2}
    values |= in_files(tmp_path) if way == "files" else {}
    if all_weights := way == "all weights":
        values = ALL | {"optimizer_offload": True, "optimizer": "sgd", "micro_batch_size": 8}
    settings, training, _ = case(tmp_path, "bloom", **values, model=str(path), stream_layers=count)
    predicted, measured = predict_peak(settings, training), tracked_peak(settings, training)
    assert predicted.total == pytest.approx(measured.total, rel=0.01)
    assert predicted.host == pytest.approx((1 + all_weights) * measured.host, rel=0.01)


def test_4_bit_blocks_leave_their_constants_on_the_device(tmp_path):
    counts = Counts(
        all=0, trained=0, largest_layer=0, linear=900, in_blocks=1000, linear_in_blocks=800, largest_block=100
    )
    settings = Settings(precision="bf16-true", lora=True, quantization="nf4", stream_layers=True)
    peak = StreamedLayers().add_memory(NO_PEAK._replace(parameters=5000), counts, settings)
    assert peak.host == 800 / 2 + 200 * 2
    assert peak.parameters == 5000 - 800 + 2 * 80
    from_files = replace(settings, stream_from="files")
    assert StreamedLayers().add_memory(NO_PEAK, counts, from_files).host == 2 * 80
    constants = 900 * (NF4_BYTES - 1 / 2)
    assert StreamedLayers().loaded_bytes(4000, counts, settings) == 4000
    assert StreamedLayers().loaded_bytes(4000, counts._replace(largest_layer=70), from_files) == round(280 + constants)


def test_shared_weights_are_not_streamed(tmp_path):
    _, _, model = prepared(tmp_path, "llama")
    first, second = find_blocks(model)[:2]
    second.input_layernorm.weight = first.input_layernorm.weight
    found = list(streamed_weights(model).values())
    assert not any("input_layernorm.weight" in names for names in found[:2])
    assert "input_layernorm.weight" in found[2]
    assert not any("lora" in name for names in found for name in names)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"lora": True, "strategy": "ddp", "devices": 2}, "10_fsdp.py --lora true, which shards the weights$"),
        ({}, "add --lora true; or train all weights with --step_in_backward true and --optimizer_offload true"),
        ({"optimizer_offload": True}, "add --lora true; or train all weights with --step_in_backward true"),
        ({"lora": True, "stream_layers": BLOCKS + 1}, "has 4 blocks; use at most 4, or true for all"),
        (ALL | STREAMED | {"stream_from": "x"}, "--stream_from holds frozen weights alone"),
        (ALL | STREAMED | {"precision": "bf16-mixed"}, "mixed precision keeps a 16-bit copy of all weights"),
        (ALL | STREAMED | {"devices": 2}, "only on one device"),
        (ALL | STREAMED | {"max_grad_norm": 1.0}, "--max_grad_norm needs all gradients together"),
        (ALL | STREAMED | {"precision": "16-mixed"}, "not under 16-mixed"),
        (ALL | STREAMED | {"micro_batch_size": 8}, "must be one micro-batch"),
        (ALL | STREAMED | {"train_blocks": "last:1"}, "streamed blocks are all trained, or have adapters"),
    ],
)
def test_settings_that_cannot_be_streamed_are_refused_in_one_line(tmp_path, values, message):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(CONFIGS["llama"]))
    settings = settings_for(tmp_path, **({"model": str(path), "stream_layers": True} | values))
    with pytest.raises(UserError, match=f"^--[^\\n]*{message}[^\\n]*$"):
        check(settings)


def test_files_without_names_are_refused_on_windows(tmp_path, monkeypatch):
    monkeypatch.setattr(streamed_layers.sys, "platform", "win32")
    with pytest.raises(UserError, match=r"^--stream_layers true: --stream_from does not work on Windows[^\n]*$"):
        check(settings_for(tmp_path, lora=True, stream_layers=True, stream_from="files"))


def check(settings):
    check_together(settings)
    for technique in TECHNIQUES:
        technique.check(settings, None)
