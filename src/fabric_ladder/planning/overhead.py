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

    def bounds(self, peak: Peak) -> tuple[int, int]:
        """Return the least and the most bytes of GPU memory that a run with this peak may need.

        Both are `needed` if the overhead is measured: context and workspace of a GPU hardly change. The measured
        fragmentation is of one short training. Its spread over models is not known.
        """
        low, high = (LOW, HIGH) if self == ASSUMED else (self, self)
        return low.needed(peak), high.needed(peak)


# Assumptions about a run on one GPU; ASSUMED is the expected case.
#
# context: PyTorch's out-of-memory errors print the memory of the process, the allocated bytes and the reserved bytes.
# The rest is the context with its kernels. PyTorch 2.1 or later, transformers of texts, images and videos:
#     T4 0.15 GB (FoundationVision/GenerateU#10), P100 0.32 (andimarafioti/florence2-finetuning#17; both GPUs are known
#     by their memory), RTX 6000 Ada 0.45 (DINGYANB/MTVCrafter#21), RTX 4090 0.50 and 0.55 (lrzjason/T2ITrainer#37,
#     huggingface/lora-fast#1), L40S 0.54 (huggingface/sentence-transformers#3214), RTX 5090 0.62 and 0.65
#     (Wan-Video/Wan2.1#465, TrajectoryCrafter/TrajectoryCrafter#20)
# Without kernels it is 0.27 GB on an RTX 3090 with CUDA 12.8 (invoke-ai/InvokeAI#9413). PyTorch loads kernels lazily
# since 1.13 (pytorch#86509). With all kernels a V100 with CUDA 11.2 took 1.41 GB (transformers' documentation, "Model
# training anatomy"). On several GPUs, with NCCL, 2.2 GB are published (minerva4ai-eu/minerva-benchmarks#42). HIGH does
# not cover these two.
#
# workspace: the forward and the backward pass run in separate threads, each with a workspace of cuBLAS: 8.1 MiB, or
# 32 MiB on compute capability 9.0 (PyTorch, `CublasHandlePool.cpp: parseChosenWorkspaceSize`).
#
# fragmentation: in the errors above, reserved bytes exceed the allocated bytes by 0.1 to 2.3 % on one GPU, and by 6 to
# 10 % on several. GMLake (arXiv:2401.08156) saw 15 % on average in eight large models. A run has expandable segments,
# which reduce it. The three figures are guesses between these.
LOW = Overhead(context=150_000_000, workspace=2 * 8_519_680, fragmentation=0.01, source="assumed, low")
ASSUMED = Overhead(context=500_000_000, workspace=2 * 32 * 2**20, fragmentation=0.05, source="assumed, not measured")
HIGH = Overhead(context=700_000_000, workspace=2 * 32 * 2**20, fragmentation=0.1, source="assumed, high")


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
