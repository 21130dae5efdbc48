"""GPU memory that a run needs in addition to its tensors: measured on a GPU and cached, or assumed."""

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from time import strftime
from typing import NamedTuple

import torch

from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError
from fabric_ladder.techniques.memory import Peak

KEPT = "memory/overhead.json"  # path in the cache folder


class Overhead(NamedTuple):
    """GPU memory that a run needs in addition to its tensors.

    Attributes:
        context: Bytes of the driver and CUDA's kernels before the first tensor.
        workspace: Bytes of cuBLAS in PyTorch's allocator.
        fragmentation: Memory that the allocator reserves beyond the peak of its tensors, as a fraction of that peak.
        source: Source of the figures, in words.
    """

    context: int
    workspace: int
    fragmentation: float
    source: str

    def needed(self, peak: Peak) -> int:
        """Return the bytes of GPU memory that a run with this peak needs."""
        tensors = peak.total
        return tensors + round(self.context + self.workspace + self.fragmentation * (tensors + self.workspace))


# 2 x 32 MiB: the forward and the backward pass run in separate threads. Each has the workspace that NVIDIA recommends
# for compute capability 9.0 (pytorch#120925; older GPUs need less). The other figures are guesses.
ASSUMED = Overhead(context=500_000_000, workspace=2 * 32 * 2**20, fragmentation=0.05, source="assumed, not measured")


def load_overhead(cache_dir: str, gpu: str) -> Overhead:
    """Return the overhead measured on this GPU with this PyTorch, or `ASSUMED`.

    Args:
        cache_dir: Folder of the cache, as in the settings.
        gpu: The driver's name of the GPU.
    """
    try:
        return Overhead(**_read_kept(cache_dir)[_key(gpu)])
    except (LookupError, TypeError):
        return ASSUMED


def keep_overhead(cache_dir: str, gpu: str, overhead: Overhead) -> Path:
    """Add a measured overhead to the file of all GPUs and versions, and return its path.

    Raises:
        UserError: The cache cannot be written.
    """
    path = Path(cache_dir) / KEPT
    kept = _read_kept(cache_dir) | {_key(gpu): overhead._asdict()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(kept, indent=2))
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): set FABRIC_LADDER_CACHE to another folder") from error
    return path


def measure_overhead(train: Callable[[], None]) -> Overhead:
    """Measure context, workspace and fragmentation on the first CUDA GPU, which no other process may use.

    Args:
        train: A function that runs a few optimizer steps of a model on that GPU, and keeps no tensors.

    Raises:
        UserError: This machine has no CUDA GPU.
        RuntimeError: This process has already used the GPU.
    """
    if not torch.cuda.is_available():
        raise UserError("--calibrate measures a CUDA GPU, and PyTorch finds none here")
    if torch.cuda.is_initialized():
        raise RuntimeError("the CUDA context must not exist yet, or it cannot be measured")
    before = _used_before()
    workspace = _measure_workspace()
    free, total = torch.cuda.mem_get_info(0)
    context = total - free - torch.cuda.memory_reserved(0) - before
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(0)
    train()
    fragmentation = torch.cuda.max_memory_reserved(0) / torch.cuda.max_memory_allocated(0) - 1
    source = f"measured on {torch.cuda.get_device_name(0)}, torch {torch.__version__}, {strftime('%Y-%m-%d')}"
    return Overhead(max(0, context), workspace, fragmentation, source)


def _measure_workspace() -> int:
    """Return the bytes that stay allocated after a forward and a backward pass of a linear layer."""
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    held = torch.cuda.memory_allocated(0)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            layer(torch.zeros(1024, 1024, device="cuda")).sum().backward()
    layer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(0) - held


def _used_before() -> int:
    """Return the bytes in use on the GPU before this process uses it, from `nvidia-smi`."""
    if not (tool := shutil.which("nvidia-smi")):
        return 0
    command = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    mebibytes = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    return int(mebibytes) * 2**20 if mebibytes.isdigit() else 0


def _read_kept(cache_dir: str) -> dict:
    try:
        kept = json.loads((Path(cache_dir) / KEPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return kept if isinstance(kept, dict) else {}


def _key(gpu: str) -> str:
    return f"{gpu}, torch {torch.__version__}, CUDA {torch.version.cuda}"
