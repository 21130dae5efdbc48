"""Model classes for each task, and reading a model's config."""

import sys
from pathlib import Path

import transformers
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    PretrainedConfig,
)

from fabric_ladder.data.hub import reachable
from fabric_ladder.errors import UserError, first_line
from fabric_ladder.settings import Settings

MODELS = {
    "text-classification": AutoModelForSequenceClassification,
    "image-classification": AutoModelForImageClassification,
    "instruction-tuning": AutoModelForCausalLM,
}


def check_model(settings: Settings) -> None:
    """Refuse, before any work, a model that cannot become a run.

    Raises:
        UserError: No such model, a config file without `from_scratch`, a model of another kind than the task's, one
            that cannot recompute its activations, or `max_length` or `image_size` that it was not made for.
    """
    config = load_config(settings.model)
    if Path(settings.model).is_file() and not settings.from_scratch:
        raise UserError(f"{settings.model} is a config file, which holds no weights: add --from_scratch true")
    classes = MODELS[settings.task]._model_mapping
    if type(config) not in classes:
        raise UserError(f"{settings.model} ({config.model_type}) has no form for --task {settings.task}")
    if settings.activation_checkpointing and not classes[type(config)].supports_gradient_checkpointing:
        raise UserError(f"--activation_checkpointing true: transformers does not offer it for {config.model_type}")
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


def load_config(name: str) -> PretrainedConfig:
    """Return the config of a model on the Hub, in a folder, or in a file of its own.

    Raises:
        UserError: The file holds no model config.
        UserError: The name is neither a folder nor reachable.
    """
    if name.endswith(".json") and not Path(name).is_file():
        raise UserError(f"there is no model config {name}")
    if Path(name).is_file():
        try:
            return AutoConfig.from_pretrained(name)
        except (OSError, ValueError, KeyError, StrictDataclassError) as error:
            raise UserError(f"{name} is no model config: {first_line(error)}") from error
    with reachable(name, "model") as options:
        return AutoConfig.from_pretrained(name, **options)


def silence_loading() -> None:
    """Hide what transformers reports of weights that it draws anew, and its progress bars but on a terminal."""
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
