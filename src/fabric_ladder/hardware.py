"""What the run stands on: versions, the device's name, and its peak memory."""

import os
import platform
from importlib.metadata import version
from pathlib import Path

import psutil
import torch

PACKAGES = ("torch", "lightning", "transformers", "tokenizers", "datasets", "numpy", "pandas")


def describe_versions(*more: str) -> dict[str, str]:
    """Return the versions of Python and of the packages that a result depends on, and of `more` packages."""
    versions = {"Python": platform.python_version()} | {name: version(name) for name in (*PACKAGES, *more)}
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
    if Path("/proc/self/status").exists():
        status = Path("/proc/self/status").read_text().split()
        return int(status[status.index("VmHWM:") + 1]) * 1024
    import resource  # not on Windows; macOS counts in bytes

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
