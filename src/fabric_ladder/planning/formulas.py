"""Formulas for the memory that cannot be rehearsed on fake tensors.

The first part changes the tensors of a rehearsed `Peak`: 4-bit weights, 8-bit Adam, DeepSpeed's ZeRO. The second part
is `Overhead`, the GPU memory in addition to tensors. It is measured on a GPU and cached, or assumed.
"""

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
from fabric_ladder.models.optimizer import state_dtypes
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.adam_4bit import AT_ONCE, BLOCK
from fabric_ladder.techniques.memory import Counts, Peak

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8  # bytes per weight, with its constants: QLoRA, section 3
ADAM_8_BIT = 2 * (1 + 4 / 256)  # bytes of a weight's two moments, with a 32-bit constant per block of 256
ADAM_4_BIT = 2 * (1 / 2 + 4 / BLOCK)  # bytes of the two moments of 4-bit Adam
MOMENTS = {"adam": 8, "adamw": 8, "adam-8bit": ADAM_8_BIT, "sgd": 0}  # bytes of optimizer state per 32-bit weight


def in_4_bits(peak: Peak, counts: Counts, width: int) -> Peak:
    """Return the peak of training adapters with the frozen linear layers in 4 bits.

    NF4 with double quantization takes 4.127 bits per weight (Dettmers et al., 2023, QLoRA, section 3). For its matrix
    multiplication each layer is unpacked to `width` bytes per weight, one layer at a time.
    """
    saved = round(counts.linear * (width - NF4_BYTES))
    return peak._replace(parameters=peak.parameters - saved, other=peak.other + width * counts.largest_linear)


def with_8_bit_adam(peak: Peak, counts: Counts) -> Peak:
    """Return the peak with the moments of 8-bit Adam, from a peak without moments.

    Each weight has two moments of one byte, and each block of 256 moments a 32-bit constant (Dettmers et al., 2022,
    8-bit Optimizers via Block-wise Quantization; bitsandbytes 0.50).
    """
    return peak._replace(optimizer_state=peak.optimizer_state + round(counts.trained * ADAM_8_BIT))


def with_optimizer_offload(peak: Peak, counts: Counts, settings: Settings) -> Peak:
    """Return the peak with optimizer state and a copy of the trained weights in CPU memory.

    CPU memory also holds the gradients in transfer: all gradients, if the device is faster than the CPU. bitsandbytes
    unpacks each weight into six 32-bit tensors for a step on the CPU, and 4-bit Adam a part of it into five. The
    formula counts the largest weight's tensors. It ignores that PyTorch rounds pinned tensors up to a power of two.
    """
    width = 4 if settings.lora else {"64-true": 8, "bf16-true": 2, "16-true": 2}.get(settings.precision, 4)
    state = width * state_dtypes(settings).count(None)
    state += {"adam-8bit": ADAM_8_BIT, "adam-4bit": ADAM_4_BIT}.get(settings.optimizer, 0)
    host = counts.trained * (state + 2 * width)
    if settings.optimizer == "adam-8bit":
        host += 24 * counts.largest_layer
    elif settings.optimizer == "adam-4bit":
        host += 20 * min(counts.largest_layer, AT_ONCE)
    return peak._replace(host=peak.host + round(host))


def with_zero(peak: Peak, counts: Counts, config: dict, optimizer: str, ranks: int) -> Peak:
    """Return the peak under DeepSpeed's ZeRO in 16-bit mixed precision, on each of N GPUs of one machine.

    The table gives the bytes of model states on each GPU, and in CPU memory divided by N. It uses P parameters, T
    trained parameters and o bytes of optimizer state (8 for Adam):

    | stage | GPU | CPU |
    |---|---|---|
    | 1 | 2 P + 6 T + (4 + o) T / N | |
    | 2 | 2 P + (10 + o) T / N | |
    | 2, optimizer offloaded | 2 P + 4 L | 1.5 max(4 N, 8 + o) T / N |
    | 3 | 4 L + 2 V + 2 P / N + (8 + o) T / N | |
    | 3, optimizer offloaded | 4 L + 2 V + 2 P / N | 1.5 max(4 N, 8 + o) T / N |
    | 3, parameters too | 4 L + 2 V | 1.5 max(4 N P, 2 P + (8 + o) T) / N |

    L is the largest layer. V are the weights that stage 3 gathers early or keeps for the next use. Stage 1 is
    Rajbhandari et al., 2020, ZeRO, section 3, with the 32-bit sum of the gradients that `data_types.grad_accum_dtype`
    asks for; the others are DeepSpeed 0.19's own `estimate_zero2_model_states_mem_needs` and
    `estimate_zero3_model_states_mem_needs`, for T = P and o = 8, with what its source adds: V, and in stage 2 a buffer
    for the gradient of the largest layer beside that gradient. The two communication buckets come on top, in 16 bits.
    Two other moments may need more memory. The start of stage 2 with offload copies the offloaded share on the GPU. The
    step of stage 3 copies `sub_group_size` gradients into 32 bits. The buffers of NVMe offload are left out.

    Args:
        peak: The peak on one GPU without DeepSpeed under `bf16-true`, without optimizer state.
        counts: Numbers of the model's parameters.
        config: The `zero_optimization` section of DeepSpeed's configuration.
        optimizer: Name of the optimizer in the settings.
        ranks: Number of GPUs.
    """
    state = 8 + MOMENTS[optimizer]  # with the 32-bit copy and the 32-bit gradient
    devices = [(config.get(f"offload_{name}") or {}).get("device", "none") for name in ("optimizer", "param")]
    weights, gradients, kept, elsewhen = _on_gpu(counts, state, devices, ranks, config)
    buckets = 2 * (config.get("reduce_bucket_size", 5e8) + config.get("allgather_bucket_size", 0))
    peak = peak._replace(
        parameters=round(weights),
        gradients=round(gradients),
        optimizer_state=round(kept),
        other=peak.other + round(buckets),
        host=peak.host + round(_parked(counts, state, devices, ranks)),
    )
    return peak._replace(other=peak.other + max(0, round(elsewhen) - peak.total))


def _on_gpu(counts: Counts, state: float, devices: list[str], ranks: int, config: dict) -> tuple[float, ...]:
    """Return the bytes of weights, gradients and optimizer state on each GPU, and of all three at the other moment."""
    steps_on_gpu, keeps_weights = (device == "none" for device in devices)
    stage, weights, trained, gradients, kept, elsewhen = config["stage"], 2 * counts.all, counts.trained, 0, 0, 0
    if stage == 3:
        live = max(config.get(f"stage3_max_{name}", 1e9) for name in ("live_parameters", "reuse_distance"))
        gathered = 4 * counts.largest_layer + 2 * min(counts.all, live)
        weights = gathered + (weights / ranks if keeps_weights else 0)
    if steps_on_gpu:
        gradients = {1: 6 * trained, 2: 6 * trained / ranks, 3: 4 * trained / ranks}[stage]
        kept = (state - 4) * trained / ranks
        if stage == 3:
            elsewhen = weights + gradients + kept + 4 * min(config.get("sub_group_size", 1e9), trained / ranks)
    elif stage < 3:
        weights, elsewhen = weights + 4 * min(counts.largest_layer, trained), weights + 2 * trained / ranks
    return weights, gradients, kept, elsewhen


def _parked(counts: Counts, state: float, devices: list[str], ranks: int) -> float:
    """Return the bytes of CPU memory per GPU, by the table of `with_zero`, for optimizer and weights on `devices`."""
    optimizer, weights = (device == "cpu" for device in devices)
    trained = state * counts.trained
    if optimizer and weights:
        return 1.5 * max(4 * ranks * counts.all, 2 * counts.all + trained) / ranks
    return 1.5 * max(4 * ranks * counts.trained, trained) / ranks if optimizer else 0


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
