"""scripts/doctor.py on complete, bare and broken installations."""

import contextlib
import http.server
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from importlib.metadata import version

import pytest
from support.helpers import ROOT, RUNGS, run_script, without_package

from fabric_ladder.tools import doctor

SCRIPT = ROOT / "scripts" / "doctor.py"
SHA = "0" * 40


def items(process):
    """Return the items of a --json run by section and name; the run itself must be clean."""
    assert (process.returncode, process.stderr) == (0, "")
    document = json.loads(process.stdout)
    assert document.keys() == {"format", "items"}
    for each in document["items"]:
        assert list(each) == ["section", "name", "status", "text", "fix"]
        assert each["status"] in ("ok", "warn", "slow", "missing")
        assert each["text"]
        assert "\n" not in each["text"]
        assert each["fix"] is None or each["status"] != "ok"
    named = {(each["section"], each["name"]): each for each in document["items"]}
    assert len(named) == len(document["items"])
    return named


def quick(folder, *args, script=SCRIPT, package="torch", **environment):
    """Run the script without torch, which takes a second."""
    hidden = folder / "hidden"
    hidden.mkdir(exist_ok=True)
    defaults = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "hub")}
    return run_script(script, *args, cwd=folder, **(without_package(hidden, package) | defaults | environment))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Everything is installed, but there is no compiler, and the home is empty."""
    folder = tmp_path_factory.mktemp("whole")
    places = {name: folder / name.lower() for name in ("HOME", "TMPDIR", "PATH", "CWD")}
    for place in places.values():
        place.mkdir()
    cwd = places.pop("CWD")
    environment = {name: str(place) for name, place in places.items()}
    process = run_script(SCRIPT, "--json", cwd=cwd, **environment, HF_HUB_OFFLINE="1", CXX="", CC="", XDG_CACHE_HOME="")
    assert not [path for place in (cwd, *places.values()) for path in place.iterdir()], "it leaves files behind"
    return items(process)


def test_every_package_and_every_rung_has_a_line(whole):
    requirements = re.findall(r"^([\w-]+).*==", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    packages = [name for section, name in whole if section == "Packages"]
    assert packages[: len(requirements)] == requirements
    assert {"deepspeed", "wandb", "tensorboard"} <= set(packages)
    assert [name for section, name in whole if section == "Rungs"] == [path.stem for path in RUNGS]
    sections = list(dict.fromkeys(section for section, _ in whole))
    assert sections == ["Python", "Packages", "Memory and disk", "Data and models", "GPU", "Extensions", "Rungs"]
    assert whole["Python", "fabric_ladder"]["text"] == f"in {ROOT}/src/fabric_ladder"
    free, total = re.match(r"([\d.]+) GB free of ([\d.]+) GB", whole["Memory and disk", "runs"]["text"]).groups()
    assert float(total) == pytest.approx(shutil.disk_usage(ROOT).total / 1e9, abs=0.006)
    assert float(free) <= float(total)


def test_without_a_compiler_only_what_needs_it_is_missing(whole):
    compiler = whole["Extensions", "torch.compile"]
    assert (compiler["status"], compiler["text"]) == ("missing", "there is no compiler g++")
    assert compiler["fix"] == "apt install g++ python3-dev, or set CXX"
    assert whole["Rungs", "3_torch_compile"]["text"] == "torch.compile: there is no compiler g++"
    assert whole["Extensions", "DeepSpeed offload"]["text"].startswith("ninja is not on the PATH: ")
    assert whole["Extensions", "bitsandbytes"]["status"] == "ok"
    missing = [name for (section, name), each in whole.items() if section == "Rungs" and each["status"] == "missing"]
    assert missing == ["3_torch_compile", "12_deepspeed_zero"]
    assert whole["Rungs", "12_deepspeed_zero"]["text"].startswith("12_deepspeed_zero needs a CUDA GPU")
    assert whole["Rungs", "4_mixed_precision"]["text"] == "can run the quickstart: 1 x cpu, bf16-mixed"


def test_a_bare_python_is_told_what_to_install(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    command = [tmp_path / "bare" / "bin" / "python", SCRIPT]
    process = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert (process.returncode, process.stdout) == (2, "")
    assert re.fullmatch(rf"error: No module named '\w+'; pip install -r {ROOT}/requirements.txt\n", process.stderr)


def test_without_torch_every_rung_has_its_fix_as_text_and_as_json(tmp_path):
    found = items(quick(tmp_path, "--json"))
    assert found["GPU", "torch"]["text"] == "No module named 'torch'"
    rungs = [each for (section, _), each in found.items() if section == "Rungs"]
    assert len(rungs) == len(RUNGS)
    assert {each["fix"] for each in rungs} == {"pip install -r requirements.txt"}
    text = quick(tmp_path).stdout
    for each in found.values():
        if "GB" not in each["text"]:
            fix = f" -> {each['fix']}" if each["fix"] else ""
            assert f"  {each['status']:<7}  {each['name']:<28}  {each['text']}{fix}\n" in text
    assert re.search(r"^\d+ ok, \d+ warn, 0 slow, \d+ missing\n\Z", text, re.MULTILINE)


def test_a_library_that_raises_aborts_or_prints_is_a_line(tmp_path):
    hidden = tmp_path / "hidden"
    for package, source in {
        "bitsandbytes": "import os\nprint('noise', flush=True)\nos.abort()",
        "deepspeed": "import sys\nprint('noise')\nprint('noise', file=sys.stderr)\nraise RuntimeError('two\\nlines')",
        "psutil": "raise OSError('libc.so.6: no version')",
    }.items():
        (hidden / package).mkdir(parents=True)
        (hidden / package / "__init__.py").write_text(source)
    found = items(quick(tmp_path, "--json"))
    aborting = found["Extensions", "bitsandbytes"]
    assert (aborting["status"], aborting["text"]) == ("missing", "ends Python with SIGABRT")
    assert aborting["fix"] == "python scripts/doctor.py --steps bitsandbytes shows more"
    assert found["Extensions", "DeepSpeed"]["text"] == "RuntimeError: two lines"
    assert found["Memory and disk", "memory"]["text"] == "unknown: libc.so.6: no version"
    assert [name for section, name in found if section == "Rungs"] == [path.stem for path in RUNGS]


def test_a_check_that_takes_too_long_is_slow_and_not_missing(tmp_path, monkeypatch):
    (tmp_path / "bitsandbytes.py").write_text("import time\ntime.sleep(600)")
    (tmp_path / "torch.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(doctor, "SECONDS", 5)
    ((step, found),) = doctor.run_steps(["bitsandbytes"], str(tmp_path))
    assert (step, found.status, found.text) == ("bitsandbytes", "slow", "took longer than 5 s, unknown")
    _, second = doctor.run_steps(["bitsandbytes", "2_grad_accum"], str(tmp_path))
    assert second[1][1:3] == ("slow", "not checked, because of bitsandbytes")


def test_pins_and_ranges_of_a_copy(tmp_path):
    """The copy has another pin, excludes a version, and needs another package."""
    copy = tmp_path / "copy"
    for name in ("src", "scripts", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    project = (ROOT / "pyproject.toml").read_text()
    project = re.sub(r'"lightning>=.*?"', f'"lightning>=2.6.1,!={version("lightning")}"', project)
    (copy / "pyproject.toml").write_text(project.replace('"torch>=', '"not-there-yet[more]>=7",\n  "torch>='))
    pins = re.sub(r"rich==.*", "rich==1.0.0", (ROOT / "requirements.txt").read_text())
    (copy / "requirements.txt").write_text(pins)
    found = items(quick(tmp_path, "--json", script=copy / "scripts" / "doctor.py"))

    def line(name):
        each = found["Packages", name]
        return each["status"], each["text"], each["fix"]

    rich, lightning = version("rich"), version("lightning")
    assert line("rich") == ("warn", f"{rich}, tested with 1.0.0", 'pip install "rich==1.0.0"')
    assert line("lightning")[:2] == ("missing", f"{lightning} is not >=2.6.1,!={lightning}")
    assert line("not-there-yet") == ("missing", "not installed", 'pip install "not-there-yet>=7"')
    assert line("numpy") == ("ok", version("numpy"), None)
    assert found["Python", "fabric_ladder"]["status"] == "warn"
    assert found["Python", "fabric_ladder"]["fix"] == f'pip install -e "{copy}"'


def cache_model(hub, name, *files, **contents):
    """Put a model into a cache as the Hub's library does."""
    home = hub / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(SHA)
    for file in files:
        (snapshot / file).write_text(contents.get(file.split(".")[0], "{}"))


def test_models_in_the_cache_of_the_hub_and_data_on_the_disk(tmp_path):
    cache_model(tmp_path / "hub", "bigscience/bloom-560m", "config.json", "model.safetensors")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "aclImdb_v1.tar.gz").write_bytes(b"")
    found = items(quick(tmp_path, "--json", FABRIC_LADDER_DATA=str(tmp_path / "data")))
    assert found["Data and models", "Hub"]["text"] == "HF_HUB_OFFLINE is set: only its cache is used"
    assert found["Data and models", "bigscience/bloom-560m"]["text"] == "in the cache"
    absent = found["Data and models", "google/vit-large-patch16-224"]
    assert (absent["status"], absent["text"]) == ("missing", "not in the cache")
    assert found["Data and models", "imdb"]["text"] == str(tmp_path / "data" / "aclImdb_v1.tar.gz")
    assert found["Data and models", "cifar10_subset.tar.gz"]["status"] == "missing"
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    online = {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "HF_ENDPOINT": address}
    with contextlib.closing(server.socket):
        found = items(quick(tmp_path, "--json", FABRIC_LADDER_DATA=str(tmp_path / "nowhere"), **online))
        server.shutdown()
    assert found["Data and models", "Hub"]["text"] == f"{address} answers"
    absent = found["Data and models", "google/vit-large-patch16-224"]
    assert (absent["status"], absent["text"]) == ("ok", "not in the cache: a run downloads it")
    assert found["Data and models", "imdb"]["text"].startswith(f"not in {tmp_path / 'nowhere'}: a run downloads it")


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    found = doctor.disk("cache", str(tmp_path / "file" / "cache"), "set it")
    assert found == ("cache", "missing", f"{tmp_path}/file/cache cannot be used: {tmp_path}/file is a file", "set it")
    (tmp_path / "locked").mkdir(mode=0o555)
    if not os.access(tmp_path / "locked", os.W_OK):  # root can write everywhere
        assert doctor.disk("runs", str(tmp_path / "locked" / "a"), "").text.endswith("is not writable")
    assert list((tmp_path / "locked").iterdir()) == []


def test_a_closed_pipe_is_not_an_error(tmp_path):
    environment = os.environ | without_package(tmp_path, "torch") | {"HF_HUB_OFFLINE": "1"}
    command = f"({sys.executable} {SCRIPT}; echo status $? >&2) | head -n 1"
    process = subprocess.run(["sh", "-c", command], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (process.stdout, process.stderr) == ("Python\n", "status 0\n")


def test_a_compiler_compiles_a_file(tmp_path):
    assert doctor.compiler_problem("g++", "c++") is None
    without_headers = tmp_path / "without_headers"
    without_headers.write_text(f"#!/bin/sh\nexec {shutil.which('g++')} -fsyntax-only -x c++ -\n")
    without_headers.chmod(0o755)
    assert re.match(f"{without_headers} fails: .*Python.h", doctor.compiler_problem(str(without_headers), "c++"))
    assert doctor.compiler_problem("false", "c").endswith("false fails: status 1")
    assert doctor.compiler_problem(str(tmp_path / "nowhere"), "c") == f"there is no compiler {tmp_path}/nowhere"


def test_a_driver_that_does_not_answer(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").symlink_to(shutil.which("false"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert doctor.nvidia_smi() == ([], "status 1")


A100 = ["NVIDIA A100", "NVIDIA A100"]


@pytest.mark.parametrize(
    ("torch", "driver", "visible", "status", "text", "fix"),
    [
        (("CUDA 13.0", True, None), (A100, None), None, "ok", "available to torch: CUDA 13.0", None),
        (("CUDA 13.0", True, "Found GPU0 which is too old"), (A100, None), None, "warn", "Found GPU0", "another build"),
        (("CPU", False, ""), ([], None), None, "warn", "no GPU found: the rungs run on the CPU", "--gpus all"),
        (("CPU", False, ""), ([], "status 1"), None, "missing", "nvidia-smi fails: status 1", "reinstall"),
        (("CPU", False, ""), (A100, None), None, "missing", "torch is built for CPU, but the driver", "another build"),
        (("CUDA 13.0", False, ""), (A100, None), "7", "missing", 'CUDA_VISIBLE_DEVICES="7" hides NVIDIA', "unset"),
        (("CUDA 13.0", False, "too old"), (A100, None), None, "missing", "A100: too old", "update the driver"),
    ],
)
def test_torch_and_the_driver(monkeypatch, torch, driver, visible, status, text, fix):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    found = doctor.driver_item(*torch, *driver)
    assert found.status == status
    assert text in found.text
    assert found.fix is None if fix is None else fix in found.fix
