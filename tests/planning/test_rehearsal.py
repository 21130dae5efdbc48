"""The memory of a deep model, found from a few of its blocks, compared with a rehearsal of all blocks."""

import json
from dataclasses import replace

import pytest
from support.helpers import MODELS
from support.planning import PIXELS, VIT

from fabric_ladder.ladder import CHECKPOINTING
from fabric_ladder.models.configs import load_config
from fabric_ladder.models.layers import fewer_blocks
from fabric_ladder.planning.candidates import list_choices, read_settings
from fabric_ladder.planning.predict import blank_datasets, largest_batches
from fabric_ladder.planning.rehearsal import rehearse
from fabric_ladder.planning.tracker import Moment, extrapolate
from fabric_ladder.rungs import RUNGS

BLOCKS = 8
IN_16_BITS = ("--precision", "bf16-true")
WIDE = {"hidden_size": 64, "num_hidden_layers": BLOCKS, "num_attention_heads": 4, "intermediate_size": 160,
        "vocab_size": 512}  # fmt: skip
GROUPED = WIDE | {"num_key_value_heads": 2, "head_dim": 16}
CONFIGS = {
    "bloom": json.loads((MODELS / "bloom-quickstart.json").read_text()) | {"n_layer": BLOCKS},
    "llama": GROUPED | {"model_type": "llama"},
    "qwen3": GROUPED | {"model_type": "qwen3"},
    "mistral": GROUPED | {"model_type": "mistral"},
    "gemma2": GROUPED | {"model_type": "gemma2", "num_hidden_layers": 14},
    "bert": WIDE | {"model_type": "bert"},
    "modernbert": WIDE | {"model_type": "modernbert", "num_hidden_layers": 16, "pad_token_id": 0},
    "gpt2": {"model_type": "gpt2", "n_embd": 64, "n_layer": BLOCKS, "n_head": 4, "vocab_size": 512},
    "vit": VIT | {"num_hidden_layers": BLOCKS},
}
BY_FORMULA = ("3_torch_compile", "8_init_on_device", "12_deepspeed_zero")  # other rungs take the same rehearsal
PLANNED = [rung for rung in dict(list_choices(RUNGS, 1)[0] + list_choices(RUNGS, 2)[0]) if rung not in BY_FORMULA]
REFUSED = (("15_packing", "vit"), ("25_block_by_block", "modernbert"))
# each rung with a family that it accepts, and each family at least once
CASES = [(rung, [*CONFIGS][number % len(CONFIGS)]) for number, rung in enumerate(PLANNED)]
CASES = [(rung, "llama" if (rung, family) in REFUSED else family) for rung, family in CASES]


@pytest.mark.parametrize(
    ("rung", "family"),
    [pytest.param(*case, marks=[] if case[0] == "1_batch_size_1" else pytest.mark.slow) for case in CASES],
)
def test_the_memory_of_all_blocks_is_found_from_a_few(tmp_path, rung, family):
    path = tmp_path / "model.json"
    path.write_text(json.dumps(CONFIGS[family]))
    image_size = PIXELS if family == "vit" else None
    task = ["--task", "image-classification"] if image_size else []
    words = ["--model", str(path), *task, "--batch_size", "8", "--max_length", "96"]
    settings = read_settings(rung, words, gpus=2 if rung in ("9_ddp", "10_fsdp", "11_fsdp_cpu_offload") else 1)
    cut = replace(settings, micro_batch_size=4, micro_batch_tokens=None)
    peaks = []
    for all_blocks in (True, False):
        with rehearse(settings, blank_datasets(3, image_size), all_blocks=all_blocks) as rehearsal:
            peaks.append(rehearsal.peak(cut, *largest_batches(cut, 96, image_size)))
            assert len(rehearsal.blocks) == (1 if all_blocks else 2)
            assert rehearsal.counts.all > 0
    whole, found = peaks
    assert found.phase == whole.phase
    assert found.total == pytest.approx(whole.total, rel=1e-3)
    assert found.host == pytest.approx(whole.host, rel=1e-3)


@pytest.mark.parametrize(
    ("family", "trained", "rehearsed", "options"),
    [
        ("bloom", "last:1", 2, ()),
        ("gpt2", "last:2", 2, (*IN_16_BITS, *CHECKPOINTING)),
        # more blocks are trained than the smaller models could leave out
        pytest.param("llama", "last:6", 1, (), marks=pytest.mark.slow),
        pytest.param("vit", "last:1", 2, ("--max_grad_norm", "1"), marks=pytest.mark.slow),
    ],
)
def test_a_rehearsal_with_fewer_blocks_leaves_out_frozen_ones(tmp_path, family, trained, rehearsed, options):
    path = tmp_path / "model.json"
    depth = "n_layer" if "n_layer" in CONFIGS[family] else "num_hidden_layers"
    path.write_text(json.dumps(CONFIGS[family] | {depth: 12}))
    image_size = PIXELS if family == "vit" else None
    task = ["--task", "image-classification"] if image_size else []
    words = ["--model", str(path), *task, "--batch_size", "4", "--max_length", "96", "--train_blocks", trained]
    settings = read_settings("2_grad_accum", [*words, *options])
    batches = largest_batches(replace(settings, micro_batch_size=4), 96, image_size)
    peaks = []
    for all_blocks in (True, False):
        with rehearse(settings, blank_datasets(3, image_size), all_blocks=all_blocks) as rehearsal:
            peaks.append(rehearsal.peak(settings, *batches))
            blocks = len(rehearsal.blocks)
            counts = rehearsal.counts
    assert blocks == rehearsed
    assert 0 < counts.trained < counts.all / 2 or trained == "last:6"
    assert peaks[1].phase == peaks[0].phase
    for part in ("parameters", "gradients", "optimizer_state", "activations", "total"):
        assert getattr(peaks[1], part) == pytest.approx(getattr(peaks[0], part), rel=1e-3), part


def test_blocks_that_alternate_end_at_the_same_type(tmp_path):
    path = tmp_path / "model.json"
    found = {}
    for types, blocks in (("a", 12), ("ab", 12), ("ab", 13), ("aaab", 26), ("ab", 7), ("abc" * 9, 27)):
        layers = [{"a": "full_attention"}.get(each, "sliding_attention") for each in types] * blocks
        path.write_text(json.dumps(CONFIGS["qwen3"] | {"num_hidden_layers": blocks, "layer_types": layers[:blocks]}))
        found[types[:4], blocks] = fewer_blocks(load_config(str(path)))
    assert found == {("a", 12): (3, 4), ("ab", 12): (4, 6), ("ab", 13): (3, 5), ("aaab", 26): (6, 10), ("ab", 7): None,
                     ("abca", 27): (3, 6)}  # fmt: skip


def test_the_peak_moves_to_another_moment_with_the_number_of_blocks():
    """The first moment grows by 1 byte a block, the second by 3, and in a deep model it is higher."""

    def moments(blocks):
        made = [f"{number}" for number in range(blocks)]
        return [Moment("training", False, name, (10 + blocks,)) for name in made] + [
            Moment("training", True, name, (3 * blocks,)) for name in made
        ]

    found = extrapolate(moments(3), moments(4), 16)
    assert {moment.held for moment in found} == {(30,), (60,)}
    assert extrapolate(moments(3), moments(4)[:4], 16) is None
    others = [moment._replace(made=f"other {moment.made}") for moment in moments(4)]
    assert extrapolate(moments(3), others, 16) is None
