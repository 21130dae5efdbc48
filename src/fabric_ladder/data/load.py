"""Load the data set in the settings: read, split, tokenize or decode, and keep the result in the cache."""

import inspect
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import datasets as hf
import numpy as np
import pandas as pd
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from fabric_ladder.data.cache import make_once, map_batches, quiet, save_tokens
from fabric_ladder.data.hub import find_commit, load_config
from fabric_ladder.data.image_files import find_images
from fabric_ladder.data.images import load_images, read_image_splits
from fabric_ladder.data.instruction_rows import read_instructions
from fabric_ladder.data.instructions import (
    INSTRUCTION_CACHE_FORMAT,
    check_template,
    prompt_templates,
    set_end_token,
    tokenize_instructions,
)
from fabric_ladder.data.kinds import kind_of
from fabric_ladder.data.reviews import REVIEWS
from fabric_ladder.data.rows import note_bad_samples, shown
from fabric_ladder.data.splits import SPLITS, ImageDatasets, TextDatasets
from fabric_ladder.data.summary import ReadData, complete
from fabric_ladder.data.tables import read_splits, text_columns
from fabric_ladder.data.text_sources import Source, find_source
from fabric_ladder.data.tokens import (
    CACHE_FORMAT,
    NO_TOKEN,
    add_tokens,
    check_entries,
    load_tokenizer,
    tokenize_start,
    train_tokenizer,
    trained_vocabulary,
)
from fabric_ladder.data.words import read_words, tokenize_words, word_columns
from fabric_ladder.errors import UserError, refused
from fabric_ladder.settings import DataSettings

KIND_CACHE_FORMAT = 1  # raise it whenever the same inputs would give other labels than classes
CHOICES = (  # settings that change the tokens
    "text_column label_column column_names bad_samples train_samples validation_samples test_samples split_seed "
    "max_length".split()
)


def load_datasets(settings: DataSettings) -> TextDatasets | ImageDatasets:
    """Read, split, and tokenize or decode; a second call with the same inputs only maps the first call's files.

    Several processes may call it at the same time: one does the work, the others wait for it.

    Raises:
        UserError: The data, the tokenizer or the cache folder cannot be used.
    """
    if settings.task == "image-classification":
        return load_images(settings)
    instructed = settings.task == "instruction-tuning"
    templates = prompt_templates(settings.prompt_template) if instructed else None
    source = find_source(settings)
    commit = find_commit(settings) if source.key[0] == "hub" else None
    if commit:
        source.key.append(commit)
    name = tokenizer_name(settings)
    new_tokens = []
    if name == "trained":
        tokenizer, vocabulary = None, trained_vocabulary(settings.model)
    else:
        tokenizer = load_tokenizer(name)
        new_tokens = add_tokens(tokenizer, settings.train_tokens)
        vocabulary = tokenizer.backend_tokenizer.to_str()
    end = _counted_end(settings)
    inputs = [CACHE_FORMAT, pd.__version__, source.key, vocabulary, *(getattr(settings, choice) for choice in CHOICES)]
    if tokenizer is not None:
        inputs.append(tokenizer.truncation_side)
    if kind_of(settings):
        inputs += [settings.task, settings.problem_type, KIND_CACHE_FORMAT]
    if end is not None:
        inputs.append(["one end token", end])
    if instructed:
        inputs += [settings.task, INSTRUCTION_CACHE_FORMAT, templates, settings.train_on_inputs]
        if tokenizer is not None:
            set_end_token(tokenizer, name)
            inputs += [tokenizer.chat_template, tokenizer.special_tokens_map]
    make = partial(_read_and_tokenize, settings, source, tokenizer, vocabulary)
    folder, facts = make_once(settings, "tokenised", inputs, make)
    if tokenizer is None:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")
    splits = hf.DatasetDict({split: hf.load_from_disk(folder / split) for split in SPLITS})
    if instructed:
        template = "chat" if facts["chat"] else settings.prompt_template or "alpaca"
        tokenizer.init_kwargs |= {"prompt_template": template, "answer_ends": facts["answer_ends"]}  # saved with it
    else:
        tokenizer.model_max_length = settings.max_length  # saved too: users of the model cut texts as the training did
    names, notices, summary = (facts[name] for name in ("class_names", "notices", "summary"))
    return TextDatasets(splits, names, tokenizer, facts["fingerprint"], notices, commit, summary, new_tokens)


def check_data(settings: DataSettings) -> tuple[list[str], int | None, list[str]]:
    """Return lines about what a run would read, its training samples and its classes; nothing is downloaded or kept.

    Only files and synthetic reviews are read; for others the number is None. Tokenizing may leave out samples.

    Raises:
        UserError: Data are missing or cannot be read, or a tokenizer cannot be loaded or does not suit them or the
            model.
    """
    images, tokenizer = settings.task == "image-classification", None
    instructed = settings.task == "instruction-tuning"
    if images:
        path, _ = find_images(settings)
        readable = path is not None
    else:
        source = find_source(settings)
        if (name := tokenizer_name(settings)) != "trained":
            new_tokens = add_tokens(tokenizer := load_tokenizer(name), settings.train_tokens)
            rows = getattr(load_config(settings.model).get_text_config(), "vocab_size", None)
            check_entries(tokenizer, new_tokens, settings.model, rows)
            if instructed:
                set_end_token(tokenizer, name)
        _counted_end(settings)
        if source.key[0] == "hub":
            find_commit(settings)
        readable = source.key[0] in ("files", "synthetic")
    if not readable:
        return [f"{settings.dataset} is read by a run only, which then prints its rows, columns and classes"], None, []
    with refused("cannot keep the data in a temporary folder"), TemporaryDirectory() as scratch, quiet():
        if images:
            *_, data = read_image_splits(settings, path, [], Path(scratch))
        else:
            data = _read(settings, source, Path(scratch))
            if instructed:
                check_template(settings, data, tokenizer)
        return [*data.summary, *data.notices], len(data.splits["train"]), data.class_names


def tokenizer_name(settings: DataSettings) -> str:
    """Return the name or folder of the tokenizer that the settings choose."""
    return settings.tokenizer or ("trained" if settings.model.endswith(".json") else settings.model)


def _counted_end(settings: DataSettings) -> int | None:
    """Return the end token that the head of BART or T5 must find once in each text; None for other heads."""
    classes = AutoModelForSequenceClassification._model_mapping
    if settings.task != "text-classification":
        return None
    config = load_config(settings.model)
    if type(config) not in classes or "eos_mask" not in inspect.getsource(classes[type(config)].forward):
        return None
    if tokenizer_name(settings) == "trained":
        raise UserError(
            f"--tokenizer trained writes no end token, and the head of {settings.model} reads it: choose a --tokenizer"
        )
    return config.eos_token_id


def _read(settings: DataSettings, source: Source, scratch: Path) -> ReadData:
    """Read all splits into files below `scratch`."""
    kind = kind_of(settings)
    columns = ()
    if settings.task == "instruction-tuning":
        names = []
        splits, notices = read_instructions(settings, source, scratch)
    elif settings.task == "token-classification":
        splits, notices = read_words(settings, source, scratch, kind)
        names = kind.names
        columns = [(column,) for column in word_columns(settings, kind)]
    else:
        splits, names, notices = read_splits(settings, source, scratch, kind)
        columns = text_columns(settings, kind)
    files = [path for paths in (source.files or {}).values() for path in paths]
    name = files[0].name if len(files) == 1 and source.key[0] == "files" else settings.dataset
    columns = () if source.key[0] in REVIEWS else columns
    return complete(settings, splits, names, notices, columns, name, source.files, kind)


def _read_and_tokenize(
    settings: DataSettings, source: Source, tokenizer: PreTrainedTokenizerBase | None, vocabulary, scratch: Path
) -> tuple[Path, dict]:
    """Read all splits, tokenize them and save them below `scratch`; return the folder and the facts about it."""
    tokenize = {"instruction-tuning": tokenize_instructions, "token-classification": tokenize_words}
    data = _read(settings, source, scratch)
    folder, facts = tokenize.get(settings.task, _tokenize_texts)(settings, data, tokenizer, vocabulary, scratch)
    return folder, facts | {"summary": data.summary}


def _tokenize_texts(
    settings: DataSettings, data: ReadData, tokenizer: PreTrainedTokenizerBase | None, vocabulary, scratch: Path
) -> tuple[Path, dict]:
    """Tokenize all splits and save them below `scratch`; return the folder and the facts about it."""
    target = scratch / "tokens"
    splits, class_names, notices = data.splits, data.class_names, data.notices
    if tokenizer is None:
        tokenizer = train_tokenizer(splits["train"], vocabulary)
        tokenizer.save_pretrained(target / "tokenizer")

    bad = []
    encode = partial(_encode_texts, tokenizer, settings.max_length, _counted_end(settings), bad)
    tokens = {split: map_batches(rows, encode, split, scratch) for split, rows in splits.items()}
    notices += note_bad_samples(bad, sum(map(len, splits.values())), "texts cannot be used", settings)
    if empty := [split for split, rows in tokens.items() if len(rows) == 0]:
        raise UserError(f"no {empty[0]} text is left ({'; '.join(notices)}): choose another --tokenizer")
    full = sum(int((np.asarray(rows["length"][:]) == settings.max_length).sum()) for rows in tokens.values())
    if full:
        counts = f"{full:,} of {sum(map(len, tokens.values())):,} texts"
        notices.append(f"{counts} have --max_length {settings.max_length} tokens or more; longer ones are cut")
    return save_tokens(target, tokens, {"class_names": class_names, "notices": notices})


def _encode_texts(
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    end: int | None,
    bad: list[tuple[str, str]],
    batch: dict[str, list],
) -> dict[str, list]:
    """Tokenize texts; `bad` gets those that are left out: they have only special tokens, or not one token `end`."""
    columns = {"input_ids": [], "length": [], "labels": []}
    special = min(tokenizer.num_special_tokens_to_add(), max_length - 1)
    rows = zip(tokenize_start(tokenizer, batch["text"], max_length), batch.get("labels") or batch["label"], strict=True)
    for row, (ids, label) in enumerate(rows):
        reason = NO_TOKEN if len(ids) <= special else None
        if end is not None and (count := ids.count(end)) != 1:
            token = tokenizer.convert_ids_to_tokens(end)
            reason = f"{count} end tokens {token}, and the head of this model needs one"
        if reason:
            bad.append((batch["location"][row] if "location" in batch else shown(batch["text"][row]), reason))
            continue
        for name, value in zip(columns, (np.asarray(ids, np.int32), len(ids), label), strict=True):
            columns[name].append(value)
    return columns
