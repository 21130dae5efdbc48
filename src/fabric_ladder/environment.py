"""What a run stands on: versions, hardware and its peak memory, the folder of configs, a script or a notebook."""

import ctypes
import os
import platform
import sys
from pathlib import Path

import psutil
import torch
from watermark import watermark

NO_FLOAT64 = ("mps",)  # devices that have none; sums are in 32 bits there
PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "datasets", "numpy", "pandas")


def describe_versions(*more: str) -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on, and of `more` packages."""
    lines = watermark(python=True, packages=",".join([*PACKAGES, *more])).splitlines()
    found = dict(map(str.strip, line.split(":", 1)) for line in lines if ":" in line)
    versions = {"Python": found["Python version"]} | {name: found[name] for name in (*PACKAGES, *more)}
    return versions | {"torch": torch.__version__}  # this one tells CPU and CUDA builds apart


def describe_hardware(device: torch.device) -> dict:
    """Return names and sizes (bytes) of the processor and, on CUDA, the GPU."""
    facts = {
        "device": device.type,
        "processor": _processor(),
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
    """Return the GPU's compute capability; None where there is no CUDA GPU."""
    return torch.cuda.get_device_capability() if torch.cuda.is_available() else None


def emulates(precision: str, capability: tuple[int, int] | None) -> bool:
    """Tell whether a GPU would only emulate the bfloat16 of a precision, which `torch.cuda.is_bf16_supported` hides."""
    return precision.startswith("bf16") and capability is not None and capability < (8, 0)


def mixed_precision() -> str:
    """Return what `mixed` stands for on this machine: `bf16-mixed`, or `16-mixed` where bfloat16 is emulated."""
    return fit_precision("mixed", compute_capability())[0]


def fit_precision(
    precision: str, capability: tuple[int, int] | None, lora: bool = False, sharded: bool = False
) -> tuple[str, str]:
    """Return what comes closest to a script's precision on a device, and what that means, where it must be said.

    Args:
        precision: As in the settings.
        capability: Compute capability of the GPU; None: a CPU.
        lora: Only adapters are trained, which `16-mixed` keeps in 32-bit beside frozen matrices in float16.
        sharded: By FSDP2, which cannot scale the loss as float16 needs (Fabric's `FSDPPrecision`).
    """
    if not emulates("bf16-true", capability):
        return "bf16-mixed" if precision == "mixed" else precision, ""
    if precision == "mixed" and sharded:
        return "32-true", "32-true in place of mixed precision, since FSDP2 cannot scale the loss that float16 needs"
    if precision == "bf16-true" and lora:
        return "16-mixed", "16-mixed in place of bf16-true: frozen matrices in float16, adapters in 32-bit"
    if precision == "bf16-true":
        return precision, (
            "bf16-true saves the same memory of weights, but its products take no tensor cores, and attention keeps a "
            "matrix of tokens x tokens; src/4_mixed_precision.py computes in float16"
        )
    return "16-mixed" if precision == "mixed" else precision, ""


def count_device(device: torch.device) -> torch.device:
    """Return where 64-bit counts are made for all ranks: on the device, or on the host if it has no such numbers."""
    return torch.device("cpu") if device.type in NO_FLOAT64 else device


def prepare_cuda(accelerator: str, deterministic: bool) -> None:
    """Set what CUDA reads as it starts: before it does, and unless the user has.

    Segments that grow leave fewer gaps between tensors of varying sizes. Under WSL and on Jetson the driver says that
    it has them, and fails (pytorch#192330).
    """
    if accelerator not in ("auto", "cuda") or not torch.cuda.is_available():
        return
    known = sys.platform == "linux" and not any(name in platform.release().lower() for name in ("microsoft", "tegra"))
    if known and not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
        if torch.cuda.is_initialized():  # a notebook's first cell has asked which GPU there is
            torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # 24 MiB of buffers of one size


def keep_freed_memory() -> None:
    """Let glibc keep what tensors free for the next ones, as GPUs do, unless the user has told it what to do.

    Otherwise it gives every large block back to the system, which clears each page anew: with several samples at once
    that takes up to half of a step on a CPU. Other C libraries are left alone; see mallopt(3) for the numbers.
    """
    told = any(name.startswith("MALLOC_") for name in os.environ) or "glibc.malloc" in os.getenv("GLIBC_TUNABLES", "")
    if sys.platform != "linux" or told:
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    # M_MMAP_THRESHOLD: blocks below are taken from what is kept; before glibc 2.35 it is 32 MiB at most
    if mallopt and (mallopt(-3, 1 << 30) or mallopt(-3, 1 << 25)):
        mallopt(-1, -1)  # M_TRIM_THRESHOLD: nothing is given back


def reset_peak_memory(device: torch.device) -> None:
    """Let the peak start from what is held now."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    elif Path("/proc/self/clear_refs").exists():
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM, see proc(5)


def peak_memory(device: torch.device) -> int:
    """Return the peak in bytes: what PyTorch allocated on the GPU, or what the process held in the host's memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = Path("/proc/self/status").read_text().split() if Path("/proc/self/status").exists() else []
    if "VmHWM:" in status:  # not in gVisor's
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


def notebook_shell():
    """Return IPython's shell when this process is a notebook kernel, else None."""
    if "ipykernel" not in sys.modules:
        return None
    from IPython import get_ipython

    return get_ipython()


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file that is there as a whole, or as it was before."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(content.encode("utf-8") if isinstance(content, str) else content)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
