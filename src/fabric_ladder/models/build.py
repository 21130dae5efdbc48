"""The model for the task: pretrained weights from the Hub or a folder, or random ones from a config."""

import tempfile

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from fabric_ladder.data.hub import reachable
from fabric_ladder.data.splits import ImageDatasets, TextDatasets
from fabric_ladder.errors import UserError, refused
from fabric_ladder.models.bloom import fuse_attention
from fabric_ladder.models.checkpointing import enable_checkpointing
from fabric_ladder.models.chunked_loss import use_chunked_loss
from fabric_ladder.models.compile import compile_blocks
from fabric_ladder.models.configs import MODELS, load_config, silence_loading
from fabric_ladder.models.embeddings import add_rows
from fabric_ladder.models.float8 import float8_layers, use_float8
from fabric_ladder.models.lora import add_adapters, half_precision, keep_dtype, quantization
from fabric_ladder.models.packing import support_packing
from fabric_ladder.settings import Settings


def build_model(settings: Settings, datasets: TextDatasets | ImageDatasets) -> nn.Module:
    """Return the model for the task in train mode, a classifier with the class names as its labels.

    Weights are made and read in 32-bit, so that every precision starts from the same ones, and Fabric converts them.
    Without `dtype` a half-precision checkpoint would stay so under `32-true` and the mixed precisions. They are made on
    the device and in the precision that it says under `fabric.init_module`, and a language model that `lora` freezes is
    read in its final precision.

    `attention`, `lora`, `activation_checkpointing`, `float8` and `compile` are applied here: all must come before
    Fabric sets the model up.

    Raises:
        UserError: The weights cannot be loaded, or the tokenizer has more entries than the embedding has rows.
    """
    config = load_config(settings.model)
    config.return_dict = True
    if settings.task != "instruction-tuning":
        config.id2label = dict(enumerate(datasets.class_names))  # and with it `num_labels`
        config.problem_type = "single_label_classification"  # a config may ask for a regression
        config.label2id = {name: index for index, name in config.id2label.items()}
    if isinstance(datasets, ImageDatasets):
        config.image_size = datasets.format.size
    else:
        _fit_text(config, settings.model, datasets.tokenizer)
    model = _make(settings, config)
    if not settings.deepspeed:  # which takes gradients as autograd makes them
        add_rows(model)
    if settings.attention == "fused":
        fuse_attention(model)
    for module in model.modules():
        if module._non_persistent_buffers_set:  # such as the rotary frequencies, which 16 bits would detune
            keep_dtype(module, buffers_alone=True)
    if settings.task == "instruction-tuning":
        use_chunked_loss(model, settings.loss_chunk)
    if settings.packing:
        support_packing(model, settings.max_length)
    if settings.activation_checkpointing:
        enable_checkpointing(model, settings)
    layers = float8_layers(model) if settings.float8 else []
    if settings.lora:
        model = add_adapters(model, settings)
    if settings.float8:
        use_float8(model, layers, settings.accelerator)
    if settings.compile:
        compile_blocks(model, settings.cache_dir, settings.accelerator)
    return model.train()


def _make(settings: Settings, config: PretrainedConfig) -> nn.Module:
    """Draw random weights, or read pretrained ones, from a folder or the Hub."""
    model_class, dtype = MODELS[settings.task], torch.get_default_dtype()
    attention = {"attn_implementation": "eager"} if settings.attention == "eager" else {}
    options = attention | quantization(settings, config)
    if settings.from_scratch:
        with refused(f"no model can be made of {settings.model}"):
            model = model_class.from_config(config, dtype=dtype, **attention)
        if settings.quantization == "no":
            return model
        silence_loading()
        with tempfile.TemporaryDirectory() as folder:  # only what is read is quantised
            model.save_pretrained(folder)
            return model_class.from_pretrained(folder, dtype=dtype, **options)
    if settings.lora and settings.task == "instruction-tuning" and settings.precision.endswith("true"):
        dtype = half_precision(settings) or dtype  # a classifier's new head is drawn in 32-bit, as in every rung
    silence_loading()
    with reachable(settings.model, "weights") as local:
        options |= local | {"config": config, "dtype": dtype, "ignore_mismatched_sizes": True}
        return model_class.from_pretrained(settings.model, **options)


def _fit_text(config: PretrainedConfig, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} entries, {name} only {config.vocab_size:,}: "
            "choose the model's own --tokenizer"
        )
    config.pad_token_id = tokenizer.pad_token_id
    config.use_cache = False  # keys and values are kept for generation only
