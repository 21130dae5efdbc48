"""The names of a model's layers, read from a model without values."""

import inspect

import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.pytorch_utils import Conv1D

from fabric_ladder.data.images import read_image_format, side
from fabric_ladder.errors import UserError, refused
from fabric_ladder.models.configs import MODELS, class_for, fit_images, load_config, part_config
from fabric_ladder.settings import Settings

FEWEST_BLOCKS = 3  # the first, the last, and a block between two others
# The MLP of a block in transformers; the last two are BERT's, which computes it in two modules.
MLP_NAMES = (("mlp",), ("feed_forward",), ("ffn",), ("intermediate", "output"))
_latest: tuple[tuple[str, dict], nn.Module] | None = None  # several checks use the same model
_taken: tuple[nn.Module, int] | None = None  # the latest model and size that `check_images` accepted


def meta_model(settings: Settings, config: PretrainedConfig | None = None) -> nn.Module:
    """Return the task's model on the device `meta`, where weights need no memory. Callers must not change it.

    Args:
        settings: `task` and `model`.
        config: Default: that of `settings.model`.

    Raises:
        UserError: The config does not describe a model.
    """
    global _latest
    config = config or load_config(settings.model)
    config.architectures = [class_for(config, settings.task).__name__]
    key = settings.task, config.to_dict()
    if _latest is None or _latest[0] != key:
        with refused(f"no model can be made of {settings.model}"), torch.device("meta"):
            _latest = key, MODELS[settings.task].from_config(config)
    return _latest[1]


def check_images(settings: Settings) -> None:
    """Refuse a model whose forward pass does not take images of the run's size.

    Raises:
        UserError: In one line, with the size that the model takes.
    """
    global _taken
    size = read_image_format(settings)[0].size
    config = load_config(settings.model)
    own = side(getattr(part_config(config, settings.task), "image_size", None))
    problem = f"{settings.model} ({config.model_type}) takes no images of {size} pixels: choose another --model or size"
    if settings.from_scratch:
        fit_images(config, size)
    elif own not in (None, size):
        problem = f"{settings.model} takes images of {own} pixels, not {size}: use --image_size {own}"
    model = meta_model(settings, config)
    if "labels" not in inspect.signature(model.forward).parameters:  # PP-LCNet
        raise UserError(f"{settings.model} ({config.model_type}) computes no loss: choose another --model")
    if _taken == (model, size):  # a plan asks for each candidate
        return
    with refused(problem), torch.no_grad():
        try:
            model(pixel_values=torch.zeros(2, 3, size, size, device="meta"))
        except RuntimeError as error:
            if "meta tensors" not in str(error):  # Perceiver reads values
                raise
    _taken = model, size


def head_names(model: nn.Module) -> list[str]:
    """Return the names of the modules on top of the pretrained body: a classifier and the layers before it."""
    children = list(model.named_children())
    heads = [(name, child) for name, child in children if child is not model.base_model]
    blocks = find_blocks(model)
    if model.base_model is model and blocks:  # CLIP's classifier names no body
        holders = [place for place, (_, child) in enumerate(children) if blocks[-1] in child.modules()]
        heads = children[holders[0] + 1 :]
    return [name for name, child in heads if any(True for _ in child.parameters())]


def batch_norms(model: nn.Module) -> list[nn.Module]:
    """Return the modules that normalize over the micro-batch in training."""
    return [module for module in model.modules() if isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d)]


def text_part(model: nn.Module) -> str:
    """Return the prefix of the names in the part that reads texts; empty if the model has no parts for other inputs."""
    text = model.config.get_text_config()
    if text is model.config or model.config.is_encoder_decoder:
        return ""
    parts = (name for name, module in model.named_modules() if type(getattr(module, "config", None)) is type(text))
    return f"{part}." if (part := next(parts, "")) else ""


def linear_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers of the pretrained body.

    Layers that compute the logits, that belong to images or sounds, that choose experts, or whose weights Mamba reads
    itself are left out.
    """
    output, heads, part, fused = model.get_output_embeddings(), head_names(model), text_part(model), fused_layers(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D)
        and module is not output
        and name not in fused
        and name.split(".")[0] not in heads
        and name.startswith(part)
        and "router" not in name
    ]


def fused_layers(model: nn.Module) -> list[str]:
    """Return the names of the linear layers whose weights the fused kernel of a state-space model reads."""
    mixers = [(name, module) for name, module in model.named_modules() if hasattr(module, "ssm_state_size")]
    layers = ("out_proj", "dt_proj", "x_proj")
    return [f"{name}.{layer}" for name, mixer in mixers for layer in layers if hasattr(mixer, layer)]


def expert_share(model: nn.Module) -> float:
    """Return the share of the weights that belong to stacked experts, which are not linear layers."""
    experts = [module for module in model.modules() if "Expert" in type(module).__name__]
    weights = {id(each): each.numel() for module in experts for each in module.parameters(recurse=False)}
    return sum(weights.values()) / sum(each.numel() for each in model.parameters())


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks that transformers marks for activation checkpointing, without blocks inside other blocks.

    A model with parts for texts and other inputs has those of its text part.
    """
    part = text_part(model)
    named = [(name, module) for name, module in model.named_modules() if name.startswith(part)]
    blocks = [module for _, module in named if isinstance(module, GradientCheckpointingLayer)]
    inner = {part for block in blocks for part in block.modules() if part is not block}
    return [block for block in blocks if block not in inner]


def find_mlp(block: nn.Module) -> list[nn.Module] | None:
    """Return the modules that compute the block's MLP one after the other, or None if no such MLP is known.

    Their weights belong to linear layers and norms, so that they compute each token alone. Experts have other weights.
    They take hidden states, and the last one may also take those that it adds to its result.
    """
    for names in MLP_NAMES:
        parts = [getattr(block, name, None) for name in names]
        if all(map(_computes_tokens_alone, parts)):
            return parts
    return None


def _computes_tokens_alone(part: nn.Module | None) -> bool:
    if part is None or isinstance(part, nn.ModuleList):
        return False
    inputs = [*inspect.signature(part.forward).parameters]
    return inputs[1:] in ([], ["residual"], ["input_tensor"]) and all(
        isinstance(module, nn.Linear | Conv1D) or "Norm" in type(module).__name__
        for module in part.modules()
        if module._parameters
    )


def fewer_blocks(config: PretrainedConfig, least: int = FEWEST_BLOCKS) -> tuple[int, int] | None:
    """Return two numbers of blocks whose models do the same as the whole model in every pass, only less often.

    Block types such as sliding and full attention may alternate. Then both numbers end at the same type as the model.

    Args:
        config: Config of the model.
        least: The smaller number is at least this.

    Returns:
        None if the model has not many more blocks.
    """
    blocks = getattr(config, "num_hidden_layers", 0)
    types = getattr(config, "layer_types", None) or [""]
    cycle = next(cycle for cycle in range(1, len(types) + 1) if types[cycle:] == types[:-cycle])
    short = least + (blocks - least) % cycle
    return (short, short + cycle) if 2 * short + cycle < blocks else None


def keep_blocks(config: PretrainedConfig, blocks: int) -> None:
    """Give the model of this config only its first blocks."""
    config.num_hidden_layers = blocks
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:blocks]
