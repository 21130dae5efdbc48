"""GPU memory that a run needs in addition to its tensors: assumed, or measured by `calibration` and cached."""

import json
from pathlib import Path
from typing import NamedTuple

import torch

from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError
from fabric_ladder.planning.gpus import ANY, Gpu
from fabric_ladder.techniques.memory import Peak

KEPT = "memory/overhead.json"  # path in the cache folder


class Overhead(NamedTuple):
    """GPU memory that a run needs in addition to its tensors.

    Attributes:
        context: Bytes of the driver and CUDA's kernels before the first tensor.
        workspace: Bytes of cuBLAS in PyTorch's allocator.
        fragmentation: Memory that the allocator reserves beyond the peak of its tensors, as a fraction of that peak.
        source: Source of the figures, in words.
        nccl: Bytes of NCCL, which several GPUs communicate by.
    """

    context: int
    workspace: int
    fragmentation: float
    source: str
    nccl: int = 0

    @property
    def outside(self) -> int:
        """Bytes outside PyTorch's allocator."""
        return self.context + self.nccl

    def needed(self, peak: Peak) -> int:
        """Return the bytes of GPU memory that a run with this peak needs."""
        tensors = peak.total + peak.pool
        return tensors + round(self.outside + self.workspace + self.fragmentation * (tensors + self.workspace))


class Bounds(NamedTuple):
    """The least, the expected and the largest overhead of a run; equal if it is measured, apart from NCCL.

    The measured fragmentation is of one short training. Its spread over models is not known.
    """

    low: Overhead
    expected: Overhead
    high: Overhead

    def needed(self, peak: Peak) -> int:
        """Return the expected bytes of GPU memory that a run with this peak needs."""
        return self.expected.needed(peak)

    def bounds(self, peak: Peak) -> tuple[int, int]:
        """Return the least and the most bytes of GPU memory that a run with this peak may need."""
        return self.low.needed(peak), self.high.needed(peak)

    def on(self, gpus: int) -> "Bounds":
        """Return the overhead of a run on N GPUs, which NCCL adds to."""
        added = NCCL if gpus > 1 else (0, 0, 0)
        return Bounds(*(each._replace(nccl=size) for each, size in zip(self, added, strict=True)))


# Assumptions about a run; ASSUMED is the expected case.
#
# context: PyTorch's out-of-memory errors print the memory of the process, the allocated bytes and the reserved bytes.
# The rest is the context with its kernels, in GB (10^9 bytes). PyTorch 2.1 or later, one GPU:
#     6.0 to 7.5: T4 0.14 and 0.15 (Zheng-Chong/CatVTON#133, FoundationVision/GenerateU#10), P100 0.32
#         (andimarafioti/florence2-finetuning#17; this GPU and the second T4 are known by their memory)
#     7.0: V100 0.3 to 0.4 (PyTorch 1.1, pytorch#20532), 0.72 with NCCL (1CatAI/1Cat-vLLM#8); expected and high: assumed
#     8.0: A100 0.52 (TianheWu/CoSeR#10, and 501 MiB); without kernels A100 0.43 (awslabs/keys_values#92); low: assumed
#         for the A30, which has half the multiprocessors
#     8.6: 0.19 on a card of 8 GB (RTX 3070, meta-llama/codellama#82); without kernels RTX 3090 0.27
#         (invoke-ai/InvokeAI#9413); high: assumed for the RTX A6000
#     8.9: L4 0.24 (226 MiB), RTX 6000 Ada 0.45 (DINGYANB/MTVCrafter#21), RTX 4090 0.50, 0.53 and 0.55
#         (lrzjason/T2ITrainer#37, 3DTopia/Phidias-Diffusion#8, huggingface/lora-fast#1), L40S 0.54
#         (huggingface/sentence-transformers#3214); without kernels RTX 4060 Ti 0.11 (ggml-org/llama.cpp#23604)
#     9.0: H100 0.79 (measured by `calibration` with PyTorch 2.11 and CUDA 13.0, docs/gpu.md)
#     10.0 and above: RTX 5090 0.62 and 0.65 (Wan-Video/Wan2.1#465, TrajectoryCrafter/TrajectoryCrafter#20); without
#         kernels RTX PRO 6000 0.58 (ggml-org/llama.cpp#23604); low: assumed for small GPUs; B200: none found
# In these figures the context grows with the multiprocessors of a GPU. The bounds of an unknown GPU are those of 8.9.
# PyTorch loads kernels lazily since 1.13 (pytorch#86509). With all kernels a V100 with CUDA 11.2 took 1.41 GB
# (transformers' documentation, "Model training anatomy"). No bound covers this.
#
# workspace: the forward and the backward pass run in separate threads, each with a workspace of cuBLAS: 8.1 MiB, or
# 32 MiB on compute capability 9.0, in newer versions also on 10.0 and above (PyTorch, `CublasHandlePool.cpp:
# parseChosenWorkspaceSize`).
#
# fragmentation: in the errors above, reserved bytes exceed the allocated bytes by 0.1 to 2.3 % on one GPU, and by 6 to
# 10 % on several. GMLake (arXiv:2401.08156) saw 15 % on average in eight large models. A run has expandable segments,
# which reduce it. The three figures are guesses between these.
SMALL, LARGE = 2 * 8_519_680, 2 * 32 * 2**20  # workspaces
CONTEXTS = {  # from this compute capability on: low, expected and high, in MB
    (6, 0): (130, 250, 450),
    (7, 0): (300, 500, 750),
    (7, 5): (130, 250, 450),
    (8, 0): (250, 500, 700),
    (8, 6): (150, 300, 550),
    (8, 9): (150, 500, 700),
    (9, 0): (500, 790, 900),
    (10, 0): (150, 650, 900),
}
LOW = Overhead(context=150_000_000, workspace=SMALL, fragmentation=0.01, source="assumed, low")
ASSUMED = Overhead(context=500_000_000, workspace=LARGE, fragmentation=0.05, source="assumed, not measured")
HIGH = Overhead(context=700_000_000, workspace=LARGE, fragmentation=0.1, source="assumed, high")
ANY_GPU = Bounds(LOW, ASSUMED, HIGH)

# NCCL on several GPUs, in bytes: low, expected and high. It grows with the channels, which are few over PCIe and many
# over NVLink (NVIDIA/nccl#986). Two A100 took 0.54 GB each, four took 0.69 GB (NVIDIA/nccl#964). Other figures include
# the context: 1.06 GB (8 x H100, NVIDIA/nccl#1685), 1.19 GB (4 x A100, awslabs/keys_values#92), 1.6 GB
# (NVIDIA/nccl#864), 2.2 GB (minerva4ai-eu/minerva-benchmarks#42). From these 0.5 GB are subtracted. The low figure is a
# guess.
NCCL = (100_000_000, 700_000_000, 1_700_000_000)


def assume(capability: tuple[int, int] | None) -> Bounds:
    """Return the overhead of a run on a GPU on which it was not measured.

    Args:
        capability: Compute capability of the GPU; None: not known.
    """
    if not capability:
        return ANY_GPU
    contexts = [sizes for least, sizes in CONTEXTS.items() if least <= max(capability, (6, 0))][-1]
    known = ANY_GPU
    if capability < (10, 0):
        known = [each._replace(workspace=LARGE if capability == (9, 0) else SMALL) for each in ANY_GPU]
    return Bounds(*(each._replace(context=size * 10**6) for each, size in zip(known, contexts, strict=True)))


def overhead_of(gpu: Gpu, cache_dir: str) -> Bounds:
    """Return the overhead of a run on a GPU of this type, measured or assumed."""
    return load_overhead(cache_dir, gpu.name, None if gpu.name == ANY.name else gpu.capability)


def load_overhead(cache_dir: str, gpu: str, capability: tuple[int, int] | None = None) -> Bounds:
    """Return the overhead measured on this GPU with this PyTorch, or the assumed one.

    Args:
        cache_dir: Folder of the cache, as in the settings.
        gpu: The driver's name of the GPU.
        capability: Compute capability of the GPU; None: not known.
    """
    kept = _read_kept(cache_dir).get(_key(gpu))
    return Bounds(*[kept] * 3) if kept else assume(capability)


def keep_overhead(cache_dir: str, gpu: str, overhead: Overhead) -> Path:
    """Add a measured overhead to the file of all GPUs and versions, and return its path.

    Raises:
        UserError: The cache cannot be written.
    """
    path = Path(cache_dir) / KEPT
    kept = _read_kept(cache_dir) | {_key(gpu): overhead}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({key: each._asdict() for key, each in kept.items()}, indent=2))
    except OSError as error:
        raise UserError(f"cannot write {path} ({error.strerror}): set FABRIC_LADDER_CACHE to another folder") from error
    return path


def _read_kept(cache_dir: str) -> dict[str, Overhead]:
    try:
        kept = json.loads((Path(cache_dir) / KEPT).read_text(encoding="utf-8"))
        return {key: Overhead(**values) for key, values in kept.items()}
    except (OSError, ValueError, TypeError, AttributeError):  # nothing was measured yet, or the file is damaged
        return {}


def _key(gpu: str) -> str:
    return f"{gpu}, torch {torch.__version__}, CUDA {torch.version.cuda}"
