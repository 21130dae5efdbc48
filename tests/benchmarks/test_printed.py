"""What a script prints is kept as it is, with its seconds and peak memory."""

import sys

import pytest
from support.helpers import ROOT

sys.path.append(str(ROOT / "benchmarks"))
import printed


def test_the_lines_of_a_script_are_kept():
    figures = printed.run(["scripts/doctor.py", "--help"])
    assert figures["printed"][0].startswith("usage: doctor.py")
    assert 0 < figures["seconds"] < 60
    assert figures["peak_memory_bytes"] > 5e6


def test_a_script_that_fails_leaves_nothing():
    with pytest.raises(SystemExit, match=r"doctor.py --jason ended with status 2"):
        printed.run(["scripts/doctor.py", "--jason"])
