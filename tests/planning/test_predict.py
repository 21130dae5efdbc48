"""The predicted peak memory, compared with real tensors under PyTorch's own tracker and with arithmetic."""

import json
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch.distributed as dist
from support.helpers import MODELS, ROOT, RUNGS, finished, run_script, settings_for
from support.planning import PATCHES, PIXELS, VIT, build, case, count_weights, measured_peak, peak_of_ranks
from torch.nn.attention import SDPBackend, sdpa_kernel

from fabric_ladder import Settings, parse_settings
from fabric_ladder.data.sampler import EVALUATED
from fabric_ladder.options import script_defaults
from fabric_ladder.planning.predict import blank_datasets, largest_batches, predict_peak
from fabric_ladder.planning.rehearsal import rehearse
from fabric_ladder.techniques.qlora import NF4_BYTES

LEAN = {"precision": "bf16-true", "step_in_backward": True, "activation_checkpointing": True}
FLOAT8 = pytest.mark.skipif(find_spec("torchao") is None, reason="needs torchao")
COMBINATIONS = [  # settings that no rung combines
    ("vit", {"precision": "bf16-true", "optimizer": "adafactor"}),
    ("vit", {"attention": "eager", "micro_batch_size": 1, "optimizer": "sgd"}),
    ("bloom", {"precision": "bf16-mixed", "activation_checkpointing": True}),
    ("bloom-lm", {"lora": True, "precision": "bf16-mixed", "micro_batch_size": 2}),
    ("bloom-lm", {"lora": True, "dora": True, "precision": "bf16-true", "activation_checkpointing": True}),
    ("bloom-lm", {"lora": True, "quantization": "nf4", "precision": "bf16-mixed"}),
    ("bloom", {"lora": True, "train_tokens": "<a>,<b>", "precision": "bf16-mixed"}),
    ("bloom-lm", {"lora": True, "train_tokens": "<a>,<b>", "precision": "bf16-true", "micro_batch_size": 2}),
    (
        "bloom-lm",
        {
            "lora": True,
            "train_tokens": "<a>",
            "model": str(MODELS / "llama-tiny.json"),
            "quantization": "nf4",
            "precision": "bf16-mixed",
        },
    ),  # a head of its own
    ("bloom-lm", {"packing": True, "max_length": 256, "micro_batch_size": 2}),
    ("bloom-lm", {"packing": True, "max_length": 256, "micro_batch_size": 2, "attention": "varlen"}),
    ("bloom", {"packing": True, "max_length": 256, "attention": "varlen", "precision": "bf16-mixed"}),
    ("bloom", {"train_blocks": "none", "precision": "bf16-mixed"}),
    ("bloom-lm", {"train_blocks": "last:1", "precision": "bf16-true", "activation_checkpointing": True}),
    ("vit", {"block_steps": "auto", "precision": "bf16-mixed", "activation_checkpointing": True}),
    ("vit", {"optimizer": "sinkgd", "precision": "bf16-true", "step_in_backward": True}),
    ("bloom-lm", {"model": str(MODELS / "qwen3-tiny.json"), "optimizer": "sgd", **LEAN}),
    pytest.param("bloom", {"precision": "bf16-mixed", "float8": True}, marks=FLOAT8),
    pytest.param(
        "vit",
        {"lora": True, "precision": "bf16-mixed", "float8": True, "activation_checkpointing": True},
        marks=[FLOAT8, pytest.mark.slow],
    ),
]
FAMILIES = ("bloom-quickstart", "vit", "llama-tiny")
LEFT_OUT = {  # rungs whose prediction a process without a GPU cannot compare with real tensors
    "3_torch_compile", "10_fsdp", "11_fsdp_cpu_offload", "12_deepspeed_zero",
    "18_low_bit_optimizer",  # the formula leaves out small tensors, which are most of a small model
    "19_optimizer_offload", "20_activation_offload", "29_streamed_training",  # a CPU's own memory is the device's
    "22_float8",  # a CPU emulates it
}  # fmt: skip
ON_A_CPU = [rung.stem for rung in RUNGS if rung.stem not in LEFT_OUT]


@pytest.mark.filterwarnings("ignore:Module is None")  # a warning of PyTorch's tracker
@pytest.mark.parametrize(("family", "values"), COMBINATIONS, ids=str)
def test_the_prediction_agrees_with_real_tensors(tmp_path, family, values):
    settings, training, _ = case(tmp_path, family, **values)
    assert predict_peak(settings, training).total == pytest.approx(measured_peak(settings, training), rel=0.01)


def rung_case(tmp_path, rung, family, length):
    """Return the settings of a rung for a small model, and its share of an effective batch."""
    options = ["--accelerator", "cpu", "--from_scratch", "true", "--config", "quickstart.yaml", "--devices", "1"]
    if family == "vit":
        (tmp_path / "vit.json").write_text(json.dumps(VIT))
        options += ["--model", str(tmp_path / "vit.json"), "--task", "image-classification"]
    else:
        options += ["--model", str(MODELS / f"{family}.json")]
        options += ["--task", "instruction-tuning"] if family == "llama-tiny" else []
    settings = parse_settings(options, **script_defaults(rung))
    size = min(settings.batch_size, 4)
    cut = size if settings.step_in_backward else min(2, size)
    settings = replace(settings, batch_size=size, micro_batch_size=cut)
    return settings, largest_batches(settings, length, PIXELS if family == "vit" else None)[0]


@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize(
    ("rung", "family"),
    [  # images need no packing; graphs refuse instructions
        (rung, FAMILIES[0 if rung in ("15_packing", "27_cuda_graphs") else number % 3])
        for number, rung in enumerate(ON_A_CPU)
    ],
)
def test_the_prediction_of_every_rung_agrees_with_real_tensors(tmp_path, rung, family):
    rel = 0.02 if rung == "14_qlora" else 0.01  # 4-bit layers are rehearsed as on CUDA; a CPU unpacks them otherwise
    settings, training = rung_case(tmp_path, rung, family, PATCHES if family == "vit" else 160)
    assert predict_peak(settings, training).total == pytest.approx(measured_peak(settings, training), rel=rel)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "offload", "precision"),
    [(2, False, "bf16-mixed"), (4, True, "32-true")],
)
def test_sharded_predictions_agree_with_the_tensors_of_real_ranks(tmp_path, ranks, offload, precision):
    values = {"model": str(MODELS / "llama-tiny.json"), "from_scratch": True, "task": "instruction-tuning",
              "precision": precision, "batch_size": 8, "micro_batch_size": 1, "strategy": "fsdp", "devices": ranks,
              "offload": offload, "accelerator": "cpu", "eval_batch_tokens": 64, "optimizer": "adam",
              "pad_to_multiple_of": 1}  # fmt: skip
    script, question = ROOT / "tests" / "support" / "peaks_of_ranks.py", json.dumps(values | {"length": 96})
    process = run_script(script, question, cwd=tmp_path, fresh=True, PYTHONPATH=ROOT / "tests")
    held = json.loads(finished(process).strip().splitlines()[-1])
    settings = Settings(**values)
    predicted = predict_peak(settings, largest_batches(settings, 96)[0])
    assert predicted.phase == held["phase"]
    assert predicted.total == pytest.approx(held["total"], rel=0.03)
    assert predicted.host == pytest.approx(held["host"], rel=0.03)


def test_the_prediction_agrees_with_real_tensors_where_bfloat16_is_emulated(tmp_path):
    """Emulated attention is computed step by step, which `SDPBackend.MATH` does on a CPU."""
    settings, training, _ = case(tmp_path, "vit", precision="bf16-true")
    with sdpa_kernel(SDPBackend.MATH):
        measured = measured_peak(settings, training)
    newer, older = (predict_peak(settings, training, capability=each) for each in ((8, 0), (7, 5)))
    assert older.total == pytest.approx(measured, rel=0.01)
    assert older.total > 1.2 * newer.total


def test_a_gpu_without_flash_attention_repeats_grouped_heads(tmp_path):
    """This model has twice as many heads of queries; keys and values are kept once for each of them."""
    llama = {"model": str(MODELS / "llama-tiny.json"), "task": "instruction-tuning", "precision": "16-mixed"}
    settings, training, _ = case(tmp_path, "llama", **llama)
    older, newer = (predict_peak(settings, training, capability=each) for each in ((7, 5), (8, 0)))
    more, layers, size = 8 * 96 * 32, 2, 2
    assert older.activations - newer.activations == layers * 2 * more * size


@pytest.mark.parametrize(("precision", "offload"), [("32-true", True), ("bf16-mixed", False), ("bf16-true", True)])
def test_the_prediction_agrees_with_real_tensors_under_fsdp(tmp_path, precision, offload):
    values = {"strategy": "fsdp", "devices": 1, "precision": precision, "offload": offload}
    settings, training, _ = case(tmp_path, "bloom", optimizer="sgd", micro_batch_size=4, **values)
    predicted, measured = predict_peak(settings, training), peak_of_ranks(settings, training)
    assert predicted.total == pytest.approx(measured.total, rel=0.01)
    assert predicted.host == pytest.approx(measured.host, rel=0.01)


def test_under_fsdp_a_size_has_the_same_prediction_after_another_one(tmp_path):
    """The head shares the table, whose gradient is added to; FSDP prepares this in the first pass of a size."""
    path = tmp_path / "tied.json"
    path.write_text(
        json.dumps({"model_type": "bloom", "vocab_size": 8192, "hidden_size": 64, "n_layer": 2, "n_head": 4})
    )
    values = {"model": str(path), "strategy": "fsdp", "devices": 1, "precision": "bf16-true", "loss_chunk": 4}
    settings = [case(tmp_path, "bloom-lm", optimizer="sgd", micro_batch_size=n, **values)[0] for n in (1, 2)]
    batches = [largest_batches(each, 16) for each in settings]
    with rehearse(settings[0], blank_datasets(2)) as rehearsal:
        found = [rehearsal.peak(each, *batch) for each, batch in zip(settings, batches, strict=True)]
    assert found == [predict_peak(each, *batch) for each, batch in zip(settings, batches, strict=True)]


@pytest.mark.parametrize(("precision", "chunk"), [("32-true", 64), ("bf16-true", 4)])
def test_the_prediction_agrees_with_real_tensors_under_ddp_where_the_head_shares_the_table(tmp_path, precision, chunk):
    path = tmp_path / "tied.json"
    path.write_text(
        json.dumps({"model_type": "bloom", "vocab_size": 8192, "hidden_size": 64, "n_layer": 2, "n_head": 4})
    )
    values = {"model": str(path), "strategy": "ddp", "devices": 1, "precision": precision, "loss_chunk": chunk}
    settings, _, _ = case(tmp_path, "bloom-lm", optimizer="sgd", micro_batch_size=2, **values)
    training, _ = largest_batches(settings, 16)
    measured = peak_of_ranks(settings, training)
    assert predict_peak(settings, training).total == pytest.approx(measured.total, rel=0.01)


def test_the_prediction_agrees_with_real_tensors_for_4_bit_shards(tmp_path):
    values = {"lora": True, "quantization": "nf4", "precision": "bf16-mixed", "micro_batch_size": 2}
    settings, training, _ = case(tmp_path, "bloom-lm", strategy="fsdp", devices=1, **values)
    predicted, measured = predict_peak(settings, training), peak_of_ranks(settings, training)
    assert predicted.total == pytest.approx(measured.total, rel=0.01)
    halves = predict_peak(replace(settings, devices=2), training)
    packed = sum(parameter.nbytes for parameter in build(settings).parameters())
    assert predicted.parameters - halves.parameters == pytest.approx(packed / 2, rel=0.02)


@pytest.mark.parametrize("fused", [True, False])
def test_adam_needs_a_fifth_copy_in_its_step_unless_it_is_fused(tmp_path, fused):
    settings, _, _ = case(tmp_path, "vit", precision="16-mixed", max_grad_norm=None if fused else 1.0)
    tiny, _ = largest_batches(Settings(batch_size=1, micro_batch_size=1, eval_batch_tokens=1, devices=1), 65, 64)
    count, peak = count_weights(settings), predict_peak(settings, tiny)
    if fused:
        assert peak.phase == "training"
        assert peak.total < 19 * count
    else:
        assert peak.phase == "optimizer"
        assert peak.total == pytest.approx(20 * count, rel=0.02)


def test_the_first_micro_batch_finds_no_gradients_yet(tmp_path):
    settings, training, _ = case(tmp_path, "bloom", micro_batch_size=4)
    assert len(training) == 2
    alone, both = predict_peak(settings, training[:1]), predict_peak(settings, training)
    assert both.total > alone.total, "at the second peak gradients and all activations exist together"
    short = training[1]._replace(inputs={name: each[:1] for name, each in training[1].inputs.items()})
    assert predict_peak(settings, [training[0], short]).total == alone.total


@pytest.mark.filterwarnings("ignore:Module is None")
def test_the_logits_of_a_soft_cap_are_counted(tmp_path):
    path = tmp_path / "gemma2.json"
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"head_dim": 16, "intermediate_size": 128, "vocab_size": 4096}
    path.write_text(json.dumps({"model_type": "gemma2", "final_logit_softcapping": 30.0, **sizes}))
    settings, training, _ = case(tmp_path, "gemma2", model=str(path), task="instruction-tuning", loss_chunk=64)
    predicted = predict_peak(settings, training)
    assert predicted.total == pytest.approx(measured_peak(settings, training), rel=0.01)
    assert predicted.logits > 2 * 8 * 95 * 4096 * 4, "two copies of all logits in 32 bits"


def test_an_evaluation_may_be_the_peak(tmp_path):
    settings, training, evaluations = case(
        tmp_path, "bloom", micro_batch_size=1, optimizer="sgd", eval_batch_tokens=96 * 64
    )
    assert [batch.inputs["input_ids"].shape for batch in evaluations] == [(64, 96)]
    assert predict_peak(settings, training).phase == "training"
    assert predict_peak(settings, training, evaluations).phase == "evaluation"


def test_ranks_share_the_shards(tmp_path):
    settings, training, _ = case(tmp_path, "vit", micro_batch_size=1, strategy="fsdp", devices=1)
    count = count_weights(settings)
    on_four = replace(settings, devices=4)
    alone, shared = (predict_peak(each, training[:1]) for each in (settings, on_four))
    assert alone.optimizer_state == pytest.approx(8 * count, rel=0.01)
    assert shared.optimizer_state == pytest.approx(2 * count, rel=0.15)  # tensors with one row are not sharded
    assert not dist.is_initialized()
    parked = predict_peak(replace(on_four, offload=True), training[:1])
    assert parked.optimizer_state == 0
    assert parked.total < shared.total < alone.total
    assert parked.host >= 3 * count, "shards of weights and state"


def test_a_prediction_allocates_no_tensors(tmp_path):
    config = json.loads((MODELS / "bloom-560m.json").read_text()) | {"hidden_size": 65536, "n_layer": 2, "n_head": 512}
    path = tmp_path / "huge.json"
    path.write_text(json.dumps(config))
    assert predict_peak(*case(tmp_path, "bloom", model=str(path))[:2]).total > 1e12


def test_formulas_add_the_memory_that_cannot_be_rehearsed(tmp_path):
    def predicted(**values):
        settings, training, _ = case(tmp_path, "bloom", **({"precision": "bf16-true", "devices": 1} | values))
        return predict_peak(settings, training)

    count = count_weights(case(tmp_path, "bloom")[0])
    plain, lean = predicted(), predicted(optimizer="sgd")
    assert predicted(compile=True) == plain, "a compiled model needs at most as much"
    assert predicted(optimizer="adam-8bit") == lean._replace(optimizer_state=round(2 * count * (1 + 4 / 256)))
    kahan = predicted(optimizer="adam-8bit", kahan_summation=True)
    assert kahan.optimizer_state == round(2 * count * (1 + 4 / 256)) + 2 * count
    for error, size in ((True, 10), ("8-bit", 9)):
        on_host = predicted(kahan_summation=error, optimizer_offload=True)
        assert on_host == lean._replace(host=size * count), "weights, two moments and gradients of 2 bytes, and errors"
    assert predicted(kahan_summation="8-bit").optimizer_state == plain.optimizer_state + count
    offloaded = predicted(precision="bf16-mixed", strategy="deepspeed", deepspeed="zero2_offload")
    assert (offloaded.gradients, offloaded.optimizer_state, offloaded.host) == (0, 0, 1.5 * 16 * count)
    assert 2 * count < offloaded.parameters < 6 * count, "the weights and two copies of the largest layer's gradient"
    assert offloaded.activations == lean.activations
    zero2 = {"strategy": "deepspeed", "deepspeed": "zero2"}
    shared = predicted(precision="bf16-mixed", devices=2, optimizer="adam-8bit", **zero2)
    assert shared.gradients + shared.optimizer_state == round(count * (10 + 2 * (1 + 4 / 256)) / 2)
    assert pytest.approx(4.127, abs=5e-4) == NF4_BYTES * 8  # bits per weight in the article
    held = set()
    for precision in ("bf16-true", "32-true"):
        whole, in_4_bits = (predicted(lora=True, precision=precision, quantization=how) for how in ("no", "nf4"))
        linear = (whole.parameters - in_4_bits.parameters) / ({"bf16-true": 2, "32-true": 4}[precision] - NF4_BYTES)
        held.add(round(linear))
        assert in_4_bits.activations == whole.activations
    assert len(held) == 1, "the same layers are quantized in either precision"


def test_largest_batches_are_cut_as_the_loader_cuts_them(tmp_path):
    def shapes(image_size=None, **values):
        batches = largest_batches(settings_for(tmp_path, **values), 100, image_size)
        name = "pixel_values" if image_size else "input_ids"
        return tuple([tuple(batch.inputs[name].shape) for batch in part] for part in batches)

    assert shapes(batch_size=5, micro_batch_size=2) == ([(2, 100), (2, 100), (1, 100)], [(10, 100)])
    assert shapes(batch_size=5, micro_batch_tokens=330, pad_to_multiple_of=8)[0] == [(3, 104), (2, 104)]
    assert shapes(batch_size=16, micro_batch_size=4, devices=4)[0] == [(4, 100)]
    packed = {"packing": True, "max_length": 256, "eval_batch_tokens": 512}
    assert shapes(batch_size=5, micro_batch_size=2, **packed) == ([(2, 208), (1, 112)], [(2, 208)])
    assert shapes(batch_size=5, micro_batch_tokens=300, **packed)[0] == [(1, 208), (1, 208), (1, 112)]
    unset = replace(settings_for(tmp_path), eval_batch_tokens=None)
    assert largest_batches(unset, 100)[1][0].inputs["input_ids"].shape == (EVALUATED // 100, 100)
    assert shapes(batch_size=2, image_size=32, pad_to_multiple_of=8, eval_batch_tokens=300) == (
        [(2, 3, 32, 32)],
        [(3, 3, 32, 32)],
    )


def test_attention_of_documents_needs_less_memory_than_digits(tmp_path):
    def peak(attention, **values):
        values |= {"packing": True, "max_length": 256, "attention": attention, "precision": "bf16-true"}
        settings, training, evaluations = case(tmp_path, "bloom", **values)
        return predict_peak(settings, training, evaluations, capability=(9, 0)).total

    assert peak("varlen") < peak("fused")
    assert peak("varlen", activation_checkpointing=True) < peak("fused", activation_checkpointing=True)


@pytest.mark.filterwarnings("ignore:Module is None")
@pytest.mark.parametrize(
    "values",
    [{"activation_checkpointing": True, "precision": "bf16-mixed"}, {"lora": True, "precision": "bf16-true"}],
    ids=str,
)
def test_the_prediction_agrees_with_real_tensors_of_a_tiled_mlp(tmp_path, values):
    sizes = {"vocab_size": 256, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 1024}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    (tmp_path / "wide.json").write_text(json.dumps({"model_type": "llama", **sizes}))
    values = {"model": str(tmp_path / "wide.json"), "task": "instruction-tuning", "micro_batch_size": 1, **values}
    peaks = []
    for tile in (None, 40):
        settings, training, _ = case(tmp_path, "llama", mlp_tile=tile, **values)
        peaks.append(predict_peak(settings, training).total)
        assert peaks[-1] == pytest.approx(measured_peak(settings, training), rel=0.01)
    assert peaks[1] < peaks[0]


@pytest.mark.filterwarnings("ignore:Module is None")
def test_the_prediction_of_experts_agrees_with_real_tensors(tmp_path):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "num_hidden_layers": 2}
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 1024}
    config = {"model_type": "qwen3_moe", "decoder_sparse_step": 1, "max_position_embeddings": 128, **experts, **sizes}
    (tmp_path / "experts.json").write_text(json.dumps(config))
    values = {"model": str(tmp_path / "experts.json"), "from_scratch": True, "task": "instruction-tuning"}
    settings = settings_for(tmp_path, **values, precision="bf16-true", batch_size=4, micro_batch_size=2, max_length=96)
    training = largest_batches(settings, 96)[0]
    assert predict_peak(settings, training).total == pytest.approx(measured_peak(settings, training), rel=0.01)
