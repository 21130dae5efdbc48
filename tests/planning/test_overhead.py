"""The overhead of a GPU: kept by GPU and version, measured on a GPU alone."""

import pytest
import torch
from support.planning import NO_PEAK

from fabric_ladder.errors import UserError
from fabric_ladder.planning.overhead import ASSUMED, KEPT, Overhead, keep_overhead, load_overhead, measure_overhead


def test_overheads_are_kept_by_gpu_and_version(tmp_path):
    measured = Overhead(400_000_000, 9_000_000, 0.02, "measured on A, torch x")
    assert load_overhead(str(tmp_path), "A") is ASSUMED
    keep_overhead(str(tmp_path), "A", measured)
    keep_overhead(str(tmp_path), "B", measured._replace(context=1))
    assert load_overhead(str(tmp_path), "A") == measured
    assert load_overhead(str(tmp_path), "B").context == 1
    assert load_overhead(str(tmp_path), "C") is ASSUMED
    for broken in ("{", "[]"):
        (tmp_path / KEPT).write_text(broken)
        assert load_overhead(str(tmp_path), "A") is ASSUMED
    keep_overhead(str(tmp_path), "A", measured)
    assert load_overhead(str(tmp_path), "A") == measured
    tensors = NO_PEAK._replace(activations=1_000_000_000)
    assert measured.needed(tensors) == 1_000_000_000 + 400_000_000 + 9_000_000 + round(0.02 * 1_009_000_000)


def test_an_overhead_is_measured_on_a_gpu_alone_and_kept_where_one_may_write(tmp_path):
    if not torch.cuda.is_available():
        with pytest.raises(UserError, match="--calibrate measures a CUDA GPU"):
            measure_overhead(lambda: None)
    (tmp_path / "memory").write_text("no folder")
    with pytest.raises(UserError, match="cannot write "):
        keep_overhead(str(tmp_path), "A", ASSUMED)
