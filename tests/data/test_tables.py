"""Texts from all kinds of files, their splits and labels, and the options that are refused."""

import re
from collections import Counter
from pathlib import Path

import datasets as hf
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data_files import BLOOM, SPLITS, WRITERS, load_in, rows_of, table, texts_of, write_rows, write_table

from fabric_ladder import Settings, build_model
from fabric_ladder.data.label_kind import describe_rare
from fabric_ladder.errors import UserError

# Formats


def write_parquet(frame, path, make):
    """Write a Parquet file as one of several programs does."""
    if make == "row groups":
        frame.to_parquet(path, index=False, row_group_size=7)
    elif make == "large strings":
        columns = [pa.array(frame["text"], pa.large_string()), pa.array(frame["label"])]
        pq.write_table(pa.table(columns, names=["text", "label"]), path)
    elif make == "categories":
        frame.astype({"text": "category"}).to_parquet(path, index=False)
    elif make == "column of maps":  # `datasets` cannot read this type
        more = pa.array([[("a", "b")]] * len(frame), pa.map_(pa.string(), pa.string()))
        pq.write_table(pa.table(frame.to_dict("list") | {"more": more}), path)
    else:
        write_classes(frame, path, ["0", "1"])
    return path


def test_labels_lose_spaces_and_texts_that_are_cut_are_counted(tmp_path, load):
    texts = [f"{number} " + "word " * (93 if number % 4 == 0 else 3) for number in range(40)]
    rows = [{"text": text, "label": ("bad ", " good")[number % 2]} for number, text in enumerate(texts)]
    got = load(write_rows(rows, tmp_path / "a.csv"), max_length=16)
    assert got.class_names == ["bad", "good"]
    assert got.notices == ["10 of 40 texts have --max_length 16 tokens or more; longer ones are cut"]


def test_labels_that_are_hardly_classes_are_mentioned():
    assert describe_rare(np.ones(40, int))[0].startswith("40 of 40 classes have at most one training sample: ")
    assert describe_rare(np.ones(4, int)) == []


def test_several_columns_of_labels_need_another_kind_of_problem(tmp_path, load):
    rows = [{"text": "a", "toxic": 0, "threat": 1}] * 20
    with pytest.raises(UserError, match=r"no column 'toxic,threat'.* need --problem_type multi_label_classification"):
        load(write_rows(rows, tmp_path / "a.csv"), label_column="toxic,threat")
    with pytest.raises(UserError, match=r"no file or folder a\.csv,b\.csv .*; put several files into one folder"):
        load("a.csv,b.csv")


def write_classes(frame, path, names):
    features = hf.Features({"text": hf.Value("string"), "label": hf.ClassLabel(names=names)})
    hf.Dataset.from_pandas(frame, features=features).to_parquet(path)
    return path


def test_every_format_gives_the_same_tokens(tmp_path, load):
    files = {name: write_table(table(), tmp_path / name) for name in [*WRITERS, "CAPITALS.CSV"]}
    for make in ("row groups", "large strings", "categories", "column of maps", "class labels"):
        files[make] = write_parquet(table(), tmp_path / f"{make}.parquet", make)
    got = {name: load(path) for name, path in files.items()}
    first = got["texts.csv"]
    texts = [text for split in SPLITS for text in texts_of(first, split)]
    assert sorted(texts) == sorted(table()["text"]), "texts are unchanged, and `None` and `NA` are texts"
    for name, datasets in got.items():
        assert datasets.fingerprint == first.fingerprint, name
        assert datasets.class_names == ["0", "1"]
        assert all(datasets.splits[split][:] == first.splits[split][:] for split in SPLITS), name


def test_a_text_of_one_long_word_is_tokenized_from_its_start(tmp_path, load):
    """The word has 3 MB. Training a byte-pair encoding on all of it, or encoding all of it, would take many minutes."""
    word = "".join(np.random.default_rng(0).choice(list("abcdefgh"), 3_000_000))
    frame = pd.DataFrame({"text": [word, *(f"film {number}" for number in range(19))], "label": [0, 1] * 10})
    frame.to_csv(tmp_path / "texts.csv", index=False)
    got = load(tmp_path / "texts.csv", max_length=16)
    assert max(max(got.splits[split]["length"][:]) for split in SPLITS) == 16


def test_the_tokenizer_learns_from_texts_without_spaces(tmp_path, load):
    """The texts are DNA. If the tokenizer learned only single letters, 4,000 letters would be 4,000 tokens."""
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(["ACGT", "TTAGGG", "CCAAT"], 900)) for _ in range(20)]
    pd.DataFrame({"text": texts, "label": [0, 1] * 10}).to_csv(tmp_path / "texts.csv", index=False)
    got = load(tmp_path / "texts.csv", max_length=4000)
    assert max(got.splits["train"]["length"][:]) < 1000
    assert {text for split in SPLITS for text in texts_of(got, split)} == set(texts)


# Splits


def test_a_split_is_seeded_disjoint_and_whole(tmp_path, load):
    path = write_table(table(100), tmp_path / "texts.csv")
    one, again = (load(path, cache_dir=str(tmp_path / name)) for name in ("one", "again"))
    assert [len(one.splits[split]) for split in SPLITS] == [70, 10, 20]
    assert sorted(text for split in SPLITS for text in texts_of(one, split)) == sorted(table(100)["text"])
    assert one.fingerprint == again.fingerprint
    other = load(path, split_seed=2)
    assert set(texts_of(other, "test")) != set(texts_of(one, "test"))


def test_each_part_has_the_same_share_of_each_label(tmp_path, load):
    path = write_table(table(200).assign(label=["often"] * 120 + ["seldom"] * 60 + ["rarely"] * 20), tmp_path / "a.csv")
    got = load(path)
    counts = [Counter(got.splits[split]["labels"][:]) for split in SPLITS]
    assert counts == [{0: 84, 1: 14, 2: 42}, {0: 12, 1: 2, 2: 6}, {0: 24, 1: 4, 2: 12}]
    own = load(path, test_file=str(path))
    assert Counter(own.splits["validation"]["labels"][:]) == {0: 12, 1: 2, 2: 6}


@pytest.mark.parametrize("counts", [(60, 30, 1), (9, 9, 9), (12, 3, 3, 3, 3)])
def test_rare_labels_are_split_together(tmp_path, load, counts):
    labels = [f"class {number}" for number, count in enumerate(counts) for _ in range(count)]
    frame = pd.DataFrame({"text": [f"text {number}" for number in range(len(labels))], "label": labels})
    got = load(write_table(frame, tmp_path / "texts.csv"))
    sizes = [len(got.splits[split]) for split in SPLITS]
    assert sizes[1:] == [round(0.1 * len(labels)), round(0.2 * len(labels))]
    assert sorted(text for split in SPLITS for text in texts_of(got, split)) == sorted(frame["text"])
    if max(counts) >= 10:  # the most frequent label keeps its share
        found = Counter(got.splits["test"]["labels"][:])
        assert abs(found[0] - 0.2 * max(counts)) <= 2


def test_validation_and_test_files_stay_whole(tmp_path, load):
    path = write_table(table(50), tmp_path / "texts.csv")
    write_table(table(10, start=100), tmp_path / "own" / "v.jsonl")
    write_table(table(20, start=200), tmp_path / "own" / "t.parquet")
    both = load(path, validation_file="own/v.jsonl", test_file=str(tmp_path / "own" / "t.parquet"))
    assert [len(both.splits[split]) for split in SPLITS] == [50, 10, 20]
    assert texts_of(both, "validation") == table(10, start=100)["text"].tolist()
    one = load(path, test_file="own/t.parquet")
    assert [len(one.splits[split]) for split in SPLITS] == [45, 5, 20], "only missing splits are split off"


def test_larger_samples_contain_smaller_ones(tmp_path, load):
    """The tokenizer is fixed, because a trained one depends on the training texts."""
    path = write_table(table(120), tmp_path / "texts.csv")
    load(path).tokenizer.save_pretrained(tmp_path / "tokenizer")
    sizes = [(10, 3, 5), (30, 6, 12), (None, None, None)]
    names = ("train_samples", "validation_samples", "test_samples")
    got = [
        load(path, tokenizer=str(tmp_path / "tokenizer"), **dict(zip(names, counts, strict=True))) for counts in sizes
    ]
    for split, wanted in zip(SPLITS, zip(*sizes, strict=True), strict=True):
        few, more, every = (Counter(rows_of(datasets, split)) for datasets in got)
        assert (few.total(), more.total()) == wanted[:2]
        assert few <= more <= every
        assert every.total() == len(got[2].splits[split])


# Labels


@pytest.mark.parametrize(
    ("suffix", "labels", "names"),
    [("csv", ["bad", "good"], ["bad", "good"]), ("jsonl", [10, 3, 7], ["3", "7", "10"]),
     ("csv", ["10", "3", "x"], ["10", "3", "x"]), ("parquet", [True, False], ["False", "True"]),
     ("csv", ["None", "NA"], ["NA", "None"]), ("parquet", [10.0, 2.0, -1.0], ["-1", "2", "10"])],
)  # fmt: skip
def test_class_names_come_from_the_labels_and_reach_the_model(tmp_path, load, labels, names, suffix):
    frame = table(60, start=100).rename(columns={"text": "review"})
    frame["stars"] = [labels[index % len(labels)] for index in range(60)]
    path = write_table(frame.drop(columns="label"), tmp_path / f"texts.{suffix}")
    got = load(path, text_column="review", label_column="stars")
    assert got.class_names == names
    name_of = dict(zip(frame["review"], frame["stars"].map(str).str.removesuffix(".0"), strict=True))
    for split in SPLITS:
        numbers = got.splits[split]["labels"][:]
        assert [names[number] for number in numbers] == [name_of[text] for text in texts_of(got, split)]
    config = build_model(Settings(model=BLOOM, from_scratch=True), got).config
    assert config.id2label == dict(enumerate(names))
    assert config.num_labels == len(names)


def test_a_label_has_the_same_number_in_every_split(tmp_path, load):
    """The test lacks the label that is the only word."""
    parts = [["10", "9", "unknown"] * 10, ["9", "10"] * 15]
    paths = [write_table(table(30, start=100 * number + 100).assign(label=labels), tmp_path / f"{number}.csv")
             for number, labels in enumerate(parts)]  # fmt: skip
    got = load(paths[0], validation_file=str(paths[1]), test_file=str(paths[1]))
    assert got.class_names == ["10", "9", "unknown"]
    for split, labels in (("train", parts[0]), ("test", parts[1])):
        assert [got.class_names[label] for label in got.splits[split]["labels"][:]] == labels


def test_unknown_and_different_classes_are_refused(tmp_path, load):
    write_table(table(30), tmp_path / "a.csv")
    write_table(table(30, start=100).replace({"label": {1: "unknown"}}), tmp_path / "b.csv")
    with pytest.raises(UserError, match=r"the test texts have labels that the training texts lack: \['unknown'\]$"):
        load("a.csv", test_file="b.csv")
    for name, names in (("a", ["bad", "good"]), ("b", ["good", "bad"])):
        write_classes(table(30), tmp_path / f"{name}.parquet", names)
    assert load("a.parquet").class_names == ["bad", "good"]
    for other in ("b.parquet", "a.csv"):
        with pytest.raises(UserError, match="the class names in column 'label' differ between the files"):
            load("a.parquet", test_file=other)


def test_a_folders_test_file_without_labels_is_left_out_with_a_notice(tmp_path, load):
    (tmp_path / "competition").mkdir()
    write_table(table(30), tmp_path / "competition" / "train.csv")
    (tmp_path / "competition" / "test.csv").write_text("text\na new one\n")
    found = load("competition")
    assert any(re.search(r"test\.csv has no column 'label' and is left out", notice) for notice in found.notices)
    assert {split: len(rows) for split, rows in found.splits.items()} == {"train": 21, "validation": 3, "test": 6}
    with pytest.raises(UserError, match=r"test\.csv has no column 'label'"):
        load("competition/train.csv", test_file="competition/test.csv")


# Options that are refused

REFUSED = {
    "no label column": ({"label_column": "stars"}, r"no column 'stars', only text, label: set --text_column or"),
    "one class left": ({"train_samples": 1}, r"single label: raise --train_samples"),
    "no such validation file": ({"validation_file": "b.csv"}, r"no validation file b\.csv"),
    "a folder without training": ({"dataset": "tests"}, r"tests holds no training file \(\.csv, "),
    "folder and file": ({"dataset": "tests", "test_file": "a.csv"}, r"need a --dataset that is a file"),
    "IMDb and file": ({"dataset": "imdb", "test_file": "a.csv"}, r"need a --dataset that is a file"),
    "unpacked IMDb without reviews": ({"dataset": "imdb"}, r"aclImdb holds 0 reviews instead of 50,000: delete it"),
    "a link to nothing": ({"dataset": "links"}, r"cannot read \S*/nowhere \(.*No such file"),
    "no model config": ({"model": "a.json"}, r"a\.json is not a model config"),
    "a config without a vocabulary": ({"model": "c.json"}, r"--tokenizer trained needs a config with vocab_size, unl"),
    "names for a header": ({"column_names": "label,text"}, r"its first row holds the names of its columns: leave ou"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_options_are_refused_in_one_line(tmp_path, load, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    write_table(table(20), tmp_path / "a.csv")
    write_table(table(20), tmp_path / "tests" / "test.csv")
    Path("links").mkdir()
    Path("links/train.csv").symlink_to("nowhere")
    Path("aclImdb").mkdir()
    Path("a.json").write_text("{}")
    Path("b.json").write_text("{")
    Path("c.json").write_text('{"model_type": "vit"}')
    values, pattern = REFUSED[name]
    with pytest.raises(UserError, match=pattern) as error:
        load(**{"dataset": "a.csv"} | values)
    assert re.fullmatch(r".{10,700}", str(error.value))


def test_a_text_without_a_token_is_named_or_left_out(tmp_path, minilm):
    """The tokenizer drops the character, and adds its special tokens."""
    frame = table()
    frame.loc[3, "text"] = "\u200b"
    write_table(frame, tmp_path / "texts.jsonl")
    found = r"1 of 60 texts cannot be used \(.*texts.jsonl, line 4: the tokenizer has no token for a text\)"
    with pytest.raises(UserError, match=f"^{found}: fix or remove them"):
        load_in(tmp_path, "texts.jsonl", model=str(minilm))
    got = load_in(tmp_path, "texts.jsonl", model=str(minilm), bad_samples="skip")
    assert sum(map(len, got.splits.values())) == 59
    assert got.notices[0].endswith("and are left out")
