"""What a machine can run, and what it lacks for the rest: sections of items, each with a status and a fix.

It runs where nothing is installed, by the standard library of any Python from 3.8 on. Libraries that are slow, talk,
hang or abort are left to a process of their own, tools/hardware.py.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.metadata import version
from pathlib import Path

from fabric_ladder.places import CONFIGS, PACKAGE, SRC
from fabric_ladder.tools import hardware
from fabric_ladder.tools.hardware import brief, item
from fabric_ladder.tools.project import ROOT, describe_project, read

ASKED = hardware.__file__
TIMEOUT = 180  # seconds; from a cold network disk, the imports take a minute
MODEST = ("PYTHONSAFEPATH", "PYTHONDONTWRITEBYTECODE", "HF_HUB_OFFLINE")  # nothing shadowed, written, fetched
KERNELS = ("JPY_PARENT_PID", "COLAB_RELEASE_TAG", "KAGGLE_KERNEL_RUN_TYPE")  # set by Jupyter, Colab and Kaggle
LEAST_MEMORY = 2e9  # bytes; the quickstart holds up to 1.1 GB
LEAST_SHARED = 1e9  # bytes; Docker gives 64 MB, and NCCL's documentation advises 1 GB
LEAST_DISK = {"runs": 7e9, "cache": 1e9, "Hub cache": 2e9}  # bytes; BLOOM-560m with Adam's state is saved in 6.7 GB
ELSEWHERE = {"runs": "give --runs_dir", "cache": "set FABRIC_LADDER_CACHE", "Hub cache": "set HF_HOME"}


def python(installed: ModuleSpec | None):
    """Check this Python against the project's range, what started it, and whose package it imports."""
    wanted, bounds = describe_project().python, {}
    for sign, *number in re.findall(r"(>=|<)(\d+)\.(\d+)", wanted):
        bounds[sign] = tuple(map(int, number))
    outside = [sign for sign, bound in bounds.items() if (sys.version_info[:2] < bound) == (sign == ">=")]
    text = f"{platform.python_version()}, {sys.executable}"
    fix = "name another: make PYTHON=python{}.{} run".format(*bounds[">="]) if bounds else None
    yield item("Python", text, f"{text}, is not {wanted}" if outside else None, fix)
    kernel = any(name in os.environ for name in KERNELS) or "ipykernel" in sys.modules
    yield item("notebook", "yes: its kernel runs on one device, !python src/9_ddp.py on all" if kernel else "no")
    found = Path(installed.origin).resolve().parent if installed and installed.origin else None
    problem = None if found == PACKAGE else f"in {found}, not in {PACKAGE}" if found else "not installed"
    fix, status = f'pip install -e "{ROOT}"', "warn" if found else "missing"
    yield item("fabric_ladder", f"in {PACKAGE}", problem, fix, status)


def packages():
    """Check what is installed against the pins of requirements.txt and the ranges of the project."""
    project = describe_project()
    ranges, optional = dict(map(_split, project.needed)), dict(map(_split, project.optional))
    tested = {name: wanted for name, wanted in map(_split, read("requirements.txt").splitlines()) if "==" in wanted}
    for name in {**tested, **ranges, **optional}:
        pin, wanted = tested.get(name) or optional.get(name), ranges.get(name, "")
        fix = f'pip install "{name}{pin or wanted}"'
        try:
            found = str(version(name))
        except Exception:  # not installed, or there are only remains of it
            yield item(name, "", "not installed" + (", optional" if name in optional else ""), fix)
            continue
        fits = True
        with suppress(Exception):  # without `packaging` the pins alone count
            from packaging.specifiers import SpecifierSet

            fits = SpecifierSet(wanted).contains(found, prereleases=True)
        if fits:
            other = pin and found.split("+")[0] != pin[2:]
            yield item(name, found, f"{found}, tested with {pin[2:]}" if other else None, fix, "warn")
        else:
            yield item(name, "", f"{found} is not {wanted}", fix)


def memory():
    """Check memory that processes share, and the host's, or what the container's control group leaves of it."""
    if Path("/dev/shm").is_dir():
        usage = shutil.disk_usage("/dev/shm")
        text = f"{usage.free / 1e9:.2f} GB free of {usage.total / 1e9:.2f} GB"
        problem = f"{text}: NCCL and --num_workers may fail" if usage.free < LEAST_SHARED else None
        yield item("/dev/shm", text, problem, "docker run --ipc=host, or --shm-size=8g", "warn")

    import psutil

    host = psutil.virtual_memory()
    total, available, whose = host.total, host.available, ""
    groups = Path("/proc/self/cgroup")
    limit = cgroup_limit(groups.read_text(), Path("/sys/fs/cgroup")) if groups.exists() else None
    if limit and limit[0] < total:
        total, available, whose = limit[0], min(available, limit[0] - limit[1]), " of its control group"
    text = f"{available / 1e9:.2f} GB available of {total / 1e9:.2f} GB{whose}"
    fix = "end other programs, or give the container more: docker run --memory"
    yield item("memory", text, f"{text}: hardly enough" if available < LEAST_MEMORY else None, fix, "warn")


def cgroup_limit(groups: str, root: Path) -> tuple[int, int] | None:
    """Return the lowest memory limit on the way up from the process's control group, and what is used of it.

    Args:
        groups: Text of /proc/self/cgroup: a line `4:memory:/path` for version 1, `0::/path` for version 2.
        root: Where they are mounted, /sys/fs/cgroup.

    Returns:
        Bytes of the limit and, without files that the kernel can drop, of what is used; None without a limit.
    """
    limits = []
    for _, controllers, path in (line.split(":", 2) for line in groups.splitlines()):
        if controllers == "":
            top, limit, used, files = root, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            top, limit, used = root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            files = "total_inactive_file"
        else:
            continue
        group = top / path.lstrip("/")
        for folder in (group, *list(group.parents)[: len(group.parts) - len(top.parts)]):  # in a container only the top
            with suppress(OSError, ValueError):  # "max" is no limit, and the top of version 2 says nothing
                size, taken = int((folder / limit).read_text()), int((folder / used).read_text())
                droppable = re.search(rf"^{files} (\d+)", (folder / "memory.stat").read_text(), re.MULTILINE)
                limits.append((size, taken - int(droppable.group(1) if droppable else 0)))
    return min(limits, default=None)


def disk(name: str):
    """Check whether a folder can be written, and the free space where it is or would be made."""
    folder = "runs"
    if name == "cache":
        import platformdirs

        folder = os.environ.get("FABRIC_LADDER_CACHE") or platformdirs.user_cache_dir("fabric_ladder")
    elif name == "Hub cache":
        from huggingface_hub import constants

        folder = constants.HF_HUB_CACHE
    folder = Path(os.path.expanduser(folder)).absolute()
    there = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "cannot be written" if there.is_dir() else "is a file"
        yield item(name, "", f"{folder} cannot be used: {there} {reason}", ELSEWHERE[name])
        return
    usage = shutil.disk_usage(there)
    text = f"{usage.free / 1e9:.2f} GB free of {usage.total / 1e9:.2f} GB, {folder}"
    yield item(name, text, f"{text}: little" if usage.free < LEAST_DISK[name] else None, ELSEWHERE[name], "warn")


def data():
    """Look for the files that configs/ read."""
    folder = Path(os.environ.get("FABRIC_LADDER_DATA") or "data")
    files = {name: (name,) for name in _named_in_configs("dataset") if "/" not in name and "." in name}
    for name, wanted in {"imdb": ("aclImdb", "aclImdb_v1.tar.gz"), **files}.items():
        paths = (parent / file for parent in (folder, Path()) for file in wanted)
        found = next((str(path.absolute()) for path in paths if path.exists()), None)
        problem = f"not in {folder.absolute()}" + (": a run downloads it there (84 MB)" if name == "imdb" else "")
        fix = f"set FABRIC_LADDER_DATA to a folder with {wanted[-1]}"
        yield item(name, found, None if found else problem, fix)


def hub():
    """Ask for the Hugging Face Hub, and look which of configs/'s models are in its cache."""
    import requests
    from huggingface_hub import constants

    problem, fix = None, "check network and proxy; HF_HUB_OFFLINE=1 takes the cache at once"
    if constants.HF_HUB_OFFLINE:
        problem, fix = "HF_HUB_OFFLINE is set: its cache alone", "unset HF_HUB_OFFLINE"
    else:
        try:
            requests.head(constants.ENDPOINT, timeout=5)
        except requests.RequestException as error:
            problem = f"{constants.ENDPOINT} does not answer ({type(error).__name__}): its cache alone"
    yield item("Hub", f"{constants.ENDPOINT} answers", problem, fix, "warn")
    for name in _named_in_configs("model"):
        if not (CONFIGS / name).exists():
            lacks = _uncached(name)
            good = f"not in the cache ({lacks}): a run downloads it" if lacks else "in the cache"
            fix = f"hf download {name} where the Hub answers, then copy its cache; or --model FOLDER"
            yield item(name, good, f"not in the cache ({lacks})" if problem and lacks else None, fix)


def _uncached(name: str) -> str | None:
    """Return what the Hub's cache lacks of a model; None if it is complete."""
    from huggingface_hub import try_to_load_from_cache

    def cached(file: str) -> str | None:
        path = try_to_load_from_cache(name, file)
        return path if isinstance(path, str) else None  # else None, or a mark for what the Hub does not have

    if not cached("config.json"):
        return "no config.json"
    for weights in ("model.safetensors", "pytorch_model.bin"):
        index = cached(f"{weights}.index.json")
        shards = json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values() if index else [weights]
        if all(map(cached, shards)):
            return None
    return "no weights"


def _split(requirement: str) -> tuple[str, str]:
    """Return the package of a requirement, and its range of versions."""
    return re.match(r"([\w.-]*)(?:\[.*?\])?(.*)", requirement).groups()


def _named_in_configs(setting: str) -> list[str]:
    texts = "\n".join(path.read_text(encoding="utf-8") for path in sorted(CONFIGS.glob("*.yaml")))
    return list(dict.fromkeys(re.findall(rf"^{setting}: (\S+)", texts, re.MULTILINE)))


def ask(steps: list[str], folder: str):
    """Yield steps of tools/hardware.py with an item each time; one that ends its process is an item, too."""
    folders = dict.fromkeys(("TMPDIR", "MPLCONFIGDIR", "TORCHINDUCTOR_CACHE_DIR"), folder)  # imports leave files behind
    environment = {**os.environ, **folders, **dict.fromkeys(MODEST, "1")}
    path = os.environ.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(PACKAGE.parent), *([path] if path else [])])
    while steps:
        command, nothing = [sys.executable, ASKED, *steps], subprocess.DEVNULL
        process = subprocess.Popen(command, env=environment, stdin=nothing, stdout=subprocess.PIPE, stderr=nothing)
        timer = threading.Timer(TIMEOUT, process.kill)
        timer.start()
        left = list(steps)
        for line in process.stdout:
            step, items = json.loads(line)
            left.remove(step)
            yield from ((step, found) for found in items)
        in_time, status = timer.is_alive(), process.wait()
        timer.cancel()
        if left:
            end = signal.Signals(-status).name if status < 0 else f"status {status}"
            problem = f"ends Python with {end}" if in_time else f"no answer in {TIMEOUT} s"
            yield left[0], item(left[0], "", problem, f"python -P {ASKED} {left[0]} shows more")
            if len(left) == len(steps):  # so it would be with each
                yield from ((step, item(step, "", f"not asked: {left[0]} {problem}")) for step in left[1:])
                return
        steps = left[1:]


CHECKS = {
    "Packages": {"packages": packages},
    "Memory and disk": {"memory": memory, **{name: partial(disk, name) for name in LEAST_DISK}},
    "Data and models": {"data": data, "Hub": hub},
}
SECTIONS = {"torch": "GPU", "torch.compile": "Extensions", "bitsandbytes": "Extensions", "DeepSpeed": "Extensions"}


def report(installed: ModuleSpec | None):
    """Yield each section with an item of it; nothing that is broken here ends the report.

    Args:
        installed: What `import fabric_ladder` finds where nothing was done for it.
    """
    for section, checks in {"Python": {"Python": partial(python, installed)}, **CHECKS}.items():
        for name, check in checks.items():
            try:
                yield from ((section, found) for found in check())
            except Exception as error:
                fix = "pip install -r requirements.txt" if isinstance(error, ImportError) else None
                yield section, item(name, "", f"not known: {brief(error)}", fix)
    rungs = sorted(SRC.glob("[0-9]*.py"), key=lambda path: int(path.name.split("_")[0]))
    section_of = {**SECTIONS, **{path.stem: "Rungs" for path in rungs}}
    try:
        with tempfile.TemporaryDirectory() as folder:
            yield from ((section_of[step], found) for step, found in ask(list(section_of), folder))
    except OSError as error:  # nowhere for temporary files, or no room for a process
        yield "GPU", item("torch", "", f"not asked: {error}", "set TMPDIR")
