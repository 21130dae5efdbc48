"""Settings of PyTorch that hold for the whole process: threads, precision of matrix multiplications, kernels."""

import os

import torch

from fabric_ladder.environment import compute_capability
from fabric_ladder.models.cpu_bfloat16 import compute_in_32_bits, replaces_bfloat16
from fabric_ladder.models.kernels import attention_kernels, use_kernels
from fabric_ladder.settings import Settings


def prepare_process(settings: Settings) -> None:
    """Set what holds for the whole process; `parse_settings` calls it for every script."""
    if settings.accelerator == "cpu":
        # transformers imports DeepSpeed where it is installed; it would print that it found no accelerator
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    if replaces_bfloat16(settings):
        compute_in_32_bits()
    if settings.threads:
        torch.set_num_threads(settings.threads)
        if settings.ranks > 1:
            os.environ["OMP_NUM_THREADS"] = str(settings.threads)  # Fabric's launcher would set another number
    if settings.matmul_precision:
        torch.set_float32_matmul_precision(settings.matmul_precision)
    torch.use_deterministic_algorithms(settings.deterministic)
    if kernels := chosen_kernels(settings):
        use_kernels(kernels)


def chosen_kernels(settings: Settings) -> tuple[str, ...]:
    """Return the attention kernels of a run in PyTorch's order; empty without a CUDA GPU."""
    if settings.accelerator != "cuda" or settings.attention != "fused":
        return ()
    fixed_length = settings.task == "image-classification"
    cudnn = torch.backends.cudnn.version()
    return attention_kernels(settings.precision, compute_capability(), cudnn, fixed_length, settings.deterministic)
