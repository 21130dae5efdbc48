"""Memory of DeepSpeed's ZeRO by formula: its engine needs a GPU, so it cannot be rehearsed."""

from fabric_ladder.techniques.low_bit_optimizer import MOMENT_BYTES
from fabric_ladder.techniques.memory import Counts, Peak

STATE_BYTES = {"adam": 8, "adamw": 8, "adam-8bit": MOMENT_BYTES["adam-8bit"], "sgd": 0}  # per 32-bit weight


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
    Rajbhandari et al., 2020, ZeRO, section 3, with a 32-bit sum of the gradients (`data_types.grad_accum_dtype`). The
    others are DeepSpeed 0.19's own `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs`,
    for T = P and o = 8. Its source adds V, and in stage 2 a second buffer for the gradient of the largest layer.
    `_buckets` comes on top.
    Two other moments may need more memory. The start of stage 2 with offload copies the offloaded share on the GPU. The
    step of stage 3 copies `sub_group_size` gradients into 32 bits. The buffers of NVMe offload are left out.

    Args:
        peak: The peak on one GPU without DeepSpeed under `bf16-true`, without optimizer state.
        counts: Numbers of the model's parameters.
        config: The `zero_optimization` section of DeepSpeed's configuration.
        optimizer: Name of the optimizer in the settings.
        ranks: Number of GPUs.
    """
    state = 8 + STATE_BYTES[optimizer]  # with the 32-bit copy and the 32-bit gradient
    devices = [(config.get(f"offload_{name}") or {}).get("device", "none") for name in ("optimizer", "param")]
    weights, gradients, kept, elsewhen = _on_gpu(counts, state, devices, ranks, config)
    peak = peak._replace(
        parameters=round(weights),
        gradients=round(gradients),
        optimizer_state=round(kept),
        other=peak.other + round(_buckets(counts, config)),
        host=peak.host + round(_parked(counts, state, devices, ranks)),
    )
    return peak._replace(other=peak.other + max(0, round(elsewhen) - peak.total))


def _buckets(counts: Counts, config: dict) -> float:
    """Return the bytes of the gradients that are averaged together.

    DeepSpeed allocates the bucket in full, even if the model is smaller, and copies the gradients in it into one tensor
    (`setup_buckets` and `allreduce_bucket` in `zero/stage_1_and_2.py`, `zero/stage3.py`, `reduce_scatter_coalesced`).
    Stage 1 has its bucket in 32 bits. `overlap_comm` doubles it, but not in stage 3. Weights are gathered in place, so
    `allgather_bucket_size` needs no memory.
    """
    size = config.get("reduce_bucket_size", 5e8)
    buffers = 2 if config["stage"] < 3 and config.get("overlap_comm") else 1
    return buffers * size * (4 if config["stage"] == 1 else 2) + 2 * min(size, counts.trained)


def _on_gpu(counts: Counts, state: float, devices: list[str], ranks: int, config: dict) -> tuple[float, ...]:
    """Return the bytes of weights, gradients and optimizer state on each GPU, and of all three at the other moment."""
    steps_on_gpu, keeps_weights = (device == "none" for device in devices)
    stage, weights, trained, gradients, kept, elsewhen = config["stage"], 2 * counts.all, counts.trained, 0, 0, 0
    if stage == 3:
        live = max(config.get(f"stage3_max_{name}", 1e9) for name in ("live_parameters", "reuse_distance"))
        # one rank holds all its weights, and gathers none if they are on the GPU (`partition_parameters.py`)
        early = 0 if keeps_weights and ranks == 1 else 2 * min(counts.all, live)
        weights = 4 * counts.largest_layer + early + (weights / ranks if keeps_weights else 0)
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
