"""Read and tokenize lists of words, with a label for each word.

In tables with one word per row, a column such as `Sentence #` (Kaggle) or blank lines (CoNLL) separate the sentences.
"""

import csv
import gzip
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import datasets as hf
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from transformers import PreTrainedTokenizerBase

from fabric_ladder.data.cache import map_batches, save_tokens, write_batches
from fabric_ladder.data.instructions import FEATURES
from fabric_ladder.data.label_kind import join
from fabric_ladder.data.reviews import REVIEWS
from fabric_ladder.data.rows import SENTENCE, check_first_row, note_bad_samples, read_parts, reading, shown
from fabric_ladder.data.splits import IGNORED
from fabric_ladder.data.summary import ReadData
from fabric_ladder.data.tables import check_column
from fabric_ladder.data.text_sources import SEPARATORS, Source, read_format
from fabric_ladder.data.tokens import NO_TOKEN, tokenize, train_tokenizer
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
    total = unlabelled = without = 0
    bad = []

    def encode(batch: dict[str, list]) -> dict[str, list]:
        nonlocal total, unlabelled, without
        columns = label_tokens(tokenizer, batch["words"], batch["labels"], settings.max_length)
        labelled = sum(label != IGNORED for labels in batch["labels"] for label in labels)
        total += labelled
        unlabelled += labelled - sum(columns["items"])
        chosen = np.flatnonzero(columns["items"])
        for row in np.flatnonzero(np.equal(columns["items"], 0)):
            if {*batch["labels"][row]} == {IGNORED}:
                without += 1
            elif columns["length"][row] < settings.max_length:
                bad.append((batch["location"][row], NO_TOKEN))
        return {name: [values[index] for index in chosen] for name, values in columns.items()}

    tokens = {split: map_batches(rows, encode, split, scratch, features=FEATURES) for split, rows in splits.items()}
    texts = sum(map(len, splits.values()))
    notices += note_bad_samples(bad, texts, "texts cannot be used", settings)
    if without:
        notices.append(f"{without:,} of {texts:,} texts have only words labelled {IGNORED} and are left out")
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
    columns = {name: [] for name in FEATURES}
    for (ids, tokens, found), values in zip(place_words(tokenizer, texts, max_length), labels, strict=True):
        row = np.full(len(ids), IGNORED, np.int32)
        row[tokens] = np.array(values)[found]
        items = np.count_nonzero(row != IGNORED)
        for name, value in zip(FEATURES, (np.asarray(ids, np.int32), row, len(ids), items), strict=True):
            columns[name].append(value)
    return columns


def place_words(
    tokenizer: PreTrainedTokenizerBase, texts: list[list[str]], max_length: int
) -> Iterator[tuple[list[int], np.ndarray, np.ndarray]]:
    """Yield the tokens of each text, given as words; the first token of each word that has one, and these words."""
    options = {"truncation": True, "max_length": max_length, "return_offsets_mapping": True}
    encoded = tokenize(tokenizer, list(map(" ".join, texts)), **options)
    for ids, offsets, words in zip(encoded["input_ids"], encoded["offset_mapping"], texts, strict=True):
        yield ids, *_first_tokens(np.array(offsets).reshape(-1, 2), np.array(list(map(len, words))))


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
        columns_read = {"words": hf.List(hf.Value("string")), "label": feature}
        columns_read |= dict.fromkeys(("location", "sentence"), hf.Value("string"))
        sentence = next((column for column in columns if SENTENCE.fullmatch(column) and column != text), None)
        check = partial(_check_row, name, column=text, labels_of=labels_of, sentence=sentence)
        return check, hf.Features(columns_read).arrow_schema

    notices = []
    if blocks := _find_blocks(settings, source, text, label, scratch):
        settings, source = replace(settings, column_names=None), source._replace(files=blocks)
    parts = read_parts(settings, source, scratch, notices, check_for, (text, label), (label,))
    for split, tables in parts.items():
        parts[split] = [_group(table, scratch / f"{split}-{number}-grouped") for number, table in enumerate(tables)]
    return kind.number(join(parts, label), settings), [*notices, *kind.notices]


def _find_blocks(
    settings: DataSettings, source: Source, text: str, label: str, scratch: Path
) -> dict[str, list[Path]] | None:
    """Write the sentences of files with one word per line as JSON Lines, and return these files by their splits.

    None: not all files are such files, or no blank lines separate sentences.
    """
    found, separated = {}, False
    for split, paths in (source.files or {}).items():
        for path in paths:
            sentences = _read_blocks(path, settings.column_names, text, label)
            if sentences is None:
                return None
            separated |= len(sentences) > 1
            target = scratch / f"{split}-{len(found.get(split, []))}-{path.name}.jsonl"
            target.write_text("".join(json.dumps(sentence) + "\n" for sentence in sentences), encoding="utf-8")
            found.setdefault(split, []).append(target)
    return found if separated else None


def _read_blocks(path: Path, column_names: str | None, text: str, label: str) -> list[dict] | None:
    """Return the sentences of a CSV or TSV file with one word per line, or None for another file."""
    kind = read_format(path)
    if kind not in SEPARATORS:
        return None
    names = column_names and [name.strip() for name in column_names.split(",")]
    sentences, separator, current = [], None, None
    opened = gzip.open if path.suffix.lower() == ".gz" else open
    with reading(path, kind), opened(path, "rt", encoding="utf-8-sig") as file:
        for line in file:
            line = line.strip("\r\n")
            if not line.strip() or line.startswith("-DOCSTART-"):
                current = None
                continue
            separator = separator or max(f"{SEPARATORS[kind]}\t;| ,", key=line.count)
            if line.startswith("#") and separator not in line:  # a comment of CoNLL-U
                continue
            quoted = separator in ",;"
            fields = next(csv.reader([line], delimiter=separator)) if quoted else line.split(separator)
            if names is None:
                names = fields
                continue
            if column_names and not sentences:
                check_first_row(fields, names)
            row = dict(zip(names, map(str.strip, fields), strict=False))
            if len(row.get(text, "").split()) != 1 or len(row.get(label, "").split()) != 1:
                return None
            if current is None:
                current = {text: [], label: []}
                sentences.append(current)
            current[text].append(row[text])
            current[label].append(row[label])
    return sentences


def _group(table: hf.Dataset, target: Path) -> hf.Dataset:
    """Return a table of sentences, given one of sentences or one of words with the column `sentence`.

    Raises:
        UserError: All texts have one word, and no sentences are named.
    """
    data = table.with_format("arrow")[:]
    if len(table) < 2 or pc.max(pc.list_value_length(data["words"])).as_py() > 1:
        return table.remove_columns("sentence")
    starts, before = [], None
    for row, sentence in enumerate(data["sentence"].to_pylist()):
        if row == 0 or (sentence and sentence != before):
            starts.append(row)
        before = sentence or before
    if before is None or 2 * len(starts) > len(table):
        name = data["location"][0].as_py().rpartition(", ")[0]
        raise UserError(
            f"all {len(table):,} texts of {name} have one word: write one sentence per row, or number the sentences in "
            "a column sentence_id, or separate them by blank lines"
        )
    offsets = pa.array([*starts, len(table)], pa.int32())
    features = hf.Features({name: feature for name, feature in table.features.items() if name != "sentence"})
    columns = {"location": data["location"].take(offsets[:-1])}
    for name in ("words", "label"):
        columns[name] = pa.ListArray.from_arrays(offsets, pc.list_flatten(data[name]).combine_chunks())
    schema = features.arrow_schema
    grouped = pa.table([columns[name] for name in schema.names], schema.names).cast(schema)
    return write_batches(target, schema, grouped.to_batches(1000))


def _check_row(
    name: str, location: str, row: dict, column: str, labels_of: Callable[[dict], list], sentence: str | None
) -> dict[str, list | str | None]:
    words, labels = word_list(row, column), labels_of(row)
    if wrong := [word for word in words if not isinstance(word, str)]:
        raise ValueError(f"{column} has {shown(wrong[0])}, which is not a word")
    if len(words) != len(labels):
        raise ValueError(f"{len(words)} words and {len(labels)} labels")
    "".join(words).encode()  # refuses half of a surrogate pair, which JSON can hold
    number = "" if row.get(sentence) is None else str(row[sentence]).strip()
    return {"words": words, "label": labels, "location": f"{name}, {location}", "sentence": number or None}
