"""How much of a GPU a training uses, and how long a whole epoch takes.

Model FLOPs utilisation (MFU) follows appendix B of the PaLM paper (Chowdhery et al., 2022, arXiv:2204.02311): a token
costs 6 N + 12 L H Q T floating-point operations, forward and backward, where N counts the parameters, L the layers,
H Q = heads x head size is the hidden size, and T is the sequence's length. Over sequences of the lengths t this adds up
to 6 N sum(t) + 12 L H Q sum(t^2). N leaves out the embedding, which is only looked up: a classifier has no output
embedding. Padding is not counted as work, so it lowers the MFU. It is a share of the peak of the products' own
precision: of 16 bits, of TF32, or of 32 bits in full. The seconds are those of the training, without validation and
without what torch.compile takes, which stands beside them.
"""

import common  # noqa: F401 - first of all: it makes the project importable without an installation
import numpy as np

from fabric_ladder.planning.gpus import Gpu

EPOCH = 35_000  # reviews


def peak_flops(gpu: Gpu, precision: str, matmul_precision: str) -> float:
    """Return the peak in FLOP/s of the products that these settings ask for.

    Args:
        gpu: Its data sheet.
        precision: As in the settings; mixed ones take their products in 16 bits.
        matmul_precision: As in the settings, for 32-bit matrices.
    """
    if precision.startswith(("bf16", "16")):
        return gpu.half * 1e12
    tensor_cores = {"highest": gpu.plain, "high": gpu.single, "medium": gpu.half}
    return (tensor_cores[matmul_precision] if gpu.capability >= (8, 0) else gpu.plain) * 1e12


def training_flops(parameters: int, config: dict, lengths: np.ndarray) -> float:
    """Return the FLOPs of one epoch over sequences of these lengths; see the formula above.

    Args:
        parameters: All of the model's, its input embedding among them.
        config: The model's, with `vocab_size`, `hidden_size` and `n_layer`.
        lengths: Tokens of each training sample, without padding.
    """
    lengths = lengths.astype(float)
    others = parameters - config["vocab_size"] * config["hidden_size"]
    return 6 * others * lengths.sum() + 12 * config["n_layer"] * config["hidden_size"] * (lengths**2).sum()


def extrapolate(figures: dict, config: dict, lengths: np.ndarray, gpu: Gpu | None) -> dict:
    """Return the figures of a training with an epoch's seconds and the model FLOPs utilisation.

    The epoch's are those of the training, with what compiling, the trial of the longest batch and the first batches
    took, and for the reviews that are missing the rate of the last printed loss.

    Raises:
        RuntimeError: It trained other texts.
    """
    if figures["tokens"] != lengths.sum():
        raise RuntimeError(f"{figures['tokens']} tokens were trained instead of {lengths.sum()}")
    late = figures.get("late_samples_per_second", figures["samples_per_second"])  # the blog's rate is one
    flops = training_flops(figures["parameters"], config, lengths)
    begun = figures.get("seconds_to_last_step", figures["training_seconds"])
    found = {"epoch_seconds": begun + max(0, EPOCH - len(lengths)) / late,
             "model_tflops_per_second": flops / figures["training_seconds"] / 1e12}  # fmt: skip
    if gpu:
        peak = peak_flops(gpu, figures["precision"], figures["matmul_precision"])
        found |= {"mfu": flops / figures["training_seconds"] / peak, "late_mfu": flops / len(lengths) * late / peak}
    return figures | found
