"""The overhead of a GPU is kept by GPU and version."""

import pytest
from support.planning import NO_PEAK

from fabric_ladder.errors import UserError
from fabric_ladder.planning.overhead import ASSUMED, HIGH, KEPT, LOW, Overhead, keep_overhead, load_overhead


def test_overheads_are_kept_by_gpu_and_version(tmp_path):
    measured = Overhead(400_000_000, 9_000_000, 0.02, "measured on A, torch x")
    assert load_overhead(str(tmp_path), "A") is ASSUMED
    keep_overhead(str(tmp_path), "A", measured)
    keep_overhead(str(tmp_path), "B", measured._replace(context=1))
    assert load_overhead(str(tmp_path), "A") == measured
    assert load_overhead(str(tmp_path), "B").context == 1
    assert load_overhead(str(tmp_path), "C") is ASSUMED
    (tmp_path / KEPT).write_text("{")  # a damaged file
    assert load_overhead(str(tmp_path), "A") is ASSUMED
    tensors = NO_PEAK._replace(activations=1_000_000_000)
    assert measured.needed(tensors) == 1_000_000_000 + 400_000_000 + 9_000_000 + round(0.02 * 1_009_000_000)


def test_only_an_assumed_overhead_has_bounds():
    peak = NO_PEAK._replace(activations=10_000_000_000)
    assert ASSUMED.bounds(peak) == (LOW.needed(peak), HIGH.needed(peak))
    assert LOW.needed(peak) < 10_300_000_000 < ASSUMED.needed(peak) < 11_200_000_000 < HIGH.needed(peak)
    measured = ASSUMED._replace(source="measured on A, torch x")
    assert measured.bounds(peak) == (measured.needed(peak), measured.needed(peak))


def test_a_cache_that_cannot_be_written_prints_one_line(tmp_path):
    (tmp_path / "memory").write_text("not a folder")
    with pytest.raises(UserError, match="cannot write "):
        keep_overhead(str(tmp_path), "A", ASSUMED)
