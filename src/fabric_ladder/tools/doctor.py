"""Check this machine: packages, GPU, compiler, memory, disk and the Hugging Face Hub. Each problem comes with a fix."""

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Iterator
from pathlib import Path

from packaging.requirements import Requirement

from fabric_ladder.places import SRC
from fabric_ladder.settings import Settings

Item = tuple[str, str, str, str]


def item(name: str, text: str, problem: object = False, fix: str = "", status: str = "missing") -> Item:
    """Return a subject, `ok` or the status of its problem, the finding and the remedy."""
    return (name, status, text, fix) if problem else (name, "ok", text, "")


def packages() -> Iterator[Item]:
    """Compare the versions of Python and of the packages with the project's ranges."""
    old, version = not (3, 11) <= sys.version_info < (3, 14), f"{platform.python_version()}, {sys.executable}"
    yield item("Python", version, old, "use Python 3.11 to 3.13")
    project, extras = SRC.parent / "pyproject.toml", []
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        extras = [line for extra in table["optional-dependencies"].values() for line in extra]
    lines = [*table["dependencies"], *extras] if project.is_file() else importlib.metadata.requires("fabric-ladder")
    for line, wanted in zip(lines, map(Requirement, lines), strict=True):
        optional = line in extras or "extra ==" in line
        try:
            text = importlib.metadata.version(wanted.name)
            if unfit := not wanted.specifier.contains(text, prereleases=True):
                text += f" is not {wanted.specifier}"
        except importlib.metadata.PackageNotFoundError:
            unfit, text = True, "not installed" + ", optional" * optional
        fix = f'pip install "{wanted.name}{wanted.specifier}"'
        yield item(wanted.name, text, unfit, fix, "warn" if optional else "missing")


def gpus() -> Iterator[Item]:
    """Check torch, its GPUs and the compiler that `torch.compile` needs: C++ for a CPU, C for a GPU."""
    import torch

    build, cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU", torch.cuda.is_available()
    yield item("torch", f"{torch.__version__}, built for {build}")
    for index in range(torch.cuda.device_count()):
        found, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        text = f"{found.name} (compute capability {found.major}.{found.minor}), {free / 1e9:.2f} GB free of "
        fix = "it only emulates bfloat16: use --precision 16-mixed" if found.major < 8 else ""
        fix = "nvidia-smi lists the processes that use it" if free < total / 2 else fix
        yield item(f"GPU {index}", f"{text}{total / 1e9:.2f} GB", fix, fix, "warn")
    if torch.backends.mps.is_available():
        yield item("GPU", "Apple silicon: --accelerator mps")
    elif not cuda:
        yield no_gpu(build)
    variable, usual = ("CC", "gcc") if cuda else ("CXX", "g++")
    name = os.environ.get(variable) or ("clang++" if sys.platform == "darwin" else usual)
    fix = "xcode-select --install" if sys.platform == "darwin" else f"apt install {usual} python3-dev"
    lacks = "" if Path(sysconfig.get_path("include"), "Python.h").is_file() else "Python.h is not installed"
    lacks = lacks if shutil.which(name) else f"there is no compiler {name}"
    yield item("torch.compile", lacks or f"{name} with Python.h", lacks, fix)


def no_gpu(build: str) -> Item:
    """Explain why torch, built for `build`, finds no GPU."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return item("GPU", "none found: the rungs run on the CPU", True, "a container needs --gpus all", "warn")
    listed = " ".join((done.stdout or done.stderr).split())
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return item("GPU", f'CUDA_VISIBLE_DEVICES="{visible}" hides {listed}', True, "unset CUDA_VISIBLE_DEVICES")
    fix = "update the driver, or install another build of torch: https://pytorch.org/get-started/locally/"
    return item("GPU", f"torch (built for {build}) cannot use {listed}", True, fix)


def machine() -> Iterator[Item]:
    """Check the free memory, the free disk space of the cache, and whether the Hugging Face Hub can be reached."""
    import psutil
    import requests
    from huggingface_hub import constants

    memory, cache = psutil.virtual_memory(), Path(Settings().cache_dir).absolute()
    text = f"{memory.available / 1e9:.1f} GB free of {memory.total / 1e9:.1f} GB"
    yield item("Memory", text, memory.available < 4e9, "close other programs", "warn")
    place = next(each for each in (cache, *cache.parents) if each.exists())
    free, fix = shutil.disk_usage(place).free, "set FABRIC_LADDER_CACHE and HF_HOME to folders of a larger disk"
    yield item("Disk", f"{free / 1e9:.1f} GB free in {place}", free < 10e9, fix, "warn")
    text, problem = f"{constants.ENDPOINT} answers", False
    try:
        requests.head(constants.ENDPOINT, timeout=5)
    except OSError as error:  # all errors of requests are
        text, problem = f"{constants.ENDPOINT} cannot be reached ({type(error).__name__})", True
    fix = "check the network and https_proxy; configs/models and --dataset synthetic need no Hub"
    yield item("Hub", text, problem, fix, "warn")


def report() -> Iterator[tuple[str, Item]]:
    """Yield each item with its section; a check that fails is an item, too."""
    for section, check in (("Packages", packages), ("GPU", gpus), ("Machine", machine)):
        try:
            yield from ((section, found) for found in check())
        except Exception as error:  # broken installations raise anything
            fix = "pip install -r requirements.txt" if isinstance(error, ImportError) else ""
            yield section, item(section, f"{type(error).__name__}: {' '.join(str(error).split())[:200]}", True, fix)
