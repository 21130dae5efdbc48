"""The model and the optimizer of a run, with the techniques in use applied."""

from contextlib import ExitStack

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PretrainedConfig

from fabric_ladder.data.hub import reachable
from fabric_ladder.data.splits import ImageDatasets, TextDatasets
from fabric_ladder.data.tokens import check_entries
from fabric_ladder.errors import refused
from fabric_ladder.models.configs import (
    MODELS,
    as_in_training,
    attend_fully,
    class_for,
    fit_images,
    load_config,
    load_weights,
    part_config,
    silence_loading,
)
from fabric_ladder.models.dtypes import FREQUENCIES, keep_dtype
from fabric_ladder.models.heads import follow_names
from fabric_ladder.models.layers import batch_norms, head_names, keep_blocks, text_part
from fabric_ladder.models.optimizer import optimizer_class
from fabric_ladder.settings import Settings, weight_decay
from fabric_ladder.techniques import used
from fabric_ladder.techniques.token_rows import name_rows
from fabric_ladder.techniques.weight_steps import forget_hooks


def build_model(settings: Settings, datasets: TextDatasets | ImageDatasets, blocks: int | None = None) -> nn.Module:
    """Return the model for the task in train mode, a classifier with the class names as its labels.

    Weights are drawn and read in 32-bit, so that every precision starts from the same weights, and Fabric converts
    them. Without `dtype` a half-precision checkpoint would stay in 16 bits under `32-true` and the mixed precisions.
    Under `fabric.init_module` weights are made on the GPU and in the final precision. A technique may read them in yet
    another form.

    The techniques in use are applied here, before Fabric sets the model up.

    Args:
        settings: `model`, `task`, `precision`, and those of the techniques in use.
        datasets: Class names, and the tokenizer or the format of the images.
        blocks: Number of transformer blocks, for a rehearsal; None: all blocks of the model.

    Raises:
        UserError: The weights cannot be loaded, or the tokenizer has more entries than the embedding has rows.
    """
    config = load_config(settings.model)
    config.return_dict = True
    config.architectures = [class_for(config, settings.task).__name__]
    if blocks:
        keep_blocks(part_config(config, settings.task), blocks)
    sparse = attend_fully(config)
    pretrained_names = [config.id2label[number] for number in sorted(config.id2label)]
    if settings.task != "instruction-tuning":
        config.id2label = dict(enumerate(datasets.class_names))  # and with it `num_labels`
        config.problem_type = settings.problem_type  # a config may have another one
        config.label2id = {name: index for index, name in config.id2label.items()}
    if isinstance(datasets, ImageDatasets):
        if settings.from_scratch:
            fit_images(config, datasets.format.size)
    else:
        _fit_text(part_config(config, settings.task), settings.model, datasets)
    model = _draw_or_load(settings, config)
    model.notices = notices = []
    if sparse:
        notices.append("Attention is full, not block-sparse: the model would switch for good at the first short text")
    if new_parts := getattr(model, "new_parts", None):
        notices.append(f"{settings.model} lacks {', '.join(new_parts)}: random weights, trained like the head")
    if not getattr(model, "new_head", True) and datasets.class_names:
        notices += filter(None, [follow_names(model, pretrained_names, datasets.class_names)])
    if isinstance(datasets, TextDatasets):
        model.config.get_text_config().pad_token_id = datasets.tokenizer.pad_token_id
        notices += filter(None, [name_rows(model, datasets, settings)])
    for module in model.modules():
        if any(name.endswith(FREQUENCIES) for name in module._buffers):
            keep_dtype(module, only_buffers=True)
    if part := text_part(model):  # other parts, such as a vision tower, get no gradient
        for name, parameter in model.named_parameters():
            if not name.startswith((part, *head_names(model))):
                parameter.requires_grad_(False)
    for technique in used(settings):
        model = technique.change_model(model, settings)
    model.train()
    several = settings.ranks > 1 or settings.micro_batch_size != settings.batch_size
    if several and any(module.training for module in batch_norms(model)):
        notices.append("This model normalizes over the micro-batch: results depend on --micro_batch_size")
    return model


def build_optimizer(settings: Settings, model: nn.Module) -> Optimizer:
    """Return the optimizer of the trained parameters, with the techniques in use applied.

    Each parameter has state in its own dtype: two values for Adam and AdamW, none for SGD, one row and one column per
    matrix for Adafactor (Shazeer and Stern, 2018). Weight decay is for matrices and embeddings: biases and norms, which
    have one dimension, do not decay (as in transformers' Trainer).

    Args:
        settings: `learning_rate`, `optimizer`, its numbers and the techniques in use.
        model: Set up by Fabric, since sharding and half precision replace or convert its parameters.
    """
    # PyTorch refuses the fused kernel where a scaled loss meets clipping: the kernel unscales the gradients itself, and
    # clipping needs unscaled ones. An engine unscales and clips before the step.
    clips_scaled = settings.precision == "16-mixed" and bool(settings.max_grad_norm)
    may_fuse = settings.owns_optimizer or not clips_scaled
    kind, options = optimizer_class(settings, may_fuse)
    for technique in used(settings):
        kind = technique.change_optimizer(kind, settings, model)
    decay = weight_decay(settings)
    groups: dict[float, list[nn.Parameter]] = {decay: [], 0.0: []}  # by weight decay
    for parameter in model.parameters():
        if parameter.requires_grad:
            groups[decay if parameter.ndim > 1 else 0.0].append(parameter)
    forget_hooks([*model.parameters()])
    chosen = [{"params": own, "weight_decay": lost} for lost, own in groups.items() if own]
    return kind(chosen, lr=settings.learning_rate, **options)


def _draw_or_load(settings: Settings, config: PretrainedConfig) -> nn.Module:
    """Draw random weights, or read pretrained ones from a folder or the Hub."""
    model_class = MODELS[settings.task]
    dtype = torch.get_default_dtype()
    attention = {"attn_implementation": "eager"} if settings.attention == "eager" else {}
    loading = {"dtype": dtype} | attention
    for technique in used(settings):
        loading |= technique.loading_options(settings, config)
    if settings.from_scratch:
        with refused(f"no model can be made of {settings.model}"):
            model = model_class.from_config(config, dtype=dtype, **attention)
        if loading == {"dtype": dtype} | attention:
            return model
        silence_loading()
        # only weights that are read can be quantized
        read = type(model).from_pretrained(None, config=config, state_dict=model.state_dict(), **loading)
        return as_in_training(read)
    silence_loading()
    with reachable(settings.model, "weights") as local, ExitStack() as reading:
        for technique in used(settings):
            reading.enter_context(technique.reading(settings))
        heads = None if settings.task == "instruction-tuning" else head_names
        return load_weights(model_class, settings.model, heads, config=config, **loading | local)


def _fit_text(config: PretrainedConfig, name: str, datasets: TextDatasets) -> None:
    tokenizer = datasets.tokenizer
    check_entries(tokenizer, datasets.new_tokens, name, getattr(config, "vocab_size", None))
    # An embedding does not train its padding token. An end token is trained, so it pads only once the model is built.
    pads_with_end = tokenizer.pad_token_id == tokenizer.eos_token_id
    config.pad_token_id = None if pads_with_end else tokenizer.pad_token_id
    config.use_cache = False  # keys and values are kept for generation only
