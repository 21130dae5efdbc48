"""The cost of more GPUs: the bytes that each GPU sends in an optimizer step, and the GPUs that a link keeps busy.

In a ring of N GPUs, each GPU sends 2 (N - 1) / N S bytes to all-reduce S bytes, and (N - 1) / N S bytes to all-gather
or reduce-scatter them (Patarasuk and Yuan, 2009, Bandwidth optimal all-reduce algorithms for clusters of
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
    """The work of an optimizer step.

    Attributes:
        weights: Number of all weights.
        trained: Number of trained weights.
        root: Number of weights outside the transformer blocks. FSDP2 keeps them from the forward to the backward pass.
        precision: Precision, as in the settings.
        samples: Samples of the effective batch.
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
    """Return a model's work, as the formulas need it.

    A token costs 6 N + 12 L H T operations, forward and backward (Chowdhery et al., 2022, PaLM, appendix B). N is the
    number of parameters without embedding tables, L the number of layers, H their width, and T the tokens of a sample.

    Args:
        model: A model on any device; the meta device is enough.
        precision: Precision, as in the settings.
        samples: Samples of the effective batch.
        micro_batch: Samples of a micro-batch.
        length: Tokens of a sample.
    """
    blocks = transformer_blocks(model)
    config = model.config.get_text_config()
    weights = sum(parameter.numel() for parameter in model.parameters())
    in_blocks = sum(parameter.numel() for block in blocks for parameter in block.parameters())
    looked_up = sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Embedding))
    head = model.get_output_embeddings()
    if head is not None and head.weight is model.get_input_embeddings().weight:  # the tied head multiplies by it
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

    The table uses P weights, T trained weights, R weights outside the blocks, m micro-batches, w bytes per sent weight,
    and g bytes per sent gradient:

    | | all-reduced | all-gathered | reduce-scattered |
    |---|---|---|---|
    | ddp | g T | | |
    | fsdp2 | | m w (2 P - R) | m g T |
    | zero1 | g T | w T | |
    | zero2 | m g T | w T | |
    | zero3 | | 2 m w P | m g T |

    ddp and zero1 add gradients over the GPUs once per step, the others in each micro-batch. DeepSpeed 0.19 all-reduces
    gradients in stages 1 and 2 (`stage_1_and_2.py: average_tensor`), while the paper reduce-scatters them (Rajbhandari
    et al., 2020, ZeRO, section 7). So these stages send 3 P instead of 2 P. Stage 3 sends less than the table if it
    still keeps weights from an earlier use (`stage3_max_live_parameters`).
    """
    mixed = work.precision.endswith("-mixed")
    whole = {"32-true": 4, "64-true": 8}.get(work.precision, 2)
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
    """Return the largest number of GPUs that a link keeps busy: sending takes no longer than computing.

    Up to this number, sending can overlap with computing. Beyond it, GPUs wait for the link. Latency and networks that
    are slower than their cards are left out.

    Args:
        technique: One of `TECHNIQUES`.
        work: The work of an optimizer step.
        counts: Numbers of GPUs to choose from, ascending.
        flops: Floating-point operations of a GPU per second.
        link: Bytes that a GPU, or the network card of a machine, sends per second.

    Returns:
        The largest number, at most the number of samples; None if no number is kept busy.
    """
    best = None
    for gpus in counts:
        computing = -(-work.samples // gpus) * work.flops / flops
        if gpus > work.samples or bytes_sent(technique, work, gpus) / link > computing:
            return best
        best = gpus
    return best
