"""The memory of a run in bytes: its peak by kinds of tensors, and the numbers of weights that formulas need."""

from collections import Counter
from typing import NamedTuple

from torch import nn

from fabric_ladder.models.layers import find_blocks
from fabric_ladder.settings import Settings


class Kind(NamedTuple):
    """The name of a kind of memory, and its short form for tables."""

    name: str
    short: str


KINDS = {  # of memory on a device, in the order of lines, tables and pictures; the keys are attributes of `Peak`
    "parameters": Kind("weights", "weight"),
    "gradients": Kind("gradients", "grad"),
    "optimizer_state": Kind("optimizer", "optim"),
    "activations": Kind("activations", "activ"),
    "logits": Kind("logits", "logits"),
    "other": Kind("other", "other"),
}
ON_DEVICE = tuple(KINDS)


class Peak(NamedTuple):
    """Bytes in the memory of one device at the moment of the peak.

    Attributes:
        parameters: Weights and buffers; with FSDP the shards and the gathered weights.
        gradients: Gradients of the parameters.
        optimizer_state: State that the optimizer keeps for each parameter.
        activations: Results of the forward pass, or of its recomputation with activation checkpointing.
        logits: The activations, and their gradients, that have a value for each entry of the vocabulary.
        other: Inputs, gradients of activations, and temporary tensors of the optimizer.
        host: The largest amount of CPU memory that offloading holds at any moment; not part of the total.
        phase: The moment of the peak: `training` (forward or backward), `optimizer` or `evaluation`.
        pool: What CUDA graphs hold of the largest pass at that moment; PyTorch counts it as reserved, not in the total.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    logits: int
    other: int
    host: int
    phase: str
    pool: int = 0

    @property
    def of_pass(self) -> int:
        """The bytes that a forward and backward pass frees at its end."""
        return self.activations + self.logits + self.other

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return sum(getattr(self, part) for part in ON_DEVICE)


class Counts(NamedTuple):
    """Numbers of a model's weights.

    Attributes:
        all: All weights.
        trained: The trained weights.
        largest_layer: Weights of the largest module, its submodules not counted.
        linear: Weights of frozen linear layers, which 4-bit quantization packs.
        in_blocks: Weights of the blocks that can be streamed.
        linear_in_blocks: The weights of frozen linear layers among them.
        largest_block: The weights of the largest block among them.
    """

    all: int
    trained: int
    largest_layer: int
    linear: int
    in_blocks: int = 0
    linear_in_blocks: int = 0
    largest_block: int = 0


def bytes_of_weight(settings: Settings, frozen_linear: bool = False) -> int:
    """Return the bytes of a weight; mixed precision stores the linear layers that adapters freeze in 16 bits."""
    if frozen_linear and settings.precision.endswith("mixed"):
        return 2
    return {"64-true": 8, "bf16-true": 2, "16-true": 2}.get(settings.precision, 4)


def count_parameters(model: nn.Module) -> Counts:
    """Count the parameters of a model, adapters included; shared ones count once."""
    layers = frozen_linear_layers(model)
    linear = {id(layer.weight) for layer in layers}
    blocks = [list(weights.values()) for weights in streamed_weights(model).values()]
    return Counts(
        all=sum(parameter.numel() for parameter in model.parameters()),
        trained=sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad),
        largest_layer=max(sum(each.numel() for each in module.parameters(recurse=False)) for module in model.modules()),
        linear=sum(layer.weight.numel() for layer in layers),
        in_blocks=sum(weight.numel() for block in blocks for weight in block),
        linear_in_blocks=sum(weight.numel() for block in blocks for weight in block if id(weight) in linear),
        largest_block=max((sum(weight.numel() for weight in block) for block in blocks), default=0),
    )


def frozen_linear_layers(model: nn.Module) -> list[nn.Linear]:
    """Return the linear layers that are not trained, without the head of a language model."""
    head = model.get_output_embeddings()
    of_head = {*head.modules()} if head else set()  # PEFT may wrap it
    layers = [module for module in model.modules() if isinstance(module, nn.Linear) and module not in of_head]
    return [layer for layer in layers if not layer.weight.requires_grad]


def streamed_weights(model: nn.Module) -> dict[nn.Module, dict[str, nn.Parameter]]:
    """Return the weights of each block by name, without adapters and weights that another module has too."""
    modules = [module for _, module in model.named_modules(remove_duplicate=False)]
    adapters = hasattr(model, "peft_config")
    uses = Counter(id(weight) for module in modules for weight in module.parameters(recurse=False))
    return {
        block: {
            name: weight
            for name, weight in block.named_parameters()
            if uses[id(weight)] == 1 and not (adapters and weight.requires_grad)
        }
        for block in find_blocks(model)
    }
