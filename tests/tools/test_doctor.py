"""scripts/doctor.py on complete, bare and broken installations."""

import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from support.helpers import ROOT, RUNGS, run_script, without_package

from fabric_ladder.tools import doctor

SCRIPT = ROOT / "scripts" / "doctor.py"
LINE = re.compile(r"  (ok|warn|missing) +(\S+(?: \w+)*) {2,}(\S.*?)(?: -> (.+))?")


def read_report(process):
    """Return status, text and fix of each line, by section and name."""
    assert (process.returncode, process.stderr) == (0, "")
    items, section = {}, ""
    *lines, last = process.stdout.splitlines()
    for line in lines:
        if line.startswith(" "):
            status, name, *rest = LINE.fullmatch(line).groups()
            assert (section, name) not in items
            items[section, name] = (status, *rest)
        else:
            section = line
    counts = {status: sum(each[0] == status for each in items.values()) for status in ("ok", "warn", "missing")}
    assert last == ", ".join(f"{count} {status}" for status, count in counts.items())
    return items


@pytest.mark.slow
def test_a_complete_installation_without_a_compiler(tmp_path):
    home = tmp_path / "home"
    home.mkdir()
    process = run_script(SCRIPT, cwd=tmp_path, PATH=tmp_path, HOME=home, CXX="", CC="", FABRIC_LADDER_DATA="nowhere")
    items = read_report(process)
    packages = [name for section, name in items if section == "Packages"]
    assert packages[:3] == ["Python", "torch", "lightning"]
    assert {"deepspeed", "wandb", "tensorboard"} <= set(packages)
    assert items["Packages", "numpy"] == ("ok", version("numpy"), None)
    compiler = ("missing", "there is no compiler g++", "apt install g++ python3-dev, or set CXX")
    assert items["GPU", "torch.compile"] == items["Rungs", "3_torch_compile"] == compiler
    rungs = {name: item for (section, name), item in items.items() if section == "Rungs"}
    assert [*rungs] == [path.stem for path in RUNGS]
    assert rungs["12_deepspeed_zero"][1].startswith("12_deepspeed_zero needs a CUDA GPU")
    assert rungs["4_mixed_precision"] == ("ok", "can run the quickstart: 1 x cpu, bf16-mixed", None)
    missing = [name for name, item in rungs.items() if item[0] == "missing"]
    assert missing == ["3_torch_compile", "12_deepspeed_zero"]


def test_a_bare_python_gets_the_commands_that_install_packages(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    command = [tmp_path / "bare" / "bin" / "python", SCRIPT]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert re.fullmatch(rf"error: No module named '\w+'; pip install -r {ROOT}/requirements.txt\n", process.stderr)


def test_without_torch_the_other_checks_still_run(tmp_path):
    items = read_report(run_script(SCRIPT, cwd=tmp_path, **without_package(tmp_path, "torch")))
    lacking = ("missing", "No module named 'torch'", "pip install -r requirements.txt")
    assert items["GPU", "GPU"] == items["Rungs", "Rungs"] == lacking
    assert items["Packages", "numpy"][0] == "ok"


def test_versions_outside_the_ranges_of_a_copy_are_reported(tmp_path, monkeypatch):
    lightning = version("lightning")
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\ndependencies = ["not-there-yet[more]>=7", "lightning!={lightning}", "torch"]\n'
        '[project.optional-dependencies]\nextra = ["absent==1"]\n'
    )
    monkeypatch.setattr(doctor, "SRC", tmp_path / "src")
    python, *items = doctor.packages()
    assert python.status == "ok"
    assert items == [
        ("not-there-yet", "missing", "not installed", 'pip install "not-there-yet>=7"'),
        ("lightning", "missing", f"{lightning} is not !={lightning}", f'pip install "lightning!={lightning}"'),
        ("torch", "ok", version("torch"), ""),
        ("absent", "warn", "not installed, optional", 'pip install "absent==1"'),
    ]


def test_a_check_that_raises_prints_one_line(monkeypatch):
    def broken():
        yield doctor.Item("first", "ok", "fine")
        raise OSError("libc.so.6:\nno version")

    monkeypatch.setattr(doctor, "CHECKS", {"Data": (broken,)})
    assert [item[1:3] for _, item in doctor.report()] == [("ok", "fine"), ("missing", "OSError: libc.so.6: no version")]


@pytest.mark.parametrize(
    ("build", "listed", "visible", "status", "text", "fix"),
    [
        ("the CPU", "", None, "warn", "no GPU found: the rungs run on the CPU", "--gpus all"),
        (
            "the CPU",
            "GPU 0: A100",
            None,
            "missing",
            "torch is built for the CPU, but the driver lists",
            "another build",
        ),
        ("CUDA 13.0", "GPU 0: A100", "7", "missing", 'CUDA_VISIBLE_DEVICES="7" hides GPU 0: A100', "unset"),
        ("CUDA 13.0", "GPU 0: A100", None, "missing", "cannot use GPU 0: A100: too old", "update the driver"),
    ],
)
def test_the_reason_is_printed_if_torch_finds_no_gpu(monkeypatch, build, listed, visible, status, text, fix):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = doctor.no_gpu(build, listed, "too old")
    assert found.status == status
    assert text in found.text
    assert fix in found.fix


def test_gpus_and_the_driver_are_checked(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho GPU 0: A100; echo GPU 1: A100\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.driver_gpus() == "GPU 0: A100 GPU 1: A100"
    monkeypatch.setenv("PATH", "")
    assert doctor.driver_gpus() == ""
