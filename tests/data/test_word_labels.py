"""Labels of words: their tokens, every cut of the effective batch, packing, entities, and rows that are refused."""

import json
import random

import datasets as hf
import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from support.data_files import BLOOM, KINDS, SPLITS, load_in, write_rows
from support.helpers import settings_for
from support.objectives import labelled, labelling
from torch.nn.functional import cross_entropy
from transformers import AutoTokenizer, ViTConfig

from fabric_ladder import UserError, build_dataloaders
from fabric_ladder.data.splits import IGNORED
from fabric_ladder.data.word_labels import WordLabels
from fabric_ladder.data.words import label_tokens
from fabric_ladder.models.configs import check_model

WORDS = {"task": "token-classification"}
NAMES = ["B-LOC", "B-PER", "I-LOC", "I-PER", "O"]


def texts(count=40):
    return [
        {"tokens": ["Ann", "Lee", "went", f"{index}", "to", "Ulm", "."], "ner_tags": [1, 3, 4, 4, 4, 0, 4]}
        for index in range(count)
    ]


def named(rows):
    return [row | {"ner_tags": [NAMES[tag] for tag in row["ner_tags"]]} for row in rows]


def load(folder, rows, name="rows.jsonl", **values):
    return load_in(folder, write_rows(rows, folder / name), **({"model": BLOOM} | WORDS | values))


# Reading and tokenizing


def words_of(datasets):
    """Return the first token of each labelled word and its label, for every text."""
    return [
        [
            (datasets.tokenizer.decode([token]).strip(), datasets.class_names[label])
            for token, label in zip(row["input_ids"], row["labels"], strict=True)
            if label != IGNORED
        ]
        for split in SPLITS
        for row in datasets.splits[split]
    ]


@pytest.mark.parametrize("form", ["names", "numbers", "classes", "texts"])
def test_labels_may_be_names_numbers_or_classes_and_lists_may_be_texts(tmp_path, form, minilm):
    """Words labelled -100 do not count."""
    rows = [row | {"tokens": ["x", *row["tokens"]], "ner_tags": [-100, *row["ner_tags"]]} for row in texts()]
    rows[0]["ner_tags"] = [-100] * 8
    if form in ("names", "texts"):
        rows = [row | {"ner_tags": [NAMES[tag] if tag >= 0 else "-100" for tag in row["ner_tags"]]} for row in rows]
    if form == "classes":
        features = {"tokens": hf.List(hf.Value("string")), "ner_tags": hf.List(hf.ClassLabel(names=NAMES))}
        labels = hf.Dataset.from_list(rows).cast(hf.Features(features | {"ner_tags": hf.List(hf.Value("int64"))}))
        table = labels.data.table.replace_schema_metadata(hf.Features(features).arrow_schema.metadata)
        pq.write_table(table, tmp_path / "rows.parquet")
        datasets = load_in(tmp_path, tmp_path / "rows.parquet", model=str(minilm), **WORDS)
    else:
        rows = [{name: " ".join(row[name]) for name in row} for row in rows] if form == "texts" else rows
        datasets = load(tmp_path, rows, "rows.csv" if form == "texts" else "rows.jsonl", model=str(minilm))
    untrained = ["1 of 5 classes have no training sample (I-LOC): give more rows"] * (form == "classes")
    assert datasets.notices == [*untrained, "1 of 40 texts have only words labelled -100 and are left out"]
    names = {"numbers": ["0", "1", "3", "4"], "classes": NAMES}.get(form, sorted({*NAMES} - {"I-LOC"}))
    assert datasets.class_names == names
    assert len(words_of(datasets)) == 39
    for found in words_of(datasets):
        assert [word for word, _ in found[:3]] == ["ann", "lee", "went"]
        if form != "numbers":
            assert [label for _, label in found] == ["B-PER", "I-PER", "O", "O", "O", "B-LOC", "O"]


def test_columns_of_other_names_are_read_and_the_cache_differs(tmp_path):
    rows = [{"words": row["tokens"], "tags": row["ner_tags"]} for row in named(texts())]
    datasets = load(tmp_path, rows, text_column="words", label_column="tags")
    for split in SPLITS:
        for row in datasets.splits[split]:
            assert row["items"] == sum(label != IGNORED for label in row["labels"]) == 7
            assert row["length"] == len(row["labels"]) == len(row["input_ids"])
    again = load(tmp_path, named(texts()), "second.jsonl")
    assert again.fingerprint == datasets.fingerprint
    assert load(tmp_path, rows, text_column="words", label_column="tags", max_length=4).fingerprint != again.fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_token_of_each_word_gets_its_label(tokenizers, kind):
    """The tokens are those of the running text. Each labelled token is the first that overlaps with its word."""
    tokenizer = AutoTokenizer.from_pretrained(tokenizers[kind])
    draw = random.Random(0)
    words = [
        ["".join(draw.choices("aé.好 B9", k=draw.randint(1, 9))).strip() or "x" for _ in range(12)] for _ in range(20)
    ]
    labels = [list(range(len(row))) for row in words]
    columns = label_tokens(tokenizer, words, labels, 64)
    for text, ids, found in zip(words, columns["input_ids"], columns["labels"], strict=True):
        encoded = tokenizer(" ".join(text), truncation=True, max_length=64)
        assert encoded["input_ids"] == ids.tolist()
        start = 0
        expected = {}
        for number, word in enumerate(text):
            tokens = {encoded.char_to_token(place) for place in range(start, start + len(word))} - {None}
            if tokens:
                expected.setdefault(min(tokens), number)
            start += len(word) + 1
        assert {place: label for place, label in enumerate(found.tolist()) if label != IGNORED} == expected


def test_words_beyond_the_length_do_not_count(tmp_path):
    datasets = load(tmp_path, named(texts()), max_length=4)
    assert max(max(datasets.splits[split]["length"][:]) for split in SPLITS) == 4
    (notice,) = datasets.notices
    assert notice.endswith("of 280 words have no token within --max_length 4: their labels do not count")


def test_bad_rows_are_named(tmp_path):
    rows = [*named(texts()), {"tokens": ["a", "b"], "ner_tags": ["O"]}, {"tokens": [1], "ner_tags": ["O"]}]
    found = r"2 of 42 rows of .*line 41: 2 words and 1 labels; line 42: tokens has 1, which is not a word\)"
    with pytest.raises(UserError, match=found):
        load(tmp_path, rows)
    assert sum(map(len, load(tmp_path, rows, bad_samples="skip").splits.values())) == 40


def test_other_sources_and_models_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"--task token-classification: synthetic has no labels of words"):
        load_in(tmp_path, "synthetic", model=BLOOM, **WORDS)
    with pytest.raises(UserError, match=r"has no column 'tokens', only text, label: set --text_column"):
        load(tmp_path, [{"text": "a", "label": 1}])
    ViTConfig().to_json_file(tmp_path / "vit.json", use_diff=False)
    with pytest.raises(UserError, match=r"\(vit\) has no form for --task token-classification"):
        check_model(settings_for(tmp_path, model=str(tmp_path / "vit.json"), from_scratch=True, **WORDS))


# Training


def test_the_loss_is_that_of_transformers(tmp_path, fabric):
    datasets, model = labelled("words"), labelling("words", "bert").eval()
    loader, _, _ = build_dataloaders(fabric, datasets, settings_for(tmp_path, **WORDS))
    batch = next(iter(loader))
    (micro_batch,) = batch.micro_batches
    inputs = dict(micro_batch.inputs)
    labels = {name: inputs.pop(name) for name in WordLabels.inputs}
    logits = model(**inputs).logits
    rows = sorted((datasets.splits["train"][row] for row in batch.samples), key=lambda row: -row["length"])
    padded = torch.full(logits.shape[:2], IGNORED)
    for number, row in enumerate(rows):
        padded[number, : row["length"]] = torch.tensor(row["labels"])
    expected = cross_entropy(logits.flatten(0, 1), padded.flatten(), ignore_index=IGNORED)
    assert micro_batch.objective.loss(logits, **labels).item() == pytest.approx(expected.item(), rel=1e-6)
    assert micro_batch.items == (padded != IGNORED).sum()


def entities(names):
    """Return the entities of a text as (type, first word, last word), read word by word."""
    found = []
    for place, name in enumerate([*names, "O"]):
        prefix, _, kind = name.partition("-")
        if found and found[-1][2] is None and (prefix != "I" or kind != found[-1][0]):
            found[-1][2] = place - 1
        if prefix == "B" or (prefix == "I" and not (found and found[-1][2] is None)):
            found.append([kind, place, None])
    return {tuple(each) for each in found}


def test_entities_are_counted_as_they_are_read_word_by_word():
    draw = random.Random(1)
    names = [*NAMES, "misc"]  # a label that is not IOB2 is outside
    kind = WordLabels(names)
    counts = kind.start_counts(torch.device("cpu"))
    expected = np.zeros((2, 3), int)
    for _ in range(50):
        lengths = [draw.randint(1, 9) for _ in range(6)]
        true = [draw.choices(range(6), k=length) for length in lengths]
        predicted = [[label if draw.random() < 0.8 else draw.randrange(6) for label in row] for row in true]
        inputs = kind.collate([[IGNORED, *row] for row in true], np.cumsum([0, *(size + 1 for size in lengths[:-1])]))
        logits = torch.zeros(1, sum(lengths) + 6, 6)
        flat = [label for row in predicted for label in (0, *row)]
        logits[0, torch.arange(len(flat)), torch.tensor(flat)] = 1
        kind.count(counts, logits, **inputs)
        for row, other in zip(true, predicted, strict=True):
            mine, theirs = (entities([names[label] for label in labels]) for labels in (row, other))
            for column, chosen in enumerate((mine & theirs, theirs, mine)):
                for number, type in enumerate(("LOC", "PER")):
                    expected[number, column] += sum(entity[0] == type for entity in chosen)
    right, wrong, _, missed, true = counts.compute().T
    assert torch.stack([right, right + wrong, right + missed], 1).tolist() == expected.tolist()
    assert true.tolist() == expected[:, 2].tolist()
    right, found, true = expected.sum(0)
    described = kind.describe(counts.compute())
    assert described.results["entities"]["micro_f1"] == pytest.approx(2 * right / (found + true))
    assert described.lines[0] == f"Test entity F1 {2 * right / (found + true) * 100:.2f}%"


# Tables of other forms

SENTENCE = [("Ann", "B-PER"), ('"', "O"), ("Ulm", "B-LOC")]


def word_rows(count=20):
    """Return the sentence, the word and the label of each row."""
    pairs = [(number, *pair) for number in range(count) for pair in SENTENCE]
    return [(number, f"Ann{number}" if word == "Ann" else word, label) for number, word, label in pairs]


def one_per_row(column, number_of):
    """Return JSON Lines with a column for the number of the sentence, which `number_of` returns."""
    rows = [{column: number_of(*row[:2]), "tokens": row[1], "ner_tags": row[2]} for row in word_rows()]
    return "".join(json.dumps(row) + "\n" for row in rows)


def one_per_line(separator):
    """Return lines of CoNLL, with an empty line before each sentence."""
    return "".join("\n" * word.startswith("Ann") + f"{word}{separator}{label}\n" for _, word, label in word_rows())


FORMS = {
    "kaggle": ("rows.jsonl", one_per_row("Sentence #", lambda number, word: f"S {number}" * word.startswith("Ann"))),
    "numbers": ("rows.jsonl", one_per_row("sentence_id", lambda number, _: number)),
    "conll": ("rows.tsv", "-DOCSTART-\tO\n\n" + one_per_line("\t")),
    "spaces": ("rows.tsv", one_per_line(" ")),
}


def test_one_word_per_row_is_grouped_into_sentences(tmp_path, minilm):
    lists = [{"tokens": [f"Ann{number}", '"', "Ulm"], "ner_tags": ["B-PER", "O", "B-LOC"]} for number in range(20)]
    expected = load(tmp_path, lists, "lists.jsonl", model=str(minilm))
    assert sum(map(len, expected.splits.values())) == 20
    for form, (name, content) in FORMS.items():
        names = {"column_names": "tokens,ner_tags"} if name.endswith(".tsv") else {}
        assert load(tmp_path, content, name, model=str(minilm), **names).fingerprint == expected.fingerprint, form


def test_one_word_per_row_of_parquet_is_grouped_by_its_column(tmp_path, minilm):
    names = ["B-LOC", "B-PER", "O"]
    columns = dict(zip(("sentence_id", "tokens", "ner_tags"), zip(*word_rows(), strict=True), strict=True))
    table = hf.Dataset.from_dict(columns | {"other": columns["tokens"]})
    table.cast_column("ner_tags", hf.ClassLabel(names=names)).to_parquet(tmp_path / "rows.parquet")
    datasets = load_in(tmp_path, dataset="rows.parquet", model=str(minilm), **WORDS)
    assert datasets.class_names == names
    assert datasets.summary[0].startswith("rows.parquet: 20 sentences · text 'tokens', label 'ner_tags' · B-LOC 20, ")


def test_one_word_per_row_without_sentences_is_refused(tmp_path):
    rows = [{"tokens": word, "ner_tags": label} for _, word, label in word_rows()]
    with pytest.raises(UserError, match=r"^all 60 texts of .*rows.jsonl have one word: write one sentence per row, or"):
        load(tmp_path, rows)
    numbered = [row | {"sentence": number} for number, row in enumerate(rows)]
    with pytest.raises(UserError, match="have one word"):
        load(tmp_path, numbered, "numbered.jsonl")


def test_column_names_for_a_file_with_a_header_are_refused_in_any_order(tmp_path):
    with pytest.raises(UserError, match=r"its first row holds the names of its columns: leave out --column_names"):
        load(tmp_path, "NER_tags\ttokens\nO\tAnn\n\nO\tUlm\n", "rows.tsv", column_names="tokens,ner_tags")


@pytest.mark.parametrize("name", ["S-PER", "PER-B", "PER", "NOUN"])
def test_labels_in_another_scheme_are_named_and_have_only_an_accuracy(name):
    kind = WordLabels(["VERB" if name == "NOUN" else "O", name])
    lines = [f"No entity F1: it needs labels such as B-PER, I-PER and O (IOB2), unlike {name!r}"] * (name != "NOUN")
    assert kind.notes(hf.Dataset.from_dict({"labels": [[0, 1]]})) == lines
    assert kind.start_counts(torch.device("cpu")) is None
