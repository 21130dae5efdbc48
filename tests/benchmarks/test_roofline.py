"""The work of a step is counted as it would run on a GPU: by hand for a small module, and for tiny models."""

import json
import sys

import numpy as np
import pytest
import torch
from support.helpers import MODELS, ROOT
from torch import nn

from fabric_ladder.planning.gpus import find_gpu
from fabric_ladder.planning.rehearsal import FakeTensors

sys.path.append(str(ROOT / "benchmarks"))
import counting
import roofline
from counting import Counter, fused, launches, total
from speed import Work, host_seconds, seconds

TOKENS, WIDTH = 6, 4
BLOCKS = 9


@pytest.fixture(scope="module")
def bloom(tmp_path_factory):
    """The config of a tiny BLOOM, with enough blocks that a few of them are counted."""
    path = tmp_path_factory.mktemp("model") / "model.json"
    config = json.loads((MODELS / "bloom-quickstart.json").read_text())
    path.write_text(json.dumps(config | {"n_layer": BLOCKS, "vocab_size": 32_768}))
    return path


def counted(path, rung, options="", shape=(4, 128), first=True):
    """Return the work of a pass of the whole model."""
    side = roofline.Side(rung, options)
    with roofline.models(roofline.settings_of(side, path), side, all_blocks=True) as (steps,):
        return steps.run_pass(*shape, first)


def work_of_block(compiled):
    """Return the work of both passes of a linear layer, a GELU and a layer norm; the input is a product by 1."""
    with FakeTensors() as mode:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
        inputs = torch.ones(TOKENS, WIDTH, requires_grad=True) * 1
        gradient = torch.ones(TOKENS, WIDTH)
    counter = Counter(model)
    with mode, counter, counter.compile([model] if compiled else []):
        model(inputs).backward(gradient)
    return counter.work()


TENSOR, VECTOR, WEIGHT, STATISTICS = 4 * TOKENS * WIDTH, 4 * WIDTH, 4 * WIDTH * WIDTH, 2 * 4 * TOKENS  # bytes


def test_the_kernels_of_a_small_block_are_those_counted_by_hand():
    work = work_of_block(compiled=False)
    # forward: product, GELU, norm; backward: norm (2), GELU, two products, the sum for the bias, the product by 1
    assert work.kernels == 3 + 2 + 1 + 2 + 1 + 1
    assert work.flops == work.flops_32 == 3 * 2 * TOKENS * WIDTH * WIDTH
    assert work.product_bytes == 3 * (2 * TENSOR + WEIGHT) + VECTOR
    norm = 2 * TENSOR + 2 * VECTOR + STATISTICS
    norm_backward = (3 * TENSOR + STATISTICS + VECTOR) + (2 * TENSOR + STATISTICS + 2 * VECTOR)
    assert work.moved == 2 * TENSOR + norm + norm_backward + 3 * TENSOR + (TENSOR + VECTOR) + 2 * TENSOR


def test_compiled_code_fuses_a_block():
    work = work_of_block(compiled=True)
    # forward: product, GELU with norm; backward: norm with GELU, the norm's weights, products, sum; the product by 1
    assert work.kernels == 2 + 1 + 1 + 2 + 1 + 1
    assert work.compiled == work.kernels - 1
    assert work.graphs == 2
    forward = 3 * TENSOR + 2 * VECTOR + STATISTICS  # the norm's input is kept for the backward pass
    backward = 4 * TENSOR + STATISTICS + VECTOR
    weights = 2 * TENSOR + STATISTICS + 2 * VECTOR
    assert work.moved == forward + backward + weights + (TENSOR + VECTOR) + 2 * TENSOR


def test_waits_are_counted_and_views_are_not():
    counter = Counter(nn.Module())
    with FakeTensors():
        numbers = torch.ones(4, 4)
        with counter:
            numbers.view(16)[2:].unsqueeze(0).expand(3, 14)
            assert counter.work() == Work()
            bool((numbers > 0).all())
    assert counter.work().waits == 1
    assert counter.work().kernels == 3


@pytest.mark.parametrize(
    ("sizes", "lists", "expected"),
    [([10], 1, 1), ([1] * 110, 1, 1), ([1] * 111, 1, 2), ([1] * 37, 4, 2), ([65_536 * 320], 1, 1),
     ([65_536 * 320 + 1], 1, 2), ([65_536 * 641], 1, 3)],
)  # fmt: skip
def test_a_foreach_operation_is_a_few_launches(sizes, lists, expected):
    assert launches(sizes, lists) == expected


@pytest.mark.parametrize(
    ("rung", "options"),
    [
        ("15_packing", "--compile true"),
        pytest.param("21_selective_checkpointing", "", marks=pytest.mark.slow),
        pytest.param("", "bf16-mixed compile", marks=pytest.mark.slow),
    ],
)
def test_the_work_of_a_pass_is_linear_in_blocks(bloom, rung, options):
    side = roofline.Side(rung, options)
    settings = roofline.settings_of(side, bloom)
    with roofline.models(settings, side) as few:
        found = roofline.extrapolate(settings, [steps.run_pass(3, 96, False) for steps in few])
    assert found == pytest.approx(counted(bloom, rung, options, (3, 96), first=False))


def test_the_work_of_a_pass_is_linear_in_the_terms_of_its_shape(bloom):
    side = roofline.Side("4_mixed_precision")
    with roofline.models(roofline.settings_of(side, bloom), side) as (steps, _):
        coefficients = roofline.solve([steps.run_pass(*shape, True) for shape in roofline.SHAPES])
        for shape in ((1, 200), (6, 96)):
            found = roofline.terms(*shape) @ coefficients
            np.testing.assert_allclose(found, steps.run_pass(*shape, True), rtol=1e-6, atol=1e-3)


def test_compiled_rungs_have_fewer_kernels_and_bytes(bloom):
    eager, compiled = (counted(bloom, "4_mixed_precision", options) for options in ("", "--compile true"))
    assert compiled.kernels < 0.95 * eager.kernels
    assert compiled.moved < 0.9 * eager.moved
    assert compiled.flops == eager.flops
    assert compiled.graphs == 2 * BLOCKS


def test_selective_checkpointing_recomputes_no_products_but_passes_operations_through_python(bloom):
    selective = counted(bloom, "21_selective_checkpointing", "--compile false")
    plain = counted(bloom, "7_grad_checkpointing")
    assert selective.flops < plain.flops
    assert selective.python_calls > 0 == plain.python_calls


def test_steps_in_the_backward_pass_leave_nothing_to_the_optimizer(bloom):
    side = roofline.Side("17_step_in_backward")
    with roofline.models(roofline.settings_of(side, bloom), side) as (steps, _):
        assert steps.run_pass(1, 16, True).moved > 1e6
        assert steps.run_step().moved < 1e4


def test_a_part_of_a_weight_is_a_few_kernels_of_4_bit_adam(bloom):
    side = roofline.Side("18_low_bit_optimizer", "--optimizer adam-4bit")
    with roofline.models(roofline.settings_of(side, bloom), side) as (steps, _):
        steps.run_pass(1, 16, True)
        work = steps.run_step()
    assert 0 < work.graphs <= work.compiled <= 6 * work.graphs
    assert work.kernels - work.compiled < work.graphs, "the rest is Kahan's, for many weights together"


def test_trainer_waits_twice_in_each_of_its_two_passes_and_accelerate_does_not(bloom):
    works = {}
    for words in ("32-true", "32-true accelerate"):
        side = roofline.Side("", words)
        with roofline.models(roofline.settings_of(side, bloom), side) as (steps, _):
            works[words] = [*(steps.run_pass(8, 100, first) for first in (True, False)), steps.run_step()]
    (first, later, step), (other, _, other_step) = works.values()
    assert [first.waits, later.waits, step.waits] == [2, 2, 0]  # is the loss NaN, or infinite?
    assert later.kernels > first.kernels  # each gradient is added
    assert first.flops == later.flops == other.flops
    assert other.waits == 0
    assert other_step.moved == pytest.approx(step.moved, rel=1e-2)


def test_peers_pad_to_the_longest_text_of_a_micro_batch():
    lengths = np.arange(1, 33)
    twice, once = (
        roofline.peer_batches(roofline.Side("", f"32-true {more}"), lengths) for more in ("", "micro_batch_16")
    )
    assert [[rows for rows, _ in step] for step in twice] == [[8, 8]] * 2
    assert [[rows for rows, _ in step] for step in once] == [[16]] * 2
    assert max(width for step in once for _, width in step) == 32


def test_a_pass_takes_the_longer_of_host_and_device():
    gpu = find_gpu("H100")
    small, large = Work(kernels=1000, moved=1e6), Work(kernels=1000, moved=1e12)
    assert seconds(small, gpu) == host_seconds(small)
    assert seconds(large, gpu) > 0.3 > host_seconds(large)
    assert seconds(large._replace(waits=1), gpu) > seconds(large, gpu)
    assert seconds(large, gpu) < seconds(large, find_gpu("T4"))
    assert total([small, large]).kernels == 2000


@pytest.mark.slow
def test_the_rules_of_fusion_move_about_the_bytes_of_inductor(tmp_path, monkeypatch):
    """Inductor's scheduler for the CPU gives the bytes of all kernels of a block, except of its matrix products."""
    from torch._inductor.scheduler import ExternKernelSchedulerNode, Scheduler  # imports much

    moved = []
    codegen = Scheduler.codegen

    def record(self):
        kernels = [node for node in self.nodes if not isinstance(node, ExternKernelSchedulerNode)]
        moved.append(sum(node.get_read_write_buffers_sizes() for node in kernels))
        return codegen(self)

    monkeypatch.setattr(Scheduler, "codegen", record)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_FORCE_DISABLE_CACHES", "1")
    model = tmp_path / "model.json"
    config = json.loads((MODELS / "bloom-quickstart.json").read_text())
    model.write_text(json.dumps(config | {"n_layer": 1, "hidden_size": 256, "n_head": 4}))
    side = roofline.Side("5_low_precision", "--compile true")
    settings = roofline.settings_of(side, model)
    network = roofline.build_model(settings, roofline.blank_datasets(2)).to(torch.bfloat16)
    inputs = {name: torch.ones(4, 256, dtype=torch.long) for name in ("input_ids", "attention_mask")}
    network(**inputs, labels=torch.zeros(4, dtype=torch.long)).loss.backward()
    assert len(moved) == 2  # the block's forward and backward pass
    compiled = []
    monkeypatch.setattr(counting, "fused", lambda operations: compiled.extend(fused(operations)) or compiled)
    with roofline.models(settings, side, all_blocks=True) as (steps,):
        assert steps.run_pass(4, 256, True).graphs == 2
    assert sum(moved) == pytest.approx(total(compiled).moved, rel=0.1)
