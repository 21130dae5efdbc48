"""From settings to splits that are tokenized, or decoded, and kept in the cache."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets as hf
import numpy as np
import pandas as pd
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fabric_ladder.data.cache import make_once, map_batches, save_tokens
from fabric_ladder.data.hub import check_reachable
from fabric_ladder.data.image_files import find_images
from fabric_ladder.data.images import load_images
from fabric_ladder.data.instructions import (
    INSTRUCTION_CACHE_FORMAT,
    prompt_templates,
    set_end_token,
    tokenize_instructions,
)
from fabric_ladder.data.sources import ReadImdb, Source, find_source
from fabric_ladder.data.splits import SPLITS, ImageDatasets, TextDatasets
from fabric_ladder.data.tables import complete_splits, read_splits
from fabric_ladder.data.tokens import CACHE_FORMAT, load_tokenizer, tokenize_start, train_tokenizer, trained_vocabulary
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings

CHOICES = (  # settings that change the tokens
    "text_column label_column column_names bad_samples train_samples validation_samples test_samples split_seed "
    "max_length".split()
)


def prepare(
    settings: DataSettings, find_imdb: Callable[[str], Path], read_imdb: ReadImdb
) -> TextDatasets | ImageDatasets:
    """Read, split, and tokenize or decode; a second call with the same inputs only maps the first one's result.

    Several processes may call it at once: one does the work, the others wait for it.

    Args:
        settings: Which data, and how they are cut and tokenized.
        find_imdb: Returns the archive or folder of the IMDb reviews, from the `data_dir`.
        read_imdb: Returns the reviews (columns `text` and `label`) and the row numbers of each split.

    Raises:
        UserError: Anything that is wrong with the data, the tokenizer or the cache folder.
    """
    if settings.task == "image-classification":
        return load_images(settings)
    instructed = settings.task == "instruction-tuning"
    templates = prompt_templates(settings.prompt_template) if instructed else None
    source = find_source(settings, find_imdb, read_imdb)
    name = tokenizer_name(settings)
    tokenizer = None if name == "trained" else load_tokenizer(name)
    vocabulary = trained_vocabulary(settings.model) if tokenizer is None else tokenizer.backend_tokenizer.to_str()
    inputs = [CACHE_FORMAT, pd.__version__, source.key, vocabulary, *(getattr(settings, name) for name in CHOICES)]
    if tokenizer is not None:
        inputs += [tokenizer.truncation_side]
    if instructed:
        inputs += [settings.task, INSTRUCTION_CACHE_FORMAT, templates, settings.train_on_inputs]
        if tokenizer is not None:
            set_end_token(tokenizer, name)
            inputs += [tokenizer.chat_template, tokenizer.special_tokens_map]
    make = tokenize_instructions if instructed else _tokenize_texts
    folder, facts = make_once(settings, "tokenised", inputs, partial(make, settings, source, tokenizer, vocabulary))
    if tokenizer is None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    splits = hf.DatasetDict({split: hf.load_from_disk(folder / split) for split in SPLITS})
    if instructed:
        template = "chat" if facts["chat"] else settings.prompt_template or "alpaca"
        tokenizer.init_kwargs["prompt_template"] = template  # `save_pretrained` writes it
    return TextDatasets(splits, facts["class_names"], tokenizer, facts["fingerprint"], facts["notices"])


def check_data(settings: DataSettings) -> None:
    """Refuse data that are not where the settings say, or a tokenizer that cannot be loaded; no data are read.

    IMDb is not looked for, since it may be downloaded.

    Raises:
        UserError: In one line, what is not there.
    """
    if settings.task == "image-classification":
        path, _ = find_images(settings)
    else:
        source = None if settings.dataset == "imdb" else find_source(settings)
        if (name := tokenizer_name(settings)) != "trained":
            load_tokenizer(name)
        path = source is None or source.key[0] != "hub" or None
    if path is None:
        check_reachable(settings.dataset)


def tokenizer_name(settings: DataSettings) -> str:
    """Return the name or folder of the tokenizer that the settings choose."""
    return settings.tokenizer or ("trained" if settings.model.endswith(".json") else settings.model)


def _tokenize_texts(
    settings: DataSettings, source: Source, tokenizer: PreTrainedTokenizerBase | None, vocabulary, scratch: Path
) -> tuple[Path, dict]:
    """Read all splits, tokenize them and save them into a folder in `scratch`; return it, and what is known of it."""
    target = scratch / "tokens"
    splits, class_names, notices = read_splits(settings, source, scratch)
    splits = complete_splits(splits, settings)
    if tokenizer is None:
        tokenizer = train_tokenizer(splits["train"], vocabulary)
        tokenizer.save_pretrained(target / "tokenizer")

    def encode(batch):
        ids = tokenize_start(tokenizer, batch["text"], settings.max_length)
        lengths = [len(row) for row in ids]
        return {"input_ids": [np.asarray(row, np.int32) for row in ids], "length": lengths, "labels": batch["label"]}

    for split in SPLITS:
        splits[split] = map_batches(splits[split], encode, split, scratch)
        if pc.min(splits[split].data.column("length")).as_py() == 0:
            raise UserError(f"a {split} text has no token left: remove texts that hold only unknown characters")
    return save_tokens(
        target, {split: splits[split] for split in SPLITS}, {"class_names": class_names, "notices": notices}
    )
