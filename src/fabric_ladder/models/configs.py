"""Model classes for each task, and checks of a model's config."""

import math
import sys
from collections.abc import Callable
from inspect import signature
from pathlib import Path

import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from fabric_ladder.data.hub import load_config
from fabric_ladder.errors import UserError
from fabric_ladder.settings import Settings

MODELS = {
    "text-classification": AutoModelForSequenceClassification,
    "image-classification": AutoModelForImageClassification,
    "token-classification": AutoModelForTokenClassification,
    "instruction-tuning": AutoModelForCausalLM,
}
# architectures whose position numbers start after the number of the padding token
AS_ROBERTA = """camembert data2vec-text esm ibert layoutlmv3 lilt longformer luke markuplm mpnet roberta
    roberta-prelayernorm xlm-roberta xlm-roberta-xl xmod""".split()


def class_for(config: PretrainedConfig, task: str) -> type[PreTrainedModel]:
    """Return the class for a task. DeiT, LeViT and Perceiver have several; those that take no labels cannot train."""
    classes = MODELS[task]._model_mapping[type(config)]
    if not isinstance(classes, tuple):
        return classes
    able = [each for each in classes if "labels" in signature(each.forward).parameters]
    return next((each for each in able if each.__name__ in (config.architectures or ())), able[0])


def fit_images(config: PretrainedConfig, size: int) -> None:
    """Give the config of random weights the size of the images."""
    part = part_config(config, "image-classification")
    pair = type(part.image_size) if isinstance(getattr(part, "image_size", None), list | tuple) else None
    part.image_size = pair((size, size)) if pair else size


def part_config(config: PretrainedConfig, task: str) -> PretrainedConfig:
    """Return the config of the part of the model that the task trains: of its text or image part, if it has parts.

    Raises:
        UserError: Several parts read texts, as in MusicGen.
    """
    if task == "image-classification":
        return getattr(config, "vision_config", config)
    try:
        return config.get_text_config()
    except ValueError as error:
        raise UserError(f"several parts of a {config.model_type} read texts: choose another --model") from error


def load_weights(model_class: type, name: str, heads: Callable | None = None, **options) -> PreTrainedModel:
    """Load a pretrained model. transformers would draw weights that its files lack, without an error.

    The attribute `new_parts` lists the modules outside the head that the files lack. `new_head` is whether they lack
    any weight of the head.

    Args:
        model_class: Its `from_pretrained` is called.
        name: A folder or a name on the Hub.
        heads: Returns the names of the model's heads, which the files may lack or have in another size. The files may
            also lack a pooler before them. None: nothing may be missing.
        **options: For `from_pretrained`.

    Raises:
        UserError: The files lack weights, or have weights of another size.
    """
    options |= {"output_loading_info": True, "ignore_mismatched_sizes": True}
    model, found = model_class.from_pretrained(name, **options)
    head = tuple(f"{part}." for part in heads(model)) if heads else ()
    missing = [key for key in found["missing_keys"] if not key.startswith(head)]
    mismatched = [sizes for sizes in found["mismatched_keys"] if not sizes[0].startswith(head)]
    if mismatched:
        key, stored, own = min(mismatched)
        raise UserError(f"{name} stores {key} with the sizes {[*stored]}, but its config.json makes it {[*own]}")
    lacking = [key for key in missing if not heads or "pooler" not in key]
    if lacking:
        raise UserError(
            f"{name} lacks {len(lacking)} weights of a {type(model).__name__}, e.g. {min(lacking)}: the files are "
            "incomplete, or of another kind of model"
        )
    model.new_parts = sorted({key.rpartition(".")[0] for key in missing})
    model.new_head = len(found["missing_keys"]) > len(missing) or bool(found["mismatched_keys"])
    return as_in_training(model)


def as_in_training(model: PreTrainedModel) -> PreTrainedModel:
    """Keep bitsandbytes from repacking 4-bit weights on a CPU, for a kernel without a gradient that rounds them."""
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
    return model


def check_model(settings: Settings) -> None:
    """Refuse, before any work, a model that cannot become a run.

    Raises:
        UserError: The model cannot be found, does not fit the task or `max_length`, or is a config file without
            `from_scratch`.
    """
    config = load_config(settings.model)
    if Path(settings.model).is_file() and not settings.from_scratch:
        raise UserError(f"{settings.model} is a config file, which holds no weights: add --from_scratch true")
    classes = MODELS[settings.task]._model_mapping
    if type(config) not in classes:
        raise UserError(f"{settings.model} ({config.model_type}) has no form for --task {settings.task}")
    if settings.task == "image-classification":
        return
    if settings.attention == "eager" and config.model_type == "falcon" and config.alibi:
        raise UserError(f"--attention eager: transformers adds ALiBi twice in {settings.model}; use --attention fused")
    config = part_config(config, settings.task)
    heads, shared = map(config.to_dict().get, ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise UserError(
            f"{settings.model}: num_key_value_heads {shared} does not divide num_attention_heads {heads}; correct one "
            "of them"
        )
    if (positions := count_positions(settings)) < settings.max_length:
        raise UserError(
            f"--max_length {settings.max_length} is beyond the {positions} positions of {settings.model}: "
            f"use --max_length {positions}"
        )


def attend_fully(config: PretrainedConfig) -> bool:
    """Turn off BigBird's block-sparse attention, which would end at the first short text; return whether it was on."""
    sparse = getattr(config, "attention_type", None) == "block_sparse"
    if sparse:
        config.attention_type = "original_full"
    return sparse


def count_positions(settings: Settings) -> float:
    """Return the number of tokens that a model has positions for; infinite for images and relative positions."""
    if settings.task == "image-classification":
        return math.inf
    config = part_config(load_config(settings.model), settings.task)
    positions = getattr(config, "max_position_embeddings", None) or math.inf
    positions = positions if positions > 0 else math.inf  # XLNet has -1
    return positions - (config.pad_token_id or 0) - 1 if config.model_type in AS_ROBERTA else positions


def silence_loading() -> None:
    """Hide transformers' messages about newly initialized weights, and its progress bars except on a terminal."""
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
