"""GPU memory that a run needs in addition to its tensors: assumed, or measured by `calibration` and cached."""

import json
from pathlib import Path
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
    kept = _read_kept(cache_dir).get(_key(gpu))
    return Overhead(**kept) if kept else ASSUMED


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


def _read_kept(cache_dir: str) -> dict[str, dict]:
    try:
        return json.loads((Path(cache_dir) / KEPT).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # nothing was measured yet, or the file is damaged
        return {}


def _key(gpu: str) -> str:
    return f"{gpu}, torch {torch.__version__}, CUDA {torch.version.cuda}"
