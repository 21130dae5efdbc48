"""GPU memory that no tensor shows: the CUDA context, the workspaces of cuBLAS, and what the allocator cannot use."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import strftime
from typing import NamedTuple

import torch

from fabric_ladder.errors import UserError

KEPT = "memory/overhead.json"  # in the cache's folder


class Overhead(NamedTuple):
    """What a run needs of a GPU beside its tensors.

    Attributes:
        context: Bytes that the driver and CUDA's kernels take before the first tensor.
        workspace: Bytes that cuBLAS takes from PyTorch's allocator.
        fragmentation: What the allocator reserves beyond the peak of its tensors, as a share of that peak.
        source: Where the figures are from, in words.
    """

    context: int
    workspace: int
    fragmentation: float
    source: str

    def beside(self, tensors: int) -> int:
        """Return the bytes that come on top of a peak of so many bytes of tensors."""
        return round(self.context + self.workspace + self.fragmentation * (tensors + self.workspace))


# 2 x 32 MiB: forward and backward pass run in threads of their own, each with the workspace that NVIDIA recommends for
# compute capability 9.0 (pytorch#120925; less before). The rest is a guess.
ASSUMED = Overhead(context=500_000_000, workspace=2 * 32 * 2**20, fragmentation=0.05, source="assumed, not measured")


def load_overhead(cache_dir: str, gpu: str | None) -> Overhead:
    """Return what was measured on this GPU with this PyTorch; what is assumed, if nothing was.

    Args:
        cache_dir: Folder of the cache, as in the settings.
        gpu: Name of the GPU; None: the plan is for one that is not here.
    """
    try:
        kept = json.loads((Path(cache_dir).expanduser() / KEPT).read_text(encoding="utf-8"))
        return Overhead(**kept[_key(gpu)])
    except (OSError, ValueError, LookupError, TypeError):
        return ASSUMED


def keep_overhead(cache_dir: str, gpu: str, overhead: Overhead) -> Path:
    """Write down what was measured, beside that of other GPUs and versions.

    Raises:
        UserError: The cache cannot be written.
    """
    path = Path(cache_dir).expanduser() / KEPT
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        kept = {}
    kept[_key(gpu)] = overhead._asdict()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False, encoding="utf-8") as file:
            json.dump(kept, file, indent=2)
        os.replace(file.name, path)
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): choose another --cache_dir") from error
    return path


def measure_overhead(train: Callable[[], None]) -> Overhead:
    """Measure all three on the first CUDA GPU; nothing else may use it.

    Args:
        train: Runs a few optimizer steps of a model on that GPU, and keeps nothing.

    Raises:
        UserError: There is no CUDA GPU, or this process has used it already.
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
    allocated, reserved = torch.cuda.max_memory_allocated(0), torch.cuda.max_memory_reserved(0)
    source = f"measured on {torch.cuda.get_device_name(0)}, torch {torch.__version__}, {strftime('%Y-%m-%d')}"
    return Overhead(max(0, context), workspace, reserved / allocated - 1, source)


def _measure_workspace() -> int:
    """Return the bytes that stay allocated when forward and backward pass of a linear layer are over."""
    layer = torch.nn.Linear(1024, 1024, device="cuda")
    held = torch.cuda.memory_allocated(0)
    for dtype in (torch.float32, torch.bfloat16):
        with torch.autocast("cuda", dtype, enabled=dtype != torch.float32):
            layer(torch.zeros(1024, 1024, device="cuda")).sum().backward()
    layer.zero_grad()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated(0) - held


def _used_before() -> int:
    """Return the bytes in use on the GPU before this process touches it, as the driver's own tool says."""
    if not (tool := shutil.which("nvidia-smi")):
        return 0
    command = [tool, "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    answer = subprocess.run(command, capture_output=True, text=True)
    first = answer.stdout.strip().splitlines()[:1]
    return int(first[0]) * 2**20 if first and first[0].strip().isdigit() else 0


def _key(gpu: str | None) -> str:
    return f"{gpu}, torch {torch.__version__}, CUDA {torch.version.cuda}"
