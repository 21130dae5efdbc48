"""The model for the task: pretrained weights from the Hub or a folder, or random ones from a config."""

import sys
import tempfile
from pathlib import Path

import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)

from fabric_ladder.attention import fuse_attention
from fabric_ladder.compiling import compile_blocks
from fabric_ladder.errors import UserError
from fabric_ladder.lora import add_adapters, check_targets, half_precision, keep_dtype, quantization
from fabric_ladder.packing import keep_apart
from fabric_ladder.vocabulary import use_token_loss
from local_dataset_utilities import ImageDatasets, TextDatasets, reachable

MODELS = {
    "text-classification": AutoModelForSequenceClassification,
    "image-classification": AutoModelForImageClassification,
    "instruction-tuning": AutoModelForCausalLM,
}


def check_model(settings) -> None:
    """Read the model's config and refuse, before any work, what cannot become a run.

    Raises:
        UserError: No such model, a config file without `from_scratch`, a model of another kind than the task's, one
            that cannot recompute its activations, layers for adapters that it does not have, or `max_length` or
            `image_size` that it was not made for.
    """
    config = load_config(settings.model)
    if Path(settings.model).is_file() and not settings.from_scratch:
        raise UserError(f"{settings.model} is a config file, which holds no weights: add --from_scratch true")
    kinds = MODELS[settings.task]._model_mapping
    if type(config) not in kinds:
        raise UserError(f"{settings.model} ({config.model_type}) has no form for --task {settings.task}")
    if settings.activation_checkpointing and not kinds[type(config)].supports_gradient_checkpointing:
        raise UserError(f"--activation_checkpointing true: transformers does not offer it for {config.model_type}")
    if settings.lora:
        with torch.device("meta"):
            check_targets(settings, MODELS[settings.task].from_config(config))
    if settings.task == "image-classification":
        size = getattr(config, "image_size", None)
        if size and settings.image_size and size != settings.image_size and not settings.from_scratch:
            raise UserError(
                f"--image_size {settings.image_size}: {settings.model} was trained on {size} pixels; leave it out, or "
                "start --from_scratch true"
            )
        return
    positions = getattr(config, "max_position_embeddings", None)
    if positions and config.model_type in ("roberta", "xlm-roberta", "camembert"):
        positions -= config.pad_token_id + 1  # RoBERTa's position numbers start after the padding token's
    if positions and settings.max_length > positions:
        raise UserError(
            f"--max_length {settings.max_length} is beyond the {positions} positions of {settings.model}: "
            f"use --max_length {positions}"
        )


def build_model(settings, datasets: TextDatasets | ImageDatasets) -> nn.Module:
    """Return the model for the task in train mode, a classifier with the class names as its labels.

    Weights are made and read in 32-bit, so that every precision starts from the same ones, and Fabric converts them.
    Without `dtype` a half-precision checkpoint would stay so under `32-true` and the mixed precisions. They are made on
    the device and in the precision that it says under `fabric.init_module`, and a language model that `lora` freezes is
    read in its final precision.

    `attention`, `lora`, `activation_checkpointing` and `compile` are applied here: all must come before Fabric sets the
    model up.

    Raises:
        UserError: The weights cannot be loaded, or the tokenizer has more entries than the embedding has rows.
    """
    config = load_config(settings.model)
    if settings.task != "instruction-tuning":
        _name_classes(config, datasets.class_names)
    if isinstance(datasets, ImageDatasets):
        config.image_size = datasets.format.size
    else:
        _fit_text(config, settings.model, datasets.tokenizer)
    model = _make(settings, config)
    if settings.attention == "fused":
        fuse_attention(model)
    for module in model.modules():
        if module._non_persistent_buffers_set:  # such as the rotary frequencies, which 16 bits would detune
            keep_dtype(module, buffers_alone=True)
    if settings.task == "instruction-tuning":
        keep_apart(model)
        use_token_loss(model, settings.loss_chunk)
    if settings.activation_checkpointing:
        newer = getattr(model, "activation_checkpointing_enable", None)  # transformers 5.23's name of it
        (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    if settings.lora:
        model = add_adapters(model, settings)
    if settings.compile:
        compile_blocks(model, settings.cache_dir)
    return model.train()


def _make(settings, config: PretrainedConfig) -> nn.Module:
    """Draw random weights, or read pretrained ones, from a folder or the Hub."""
    kind, dtype = MODELS[settings.task], torch.get_default_dtype()
    bits = quantization(settings, lambda: kind.from_config(config))
    attention = {"attn_implementation": "eager"} if settings.attention == "eager" else {}
    if settings.from_scratch:
        model = kind.from_config(config, dtype=dtype, **attention)
        if not bits:
            return model
        silence_loading()
        with tempfile.TemporaryDirectory() as folder:  # only what is read is quantised
            model.save_pretrained(folder)
            return kind.from_pretrained(folder, dtype=dtype, **attention, **bits)
    if settings.lora and settings.task == "instruction-tuning" and settings.precision.endswith("true"):
        dtype = half_precision(settings) or dtype  # a classifier's new head is drawn in 32-bit, as in every rung
    silence_loading()
    with reachable(settings.model, "weights") as options:
        return kind.from_pretrained(
            settings.model,
            config=config,
            dtype=dtype,
            ignore_mismatched_sizes=True,
            **attention,
            **bits,
            **options,
        )


def _name_classes(config: PretrainedConfig, names: list[str]) -> None:
    config.num_labels = len(names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}


def _fit_text(config: PretrainedConfig, name: str, tokenizer: PreTrainedTokenizerBase) -> None:
    if len(tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(tokenizer):,} entries, {name} only {config.vocab_size:,}: "
            "choose the model's own --tokenizer"
        )
    config.pad_token_id = tokenizer.pad_token_id
    config.use_cache = False  # keys and values are kept for generation only


def load_config(name: str) -> PretrainedConfig:
    """Return the config of a model on the Hub, in a folder, or in a file of its own.

    Raises:
        UserError: The file holds no model config.
        DatasetError: The name is neither a folder nor reachable.
    """
    if name.endswith(".json") and not Path(name).is_file():
        raise UserError(f"there is no model config {name}")
    if Path(name).is_file():
        try:
            return AutoConfig.from_pretrained(name)
        except (OSError, ValueError, KeyError, StrictDataclassError) as error:
            raise UserError(f"{name} is no model config: {' '.join(str(error).split())[:200]}") from error
    with reachable(name, "model") as options:
        return AutoConfig.from_pretrained(name, **options)


def silence_loading() -> None:
    """The new classification head is no news, and a progress bar is for a terminal."""
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
