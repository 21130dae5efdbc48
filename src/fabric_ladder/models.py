"""The model for the task: pretrained weights from the Hub or a folder, or random ones from a config."""

import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoConfig, AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from fabric_ladder.errors import UserError
from local_dataset_utilities import DatasetError, TextDatasets, reachable


def check_model(settings) -> None:
    """Read the model's config and refuse, before any work, what cannot become a run.

    Raises:
        UserError: No such model, a config file without `from_scratch`, or `max_length` beyond the model's positions.
    """
    config = _load_config(settings.model)
    if Path(settings.model).is_file() and not settings.from_scratch:
        raise UserError(f"{settings.model} is a config file, which holds no weights: add --from_scratch true")
    positions = getattr(config, "max_position_embeddings", None)
    if positions and config.model_type in ("roberta", "xlm-roberta", "camembert"):
        positions -= config.pad_token_id + 1  # RoBERTa's position numbers start after the padding token's
    if positions and settings.max_length > positions:
        raise UserError(
            f"--max_length {settings.max_length} is beyond the {positions} positions of {settings.model}: "
            f"use --max_length {positions}"
        )


def build_model(settings, datasets: TextDatasets) -> PreTrainedModel:
    """Return the classifier, in 32-bit and in train mode, with the class names as its labels.

    The weights are always made and read in 32-bit, so that every precision starts from the same ones; Fabric
    converts them. Without `dtype` a half-precision checkpoint would stay so under `32-true` and the mixed precisions.

    Raises:
        UserError: The weights cannot be loaded, or the tokenizer has more entries than the embedding has rows.
    """
    names = datasets.class_names
    config = _load_config(settings.model)
    config.num_labels = len(names)
    config.id2label = dict(enumerate(names))
    config.label2id = {name: index for index, name in enumerate(names)}
    config.pad_token_id = datasets.tokenizer.pad_token_id
    config.use_cache = False  # keys and values are kept for generation only
    if len(datasets.tokenizer) > config.vocab_size:
        raise UserError(
            f"the tokenizer has {len(datasets.tokenizer):,} entries, {settings.model} only {config.vocab_size:,}: "
            "choose the model's own --tokenizer"
        )
    if settings.from_scratch:
        model = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    else:
        _silence_loading()
        try:
            with reachable(settings.model, "weights") as options:
                model = AutoModelForSequenceClassification.from_pretrained(
                    settings.model, config=config, dtype=torch.float32, ignore_mismatched_sizes=True, **options
                )
        except DatasetError as error:
            raise UserError(str(error)) from error
    return model.train()


def _load_config(name: str) -> PretrainedConfig:
    if name.endswith(".json") and not Path(name).is_file():
        raise UserError(f"there is no model config {name}")
    if Path(name).is_file():
        try:
            return AutoConfig.from_pretrained(name)
        except (OSError, ValueError, KeyError) as error:
            raise UserError(f"{name} is no model config: {' '.join(str(error).split())[:200]}") from error
    try:
        with reachable(name, "model") as options:
            return AutoConfig.from_pretrained(name, **options)
    except DatasetError as error:
        raise UserError(str(error)) from error


def _silence_loading() -> None:
    """The new classification head is no news, and a progress bar is for a terminal."""
    transformers.logging.set_verbosity_error()
    if not sys.stderr.isatty():
        transformers.utils.logging.disable_progress_bar()
