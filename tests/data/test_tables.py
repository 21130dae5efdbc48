"""Texts from all kinds of files, their splits and labels, and the inputs that are refused."""

import itertools
import json
import re
from collections import Counter
from contextlib import suppress
from functools import partial
from pathlib import Path

import datasets as hf
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from support.data_files import BLOOM, SPLITS, WRITERS, cached, load_in, rows_of, table, texts_of, write_table
from support.helpers import ROOT, finished, run_script

from fabric_ladder import Settings, build_model
from fabric_ladder.errors import UserError


@pytest.fixture
def load(tmp_path):
    """Load a file or folder with a cache of the test's own."""
    return partial(load_in, tmp_path, model=BLOOM)


def test_what_load_datasets_returns(tmp_path, load):
    got = load(write_table(table(), tmp_path / "texts.csv"), max_length=5)
    for split in SPLITS:
        part = got.splits[split]
        assert set(part.column_names) == {"input_ids", "labels", "length"}
        assert part["length"][:] == [len(row) for row in part["input_ids"][:]]
        assert max(part["length"][:]) == 5
        assert set(part["labels"][:]) == {0, 1}
    assert got.tokenizer.pad_token_id == 0
    assert len(got.tokenizer) <= 1024
    assert got.class_names == ["0", "1"]


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_a_csv_file_may_have_another_separator(tmp_path, load, separator):
    texts = [f"one, two, film {number}" for number in range(20)]
    frame = pd.DataFrame({"text": texts, "label": [0, 1] * 10})
    path = tmp_path / "texts.csv"
    frame.to_csv(path, index=False, sep=separator)
    got = load(path)
    assert sorted(text for split in SPLITS for text in texts_of(got, split)) == sorted(texts)


@pytest.mark.parametrize("suffix", [".csv", ".jsonl", ".parquet"])
def test_labels_that_became_decimal_numbers_are_the_whole_numbers_they_were(tmp_path, load, suffix):
    frame = pd.DataFrame({"text": [f"film {number}" for number in range(24)], "label": [10.0, 2.0, -1.0] * 8})
    path = tmp_path / f"texts{suffix}"
    write = {".csv": frame.to_csv, ".jsonl": partial(frame.to_json, orient="records", lines=True)}
    write.get(suffix, frame.to_parquet)(path, **({} if suffix == ".jsonl" else {"index": False}))
    assert load(path).class_names == ["-1", "2", "10"]


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("text,label\na b,0\nc d,1\ne f,0\n", "texts that are left have a single label: 3 are too few, give more"),
        ("text,label\na b,0\n", "1 texts are too few to be split into train, validation and test: give more"),
        ("text,label\n", "holds no rows below the header: there is nothing to learn"),
        ("text,label\na,1.0\nb,0.5\n", "holds decimal numbers"),
        ("text,label\na,1e300\nb,0\n", "holds decimal numbers"),
        ("\n\n", "cannot be read as csv"),
    ],
)
def test_too_few_rows_say_so(tmp_path, load, content, line):
    (tmp_path / "few.csv").write_text(content)
    with pytest.raises(UserError, match=re.escape(line)):
        load(tmp_path / "few.csv")


def test_a_text_of_one_long_word_takes_no_longer_than_its_first_tokens(tmp_path, load):
    """The word has 10 MB. Training a byte-pair encoding on all of it, or encoding all of it, would take an hour."""
    draw = np.random.default_rng(0)
    word = "".join(draw.choice(list("abcdefgh"), 10_000_000))
    frame = pd.DataFrame({"text": [word, *(f"film {number}" for number in range(19))], "label": [0, 1] * 10})
    frame.to_csv(tmp_path / "texts.csv", index=False)
    got = load(tmp_path / "texts.csv", max_length=16)
    assert max(max(got.splits[split]["length"][:]) for split in SPLITS) == 16


def test_texts_without_spaces_are_learned_from_in_pieces(tmp_path, load):
    """The texts are DNA. If the tokenizer learned only single letters, 4,000 letters would be 4,000 tokens."""
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(["ACGT", "TTAGGG", "CCAAT"], 900)) for _ in range(20)]
    pd.DataFrame({"text": texts, "label": [0, 1] * 10}).to_csv(tmp_path / "texts.csv", index=False)
    got = load(tmp_path / "texts.csv", max_length=4000)
    assert max(got.splits["train"]["length"][:]) < 1000
    assert {text for split in SPLITS for text in texts_of(got, split)} == set(texts)


def test_every_format_gives_the_same_tokens(tmp_path, load):
    got = {name: load(write_table(table(), tmp_path / name)) for name in [*WRITERS, "CAPITALS.CSV"]}
    first = got["texts.csv"]
    texts = [text for split in SPLITS for text in texts_of(first, split)]
    assert sorted(texts) == sorted(table()["text"]), "texts are unchanged, and `None` and `NA` are texts"
    for name, datasets in got.items():
        assert datasets.fingerprint == first.fingerprint, name
        assert all(datasets.splits[split][:] == first.splits[split][:] for split in SPLITS), name


def test_a_split_is_seeded_disjoint_and_whole(tmp_path, load):
    path = write_table(table(100), tmp_path / "texts.csv")
    one, again = (load(path, cache_dir=str(tmp_path / name)) for name in ("one", "again"))
    assert [len(one.splits[split]) for split in SPLITS] == [70, 10, 20]
    assert sorted(text for split in SPLITS for text in texts_of(one, split)) == sorted(table(100)["text"])
    assert one.fingerprint == again.fingerprint
    other = load(path, split_seed=2)
    assert set(texts_of(other, "test")) != set(texts_of(one, "test"))


@pytest.mark.parametrize("names", [("train.csv", "val.csv", "test.csv"),
                                   ("Train.jsonl", "validation.parquet", "TEST.json"),
                                   ("train-00000.csv", "dev.csv", "test_1.csv"),
                                   ("testimonials.csv", "valset.csv", "testing.csv"),
                                   ("valères.csv", "devtest.csv", "test2.csv")])  # fmt: skip
def test_a_folder_is_told_apart_by_its_names(tmp_path, load, names):
    sizes = (30, 12, 14)
    for number, (name, rows) in enumerate(zip(names, sizes, strict=True)):
        write_table(table(rows, start=100 * number), tmp_path / "folder" / name)
    (tmp_path / "folder" / "notes.txt").write_text("not read", encoding="utf-8")
    (tmp_path / "folder" / "._train.csv").write_bytes(b"\0\5\x16\7")  # a metadata file of macOS
    got = load("folder")
    assert [len(got.splits[split]) for split in SPLITS] == list(sizes)
    assert texts_of(got, "test") == table(14, start=200)["text"].tolist()


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_split_has_the_same_share_of_each_label_in_all_parts(tmp_path, load, suffix):
    frame = table(200)
    frame["label"] = ["often"] * 120 + ["seldom"] * 60 + ["rarely"] * 20
    path = write_table(frame, tmp_path / f"texts.{suffix}")
    for seed in (1, 2):
        got = load(path, split_seed=seed)
        assert got.class_names == ["often", "rarely", "seldom"]
        counts = {split: Counter(got.splits[split]["labels"][:]) for split in SPLITS}
        assert counts == {
            "train": {0: 84, 1: 14, 2: 42}, "validation": {0: 12, 1: 2, 2: 6}, "test": {0: 24, 1: 4, 2: 12}
        }  # fmt: skip
    own = load(path, test_file=str(path))
    assert Counter(own.splits["validation"]["labels"][:]) == {0: 12, 1: 2, 2: 6}


@pytest.mark.parametrize("counts", [(60, 30, 1), (60, 6, 6), (9, 9, 9), (30, 1, 1), (12, 3, 3, 3, 3)])
def test_labels_with_too_few_samples_for_each_part_are_split_together(tmp_path, load, counts):
    labels = [f"class {number}" for number, count in enumerate(counts) for _ in range(count)]
    frame = pd.DataFrame({"text": [f"text {number}" for number in range(len(labels))], "label": labels})
    got = load(write_table(frame, tmp_path / "texts.csv"))
    sizes = [len(got.splits[split]) for split in SPLITS]
    assert sizes[1:] == [round(0.1 * len(labels)), round(0.2 * len(labels))]
    assert sorted(text for split in SPLITS for text in texts_of(got, split)) == sorted(frame["text"])
    if max(counts) >= 10:  # the most frequent label keeps its share
        found = Counter(got.splits["test"]["labels"][:])
        assert abs(found[0] - 0.2 * max(counts)) <= 2


def test_several_training_files_are_one_split(tmp_path, load):
    for number in range(3):
        write_table(table(20, start=100 * (number + 1)), tmp_path / "folder" / f"part{number}.csv")
    got = load("folder")
    assert [len(got.splits[split]) for split in SPLITS] == [42, 6, 12]


def test_validation_and_test_files_are_taken_as_they_are(tmp_path, load):
    path = write_table(table(50), tmp_path / "texts.csv")
    write_table(table(10, start=100), tmp_path / "own" / "v.jsonl")
    write_table(table(20, start=200), tmp_path / "own" / "t.parquet")
    both = load(path, validation_file="own/v.jsonl", test_file=str(tmp_path / "own" / "t.parquet"))
    assert [len(both.splits[split]) for split in SPLITS] == [50, 10, 20]
    assert texts_of(both, "validation") == table(10, start=100)["text"].tolist()
    one = load(path, test_file="own/t.parquet")
    assert [len(one.splits[split]) for split in SPLITS] == [45, 5, 20], "only missing splits are split off"


def test_smaller_samples_lie_in_larger_ones(tmp_path, load):
    """The tokenizer is fixed, because a trained one depends on the training texts."""
    path = write_table(table(400), tmp_path / "texts.csv")
    load(path).tokenizer.save_pretrained(tmp_path / "tokenizer")
    sizes = [(20, 5, 10), (100, 20, 40), (None, None, None)]
    names = ("train_samples", "validation_samples", "test_samples")
    got = [
        load(path, tokenizer=str(tmp_path / "tokenizer"), **dict(zip(names, counts, strict=True))) for counts in sizes
    ]
    for split, wanted in zip(SPLITS, zip(*sizes, strict=True), strict=True):
        few, more, every = (Counter(rows_of(datasets, split)) for datasets in got)
        assert (few.total(), more.total()) == wanted[:2]
        assert few <= more <= every
        assert every.total() == len(got[2].splits[split])


@pytest.mark.parametrize(
    ("labels", "names"),
    [(["bad", "good"], ["bad", "good"]), ([10, 3, 7], ["3", "7", "10"]), (["10", "3", "x"], ["10", "3", "x"]),
     (["neutral", "bad", "good"], ["bad", "good", "neutral"]), ([-1, 1], ["-1", "1"]),
     ([True, False], ["False", "True"]), (["None", "NA"], ["NA", "None"])],
)  # fmt: skip
@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_class_names_come_from_the_labels_and_reach_the_model(tmp_path, load, labels, names, suffix):
    frame = table(60, start=100).rename(columns={"text": "review"})
    frame["stars"] = [labels[index % len(labels)] for index in range(60)]
    path = write_table(frame.drop(columns="label"), tmp_path / f"texts.{suffix}")
    got = load(path, text_column="review", label_column="stars")
    assert got.class_names == names
    name_of = dict(zip(frame["review"], frame["stars"].map(str), strict=True))
    for split in SPLITS:
        numbers = got.splits[split]["labels"][:]
        assert [names[number] for number in numbers] == [name_of[text] for text in texts_of(got, split)]
    config = build_model(Settings(model=BLOOM, from_scratch=True), got).config
    assert config.id2label == dict(enumerate(names))
    assert config.num_labels == len(names)


@pytest.mark.parametrize("labels", [("zebra", "ant", "cow"), (10, 9, 100)])
def test_a_label_has_the_same_number_in_every_split_whichever_comes_first(tmp_path, load, labels):
    paths = []
    for number in range(3):
        frame = table(30, start=100 * (number + 1))
        frame["label"] = [labels[(index + number) % 3] for index in range(30)]
        paths.append(write_table(frame, tmp_path / f"{number}.csv"))
    got = load(paths[0], validation_file=str(paths[1]), test_file=str(paths[2]))
    assert got.class_names == list(map(str, sorted(labels)))
    for number, split in enumerate(SPLITS):
        names = [got.class_names[label] for label in got.splits[split]["labels"][:]]
        assert names == [str(labels[(index + number) % 3]) for index in range(30)]


GOOD = "text,label\n" + "".join(f"review {index},{index % 2}\n" for index in range(20))

JSON = [{"text": f"review {index}", "label": index % 2} for index in range(20)]

REFUSED = {
    "empty text": (
        "a.csv",
        GOOD.replace("review 3", "  "),
        {},
        r"1 of 20 rows of .*a\.csv cannot be used \(row 4: no text\)",
    ),
    "null text": ("a.json", [*JSON, {"label": 1}], {}, r"1 of 21 rows of .* \(row 21: no text\)"),
    "null label": ("a.jsonl", [*JSON, {"text": "a"}], {}, r"1 of 21 rows of .* \(line 21: no label\)"),
    "numbers": ("a.csv", GOOD.replace("review", ""), {}, r"column 'text' holds numbers, not text: set --text_col"),
    "lists": (
        "a.json",
        [{"text": ["a"], "label": 1}] * 9,
        {},
        r"nothing is left: 9 .*row 1: text is \[\"a\"\], not text; ",
    ),
    "list labels": (
        "a.json",
        [{"text": "a", "label": [1]}] * 9,
        {},
        r"row 1: label is \[1\], not an integer or a string;",
    ),
    "no label column": ("a.csv", GOOD, {"label_column": "stars"}, r"no column 'stars', only text, label: set --text"),
    "one class": ("a.csv", "text,label\n" + "a,x\n" * 9, {}, r"the same label, 'x'"),
    "one class left": ("a.csv", GOOD, {"train_samples": 1}, r"single label: raise --train_samples"),
    "UTF-16": ("a.csv", GOOD.encode("utf-16"), {}, r"not UTF-8 \(byte 0xff\): convert it"),
    "a number": ("a.json", "17", {}, r"a\.json"),
    "a list of numbers": ("a.json", "[1, 2]", {}, r"a\.json"),
    "no such validation file": ("a.csv", GOOD, {"validation_file": "b.csv"}, r"no validation file b\.csv"),
    "itself as a folder": ("b/test.csv", GOOD, {"dataset": "b"}, r"b holds no training file \(\.csv, "),
    "folder and file": ("b/a.csv", GOOD, {"dataset": "b", "test_file": "b/a.csv"}, r"need a --dataset that is a"),
    "no model config": (
        "a.json",
        "{}",
        {"dataset": "synthetic", "model": "{a}"},
        r"needs a config with vocab_size",
    ),
    "no JSON config": (
        "a.json",
        "{",
        {"dataset": "synthetic", "model": "{a}"},
        r"cannot read .* as JSON",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_in_one_line(tmp_path, load, name):
    file, content, values, pattern = REFUSED[name]
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, list):
        lines = [json.dumps(row) for row in content]
        content = "\n".join(lines) if path.suffix == ".jsonl" else f"[{', '.join(lines)}]"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    values = {key: str(path) if value == "{a}" else value for key, value in values.items()}
    with pytest.raises(UserError, match=pattern) as error:
        load(values.pop("dataset", path), **values)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
    assert cached(tmp_path) == []


def test_a_parquet_column_that_is_not_used_may_be_of_any_type(tmp_path, load):
    more = pa.array([[("a", "b")]] * len(table()), pa.map_(pa.string(), pa.string()))
    pq.write_table(pa.table(table().to_dict("list") | {"more": more}), tmp_path / "texts.parquet")
    assert len(load("texts.parquet").splits["train"]) > 0


def test_files_that_are_not_there_any_more_are_one_line(tmp_path, load):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "train.csv").symlink_to("nowhere")
    with pytest.raises(UserError, match=r"cannot read \S*folder/nowhere \(No such file"):
        load("folder")
    (tmp_path / "aclImdb").mkdir()
    with pytest.raises(UserError, match=r"aclImdb holds 0 reviews instead of 50,000: delete it and download it again"):
        load("imdb")


def test_parquet_without_rows_is_refused(tmp_path, load):
    with pytest.raises(UserError, match=r"texts\.parquet holds no rows"):
        load(write_table(table().iloc[:0], tmp_path / "texts.parquet"))


@pytest.mark.parametrize("make", ["row groups", "large strings", "categories", "class labels"])
def test_parquet_of_any_make_gives_the_same_tokens(tmp_path, load, make):
    frame, path = table(), tmp_path / "texts.parquet"
    names = ["0", "1"]
    if make == "row groups":
        frame.to_parquet(path, index=False, row_group_size=7)
    elif make == "large strings":
        columns = [pa.array(frame["text"], pa.large_string()), pa.array(frame["label"])]
        pq.write_table(pa.table(columns, names=["text", "label"]), path)
    elif make == "categories":
        frame.astype({"text": "category"}).to_parquet(path, index=False)
    else:
        features = hf.Features({"text": hf.Value("string"), "label": hf.ClassLabel(names=names)})
        hf.Dataset.from_pandas(frame, features=features).to_parquet(path)
    assert load(path).class_names == names
    assert load(path).fingerprint == load(write_table(table(), tmp_path / "texts.csv")).fingerprint


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux, which tells memory from mapped files")
def test_a_large_file_is_never_in_memory(tmp_path):
    """The file has 100,000 texts of 200 bytes in one row group, as pandas writes it. 2,000 texts are loaded first."""
    words = ["".join(letter * 8 for letter in letters) for letters in itertools.permutations("abcd")]
    chosen = np.array(words, object)[np.random.default_rng(0).integers(len(words), size=(6, 100_000))]
    frame = pd.DataFrame({"text": [" ".join(row) for row in chosen.T], "label": np.arange(100_000) % 2})
    frame.to_parquet(tmp_path / "many.parquet", index=False)
    frame[:2000].to_parquet(tmp_path / "few.parquet", index=False)
    assert frame["text"].str.len().sum() > 19e6
    printed = finished(run_script(ROOT / "tests" / "support" / "loading_memory.py", BLOOM, cwd=tmp_path))
    first, *later = map(int, printed.split())
    assert first < 50e6, "a row group, or Python lists of lengths and rows, would take 110 MB"
    # memory that a load keeps shows in every load; only some loads include new pages of the allocator
    assert min(later) < 5e6, "at most 50 bytes per text"


def test_files_with_unlike_kinds_of_labels_are_refused(tmp_path, load):
    write_table(table(20), tmp_path / "folder" / "numbers.csv")
    write_table(table(20).replace({"label": {0: "bad", 1: "good"}}), tmp_path / "folder" / "words.csv")
    with pytest.raises(UserError, match="label"):
        load("folder")


@pytest.mark.parametrize("where", [0, 2])
def test_a_word_among_the_labels_of_one_split_makes_them_words_in_all(tmp_path, load, where):
    """Otherwise the label `1` of one split and `1` of the other would be two classes."""
    for number in range(3):
        frame = table(30, start=100 * (number + 1))
        frame["label"] = [["10", "9", "unknown" if number in (0, where) else "10"][index % 3] for index in range(30)]
        write_table(frame, tmp_path / f"{number}.csv")
    got = load(tmp_path / "0.csv", validation_file="1.csv", test_file="2.csv")
    assert got.class_names == ["10", "9", "unknown"]
    for number, split in enumerate(SPLITS):
        assert got.splits[split]["labels"][:3] == [0, 1, 2 if number in (0, where) else 0]


def test_a_label_that_only_the_test_file_has_is_the_one_that_is_named(tmp_path, load):
    write_table(table(30), tmp_path / "a.csv")
    write_table(table(30, start=100).replace({"label": {1: "unknown"}}), tmp_path / "b.csv")
    with pytest.raises(UserError, match=r"the test texts have labels that the training texts lack: \['unknown'\]$"):
        load(tmp_path / "a.csv", test_file="b.csv")


def test_classes_with_other_names_in_another_split_are_refused(tmp_path, load):
    for name, names in (("a", ["bad", "good"]), ("b", ["good", "bad"])):
        features = hf.Features({"text": hf.Value("string"), "label": hf.ClassLabel(names=names)})
        hf.Dataset.from_pandas(table(30), features=features).to_parquet(tmp_path / f"{name}.parquet")
    assert load(tmp_path / "a.parquet").class_names == ["bad", "good"]
    write_table(table(30), tmp_path / "c.csv")
    for other in ("b.parquet", "c.csv"):
        with pytest.raises(UserError, match="the class names differ between the splits"):
            load(tmp_path / "a.parquet", test_file=other)


def test_numbers_and_words_as_labels_of_one_file_are_refused_or_read(tmp_path, load):
    rows = [{"text": f"review {index}", "label": "none" if index == 9 else index % 2} for index in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with suppress(UserError):
        assert load(tmp_path / "a.jsonl").class_names == ["0", "1", "none"], "the same names as from a CSV file"


def test_one_column_cannot_be_text_and_label(tmp_path, load):
    with pytest.raises(UserError, match="label_column"):
        load(write_table(table(), tmp_path / "texts.csv"), label_column="text")


@pytest.mark.parametrize("dataset", ["synthetic", "imdb"])
def test_own_test_files_of_other_data_are_refused(archive, load, dataset):
    with pytest.raises(UserError, match="need a --dataset that is a file"):
        load(dataset, data_dir=str(archive.parent), test_file="a.csv", train_samples=50, test_samples=20)
