"""What of a run's memory cannot be rehearsed, by formula: DeepSpeed's ZeRO, and weights in 4 bits."""

from typing import NamedTuple

from torch import nn

from fabric_ladder.tracker import Peak

NF4_BYTES = (4 + 8 / 64 + 32 / (64 * 256)) / 8  # of a weight, with its constants: QLoRA, section 3
MOMENTS = {"adam": 8, "adamw": 8, "adafactor": 0, "sgd": 0}  # bytes of a weight's optimizer state, in 32-bit


class Counts(NamedTuple):
    """Elements of a model's parameters.

    Attributes:
        all: Of the whole model.
        trained: That are trained.
        largest_layer: Of the module that holds most itself.
        linear: Of frozen linear layers, which `quantization` keeps in 4 bits.
        largest_linear: Of the largest of these.
    """

    all: int
    trained: int
    largest_layer: int
    linear: int
    largest_linear: int


def count_parameters(model: nn.Module) -> Counts:
    """Count the parameters of a model, with its adapters if it has any; shared ones once."""
    layers = [sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules()]
    head = model.get_output_embeddings()
    frozen = [
        module.weight.numel()
        for module in model.modules()
        if isinstance(module, nn.Linear) and module is not head and not module.weight.requires_grad
    ]
    return Counts(
        all=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        largest_layer=max(layers),
        linear=sum(frozen),
        largest_linear=max(frozen, default=0),
    )


def in_4_bits(peak: Peak, counts: Counts) -> Peak:
    """Return the peak of 16-bit adapters' training once the frozen linear layers are in 4 bits.

    NF4 with double quantisation takes 4.127 bits a weight (Dettmers et al., 2023, QLoRA, section 3). For its product a
    layer is unpacked to 16 bits, one at a time.
    """
    saved = round(counts.linear * (2 - NF4_BYTES))
    return peak._replace(parameters=peak.parameters - saved, other=peak.other + 2 * counts.largest_linear)


def with_8_bit_adam(peak: Peak, counts: Counts) -> Peak:
    """Return the peak of training without optimizer state once 8-bit Adam keeps its own.

    Two moments of a byte for each weight, and a 32-bit constant for every 256 of them (Dettmers et al., 2022, 8-bit
    Optimizers via Block-wise Quantization; bitsandbytes 0.50).
    """
    return peak._replace(optimizer_state=round(2 * counts.trained * (1 + 4 / 256)))


def with_zero(peak: Peak, counts: Counts, config: dict, optimizer: str, ranks: int) -> Peak:
    """Return the peak under DeepSpeed's ZeRO in 16-bit mixed precision, on each of so many GPUs of one machine.

    With P parameters, T of them trained, N GPUs and o bytes of optimizer state (8 for Adam), of model states each GPU
    holds, and `host` the machine's memory over N:

    | stage | GPU | host |
    |---|---|---|
    | 1 | 2 P + 6 T + (4 + o) T / N | |
    | 2 | 2 P + (10 + o) T / N | |
    | 2, optimizer offloaded | 2 P | 1.5 max(4 N, 8 + o) T / N |
    | 3 | 4 L + 2 P / N + (8 + o) T / N | |
    | 3, optimizer offloaded | 4 L + 2 P / N | 1.5 max(4 N, 8 + o) T / N |
    | 3, parameters too | 4 L | 1.5 max(4 N P, 2 P + (8 + o) T) / N |

    where L is the largest layer. Stage 1 is Rajbhandari et al., 2020, ZeRO, section 3, with the 32-bit sum of the
    gradients that `data_types.grad_accum_dtype` asks for; the others are DeepSpeed 0.19's own
    `estimate_zero2_model_states_mem_needs` and `estimate_zero3_model_states_mem_needs`, for T = P and o = 8. The two
    communication buckets come on top, in 16 bits.

    Args:
        peak: Of one GPU without DeepSpeed under `bf16-true`, without optimizer state.
        counts: Of the model's parameters.
        config: The `zero_optimization` section of DeepSpeed's configuration.
        optimizer: Its name in the settings.
        ranks: GPUs.
    """
    stage, state = config["stage"], 8 + MOMENTS[optimizer]  # with the 32-bit copy and the 32-bit gradient
    offloaded = {kind for kind in ("optimizer", "param") if config.get(f"offload_{kind}", {}).get("device") == "cpu"}
    everything, trained = counts.all, counts.trained
    weights, gradients, kept, host = 2 * everything, 0, 0, 0
    if stage == 3:
        weights = 4 * counts.largest_layer + (0 if "param" in offloaded else 2 * everything / ranks)
    if "optimizer" in offloaded:
        host = max(4 * ranks, state) * trained
        if "param" in offloaded:
            host = max(4 * ranks * everything, 2 * everything + state * trained)
    else:
        gradients = {1: 6 * trained, 2: 6 * trained / ranks, 3: 4 * trained / ranks}[stage]
        kept = (state - 4) * trained / ranks
    buckets = 2 * (config.get("reduce_bucket_size", 5e8) + config.get("allgather_bucket_size", 0))
    return peak._replace(
        parameters=round(weights),
        gradients=round(gradients),
        optimizer_state=round(kept),
        other=peak.other + round(buckets),
        host=round(1.5 * host / ranks),
    )
