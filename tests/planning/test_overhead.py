"""The overhead of a GPU is kept by GPU and version; without a measurement it is assumed by architecture."""

import pytest
from support.planning import NO_PEAK

from fabric_ladder.errors import UserError
from fabric_ladder.planning.gpus import ANY, GPUS, find_gpu
from fabric_ladder.planning.overhead import (
    ANY_GPU,
    ASSUMED,
    HIGH,
    KEPT,
    LOW,
    NCCL,
    Overhead,
    assume,
    keep_overhead,
    load_overhead,
    overhead_of,
)

PEAK = NO_PEAK._replace(activations=10_000_000_000)


def test_overheads_are_kept_by_gpu_and_version(tmp_path):
    measured = Overhead(400_000_000, 9_000_000, 0.02, "measured on A, torch x")
    assert load_overhead(str(tmp_path), "A") == ANY_GPU
    keep_overhead(str(tmp_path), "A", measured)
    keep_overhead(str(tmp_path), "B", measured._replace(context=1))
    assert set(load_overhead(str(tmp_path), "A")) == {measured}
    assert load_overhead(str(tmp_path), "B").expected.context == 1
    assert load_overhead(str(tmp_path), "C") == ANY_GPU
    for damaged in ("{", "[]", '{"A": {"context": 1}}'):
        (tmp_path / KEPT).write_text(damaged)
        assert load_overhead(str(tmp_path), "A") == ANY_GPU
    with pytest.raises(UserError, match="cannot write "):
        keep_overhead(str(tmp_path / KEPT), "A", measured)
    tensors = NO_PEAK._replace(activations=1_000_000_000)
    assert measured.needed(tensors) == 1_000_000_000 + 400_000_000 + 9_000_000 + round(0.02 * 1_009_000_000)


def test_only_an_assumed_overhead_has_bounds(tmp_path):
    assert ANY_GPU.bounds(PEAK) == (LOW.needed(PEAK), HIGH.needed(PEAK))
    assert LOW.needed(PEAK) < 10_300_000_000 < ASSUMED.needed(PEAK) < 11_200_000_000 < HIGH.needed(PEAK)
    keep_overhead(str(tmp_path), "A", ASSUMED)
    measured = load_overhead(str(tmp_path), "A")
    assert measured.bounds(PEAK) == (measured.needed(PEAK), measured.needed(PEAK))


# Contexts in GB, by GPU, as in the comments of overhead.py; with kernels
@pytest.mark.parametrize(
    ("gpu", "contexts"),
    [("T4", (0.14, 0.15)), ("P100", (0.32,)), ("V100", (0.3, 0.4, 0.72)), ("A100 40GB", (0.43, 0.52, 0.525)),
     ("RTX 3070", (0.19,)), ("RTX 3090", (0.27,)), ("RTX 6000 Ada", (0.45,)), ("RTX 4090", (0.50, 0.53, 0.55)),
     ("L40S", (0.54,)), ("L4", (0.237,)), ("H100", (0.79,)), ("RTX 5090", (0.62, 0.65))],
)  # fmt: skip
def test_the_bounds_of_an_architecture_cover_what_was_published(gpu, contexts):
    low, _, high = (each.context / 1e9 for each in assume(find_gpu(gpu).capability))
    assert all(low <= context <= high for context in contexts)


def test_cublas_has_its_workspace_by_architecture_and_an_unknown_gpu_has_the_widest_bounds():
    for gpu in GPUS:
        bounds = assume(gpu.capability)
        workspaces = {each.workspace for each in bounds}
        assert workspaces <= {2 * 8_519_680, 2 * 32 * 2**20}
        assert len(workspaces) == 1 or gpu.capability >= (10, 0), "newer versions of PyTorch changed it"
        assert bounds.low.needed(PEAK) < bounds.needed(PEAK) < bounds.high.needed(PEAK)
    assert assume((9, 0)).low.workspace == 2 * 32 * 2**20
    assert len({assume(gpu.capability).expected.context for gpu in GPUS}) == 5, "one value by architecture"
    assert overhead_of(ANY, "nowhere") == ANY_GPU


def test_nccl_is_added_for_several_gpus(tmp_path):
    alone, several = (load_overhead(str(tmp_path), "A", (8, 6)).on(gpus).bounds(PEAK) for gpus in (1, 2))
    assert [more - less for less, more in zip(alone, several, strict=True)] == [NCCL[0], NCCL[2]]
    keep_overhead(str(tmp_path), "A", ASSUMED)
    alone, several = (load_overhead(str(tmp_path), "A").on(gpus).needed(PEAK) for gpus in (1, 2))
    assert several - alone == NCCL[1]
