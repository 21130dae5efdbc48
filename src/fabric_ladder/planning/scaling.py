"""What more GPUs cost: the bytes that each sends in an optimizer step, and how many a link can keep busy.

Of S bytes, a ring of N GPUs has each of them send 2 (N - 1) / N S to all-reduce them, and (N - 1) / N S to all-gather
or to reduce-scatter them (Patarasuk and Yuan, 2009, Bandwidth optimal all-reduce algorithms for clusters of
workstations, section 3; nccl-tests, doc/PERFORMANCE.md). Across machines, the ring passes through each network card
once, so the same bytes go through the card of a machine with several GPUs.
"""

from typing import NamedTuple

from torch import nn

from fabric_ladder.distributed.fsdp import transformer_blocks

TECHNIQUES = ("ddp", "fsdp2", "zero1", "zero2", "zero3")
# Bytes/s in one direction, by their makers' data sheets, before any overhead
LINKS = {
    "PCIe 4.0 x16": 31.5e9,
    "NVLink, A100": 300e9,
    "NVLink, H100": 450e9,
    "100 Gbit/s": 12.5e9,
    "400 Gbit/s": 50e9,
}


class Work(NamedTuple):
    """What is trained.

    Attributes:
        weights: Elements of all parameters.
        trained: Elements of those that are trained.
        root: Elements outside the transformer blocks, which FSDP2 keeps from the forward to the backward pass.
        precision: As in the settings.
        samples: Of the effective batch.
        micro_batch: Samples of a micro-batch.
        flops: Floating-point operations of a sample, forward and backward.
    """

    weights: int
    trained: int
    root: int
    precision: str
    samples: int
    micro_batch: int
    flops: float

    def micro_batches(self, gpus: int) -> int:
        """Return the micro-batches of each GPU in an optimizer step."""
        share = -(-self.samples // gpus)
        return -(-share // self.micro_batch)


def describe_work(model: nn.Module, precision: str, samples: int, micro_batch: int, length: int) -> Work:
    """Return what the formulas need to know of a model, on any device.

    A token costs 6 N + 12 L H T operations, forward and backward: N parameters without embeddings, which are only
    looked up, L layers of width H, T tokens in the sample (Chowdhery et al., 2022, PaLM, appendix B).

    Args:
        model: May be on the meta device.
        precision: As in the settings.
        samples: Of the effective batch.
        micro_batch: Samples of a micro-batch.
        length: Tokens of a sample.
    """
    blocks, config = transformer_blocks(model), model.config.get_text_config()
    weights = sum(parameter.numel() for parameter in model.parameters())
    in_blocks = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    looked_up = sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Embedding))
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:  # it is multiplied, too
        looked_up -= head.weight.numel()
    return Work(
        weights=weights,
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        root=weights - in_blocks,
        precision=precision,
        samples=samples,
        micro_batch=micro_batch,
        flops=length * (6 * (weights - looked_up) + 12 * len(blocks) * config.hidden_size * length),
    )


def bytes_sent(technique: str, work: Work, gpus: int) -> int:
    """Return the bytes that each GPU sends in an optimizer step.

    With P weights, T of them trained, R outside the blocks, m micro-batches, and w and g bytes of a weight and of a
    gradient while they are sent:

    | | all-reduced | all-gathered | reduce-scattered |
    |---|---|---|---|
    | ddp | g T | | |
    | fsdp2 | | m w (2 P - R) | m g T |
    | zero1 | g T | w T | |
    | zero2 | m g T | w T | |
    | zero3 | | 2 m w P | m g T |

    Gradients are summed over the GPUs once in a step by ddp and zero1, and in each micro-batch by the others. DeepSpeed
    0.19 all-reduces where the paper reduce-scatters (`stage_1_and_2.py: average_tensor`), so its stages 1 and 2 send
    half as much again as the 2 P of Rajbhandari et al., 2020, ZeRO, section 7; its stage 3 sends less than this where
    it still holds weights from before (`stage3_max_live_parameters`).
    """
    mixed, whole = work.precision.endswith("-mixed"), {"32-true": 4, "64-true": 8}.get(work.precision, 2)
    weight = 2 if mixed else whole
    gradient = (2 if technique.startswith("zero") else 4) if mixed else whole
    micro_batches = work.micro_batches(gpus)
    gradients = gradient * work.trained * (1 if technique in ("ddp", "zero1") else micro_batches)
    gathered = {
        "ddp": 0,
        "fsdp2": micro_batches * (2 * work.weights - work.root),
        "zero1": work.trained,
        "zero2": work.trained,
        "zero3": micro_batches * 2 * work.weights,
    }[technique]
    twice = 1 if technique in ("fsdp2", "zero3") else 2  # reduce-scattered, or all-reduced
    return round((gpus - 1) / gpus * (twice * gradients + weight * gathered))


def most_gpus(technique: str, work: Work, counts: list[int], flops: float, link: float) -> int | None:
    """Return the most GPUs that are kept busy: on all fewer, too, sending takes no longer than computing.

    At best, then, sending hides behind computing and the step takes as long as the computing. Beyond, more GPUs wait
    for the link. Latency and a network that is slower than its cards are left out.

    Args:
        technique: One of `TECHNIQUES`.
        work: What is trained.
        counts: Of GPUs to choose from, ascending.
        flops: Floating-point operations that a GPU does in a second.
        link: Bytes that a GPU, or the card of a machine with several, sends in a second.

    Returns:
        None where no count is kept busy; no count above the samples is looked at, since a GPU needs one.
    """
    best = None
    for gpus in counts:
        computing = -(-work.samples // gpus) * work.flops / flops
        if gpus > work.samples or bytes_sent(technique, work, gpus) / link > computing:
            return best
        best = gpus
    return best
