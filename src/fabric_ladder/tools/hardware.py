"""What the doctor leaves to a process of its own: libraries that are slow, talk, hang or abort at import.

python -P src/fabric_ladder/tools/hardware.py STEP...

A step is the name of a library or of a rung; each prints one line of JSON, `[STEP, [[name, status, text, fix], ...]]`.
"""

from __future__ import annotations  # tools/doctor.py shares the first functions, on Python 3.8

import ctypes
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

OTHER_TORCH = "install another build of torch: https://pytorch.org/get-started/locally/"
BF16_FLAGS = {"avx512_bf16", "amx_bf16", "bf16"}  # as Linux names them, for x86 and Arm


def item(name: str, good: str, problem: str | None = None, fix: str | None = None, status: str = "missing") -> tuple:
    """Return name, status, text and fix of a thing that is good, or has a problem of this status."""
    return (name, status, problem, fix) if problem else (name, "ok", good, None)


def brief(error: object) -> str:
    """Return an error, or a text, as one line."""
    return " ".join(str(error).split())[:200]


def torch_items() -> Iterator[tuple]:
    """Check the build of torch, what is between it and the GPUs, and each GPU."""
    driver = nvidia_driver()
    try:
        import torch
    except Exception:
        yield diagnose_cuda(None, driver)
        raise
    cuda, hip = torch.version.cuda, torch.version.hip
    build = f"CUDA {cuda}" if cuda else f"ROCm {hip}" if hip else "CPU"
    yield item("torch", f"{torch.__version__}, built for {build}")
    reason = None
    with warnings.catch_warnings(record=True) as caught:  # of a driver or a GPU that is too old torch only warns
        warnings.simplefilter("always")
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:
            reason = brief(error)
        available = torch.cuda.is_available()
    said = [brief(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    facts = {"build": build, "cuda": cuda, "available": available, "reason": reason, "warnings": said}
    yield apple_item(torch) if sys.platform == "darwin" else diagnose_cuda(facts, driver)
    yield from gpu_items(torch) if available else [processor_item()]
    if cuda or hip:
        nccl = torch.distributed.is_nccl_available() and ".".join(map(str, torch.cuda.nccl.version()))
        yield item(
            "RCCL" if hip else "NCCL", f"{nccl}", None if nccl else "not in this build: one GPU alone", OTHER_TORCH
        )
    gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    problem = None if gloo else "not in this build of torch: one CPU process alone"
    yield item("gloo", "connects CPU processes (--accelerator cpu --devices 2)", problem, OTHER_TORCH)


def nvidia_driver() -> dict:
    """Return what nvidia-smi, libcuda and AMD's kernel driver say, without torch, as `diagnose_cuda` takes it."""
    driver = {"gpus": [], "version": None, "problem": None, "cuda": None, "amd": Path("/dev/kfd").exists()}
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"]
        try:
            said = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True).stdout
            rows = [line.rsplit(", ", 1) for line in said.splitlines() if ", " in line]
            driver |= {"gpus": [name for name, _ in rows], "version": rows[0][1] if rows else None}
        except subprocess.CalledProcessError as error:
            driver["problem"] = brief(error.stdout + error.stderr) or f"status {error.returncode}"
        except (OSError, subprocess.TimeoutExpired) as error:
            driver["problem"] = brief(error)
    number = ctypes.c_int()
    with suppress(OSError, AttributeError):
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(number))
    if number.value:
        driver["cuda"] = number.value // 1000, number.value % 1000 // 10
    return driver


def diagnose_cuda(torch: dict | None, driver: dict) -> tuple:
    """Say what stands between torch and the GPUs of NVIDIA or AMD.

    Args:
        torch: `build`, version of `cuda`, whether that is `available`, the `reason` if not, `warnings`; None where
            torch cannot be imported.
        driver: Names of `gpus` and `version` by nvidia-smi, its `problem` if it fails, and the newest version of `cuda`
            that the driver serves (major, minor), None where there is none; whether there is a GPU of `amd`.
    """
    serves = "CUDA up to {}.{}".format(*driver["cuda"]) if driver["cuda"] else "an unknown CUDA"
    seen = f"driver {driver['version']} ({serves}) sees {', '.join(driver['gpus']) or 'no GPU'}"
    build = torch["build"] if torch else ""
    name = "ROCm" if build.startswith("ROCm") else "CUDA"
    if torch and torch["available"]:
        warning = next(iter(torch["warnings"]), None)
        return item(name, seen if driver["gpus"] else "available", warning, OTHER_TORCH, "warn")
    if driver["problem"]:
        return item("CUDA", "", f"nvidia-smi fails: {driver['problem']}", "install NVIDIA's driver anew, and restart")
    if not driver["gpus"]:
        if driver["amd"] and name != "ROCm":
            return item(name, "", f"there is an AMD GPU; torch is built for {build or 'nothing yet'}", OTHER_TORCH)
        reason = f" ({torch['reason']})" if name == "ROCm" else ""
        problem = f"no GPU is seen{reason}: the rungs run on the CPU, to try them out"
        devices = "--device /dev/kfd --device /dev/dri" if name == "ROCm" else "--gpus all"
        return item(name, "", problem, f"where there is one, start the container with {devices}", "warn")
    if torch is None:
        return item("CUDA", f"{seen}; torch is not there to use it")
    if not torch["cuda"]:
        return item("CUDA", "", f"torch is built for {torch['build']}, though {seen}", OTHER_TORCH)
    # a driver serves newer toolkits too, but of its own major version only
    older = driver["cuda"] and driver["cuda"][0] < int(torch["cuda"].split(".")[0])
    if older or "driver on your system is too old" in str(torch["reason"]):
        problem = f"the driver is too old for torch's CUDA {torch['cuda']}: {seen}"
        return item("CUDA", "", problem, f"update the driver, or {OTHER_TORCH}")
    if (chosen := os.environ.get("CUDA_VISIBLE_DEVICES")) is not None:
        problem = f'CUDA_VISIBLE_DEVICES="{chosen}" leaves torch no GPU; {seen}'
        return item("CUDA", "", problem, "unset CUDA_VISIBLE_DEVICES")
    problem = f"torch cannot use what {seen}: {torch['reason']}"
    return item("CUDA", "", problem, "restart, if the driver was updated; start a container with --gpus all")


def gpu_items(torch) -> Iterator[tuple]:
    """Check each GPU's memory, and whether all of them compute in bfloat16."""
    emulating, amd = [], torch.version.hip
    fix = "amd-smi or rocm-smi names the processes on it" if amd else "nvidia-smi names the processes on it"
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = gpu.gcnArchName if amd else f"compute capability {gpu.major}.{gpu.minor}"
        try:
            free, total = torch.cuda.mem_get_info(index)
        except RuntimeError as error:  # another process has it for itself, or it is broken
            yield item(f"GPU {index}", "", f"{gpu.name}: {brief(error)}", fix)
        else:
            text = f"{gpu.name}, {free / 1e9:.2f} GB free of {total / 1e9:.2f} GB, {capability}"
            taken = f"{text}: others hold most of it" if free < total / 2 else None
            yield item(f"GPU {index}", text, taken, fix, "warn")
        if (gpu.major, gpu.minor) < (8, 0):  # `torch.cuda.is_bf16_supported()` also says yes to an emulation
            emulating.append(f"{gpu.name} ({capability})")
    problem = f"only emulated by {', '.join(emulating)}: `mixed` is 16-mixed there" if emulating else None
    yield item("bfloat16", "computed by the GPU: `mixed` is bf16-mixed", problem, "--precision 16-mixed", "warn")


def apple_item(torch) -> tuple:
    """Check Apple's GPU, which torch computes on by Metal."""
    if not torch.backends.mps.is_available():
        problem = "torch does not see Apple's GPU: the rungs run on the CPU, to try them out"
        return item("MPS", "", problem, "it needs Apple silicon and macOS 14 or newer", "warn")
    limit = torch.mps.recommended_max_memory() / 1e9
    return item("MPS", f"Apple's GPU, up to {limit:.2f} GB of memory: --accelerator mps")


def processor_item() -> tuple:
    """Check whether the processor computes in bfloat16, which torch otherwise emulates."""
    cpuinfo = Path("/proc/cpuinfo")
    words = set(cpuinfo.read_text(encoding="utf-8").lower().split()) if cpuinfo.exists() else set()
    found = sorted(words & BF16_FLAGS)
    problem = None if found else "the processor is not known to compute in it: on this CPU it may save no time"
    return item("bfloat16", f"computed by the processor ({', '.join(found)})", problem, "--precision 32-true", "warn")


def compile_item() -> tuple:
    """Check what `torch.compile` calls: a C++ compiler for a CPU, Triton and a C compiler for a GPU."""
    import torch

    if not torch.cuda.is_available():
        path, problem, fix = compiler("CXX", ("clang++",) if sys.platform == "darwin" else ("g++",), "c++")
        return item("torch.compile", f"{path} with Python.h", problem, fix)
    try:
        import triton
    except Exception as error:
        return item("torch.compile", "", f"Triton cannot be imported: {brief(error)}", OTHER_TORCH)
    path, problem, fix = compiler("CC", ("gcc", "clang"), "c")
    return item("torch.compile", f"Triton {triton.__version__}, {path} with Python.h", problem, fix)


def compiler(variable: str, names: tuple[str, ...], language: str) -> tuple[str | None, str | None, str | None]:
    """Return the path of a compiler that finds Python's headers, or a problem and its fix."""
    wanted = (os.environ[variable],) if os.environ.get(variable) else names
    path, fix = next(filter(None, map(shutil.which, wanted)), None), f"apt install g++, or set {variable}"
    if path is None:
        return None, f"there is no compiler {' or '.join(wanted)}", fix
    command = [path, "-fsyntax-only", "-x", language, "-I", sysconfig.get_paths()["include"], "-"]
    options = {"capture_output": True, "text": True, "timeout": 60, "env": {**os.environ, "LC_ALL": "C"}}
    try:
        done = subprocess.run(command, input="#include <Python.h>\n", **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        return path, f"{path} does not run: {brief(error)}", fix
    if done.returncode and re.search(r"fatal error: '?Python\.h", done.stderr):
        return path, f"{path} finds no Python.h", "install this Python's headers: apt install python3-dev"
    said = brief(done.stderr) or f"status {done.returncode}"
    return path, f"{path} compiles nothing: {said}" if done.returncode else None, fix


def bitsandbytes_item() -> tuple:
    """Check whether bitsandbytes makes 4-bit weights on the device that a run would take."""
    import bitsandbytes
    import torch
    from bitsandbytes.functional import quantize_4bit

    device, problem = "cuda" if torch.cuda.is_available() else "cpu", None
    try:
        quantize_4bit(torch.ones(64, 64, device=device), quant_type="nf4", compress_statistics=True)
    except Exception as error:  # its class depends on what its native library lacks
        problem = f"{bitsandbytes.__version__} cannot make 4-bit weights on {device}: {brief(error)}"
    return item(
        "bitsandbytes",
        f"{bitsandbytes.__version__} makes 4-bit weights on {device}",
        problem,
        "run src/13_lora.py, which needs none",
    )


def deepspeed_items() -> Iterator[tuple]:
    """Check whether DeepSpeed can be imported, and what its offloads would have to be compiled with."""
    import deepspeed
    import torch
    from deepspeed.ops.op_builder import AsyncIOBuilder
    from deepspeed.ops.op_builder.builder import assert_no_cuda_mismatch

    on_gpu = torch.cuda.is_available()
    yield item("DeepSpeed", deepspeed.__version__ + ("" if on_gpu else "; src/12_deepspeed_zero.py needs a CUDA GPU"))
    _, problem, fix = compiler("CXX", ("c++",), "c++")
    if not shutil.which("ninja"):
        beside = Path(sys.executable).with_name("ninja").exists()
        problem = "ninja is not on the PATH"
        fix = f"source {Path(sys.executable).with_name('activate')}" if beside else "pip install ninja"
    slower = f"{problem}: PyTorch's slower Adam takes its place in zero2_offload and zero3_offload"
    yield item("DeepSpeed CPU Adam", "compiled by its first use", problem and slower, fix, "warn")
    if not problem and on_gpu:
        try:
            assert_no_cuda_mismatch()
        except Exception as error:  # there is no CUDA toolkit, or it is that of another version
            problem, fix = brief(error), f"install the toolkit of CUDA {torch.version.cuda}, or set CUDA_HOME to it"
    if not problem and not AsyncIOBuilder().is_compatible():
        problem, fix = "no libaio", "apt install libaio-dev, or dnf install libaio-devel"
    problem = problem and f"{problem}: zero3_nvme cannot run"
    yield item("DeepSpeed NVMe offload", "compiled by its first use", problem, fix)


def rung_item(stem: str) -> tuple:
    """Ask the rung itself, for the quickstart, which needs no network; its check starts no compiler."""
    from fabric_ladder.places import SRC
    from fabric_ladder.rungs import check_rung

    answer = check_rung(SRC / f"{stem}.py", ["--config", "quickstart.yaml"])
    if isinstance(answer, str):
        return item(stem, "", answer)
    good = f"can run the quickstart: {answer.devices} x {answer.accelerator}, {answer.precision}"
    _, status, problem, fix = compile_item() if answer.compile else (None, "ok", None, None)
    return item(stem, good, None if status == "ok" else f"torch.compile: {problem}", fix)


CHECKS = {
    "torch": torch_items,
    "torch.compile": lambda: [compile_item()],
    "bitsandbytes": lambda: [bitsandbytes_item()],
    "DeepSpeed": deepspeed_items,
}


def check(step: str) -> Iterator[tuple]:
    """Yield the items of a step; what it raises is one, too."""
    try:
        yield from CHECKS[step]() if step in CHECKS else [rung_item(step)]
    except ModuleNotFoundError as error:
        source = '-e ".[deepspeed]"' if step == "DeepSpeed" else "-r requirements.txt"
        yield item(step, "", brief(error), f"pip install {source}")
    except (Exception, SystemExit) as error:  # a broken installation raises anything
        traceback.print_exc()
        yield item(step, "", f"{type(error).__name__}: {brief(error)}", f"python -P {__file__} {step} shows more")


if __name__ == "__main__":
    with os.fdopen(os.dup(1), "w") as channel:
        os.dup2(2, 1)  # libraries print on stdout, too
        for step in sys.argv[1:]:
            print(json.dumps([step, list(check(step))]), file=channel, flush=True)
