"""Model classes for each task, and checks of a model's config."""

import sys
from pathlib import Path

import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
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


def load_weights(model_class: type, name: str, new_head: bool = False, **options) -> PreTrainedModel:
    """Load a pretrained model. transformers would draw weights that its files lack, without an error.

    Args:
        model_class: Its `from_pretrained` is called.
        name: A folder or a name on the Hub.
        new_head: Whether the files may lack the head, and a pooler before it. Then only weights below the
            `base_model_prefix` of the class are checked.
        **options: For `from_pretrained`.

    Raises:
        UserError: The files lack weights.
    """
    model, found = model_class.from_pretrained(name, output_loading_info=True, **options)
    body = f"{model.base_model_prefix}."
    missing = [key for key in found["missing_keys"] if not new_head or (key.startswith(body) and "pooler" not in key)]
    if missing:
        raise UserError(
            f"{name} lacks {len(missing)} weights of a {type(model).__name__}, e.g. {min(missing)}: the files are "
            "incomplete, or of another kind of model"
        )
    return model


def check_model(settings: Settings) -> None:
    """Refuse, before any work, a model that cannot become a run.

    Raises:
        UserError: The model cannot be found, does not fit the task, `max_length` or `image_size`, or is a config file
            without `from_scratch`.
    """
    config = load_config(settings.model, settings.model_revision)
    if Path(settings.model).is_file() and not settings.from_scratch:
        raise UserError(f"{settings.model} is a config file, which holds no weights: add --from_scratch true")
    classes = MODELS[settings.task]._model_mapping
    if type(config) not in classes:
        raise UserError(f"{settings.model} ({config.model_type}) has no form for --task {settings.task}")
    if settings.task == "image-classification":
        size = getattr(config, "image_size", None)
        if size and settings.image_size and size != settings.image_size and not settings.from_scratch:
            raise UserError(
                f"--image_size {settings.image_size}: {settings.model} was trained on {size} pixels; leave it out, or "
                "start --from_scratch true"
            )
        return
    if settings.attention == "eager" and config.model_type == "falcon" and config.alibi:
        raise UserError(f"--attention eager: transformers adds ALiBi twice in {settings.model}; use --attention fused")
    heads, shared = (getattr(config, name, None) for name in ("num_attention_heads", "num_key_value_heads"))
    if isinstance(heads, int) and isinstance(shared, int) and (shared < 1 or heads % shared):
        raise UserError(
            f"{settings.model}: num_key_value_heads {shared} does not divide num_attention_heads {heads}; correct one "
            "of them"
        )
    positions = getattr(config, "max_position_embeddings", None)
    if positions and config.model_type in AS_ROBERTA:
        positions -= (config.pad_token_id or 0) + 1
    if positions and settings.max_length > positions:
        raise UserError(
            f"--max_length {settings.max_length} is beyond the {positions} positions of {settings.model}: "
            f"use --max_length {positions}"
        )


def silence_loading() -> None:
    """Hide transformers' messages about newly initialized weights, and its progress bars except on a terminal."""
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
