"""Check this machine: packages, memory, disk, data, GPU and libraries, and every rung. Each problem comes with a fix.

The first checks use only the standard library where they can. Checks that import torch run in a second process, because
libraries can hang or abort.
"""

import importlib.metadata
import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import threading
import tomllib
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from fabric_ladder.places import CONFIGS, PACKAGE, SCRIPTS, SRC

SECONDS = 180  # limit of a check; imports from a cold network disk take a minute
LEAST_MEMORY = 2e9  # bytes; the quickstart needs up to 1.1 GB
LEAST_SHARED = 1e9  # bytes; Docker's default is 64 MB, NCCL's documentation advises 1 GB
LEAST_DISK = 7e9  # bytes; a checkpoint of BLOOM-560m with Adam's state has 6.7 GB
OTHER_TORCH = "install another build of torch: https://pytorch.org/get-started/locally/"
ROOT = SRC.parent


class Item(NamedTuple):
    """One line of the report.

    Attributes:
        name: The subject.
        status: `ok`, `warn`, `missing`, or `slow` if the check did not end in time.
        text: The finding.
        fix: The remedy, unless the status is `ok`.
    """

    name: str
    status: str
    text: str
    fix: str | None = None


def item(name: str, good: str, problem: str | None = None, fix: str | None = None, status: str = "missing") -> Item:
    """Return an item: `ok` with the text `good`, or the problem with its status and fix."""
    return Item(name, status, problem, fix) if problem else Item(name, "ok", good)


def brief(error: object) -> str:
    """Return an error or a text as one short line."""
    return " ".join(str(error).split())[:200]


def python(installed: str | None) -> Iterator[Item]:
    """Check the version of Python, and whether `import fabric_ladder` finds this copy.

    Args:
        installed: The file that this import finds, if it finds one.
    """
    text = f"{platform.python_version()}, {sys.executable}"
    yield item("Python", text, f"{text}: too new" if sys.version_info >= (3, 14) else None, "use Python 3.11 to 3.13")
    fix = f'pip install -e "{ROOT}"'
    if not installed:
        yield item("fabric_ladder", "", "not installed", fix)
    else:
        other = None if Path(installed).resolve().parent == PACKAGE else f"in {installed}, not in {PACKAGE}"
        yield item("fabric_ladder", f"in {PACKAGE}", other, fix, "warn")


def requirements() -> tuple[dict[str, str], dict[str, str], dict[str, str]]:
    """Return version ranges of required packages, pins of optional ones, and tested pins, by package."""
    if (ROOT / "pyproject.toml").is_file():
        project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        needed = project["dependencies"]
        optional = [line for extra in project["optional-dependencies"].values() for line in extra]
    else:
        lines = importlib.metadata.requires("fabric-ladder") or []
        needed = [line for line in lines if "extra ==" not in line]
        optional = [line.split(";")[0].strip() for line in lines if "extra ==" in line]
    pins = ROOT / "requirements.txt"
    tested = [line for line in pins.read_text(encoding="utf-8").splitlines() if "==" in line] if pins.is_file() else []

    def split(lines: list[str]) -> dict[str, str]:
        return dict(re.match(r"([\w.-]*)(?:\[.*?\])?(.*)", line).groups() for line in lines)

    return split(needed), split(optional), split(tested)


def packages() -> Iterator[Item]:
    """Compare installed packages with the project's ranges and tested pins."""
    needed, optional, tested = requirements()
    for name in {**tested, **needed, **optional}:
        pin = tested.get(name) or optional.get(name)
        wanted = needed.get(name, "")
        fix = f'pip install "{name}{pin or wanted}"'
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield item(name, "", "not installed" + ", optional" * (name in optional), fix)
            continue
        try:
            from packaging.specifiers import SpecifierSet

            fits = SpecifierSet(wanted).contains(found, prereleases=True)
        except ImportError:
            fits = True
        if not fits:
            yield item(name, "", f"{found} is not {wanted}", fix)
            continue
        other = pin and found.split("+")[0] != pin[2:]
        yield item(name, found, f"{found}, tested with {pin[2:]}" if other else None, fix, "warn")


def memory() -> Iterator[Item]:
    """Check CPU memory, and the memory that processes share."""
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        text = f"{usage.free / 1e9:.2f} GB free of {usage.total / 1e9:.2f} GB"
        problem = f"{text}: NCCL and --num_workers may fail" if usage.free < LEAST_SHARED else None
        yield item("/dev/shm", text, problem, "docker run --ipc=host, or --shm-size=8g", "warn")
    import psutil

    memory = psutil.virtual_memory()
    text = f"{memory.available / 1e9:.2f} GB available of {memory.total / 1e9:.2f} GB"
    problem = f"{text}: barely enough" if memory.available < LEAST_MEMORY else None
    yield item("memory", text, problem, "close other programs", "warn")


def disks() -> Iterator[Item]:
    """Check the folders of runs, of the cache and of the Hub's cache."""
    import platformdirs
    from huggingface_hub import constants

    cache = os.environ.get("FABRIC_LADDER_CACHE") or platformdirs.user_cache_dir("fabric_ladder")
    yield disk("runs", "runs", "use --runs_dir")
    yield disk("cache", cache, "set FABRIC_LADDER_CACHE")
    yield disk("Hub cache", constants.HF_HUB_CACHE, "set HF_HOME")


def disk(name: str, folder: str, fix: str) -> Item:
    """Check whether a folder is writable, or can be made, and the free space there."""
    path = Path(folder).expanduser().absolute()
    existing = next(parent for parent in (path, *path.parents) if os.path.exists(parent))
    if not existing.is_dir():
        return item(name, "", f"{path} cannot be used: {existing} is a file", fix)
    if not os.access(existing, os.W_OK | os.X_OK):
        return item(name, "", f"{path} cannot be used: {existing} is not writable", fix)
    usage = shutil.disk_usage(existing)
    text = f"{usage.free / 1e9:.2f} GB free of {usage.total / 1e9:.2f} GB, {path}"
    return item(name, text, f"{text}: little" if usage.free < LEAST_DISK else None, fix, "warn")


def data() -> Iterator[Item]:
    """Find the data files of the project's configs."""
    folder = Path(os.environ.get("FABRIC_LADDER_DATA") or "data")
    files = {name: (name,) for name in _named_in_configs("dataset") if "/" not in name and "." in name}
    for name, wanted in {"imdb": ("aclImdb", "aclImdb_v1.tar.gz"), **files}.items():
        paths = (parent / file for parent in (folder, Path()) for file in wanted)
        found = next((str(path.absolute()) for path in paths if path.exists()), None)
        problem = f"not in {folder.absolute()}" + (": a run downloads it there (84 MB)" if name == "imdb" else "")
        fix = f"set FABRIC_LADDER_DATA to a folder with {wanted[-1]}"
        yield item(name, found, None if found else problem, fix)


def hub() -> Iterator[Item]:
    """Check the connection to the Hugging Face Hub, and which models of the project's configs are in its cache."""
    import requests
    from huggingface_hub import constants, try_to_load_from_cache

    problem = None
    fix = "check network and proxy; HF_HUB_OFFLINE=1 uses the cache without waiting"
    if constants.HF_HUB_OFFLINE:
        problem = "HF_HUB_OFFLINE is set: only its cache is used"
        fix = "unset HF_HUB_OFFLINE"
    else:
        try:
            requests.head(constants.ENDPOINT, timeout=5)
        except requests.RequestException as error:
            problem = f"{constants.ENDPOINT} does not answer ({type(error).__name__}): only its cache is used"
    yield item("Hub", f"{constants.ENDPOINT} answers", problem, fix, "warn")
    weights = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
    for name in _named_in_configs("model"):
        if (CONFIGS / name).exists():
            continue
        cached = any(isinstance(try_to_load_from_cache(name, file), str) for file in weights)
        text = "in the cache" if cached else "not in the cache: a run downloads it"
        lacking = None if cached or not problem else "not in the cache"
        yield item(name, text, lacking, f"hf download {name} on a machine with network; or --model FOLDER")


def _named_in_configs(setting: str) -> list[str]:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in sorted(CONFIGS.glob("*.yaml")))
    return list(dict.fromkeys(re.findall(rf"^{setting}: (\S+)", texts, re.MULTILINE)))


def gpus() -> Iterator[Item]:
    """Check torch, the driver, and each GPU."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    build = f"ROCm {torch.version.hip}" if torch.version.hip else build
    yield item("torch", f"{torch.__version__}, built for {build}")
    if sys.platform == "darwin":
        problem = None if torch.backends.mps.is_available() else "torch does not find Apple's GPU"
        yield item("MPS", "Apple's GPU: --accelerator mps", problem, "it needs Apple silicon and macOS 14", "warn")
        return
    reason = ""
    with warnings.catch_warnings(record=True) as caught:  # torch only warns about old drivers and GPUs
        warnings.simplefilter("always")
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            reason = brief(error)
        available = torch.cuda.is_available()
    warning = next((brief(each.message) for each in caught if issubclass(each.category, UserWarning)), None)
    yield driver_item(build, available, reason or warning, *nvidia_smi())
    for index in range(torch.cuda.device_count() if available else 0):
        gpu = torch.cuda.get_device_properties(index)
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:
            yield item(f"GPU {index}", "", f"{gpu.name}: {brief(error)}", "nvidia-smi lists the processes on it")
            continue
        text = (
            f"{gpu.name}, {free / 1e9:.2f} GB free of {total / 1e9:.2f} GB, compute capability {gpu.major}.{gpu.minor}"
        )
        taken = f"{text}: other processes use most of it" if free < total / 2 else None
        yield item(f"GPU {index}", text, taken, "nvidia-smi lists the processes on it", "warn")
        if gpu.major < 8:
            problem = f"only emulated by {gpu.name}: `mixed` means 16-mixed here"
            yield item("bfloat16", "", problem, "--precision 16-mixed", "warn")


def nvidia_smi() -> tuple[list[str], str | None]:
    """Return the names of the GPUs that the driver finds, and the problem if nvidia-smi fails."""
    if not shutil.which("nvidia-smi"):
        return [], None
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return [], brief(error)
    if done.returncode:
        return [], brief(done.stdout + done.stderr) or f"status {done.returncode}"
    return done.stdout.split("\n")[:-1], None


def driver_item(build: str, available: bool, reason: str | None, names: list[str], problem: str | None) -> Item:
    """Explain whether torch can use the GPUs.

    Args:
        build: CUDA or ROCm version of torch's build, or `CPU`.
        available: Whether torch can use a GPU.
        reason: Error or warning of torch.
        names: GPUs that the driver finds.
        problem: Error of nvidia-smi.
    """
    if available:
        return item("GPU", f"available to torch: {build}", reason, OTHER_TORCH, "warn")
    if problem:
        return item("GPU", "", f"nvidia-smi fails: {problem}", "reinstall NVIDIA's driver and restart")
    if not names:
        text = "no GPU found: the rungs run on the CPU, to try them out"
        return item("GPU", "", text, "if there is a GPU, start the container with --gpus all", "warn")
    found = ", ".join(names)
    if build == "CPU":
        return item("GPU", "", f"torch is built for CPU, but the driver finds {found}", OTHER_TORCH)
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return item("GPU", "", f'CUDA_VISIBLE_DEVICES="{visible}" hides {found}', "unset CUDA_VISIBLE_DEVICES")
    fix = f"update the driver and restart, or {OTHER_TORCH}"
    return item("GPU", "", f"torch ({build}) cannot use {found}: {reason}", fix)


def compiling() -> Iterator[Item]:
    """Check the compiler of `torch.compile`: C++ for a CPU, Triton and C for a GPU."""
    import torch

    if torch.cuda.is_available():
        import triton

        problem = compiler_problem(os.environ.get("CC") or "gcc", "c")
        yield item("torch.compile", f"Triton {triton.__version__}", problem, "apt install gcc python3-dev, or set CC")
    else:
        name = os.environ.get("CXX") or ("clang++" if sys.platform == "darwin" else "g++")
        problem = compiler_problem(name, "c++")
        yield item("torch.compile", f"{name} with Python.h", problem, "apt install g++ python3-dev, or set CXX")


def compiler_problem(name: str, language: str) -> str | None:
    """Compile a file that includes Python.h; return the problem, if there is one."""
    path = shutil.which(name)
    if path is None:
        return f"there is no compiler {name}"
    command = [path, "-fsyntax-only", "-x", language, "-I", sysconfig.get_paths()["include"], "-"]
    try:
        done = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not run: {brief(error)}"
    return f"{path} fails: {brief(done.stderr) or f'status {done.returncode}'}" if done.returncode else None


def bitsandbytes() -> Iterator[Item]:
    """Quantise a tensor to 4 bits."""
    import bitsandbytes
    import torch
    from bitsandbytes.functional import quantize_4bit

    device = "cuda" if torch.cuda.is_available() else "cpu"
    quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4", compress_statistics=True)
    yield item("bitsandbytes", f"{bitsandbytes.__version__} makes 4-bit weights on {device}")


def deepspeed() -> Iterator[Item]:
    """Check whether DeepSpeed can be imported, and whether it can compile its offload."""
    import deepspeed
    import torch

    device = "" if torch.cuda.is_available() else "; src/12_deepspeed_zero.py needs a CUDA GPU"
    yield item("DeepSpeed", f"{deepspeed.__version__}{device}")
    problem = compiler_problem("c++", "c++") if shutil.which("ninja") else "ninja is not on the PATH"
    slower = f"{problem}: CPU offload uses PyTorch's slower Adam, NVMe offload cannot run" if problem else None
    yield item("DeepSpeed offload", "compiled at its first use", slower, "apt install g++; pip install ninja", "warn")


def rung(stem: str) -> Iterator[Item]:
    """Check a rung with the quickstart, which needs no network."""
    from fabric_ladder.rungs import check_rung

    answer = check_rung(SRC / f"{stem}.py", ["--config", "quickstart.yaml"])
    if isinstance(answer, str):
        yield item(stem, "", answer)
        return
    text = f"can run the quickstart: {answer.devices} x {answer.accelerator}, {answer.precision}"
    compiled = next(compiling()) if answer.compile else Item("", "ok", "")
    problem = None if compiled.status == "ok" else f"torch.compile: {compiled.text}"
    yield item(stem, text, problem, compiled.fix)


CHECKS = {  # in this process
    "Packages": {"packages": packages},
    "Memory and disk": {"memory": memory, "disk": disks},
    "Data and models": {"data": data, "Hub": hub},
}
LIBRARIES = {"torch": gpus, "torch.compile": compiling, "bitsandbytes": bitsandbytes, "DeepSpeed": deepspeed}


def report(installed: str | None) -> Iterator[tuple[str, Item]]:
    """Yield each item with its section; see `python` for the argument."""
    yield from (("Python", found) for found in python(installed))
    for section, checks in CHECKS.items():
        for name, check in checks.items():
            try:
                yield from ((section, found) for found in check())
            except Exception as error:
                fix = "pip install -r requirements.txt" if isinstance(error, ImportError) else None
                yield section, item(name, "", f"unknown: {brief(error)}", fix)
    sections = dict.fromkeys(LIBRARIES, "Extensions") | {"torch": "GPU"}
    rungs = sorted(SRC.glob("[0-9]*.py"), key=lambda path: int(path.name.split("_")[0]))
    sections |= {path.stem: "Rungs" for path in rungs}
    with tempfile.TemporaryDirectory() as folder:  # for files that imports leave behind
        yield from ((sections[step], found) for step, found in run_steps(list(sections), folder))


def run_steps(steps: list[str], folder: str) -> Iterator[tuple[str, Item]]:
    """Yield the items of `print_steps`, run in a second process, which starts again after a step that killed it."""
    variables = dict.fromkeys(("TMPDIR", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"), folder)
    variables |= dict.fromkeys(("PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE", "HF_HUB_OFFLINE"), "1")
    variables["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
    while steps:
        process = subprocess.Popen(
            [sys.executable, str(SCRIPTS / "doctor.py"), "--steps", *steps], env=os.environ | variables,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        left = list(steps)
        for line in process.stdout:
            step, items = json.loads(line)
            left.remove(step)
            yield from ((step, Item(*found)) for found in items)
        in_time = timer.is_alive()
        timer.cancel()
        status = process.wait()
        if left:
            step = left[0]
            more = f"python scripts/doctor.py --steps {step} shows more"
            ending = signal.Signals(-status).name if status < 0 else f"status {status}"
            if in_time:
                yield step, item(step, "", f"ends Python with {ending}", more)
            else:
                yield step, item(step, "", f"took longer than {SECONDS} s, unknown", more, "slow")
            if len(left) == len(steps):  # the import of torch failed, so all other steps would fail
                skipped = "missing" if in_time else "slow"
                yield from (
                    (other, item(other, "", f"not checked, because of {step}", more, skipped)) for other in left[1:]
                )
                return
        steps = left[1:]


def print_steps(steps: list[str]) -> None:
    """Print one line of JSON per step: its name and its items."""
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)  # libraries print to stdout
        for step in steps:
            try:
                items = list(LIBRARIES[step]() if step in LIBRARIES else rung(step))
            except ModuleNotFoundError as error:
                source = '-e ".[deepspeed]"' if step == "DeepSpeed" else "-r requirements.txt"
                items = [item(step, "", brief(error), f"pip install {source}")]
            except (Exception, SystemExit) as error:  # broken installations raise anything
                traceback.print_exc()
                more = f"python scripts/doctor.py --steps {step} shows more"
                items = [item(step, "", f"{type(error).__name__}: {brief(error)}", more)]
            print(json.dumps([step, items]), file=channel, flush=True)
