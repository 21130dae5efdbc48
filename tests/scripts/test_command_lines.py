"""Scripts answer `--help` and a mistyped option before they import a heavy library."""

import os
import subprocess
import sys

import pytest
from support.helpers import ROOT, run_script, without_package

HEAVY = ("torch", "lightning", "transformers", "datasets", "pandas", "matplotlib")
SCRIPTS = sorted((ROOT / "scripts").glob("*.py"))
FORWARDING = ("plan_memory", "run_ladder")  # these scripts pass unknown options to the rungs


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_command_line_is_read_before_heavy_imports(tmp_path, script):
    for name in HEAVY:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')")
    option = "--batch_sise" if script.stem in FORWARDING else "--no_such_option"
    process = run_script(script, "--help", cwd=tmp_path, fresh=True, PYTHONPATH=f"{tmp_path}:{ROOT / 'src'}")
    assert (process.returncode, process.stderr) == (0, "")
    assert process.stdout.startswith(f"usage: {script.name}")
    process = run_script(script, option, "1", cwd=tmp_path, fresh=True, PYTHONPATH=f"{tmp_path}:{ROOT / 'src'}")
    assert (process.returncode, process.stdout) == (2, "")
    assert process.stderr.startswith("error: ")
    assert process.stderr.count("\n") == 1
    assert ("did you mean --batch_size" in process.stderr) == (script.stem in FORWARDING)


@pytest.mark.parametrize("command", [*((script, "--help") for script in SCRIPTS), ("doctor.py",)], ids=str)
def test_nothing_is_printed_if_nobody_reads_the_output(tmp_path, command):
    """As in `doctor.py | head`: Python writes into a closed pipe when it ends or, with `flush`, when it prints."""
    reader, writer = os.pipe()
    os.close(reader)
    script, *options = command
    environment = os.environ | without_package(tmp_path, "torch")
    environment["PYTHONPATH"] += os.pathsep + str(ROOT / "src")
    command = [sys.executable, str(ROOT / "scripts" / script), *options]
    process = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    os.close(writer)
    assert process.stderr == ""
