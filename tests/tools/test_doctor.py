"""scripts/doctor.py on complete, bare and broken installations."""

import re
import subprocess
import sys
from importlib.metadata import version

import pytest
from support.helpers import ROOT, run_script, without_package

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


def test_a_complete_installation_without_a_compiler_and_without_a_network(tmp_path):
    proxies = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    more = {"CXX": "", "CC": "", "FABRIC_LADDER_CACHE": tmp_path / "not" / "yet", **proxies}
    items = read_report(run_script(SCRIPT, cwd=tmp_path, PATH=tmp_path, CUDA_VISIBLE_DEVICES="", **more))
    packages = [name for section, name in items if section == "Packages"]
    assert packages[:3] == ["Python", "torch", "lightning"]
    assert {"deepspeed", "wandb", "tensorboard"} <= set(packages)
    assert items["Packages", "numpy"] == ("ok", version("numpy"), None)
    assert items["GPU", "torch.compile"] == ("missing", "there is no compiler g++", "apt install g++ python3-dev")
    assert items["Machine", "Disk"][1].endswith(f" GB free in {tmp_path}")
    assert re.fullmatch(r"[\d.]+ GB free of [\d.]+ GB", items["Machine", "Memory"][1])
    status, text, fix = items["Machine", "Hub"]
    assert (status, text) == ("warn", "https://huggingface.co cannot be reached (ProxyError)")
    assert fix.startswith("check the network and https_proxy")
    assert not (tmp_path / "not").exists()


def test_a_bare_python_gets_the_commands_that_install_packages(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    command = [tmp_path / "bare" / "bin" / "python", SCRIPT]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert re.fullmatch(rf"error: No module named '\w+'; pip install -r {ROOT}/requirements.txt\n", process.stderr)


def test_without_torch_the_other_checks_still_run(tmp_path):
    items = read_report(run_script(SCRIPT, cwd=tmp_path, **without_package(tmp_path, "torch")))
    lacking = ("missing", "ModuleNotFoundError: No module named 'torch'", "pip install -r requirements.txt")
    assert items["GPU", "GPU"] == lacking
    assert items["Packages", "numpy"][0] == items["Machine", "Disk"][0] == "ok"


def test_versions_outside_the_ranges_of_a_copy_are_reported(tmp_path, monkeypatch):
    lightning = version("lightning")
    (tmp_path / "pyproject.toml").write_text(
        f'[project]\ndependencies = ["not-there-yet[more]>=7", "lightning!={lightning}", "torch"]\n'
        '[project.optional-dependencies]\nextra = ["absent==1"]\n'
    )
    monkeypatch.setattr(doctor, "SRC", tmp_path / "src")
    python, *items = doctor.packages()
    assert python[1] == "ok"
    assert items == [
        ("not-there-yet", "missing", "not installed", 'pip install "not-there-yet>=7"'),
        ("lightning", "missing", f"{lightning} is not !={lightning}", f'pip install "lightning!={lightning}"'),
        ("torch", "ok", version("torch"), ""),
        ("absent", "warn", "not installed, optional", 'pip install "absent==1"'),
    ]


def test_a_check_that_raises_prints_one_line(monkeypatch):
    def broken():
        yield doctor.item("first", "fine")
        raise OSError("libc.so.6:\nno version")

    monkeypatch.setattr(doctor, "packages", broken)
    found = [item[1:3] for section, item in doctor.report() if section == "Packages"]
    assert found == [("ok", "fine"), ("missing", "OSError: libc.so.6: no version")]


@pytest.mark.parametrize(
    ("listed", "visible", "status", "text", "fix"),
    [
        (None, None, "warn", "none found: the rungs run on the CPU", "--gpus all"),
        ("GPU 0: A100", "7", "missing", 'CUDA_VISIBLE_DEVICES="7" hides GPU 0: A100', "unset"),
        ("GPU 0: A100; echo GPU 1: A100", None, "missing", "(built for the CPU) cannot use GPU 0: A100 GPU 1: A100",
         "another build"),
    ],
)  # fmt: skip
def test_the_reason_is_printed_if_torch_finds_no_gpu(tmp_path, monkeypatch, listed, visible, status, text, fix):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    if listed:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\necho {listed}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = doctor.no_gpu("the CPU")
    assert (found[0], found[1]) == ("GPU", status)
    assert text in found[2]
    assert fix in found[3]
