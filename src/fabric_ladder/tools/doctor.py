"""Check this machine: packages, GPU, compiler, and every rung. Each problem comes with a fix.

Only the checks of GPU, compiler and rungs import torch, so that the others work without it.
"""

import contextlib
import importlib.metadata
import io
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement

from fabric_ladder.places import SRC
from fabric_ladder.rungs import RUNGS, check_rung

OTHER_TORCH = "install another build of torch: https://pytorch.org/get-started/locally/"


class Item(NamedTuple):
    """One line of the report.

    Attributes:
        name: The subject.
        status: `ok`, `warn` or `missing`.
        text: The finding.
        fix: The remedy, if there is one.
    """

    name: str
    status: str
    text: str
    fix: str = ""


def brief(error: object) -> str:
    """Return an error as one short line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def requirements() -> list[tuple[Requirement, bool]]:
    """Return the required and the optional packages, and for each whether it is optional."""
    project = SRC.parent / "pyproject.toml"
    if project.is_file():
        table = tomllib.loads(project.read_text(encoding="utf-8"))["project"]
        extras = [line for extra in table["optional-dependencies"].values() for line in extra]
        return [(Requirement(line), line in extras) for line in (*table["dependencies"], *extras)]
    found = map(Requirement, importlib.metadata.requires("fabric-ladder") or [])
    return [(each, "extra" in str(each.marker)) for each in found]


def packages() -> Iterator[Item]:
    """Compare the versions of Python and of the packages with the project's ranges."""
    version = f"{platform.python_version()}, {sys.executable}"
    fits = (3, 11) <= sys.version_info < (3, 14)
    yield Item("Python", "ok", version) if fits else Item("Python", "missing", version, "use Python 3.11 to 3.13")
    for wanted, optional in requirements():
        fix = f'pip install "{wanted.name}{wanted.specifier}"'
        try:
            found = importlib.metadata.version(wanted.name)
        except importlib.metadata.PackageNotFoundError:
            yield Item(wanted.name, "warn" if optional else "missing", "not installed" + ", optional" * optional, fix)
            continue
        if wanted.specifier.contains(found, prereleases=True):
            yield Item(wanted.name, "ok", found)
        else:
            yield Item(wanted.name, "warn" if optional else "missing", f"{found} is not {wanted.specifier}", fix)


def gpus() -> Iterator[Item]:
    """Check torch, the driver, and each GPU."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "the CPU"
    yield Item("torch", "ok", f"{torch.__version__}, built for {build}")
    if torch.backends.mps.is_available():
        yield Item("GPU", "ok", "Apple silicon: --accelerator mps")
    elif torch.cuda.is_available():
        yield from map(gpu, range(torch.cuda.device_count()))
    else:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            reason = brief(error)
        yield no_gpu(build, driver_gpus(), reason)


def gpu(index: int) -> Item:
    """Check a GPU's free memory and compute capability."""
    import torch

    found = torch.cuda.get_device_properties(index)
    free, total = torch.cuda.mem_get_info(index)
    text = f"{found.name} (compute capability {found.major}.{found.minor}), "
    text += f"{free / 1e9:.2f} GB free of {total / 1e9:.2f} GB"
    if free < total / 2:
        return Item(f"GPU {index}", "warn", f"{text}: in use by others", "nvidia-smi lists the processes on it")
    if found.major < 8:
        fix = "rungs 4, 9, 12 to 15 and 24 take float16 by themselves; most others are slow"
        return Item(f"GPU {index}", "warn", f"{text}: it only emulates bfloat16", fix)
    return Item(f"GPU {index}", "ok", text)


def driver_gpus() -> str:
    """Return the GPUs that NVIDIA's driver lists, or the driver's error; empty without a driver."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return brief(done.stdout or done.stderr)


def no_gpu(build: str, listed: str, reason: str) -> Item:
    """Explain why torch finds no GPU.

    Args:
        build: CUDA version of torch's build, or `the CPU`.
        listed: Result of `driver_gpus`.
        reason: Error of torch.
    """
    if not listed:
        text = "no GPU found: the rungs run on the CPU, to try them out"
        return Item("GPU", "warn", text, "if there is a GPU, start the container with --gpus all")
    if build == "the CPU":
        return Item("GPU", "missing", f"torch is built for the CPU, but the driver lists {listed}", OTHER_TORCH)
    if (visible := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        return Item("GPU", "missing", f'CUDA_VISIBLE_DEVICES="{visible}" hides {listed}', "unset CUDA_VISIBLE_DEVICES")
    text = f"torch (built for {build}) cannot use {listed}: {reason}"
    return Item("GPU", "missing", text, f"update the driver and restart, or {OTHER_TORCH}")


def compiler() -> Item:
    """Look for the compiler that `torch.compile` needs: C++ for a CPU, C for a GPU."""
    import torch

    variable, usual = ("CC", "gcc") if torch.cuda.is_available() else ("CXX", "g++")
    name = os.environ.get(variable) or ("clang++" if sys.platform == "darwin" else usual)
    fixes = {"darwin": "xcode-select --install", "win32": "leave out rung 3: PyTorch has no Triton for Windows"}
    fix = fixes.get(sys.platform, f"apt install {usual} python3-dev, or set {variable}")
    if not shutil.which(name):
        return Item("torch.compile", "missing", f"there is no compiler {name}", fix)
    if not Path(sysconfig.get_paths()["include"], "Python.h").is_file():
        return Item("torch.compile", "missing", "Python.h is not installed", fix)
    return Item("torch.compile", "ok", f"{name} with Python.h")


def rungs() -> Iterator[Item]:
    """Check whether each rung can run the quickstart, which needs no network."""
    for path in RUNGS:
        with contextlib.redirect_stdout(io.StringIO()):
            found = check_rung(path, ["--config", "quickstart.yaml"])
        if isinstance(found, str):
            yield Item(path.stem, "missing", found)
        elif found.compile and compiler().status != "ok":
            yield compiler()._replace(name=path.stem)
        else:
            text = f"can run the quickstart: {found.devices} x {found.accelerator}, {found.precision}"
            yield Item(path.stem, "ok", text)


CHECKS: dict[str, tuple[Callable, ...]] = {
    "Packages": (packages,),
    "GPU": (gpus, lambda: [compiler()]),
    "Rungs": (rungs,),
}


def report() -> Iterator[tuple[str, Item]]:
    """Yield each item with its section; a check that fails is an item, too."""
    for section, checks in CHECKS.items():
        try:
            for check in checks:
                yield from ((section, item) for item in check())
        except ImportError as error:
            yield section, Item(section, "missing", brief(error), "pip install -r requirements.txt")
        except Exception as error:  # broken installations raise anything
            yield section, Item(section, "missing", f"{type(error).__name__}: {brief(error)}")
