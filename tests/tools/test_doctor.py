"""scripts/doctor.py: true lines about machines that are whole, bare or broken, and no other lines."""

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
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient
from support.helpers import ROOT, RUNGS, run_script, without_package

from fabric_ladder.tools import hardware
from fabric_ladder.tools.doctor import cgroup_limit

SCRIPT = ROOT / "scripts" / "doctor.py"
ASKED = Path(hardware.__file__)
CONFIGS = ROOT / "configs"
SHA = "0" * 40


def items(process):
    """The items of a --json run by their names; the run itself must be clean."""
    assert (process.returncode, process.stderr) == (0, "")
    document = json.loads(process.stdout)
    assert document.keys() == {"format", "items"}
    assert document["format"] == 2
    for one in document["items"]:
        assert list(one) == ["section", "name", "status", "text", "fix"]
        assert one["status"] in ("ok", "warn", "missing")
        assert one["text"]
        assert "\n" not in one["text"]
        assert one["fix"] is None or one["status"] != "ok"
    named = {(one["section"], one["name"]): one for one in document["items"]}
    assert len(named) == len(document["items"])
    return named


def quick(folder, *args, script=SCRIPT, package="torch", **environment):
    """Run the script where torch cannot be imported, which takes a second."""
    hidden = folder / "hidden"
    hidden.mkdir(exist_ok=True)
    defaults = {"HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(folder / "hub")}
    return run_script(script, *args, cwd=folder, **(without_package(hidden, package) | defaults | environment))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run with everything that is installed, but no compiler, in an empty home."""
    folder = tmp_path_factory.mktemp("whole")
    places = {name: folder / name.lower() for name in ("HOME", "TMPDIR", "PATH", "CWD")}
    for place in places.values():
        place.mkdir()
    cwd = places.pop("CWD")
    environment = {name: str(place) for name, place in places.items()}
    process = run_script(SCRIPT, "--json", cwd=cwd, **environment, HF_HUB_OFFLINE="1", CXX="", CC="", XDG_CACHE_HOME="")
    assert not [path for place in (cwd, *places.values()) for path in place.iterdir()], "it leaves files behind"
    return items(process)


def test_all_that_is_installed_and_each_rung_have_a_line(whole):
    requirements = re.findall(r"^([\w-]+).*==", (ROOT / "requirements.txt").read_text(), re.MULTILINE)
    packages = [name for section, name in whole if section == "Packages"]
    assert packages[: len(requirements)] == requirements
    assert {"deepspeed", "wandb", "tensorboard"} <= set(packages)
    assert [name for section, name in whole if section == "Rungs"] == [path.stem for path in RUNGS]
    sections = list(dict.fromkeys(section for section, _ in whole))
    expected = ["Python", "Packages", "Memory and disk", "Data and models", "GPU", "Extensions", "Rungs"]
    assert sections == expected
    assert whole["Python", "Python"]["status"] == "ok"
    assert whole["Python", "fabric_ladder"]["text"] == f"in {ROOT}/src/fabric_ladder"


def test_figures_are_those_of_the_system(whole):
    import psutil

    free, total = re.search(r"([\d.]+) GB .* of ([\d.]+) GB", whole["Memory and disk", "memory"]["text"]).groups()
    assert float(total) <= psutil.virtual_memory().total / 1e9 + 0.005
    assert 0 < float(free) <= float(total)
    free, total = re.match(r"([\d.]+) GB free of ([\d.]+) GB", whole["Memory and disk", "runs"]["text"]).groups()
    assert float(total) == pytest.approx(shutil.disk_usage(ROOT).total / 1e9, abs=0.006)
    assert float(free) == pytest.approx(shutil.disk_usage(ROOT).free / 1e9, abs=1)


def test_what_needs_a_compiler_is_missing_without_one_and_the_rest_is_not(whole):
    compiler = whole["Extensions", "torch.compile"]
    assert (compiler["status"], compiler["text"]) == ("missing", "there is no compiler g++")
    assert compiler["fix"] == "apt install g++, or set CXX"
    rung = whole["Rungs", "3_torch_compile"]
    assert rung == compiler | {"section": "Rungs", "name": rung["name"], "text": f"torch.compile: {compiler['text']}"}
    adam = whole["Extensions", "DeepSpeed CPU Adam"]
    assert adam["status"] == "warn"
    assert adam["text"].startswith("ninja is not on the PATH: PyTorch's slower Adam")
    assert whole["Extensions", "DeepSpeed NVMe offload"]["status"] == "missing"
    assert whole["Extensions", "bitsandbytes"]["status"] == "ok"
    missing = [name for (section, name), one in whole.items() if section == "Rungs" and one["status"] == "missing"]
    assert missing == ["3_torch_compile", "12_deepspeed_zero"]
    assert whole["Rungs", "12_deepspeed_zero"]["text"].startswith("12_deepspeed_zero needs a CUDA GPU")
    assert whole["Rungs", "4_mixed_precision"]["text"] == "can run the quickstart: 1 x cpu, bf16-mixed"


def test_the_text_says_what_the_json_says(tmp_path):
    said = items(quick(tmp_path, "--json"))
    process = quick(tmp_path)
    assert (process.returncode, process.stderr) == (0, "")
    expected, last = [], None
    for (section, name), one in said.items():
        expected += [section] * (section != last)
        fix = f" -> {one['fix']}" if one["fix"] else ""
        expected.append(f"  {one['status']:<7}  {name:<28}  {one['text']}{fix}")
        last = section
    counts = {status: sum(one["status"] == status for one in said.values()) for status in ("ok", "warn", "missing")}
    expected.append(", ".join(f"{count} {status}" for status, count in counts.items()))
    figures = re.compile(r"[\d.]+ GB")
    assert figures.sub("GB", process.stdout) == figures.sub("GB", "\n".join(expected) + "\n")


def test_a_bare_python_is_told_what_to_install(tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True)
    process = subprocess.run(
        [tmp_path / "bare" / "bin" / "python", SCRIPT, "--json"], cwd=tmp_path, capture_output=True, text=True
    )
    said = items(process)
    packages = [one for (section, _), one in said.items() if section == "Packages"]
    assert {one["status"] for one in packages} == {"missing"}
    torch = re.search(r"^torch==.*", (ROOT / "requirements.txt").read_text(), re.MULTILINE).group()
    assert said["Packages", "torch"]["fix"] == f'pip install "{torch}"'
    assert said["Packages", "wandb"]["text"] == "not installed, optional"
    assert said["GPU", "torch"]["text"] == "No module named 'torch'"
    assert said["Memory and disk", "memory"]["text"] == "not known: No module named 'psutil'"
    rungs = [one for (section, _), one in said.items() if section == "Rungs"]
    assert len(rungs) == len(RUNGS)
    assert {one["fix"] for one in rungs} == {"pip install -r requirements.txt"}


def test_a_library_that_raises_aborts_or_talks_is_a_line(tmp_path):
    hidden = tmp_path / "hidden"
    for package, source in {
        "bitsandbytes": "import os\nprint('noise', flush=True)\nos.abort()",
        "deepspeed": "import sys\nprint('noise')\nprint('noise', file=sys.stderr)\nraise RuntimeError('two\\nlines')",
        "psutil": "raise OSError('libc.so.6: no version')",
        "platformdirs": "raise SyntaxError",
    }.items():
        (hidden / package).mkdir(parents=True)
        (hidden / package / "__init__.py").write_text(source)
    said = items(quick(tmp_path, "--json"))
    aborting = said["Extensions", "bitsandbytes"]
    assert (aborting["status"], aborting["text"]) == ("missing", "ends Python with SIGABRT")
    assert aborting["fix"] == f"python -P {ASKED} bitsandbytes shows more"
    assert said["Extensions", "DeepSpeed"]["text"] == "RuntimeError: two lines"
    assert said["Memory and disk", "memory"]["text"] == "not known: libc.so.6: no version"
    assert said["Memory and disk", "cache"]["status"] == "missing"
    assert said["Memory and disk", "Hub cache"]["status"] == "ok"
    assert said["GPU", "torch"]["text"] == "No module named 'torch'"
    assert [name for section, name in said if section == "Rungs"] == [path.stem for path in RUNGS]


def test_pins_and_ranges_of_a_copy(tmp_path):
    """In the copy of another day: another pin, a version that is excluded, a package that is new, a newer Python."""
    copy = tmp_path / "copy"
    ignored = shutil.ignore_patterns("__pycache__")
    for name in ("src", "scripts", "configs"):
        shutil.copytree(ROOT / name, copy / name, ignore=ignored)
    project = (ROOT / "pyproject.toml").read_text()
    project = re.sub(r'"lightning>=.*?"', f'"lightning>=2.6.1,!={version("lightning")}"', project)
    project = project.replace('"torch>=', '"not-there-yet[more]>=7",\n  "torch>=')
    (copy / "pyproject.toml").write_text(re.sub(r'(requires-python = )".*"', r'\1">=3.99"', project))
    pins = re.sub(r"rich==.*", "rich==1.0.0", (ROOT / "requirements.txt").read_text())
    (copy / "requirements.txt").write_text(pins)
    said = items(quick(tmp_path, "--json", script=copy / "scripts" / "doctor.py"))

    def line(name):
        one = said["Packages", name]
        return one["status"], one["text"], one["fix"]

    rich, lightning = version("rich"), version("lightning")
    assert line("rich") == ("warn", f"{rich}, tested with 1.0.0", 'pip install "rich==1.0.0"')
    assert line("lightning")[:2] == ("missing", f"{lightning} is not >=2.6.1,!={lightning}")
    assert line("not-there-yet") == ("missing", "not installed", 'pip install "not-there-yet>=7"')
    assert line("numpy") == ("ok", version("numpy"), None)
    assert said["Python", "Python"]["status"] == "missing"
    assert said["Python", "Python"]["text"].endswith("is not >=3.99")
    assert said["Python", "fabric_ladder"]["status"] == "warn"
    assert said["Python", "fabric_ladder"]["fix"] == f'pip install -e "{copy}"'
    (copy / "requirements.txt").unlink()
    said = items(quick(tmp_path, "--json", script=copy / "scripts" / "doctor.py"))
    assert line("rich") == ("ok", rich, None)
    assert line("lightning")[0] == "missing"


def cache_model(hub, name, *files, **contents):
    """Put a model into a cache as the Hub's library lays it out."""
    home = hub / f"models--{name.replace('/', '--')}"
    snapshot = home / "snapshots" / SHA
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(SHA)
    for file in files:
        (snapshot / file).write_text(contents.get(file.split(".")[0], "{}"))


def test_models_in_the_hub_s_cache_and_data_on_the_disk(tmp_path):
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}})
    sharded = ("config.json", "model.safetensors.index.json", "model-1.safetensors")
    cache_model(tmp_path / "hub", "bigscience/bloom-560m", "config.json", "model.safetensors")
    cache_model(tmp_path / "hub", "bigscience/bloomz-7b1-mt", *sharded, model=index)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "aclImdb_v1.tar.gz").write_bytes(b"")
    said = items(quick(tmp_path, "--json", FABRIC_LADDER_DATA=str(tmp_path / "data")))
    assert said["Data and models", "Hub"]["text"] == "HF_HUB_OFFLINE is set: its cache alone"
    assert said["Data and models", "bigscience/bloom-560m"]["text"] == "in the cache"
    half = said["Data and models", "bigscience/bloomz-7b1-mt"]
    assert (half["status"], half["text"]) == ("missing", "not in the cache (no weights)")
    absent = said["Data and models", "google/vit-large-patch16-224"]
    assert (absent["status"], absent["text"]) == ("missing", "not in the cache (no config.json)")
    assert said["Data and models", "imdb"]["text"] == str(tmp_path / "data" / "aclImdb_v1.tar.gz")
    assert said["Data and models", "cifar10_subset.tar.gz"]["status"] == "missing"
    (tmp_path / "hub" / f"models--bigscience--bloomz-7b1-mt/snapshots/{SHA}/model-2.safetensors").write_text("")
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    online = {"HF_HUB_OFFLINE": "0", "NO_PROXY": "127.0.0.1", "FABRIC_LADDER_DATA": str(tmp_path / "nowhere")}
    with contextlib.closing(server.socket):
        address = f"http://127.0.0.1:{server.server_port}"
        said = items(quick(tmp_path, "--json", HF_ENDPOINT=address, **online))
        server.shutdown()
    assert said["Data and models", "Hub"]["text"] == f"{address} answers"
    assert said["Data and models", "bigscience/bloomz-7b1-mt"]["text"] == "in the cache"
    absent = said["Data and models", "google/vit-large-patch16-224"]
    assert (absent["status"], absent["text"]) == ("ok", "not in the cache (no config.json): a run downloads it")
    assert said["Data and models", "imdb"]["text"].startswith(f"not in {tmp_path / 'nowhere'}: a run downloads it")
    said = items(quick(tmp_path, "--json", HF_ENDPOINT=address, **online))  # nobody listens there any more
    assert said["Data and models", "Hub"]["text"] == f"{address} does not answer (ConnectionError): its cache alone"
    assert said["Data and models", "google/vit-large-patch16-224"]["status"] == "missing"


def test_folders_that_cannot_be_used(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "locked").mkdir(mode=0o555)
    environment = {
        "FABRIC_LADDER_CACHE": str(tmp_path / "file" / "cache"),
        "HF_HUB_CACHE": str(tmp_path / "locked" / "a"),
    }
    said = items(quick(tmp_path, "--json", **environment))
    cache = said["Memory and disk", "cache"]
    assert cache["status"] == "missing"
    assert cache["text"] == f"{tmp_path}/file/cache cannot be used: {tmp_path}/file is a file"
    assert cache["fix"] == "set FABRIC_LADDER_CACHE"
    hub = said["Memory and disk", "Hub cache"]
    if os.access(tmp_path / "locked", os.W_OK):  # root writes everywhere
        assert hub["status"] == "ok"
    else:
        assert hub["text"] == f"{tmp_path}/locked/a cannot be used: {tmp_path}/locked cannot be written"
    assert list((tmp_path / "locked").iterdir()) == []


def test_a_small_dev_shm_and_a_disk_that_is_read_only(tmp_path):
    """As Docker mounts them, in a mount namespace of its own."""
    (tmp_path / "cache").mkdir()
    mounts = f"mount -t tmpfs -o size=64m none /dev/shm && mount -t tmpfs -o ro none {tmp_path}/cache"
    namespace = ["unshare", "--mount", "sh", "-c"]
    try:
        subprocess.run([*namespace, mounts], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs the right to mount ({error})")
    environment = os.environ | without_package(tmp_path, "torch") | {"HF_HUB_OFFLINE": "1"}
    environment["FABRIC_LADDER_CACHE"] = str(tmp_path / "cache" / "mine")
    command = [*namespace, f"{mounts} && exec {sys.executable} {SCRIPT} --json"]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    said = items(process)
    shared = said["Memory and disk", "/dev/shm"]
    assert shared["status"] == "warn"
    assert shared["text"].startswith("0.07 GB free of 0.07 GB: NCCL and --num_workers may fail")
    cache = said["Memory and disk", "cache"]
    assert cache["status"] == "missing"
    assert cache["text"] == f"{tmp_path}/cache/mine cannot be used: {tmp_path}/cache cannot be written"


def test_a_notebook_is_told(tmp_path):
    environment = without_package(tmp_path, "torch")
    command = f"!PYTHONPATH={environment['PYTHONPATH']} HF_HUB_OFFLINE=1 {sys.executable} {SCRIPT}"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(command)])
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = "".join(output.text for output in notebook.cells[0].outputs)
    assert re.search(r"^  ok       notebook +yes: its kernel runs on one device", text, re.MULTILINE)
    assert re.search(r"^\d+ ok, \d+ warn, \d+ missing\r?\n\Z", text, re.MULTILINE)


@pytest.mark.parametrize("arguments", [["--jsn"], ["everything"], ["--json=yes"]])
def test_bad_arguments_are_one_line(tmp_path, arguments):
    process = run_script(SCRIPT, *arguments, cwd=tmp_path)
    assert (process.returncode, process.stdout) == (2, "")
    assert re.fullmatch(r"error: .* \(see --help\)\n", process.stderr)


def executable(path, line):
    path.write_text(f"#!/bin/sh\n{line}\n")
    path.chmod(0o755)
    return str(path)


def test_a_reader_that_goes_away_is_no_error(tmp_path):
    environment = os.environ | without_package(tmp_path, "torch") | {"HF_HUB_OFFLINE": "1"}
    command = f"{sys.executable} {SCRIPT}; echo status $? >&2"
    process = subprocess.run(
        ["sh", "-c", f"({command}) | head -n 1"], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert (process.stdout, process.stderr) == ("Python\n", "status 0\n")


def test_a_compiler_is_tried_not_only_found(tmp_path, monkeypatch):
    compiler = hardware.compiler
    monkeypatch.delenv("CXX", raising=False)
    path, problem, fix = compiler("CXX", ("g++",), "c++")
    assert (path, problem) == (shutil.which("g++"), None)
    without_headers = executable(tmp_path / "without_headers", f"exec {path} -fsyntax-only -x c++ -")
    monkeypatch.setenv("CXX", without_headers)
    _, problem, fix = compiler("CXX", ("g++",), "c++")
    assert problem == f"{without_headers} finds no Python.h"
    assert fix == "install this Python's headers: apt install python3-dev"
    without_libc = executable(tmp_path / "without_libc", f'exec {path} -nostdinc "$@"')
    for broken, reason in ((shutil.which("false"), "status 1"), (without_libc, ".*No such file or directory.*")):
        monkeypatch.setenv("CXX", broken)
        _, problem, fix = compiler("CXX", ("g++",), "c++")
        assert re.fullmatch(f"{broken} compiles nothing: {reason}", problem)
        assert fix == "apt install g++, or set CXX"
    monkeypatch.setenv("CXX", str(tmp_path / "nowhere"))
    assert compiler("CXX", ("g++",), "c++")[1] == f"there is no compiler {tmp_path}/nowhere"


# What this machine is not


def test_a_driver_that_does_not_answer(tmp_path, monkeypatch):
    (tmp_path / "nvidia-smi").symlink_to(shutil.which("false"))
    monkeypatch.setenv("PATH", str(tmp_path))
    driver = hardware.nvidia_driver()
    assert driver["problem"] == "status 1"
    name, status, text, fix = hardware.diagnose_cuda(None, driver)
    assert (name, status, text) == ("CUDA", "missing", "nvidia-smi fails: status 1")
    assert fix == "install NVIDIA's driver anew, and restart"


CPU = {"build": "CPU", "cuda": None, "available": False, "reason": "not compiled with CUDA", "warnings": []}
CUDA = CPU | {"build": "CUDA 13.0", "cuda": "13.0", "reason": "No CUDA GPUs are available"}
ROCM = CPU | {"build": "ROCm 7.0"}
NONE = {"gpus": [], "version": None, "problem": None, "cuda": None, "amd": False}
A100 = {"gpus": ["NVIDIA A100", "NVIDIA A100"], "version": "580.65.06", "problem": None, "cuda": (13, 0), "amd": False}
SEEN = "driver 580.65.06 (CUDA up to 13.0) sees NVIDIA A100, NVIDIA A100"


@pytest.mark.parametrize(
    ("torch", "driver", "visible", "status", "text", "fix"),
    [
        (CUDA | {"available": True}, A100, None, "ok", SEEN, None),
        (CUDA | {"available": True}, NONE, None, "ok", "available", None),
        (
            CUDA | {"available": True, "warnings": ["Found GPU0 which is too old"]},
            A100,
            None,
            "warn",
            "Found GPU0",
            "anoth",
        ),
        (CPU, NONE, None, "warn", "no GPU is seen: the rungs run on the CPU", "--gpus all"),
        (None, NONE, None, "warn", "no GPU is seen: the rungs run on the CPU", "--gpus all"),
        (None, A100, None, "ok", f"{SEEN}; torch is not there to use it", None),
        (CPU, A100, None, "missing", f"torch is built for CPU, though {SEEN}", "another build of torch"),
        (CUDA, A100 | {"cuda": (12, 8)}, None, "missing", "the driver is too old for torch's CUDA 13.0", "update"),
        (CUDA | {"cuda": "12.9"}, A100 | {"cuda": (12, 2)}, None, "missing", "torch cannot use what", "restart"),
        (
            CUDA | {"reason": "The NVIDIA driver on your system is too old (found version 12020)."},
            A100 | {"cuda": None},
            None,
            "missing",
            "the driver is too old for torch's CUDA 13.0: driver 580.65.06 (an unknown CUDA)",
            "update the driver",
        ),
        (CUDA, A100, "", "missing", 'CUDA_VISIBLE_DEVICES="" leaves torch no GPU', "unset CUDA_VISIBLE_DEVICES"),
        (CUDA, A100, "7", "missing", 'CUDA_VISIBLE_DEVICES="7" leaves torch no GPU', "unset CUDA_VISIBLE_DEVICES"),
        (CUDA, A100, None, "missing", f"torch cannot use what {SEEN}: No CUDA GPUs are available", "restart"),
        (
            ROCM,
            NONE,
            None,
            "warn",
            "no GPU is seen (not compiled with CUDA): the rungs run on the CPU",
            "--device /dev/kfd",
        ),
        (ROCM | {"available": True}, NONE | {"amd": True}, None, "ok", "available", None),
        (CPU, NONE | {"amd": True}, None, "missing", "there is an AMD GPU; torch is built for CPU", "another build"),
        (None, NONE | {"amd": True}, None, "missing", "there is an AMD GPU; torch is built for nothing yet", "another"),
    ],
)
def test_what_is_between_torch_and_the_gpus(monkeypatch, torch, driver, visible, status, text, fix):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    _, found, said, advice = hardware.diagnose_cuda(torch, driver)
    assert found == status
    assert text in said
    assert advice is None if fix is None else fix in advice


def test_an_amd_gpu_and_apple_s_are_named():
    """Stand-ins for torch, since no test has such a GPU."""
    gpu = SimpleNamespace(name="AMD Instinct MI300X", gcnArchName="gfx942", major=9, minor=4)
    cuda = SimpleNamespace(
        device_count=lambda: 1, get_device_properties=lambda _: gpu, mem_get_info=lambda _: (150e9, 200e9)
    )
    amd = SimpleNamespace(version=SimpleNamespace(hip="7.0"), cuda=cuda)
    first, second = hardware.gpu_items(amd)
    assert first == ("GPU 0", "ok", "AMD Instinct MI300X, 150.00 GB free of 200.00 GB, gfx942", None)
    assert second[:2] == ("bfloat16", "ok")
    mps = SimpleNamespace(recommended_max_memory=lambda: 12e9)
    for available, status, text in ((True, "ok", "Apple's GPU, up to 12.00 GB"), (False, "warn", "torch does not see")):
        backends = SimpleNamespace(mps=SimpleNamespace(is_available=lambda available=available: available))
        found = hardware.apple_item(SimpleNamespace(backends=backends, mps=mps))
        assert found[:2] == ("MPS", status)
        assert found[2].startswith(text)


def cgroup_files(folder, limit, used, dropped=0, version=2):
    names = ("memory.max", "memory.current", "inactive_file")
    if version == 1:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / names[0]).write_text(f"{limit}\n")
    (folder / names[1]).write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 7\n{names[2]} {dropped}\nfile 9\n")


def test_the_limit_of_a_control_group(tmp_path):
    limit = cgroup_limit
    assert limit("0::/\n", tmp_path) is None
    cgroup_files(tmp_path / "pods" / "mine", 4_000_000_000, 900, 100)
    cgroup_files(tmp_path / "pods", "max", 2000)
    assert limit("0::/pods/mine\n", tmp_path) == (4_000_000_000, 800)
    cgroup_files(tmp_path / "pods", 3_000_000_000, 2000)
    assert limit("0::/pods/mine\n", tmp_path) == (3_000_000_000, 2000), "the lowest on the way up counts"
    assert limit("0::/elsewhere\n", tmp_path) is None
    cgroup_files(tmp_path, 5_000_000_000, 70)
    assert limit("0::/not/mounted/here\n", tmp_path) == (5_000_000_000, 70), "a container sees its own group as the top"
    version_1 = tmp_path / "version_1"
    cgroup_files(version_1 / "memory", 2**63 - 4096, 50, version=1)
    cgroup_files(version_1 / "memory" / "docker" / "a", 2_000_000_000, 60, 10, version=1)
    lines = "9:name=systemd:/\n4:cpu,memory:/docker/a\n1:cpuset:/x:y\n0::/\n"
    assert limit(lines, version_1) == (2_000_000_000, 50)
    assert limit(lines.replace("/docker/a", "/docker/b"), version_1) == (2**63 - 4096, 50)
    assert limit("", version_1) is None
