"""The surroundings of a run: versions, hardware, peak memory, and whether it is a script or a notebook."""

import ctypes
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import psutil
import torch
from watermark import watermark

from fabric_ladder.errors import UserError

CLONE = Path(__file__).resolve().parents[2]  # the root of the repository, unless the package is installed
NO_FLOAT64 = ("mps",)  # these devices have no 64-bit numbers; sums are in 32 bits there
PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "datasets", "numpy", "pandas")


def describe_versions(*more: str) -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on, and of `more` packages."""
    lines = watermark(python=True, packages=",".join([*PACKAGES, *more])).splitlines()
    found = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    versions = {"Python": found["Python version"]} | {name: found[name] for name in (*PACKAGES, *more)}
    return versions | {"torch": torch.__version__}  # this version names the build, CPU or CUDA


@cache
def code_commit() -> str | None:
    """Return the commit of this clone of the project; changed files add `-dirty`.

    Outside a clone, or without git, it is what the environment variable FABRIC_LADDER_COMMIT says, or None.
    """
    given = os.environ.get("FABRIC_LADDER_COMMIT")
    if not (CLONE / ".git").exists():  # an installed package may be in a repository of the user's
        return given
    git = ["git", "-C", str(CLONE)]
    changed = ["status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results"]
    try:
        name, changes = (
            subprocess.run([*git, *words], capture_output=True, text=True, check=True).stdout.strip()
            for words in (["rev-parse", "--short", "HEAD"], changed)
        )
    except (OSError, subprocess.CalledProcessError):
        return given
    return f"{name}-dirty" if changes else name


def describe_hardware(device: torch.device) -> dict:
    """Return names and sizes (bytes) of the processor and, on CUDA, the GPU; `vectors`: the widest that torch uses."""
    facts = {
        "device": device.type,
        "processor": _processor(),
        "vectors": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory": psutil.virtual_memory().total,
    }
    if device.type == "cuda":
        gpu = torch.cuda.get_device_properties(device)
        facts |= {"gpu": gpu.name, "gpu_memory": gpu.total_memory, "compute_capability": f"{gpu.major}.{gpu.minor}"}
        facts["cuda"] = torch.version.cuda
    return facts


def compute_capability() -> tuple[int, int] | None:
    """Return the GPU's compute capability, or None without a CUDA GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def find_device(accelerator: str) -> str:
    """Return the device of a tool: the named one, or for `auto` the best that there is.

    Raises:
        UserError: PyTorch finds no such device.
    """
    found = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    device = next(name for name in found if found[name]) if accelerator == "auto" else accelerator
    if not found[device]:
        raise UserError(f"--accelerator {device}: PyTorch finds no such device here; use --accelerator cpu")
    return device


def cpu_has_fast_bfloat16() -> bool:
    """Return whether PyTorch multiplies bfloat16 matrices by oneDNN, which needs AVX-512 or ARM's BF16."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def emulates(precision: str, capability: tuple[int, int] | None) -> bool:
    """Return whether a GPU only emulates the bfloat16 of a precision; `torch.cuda.is_bf16_supported` hides this."""
    return precision.startswith("bf16") and capability is not None and capability < (8, 0)


def fit_precision(
    precision: str, capability: tuple[int, int] | None, adapters: bool = False, sharded: bool = False
) -> tuple[str, str]:
    """Return the precision of a device that is closest to a script's, and a sentence if that needs an explanation.

    Args:
        precision: As in the settings.
        capability: Compute capability of the GPU; None: a CPU.
        adapters: Only adapters are trained: `16-mixed` keeps them in 32-bit, and the frozen matrices in float16.
        sharded: FSDP2 shards the weights. It cannot scale the loss, as float16 needs (Fabric's `FSDPPrecision`).
    """
    if not emulates("bf16-true", capability):
        return "bf16-mixed" if precision == "mixed" else precision, ""
    if precision == "mixed" and sharded:
        return "32-true", "32-true in place of mixed precision, since FSDP2 cannot scale the loss that float16 needs"
    if precision == "bf16-true" and adapters:
        return "16-mixed", "16-mixed in place of bf16-true: frozen matrices in float16, adapters in 32-bit"
    if precision == "bf16-true":
        return precision, (
            "bf16-true saves the same memory of weights, but it uses no tensor cores, and attention keeps a matrix of "
            "tokens x tokens; src/4_mixed_precision.py computes in float16"
        )
    return "16-mixed" if precision == "mixed" else precision, ""


def prepare_cuda(accelerator: str, deterministic: bool) -> None:
    """Set the environment variables that CUDA reads at its start, unless the user has set them.

    Expandable segments leave fewer gaps between tensors of varying sizes. Under WSL and on Jetson the driver reports
    them as available and then fails (pytorch#192330).
    """
    if accelerator not in ("auto", "cuda") or not torch.cuda.is_available():
        return
    known = sys.platform == "linux" and not any(name in platform.release().lower() for name in ("microsoft", "tegra"))
    if known and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        if torch.cuda.is_initialized():  # for example by the first cell of a notebook
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # 24 MiB of buffers of one size


def keep_freed_memory() -> None:
    """Let glibc keep freed memory for the next tensors, as GPUs do, unless the user has configured it.

    Otherwise glibc returns every large block to the system, and the system clears each page again. With several samples
    per micro-batch this takes up to half of a step on a CPU. Other C libraries stay as they are; see mallopt(3).
    """
    configured = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.getenv(
        "GLIBC_TUNABLES", ""
    )
    if sys.platform != "linux" or configured:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # M_MMAP_THRESHOLD: smaller blocks come from kept memory; before glibc 2.35 it is at most 32 MiB
    if mallopt and (mallopt(-3, 1 << 30) or mallopt(-3, 1 << 25)):
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: return nothing


def return_freed_memory() -> None:
    """Let glibc return freed memory to the system, also what lies between smaller tensors that stay."""
    if sys.platform == "linux" and (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)):
        trim(0)


def limit_memory(device: torch.device, limit: str | None) -> None:
    """Let this process have no more memory of a GPU than a smaller one would have left for PyTorch.

    What the GPU uses already, the CUDA context included, counts towards the limit.

    Raises:
        UserError: The GPU is smaller, or nothing is left.
    """
    if device.type != "cuda":
        return
    if not limit:
        if torch.cuda.is_initialized() and torch.cuda.get_per_process_memory_fraction(device) < 1:  # of an earlier run
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    size, (free, total) = read_size(limit, "--gpu_memory_limit"), torch.cuda.mem_get_info(device)
    used = total - free - torch.cuda.memory_reserved(device)
    if not used < size <= total:
        given = f"--gpu_memory_limit {limit}"
        raise UserError(f"{given}: give more than the {used / 1e9:.2f} GB in use, and at most {total / 1e9:.2f} GB")
    torch.cuda.set_per_process_memory_fraction((size - used) / total, device)


def read_size(text: str, option: str) -> int:
    """Return a size such as 16GB or 15.9GiB in bytes; the default unit is GB.

    Raises:
        UserError: The size does not parse.
    """
    found = re.fullmatch(r"(\d+\.?\d*)\s*([KMGT]?)(I?)B?", text.strip().upper())  # a lowercase b would mean bits
    size = float(found[1]) * (1024 if found[3] else 1000) ** " KMGT".index(found[2] or "G") if found else 0
    if not 1 <= size < 1e18:
        raise UserError(f"{option} {text}: give a size such as 16GB or 15.9GiB")
    return round(size)


def reset_peak_memory(device: torch.device) -> None:
    """Start the measurement of the peak from the memory that is in use now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: PyTorch's allocations on the GPU, or the CPU memory of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text().split() if Path("/proc/self/status").exists() else []
    if "VmHWM:" in status:  # gVisor has no such line
        return int(status[status.index("VmHWM:") + 1]) * 1024
    memory = psutil.Process().memory_info()
    if hasattr(memory, "peak_wset"):  # on Windows, which has no `resource`
        return memory.peak_wset
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1024 if sys.platform == "linux" else 1)  # macOS: bytes


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def write_whole(path: Path, content: str | bytes) -> None:
    """Replace a file in one step: a reader finds the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def within(names: dict, **values) -> Iterator[None]:
    """Give names of a namespace, such as `globals()`, other values in this block."""
    before = {name: names[name] for name in values}
    names.update(values)
    try:
        yield
    finally:
        names.update(before)
