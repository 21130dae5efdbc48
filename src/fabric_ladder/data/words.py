"""Read and tokenize lists of words, with a label for each word."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import datasets as hf
import numpy as np
import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from fabric_ladder.data.cache import map_batches, save_tokens
from fabric_ladder.data.instructions import FEATURES
from fabric_ladder.data.rows import read_parts, shown
from fabric_ladder.data.sources import REVIEWS, Source
from fabric_ladder.data.splits import IGNORED
from fabric_ladder.data.summary import ReadData
from fabric_ladder.data.tables import check_column
from fabric_ladder.data.tokens import tokenize, train_tokenizer
from fabric_ladder.data.word_labels import WordLabels, word_list
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings


def tokenize_words(
    settings: DataSettings, data: ReadData, tokenizer: PreTrainedTokenizerBase | None, vocabulary, scratch: Path
) -> tuple[Path, dict]:
    """Tokenize all splits and save them below `scratch`; return the folder and the facts about it."""
    target = scratch / "tokens"
    splits, notices = data.splits, data.notices
    if tokenizer is None:
        texts = map_batches(
            splits["train"], lambda rows: {"text": list(map(" ".join, rows["words"]))}, "texts", scratch
        )
        tokenizer = train_tokenizer(texts, vocabulary)
        tokenizer.save_pretrained(target / "tokenizer")
    total = unlabelled = 0

    def encode(batch: dict[str, list]) -> dict[str, list]:
        nonlocal total, unlabelled
        columns = label_tokens(tokenizer, batch["words"], batch["labels"], settings.max_length)
        total += sum(map(len, batch["words"]))
        unlabelled += sum(map(len, batch["words"])) - sum(columns["items"])
        chosen = np.flatnonzero(columns["items"])
        return {name: [values[index] for index in chosen] for name, values in columns.items()}

    tokens = {split: map_batches(rows, encode, split, scratch, features=FEATURES) for split, rows in splits.items()}
    if unlabelled:
        notices.append(
            f"{unlabelled:,} of {total:,} words have no token within --max_length {settings.max_length}: their labels "
            "do not count"
        )
    if empty := [split for split, rows in tokens.items() if len(rows) == 0]:
        raise UserError(f"no word of the {empty[0]} texts has a token: raise --max_length {settings.max_length}")
    return save_tokens(target, tokens, {"class_names": data.class_names, "notices": notices})


def label_tokens(
    tokenizer: PreTrainedTokenizerBase, texts: list[list[str]], labels: list[list[int]], max_length: int
) -> dict[str, list]:
    """Tokenize texts, given as words, and give the first token of each word its label.

    The words are tokenized together, with spaces between them, as in a text. Tokens of some tokenizers hold the space
    before a word.

    Returns:
        `input_ids`, `labels` (-100 for all other tokens), `length` and `items` (labelled words).
    """
    options = {"truncation": True, "max_length": max_length, "return_offsets_mapping": True}
    encoded = tokenize(tokenizer, list(map(" ".join, texts)), **options)
    columns = {name: [] for name in FEATURES}
    rows = zip(encoded["input_ids"], encoded["offset_mapping"], texts, labels, strict=True)
    for ids, offsets, words, values in rows:
        tokens, found = _first_tokens(np.array(offsets).reshape(-1, 2), np.array(list(map(len, words))))
        row = np.full(len(ids), IGNORED, np.int32)
        row[tokens] = np.array(values)[found]
        for name, value in zip(FEATURES, (np.asarray(ids, np.int32), row, len(ids), len(found)), strict=True):
            columns[name].append(value)
    return columns


def _first_tokens(offsets: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the first token of each word that has one, and these words.

    Args:
        offsets: Start and end of each token in the text, (tokens, 2); special tokens are empty.
        lengths: Characters of each word. The text has a space between two words.
    """
    ends = np.cumsum(lengths + 1) - 1
    starts = ends - lengths
    words = np.searchsorted(ends, offsets[:, 0], side="right")  # a token may start with the space before its word
    known = (offsets[:, 1] > offsets[:, 0]) & (words < len(lengths))
    known[known] = offsets[known, 1] > starts[words[known]]
    found, first = np.unique(words[known], return_index=True)
    return np.flatnonzero(known)[first], found


def word_columns(settings: DataSettings, kind: WordLabels) -> tuple[str, str]:
    """Return the columns of the words and of their labels."""
    return "tokens" if settings.text_column == "text" else settings.text_column, *kind.columns(settings)


def read_words(
    settings: DataSettings, source: Source, scratch: Path, kind: WordLabels
) -> tuple[dict[str, hf.Dataset], list[str]]:
    """Return the splits of the source, with the columns `words` and `labels`, and notices."""
    if source.key[0] in REVIEWS:
        raise UserError(f"--task token-classification: {source.key[0]} has no labels of words; give another --dataset")
    text, label = word_columns(settings, kind)

    def check_for(name: str, columns: list[str], features: dict) -> tuple[Callable[[str, dict], dict], pa.Schema]:
        for column in (text, label):
            check_column(columns, column, name)
        feature, labels_of = kind.reader(settings, features)
        schema = hf.Features({"words": hf.List(hf.Value("string")), "label": feature}).arrow_schema
        return partial(_check_row, column=text, labels_of=labels_of), schema

    notices = []
    parts = read_parts(settings, source, scratch, notices, check_for, (text, label), (label,))
    return kind.number(parts, settings), [*notices, *kind.notices]


def _check_row(_: str, row: dict, column: str, labels_of: Callable[[dict], list]) -> dict[str, list]:
    words, labels = word_list(row, column), labels_of(row)
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise ValueError(f"{column} has {shown(wrong[0])}, which is not a word")
    if len(words) != len(labels):
        raise ValueError(f"{len(words)} words and {len(labels)} labels")
    "".join(words).encode()  # refuses half of a surrogate pair, which JSON can hold
    return {"words": words, "label": labels}
