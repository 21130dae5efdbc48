"""The function that predicts the memory of one run."""

import pytest
from support.helpers import MODELS

from fabric_ladder.errors import UserError
from fabric_ladder.planning.run_memory import predict_memory

TINY = str(MODELS / "llama-tiny.json")


def test_a_program_asks_for_the_memory_of_a_run(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    found = predict_memory("Qwen/Qwen3-8B", precision="bf16-true", lora_rank=8, lora_targets="attention")
    assert 15e9 < found.tensors.parameters < 15.4e9, "7.57 billion weights of 2 bytes, and adapters"
    assert found.tensors.total < found.low < found.expected < found.high < 26e9
    sharded = predict_memory("Qwen/Qwen3-8B", precision="bf16-true", gpus=4, strategy="fsdp")
    assert sharded.tensors.optimizer_state < 8e9
    assert sharded.expected - sharded.reserved > 1e9 > found.expected - found.reserved, "NCCL"


def test_a_setting_of_a_technique_switches_it_on():
    small, large = (
        predict_memory(TINY, length=64, lora_rank=rank, lora_targets="attention").tensors for rank in (4, 8)
    )
    assert 0 < small.optimizer_state < large.optimizer_state < 0.1 * small.parameters
    sharded = predict_memory(TINY, length=64, gpus=2, offload=True).tensors
    assert sharded.host > sharded.parameters
    whole, packed = (predict_memory(TINY, rung, length=64).tensors for rung in ("13_lora", "14_qlora"))
    assert packed.parameters < whole.parameters
    whole = predict_memory(TINY, length=64, task="instruction-tuning", loss_chunk=1_000_000, micro_batch_size=4)
    assert whole.tensors.logits > 0


def test_without_a_length_texts_are_as_long_as_the_model_can_read():
    bert = str(MODELS / "bert-base-cased.json")
    assert predict_memory(bert).tensors == predict_memory(bert, length=512).tensors


def test_images_have_the_size_of_the_model():
    found = predict_memory("google/vit-base-patch16-224", task="image-classification", micro_batch_size=2, classes=10)
    assert found.tensors.parameters == pytest.approx(4 * 85.8e6, rel=0.01)
    assert found.tensors.phase == "training", "the evaluation has two images too"


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"lora_rnak": 8}, "there is no setting 'lora_rnak'"),
        ({"precision": "bf16-true", "kahan_summation": True, "lora": True}, "leave it out"),
        ({"gpu": "T5"}, "--gpu T5: not in the table"),
        ({"length": 1}, "length"),
        ({"micro_batch_size": 0}, "must be at least 1"),
    ],
)
def test_bad_questions_are_refused(options, line):
    with pytest.raises(UserError, match=line):
        predict_memory(TINY, **{"length": 64, **options})
