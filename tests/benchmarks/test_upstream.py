"""The minimal scripts of faults in other libraries print what docs/promises.md says of them."""

import subprocess
import sys

import pytest
from support.helpers import ROOT


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("trainer_classifier", "length of the gradient in 16 passes / in one pass: 16.00"),
        ("accelerate_last_window", "length of the last step in 4 passes / in one pass: 0.25"),
        ("accelerate_resume", "resumed dropout equals that of the whole run: False"),
    ],
)
def test_a_fault_is_still_there(tmp_path, name, line):
    script = ROOT / "benchmarks" / "upstream" / f"{name}.py"
    done = subprocess.run(
        [sys.executable, script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout.splitlines()[-1] == line
