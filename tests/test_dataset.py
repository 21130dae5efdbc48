"""The dataset module: the blog's four names, files of every kind, the cache, and the synthetic reviews."""

import gzip
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import datasets as hf
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from helpers import MODELS, ROOT

import local_dataset_utilities as module
from fabric_ladder import Settings, build_model
from local_dataset_utilities import (
    DatasetError,
    DataSettings,
    IMDBDataset,
    download_dataset,
    load_dataset_into_to_dataframe,
    load_datasets,
    partition_dataset,
    synthetic_reviews,
)

MODEL = str(MODELS / "bloom-quickstart.json")
SPLITS = ("train", "validation", "test")


# ----------------------------------------------------------------------------------------------------------------------
# The blog's four names
# ----------------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def partitioned(archive, tmp_path_factory):
    """The folder and the frame after the blog's first three calls, on the real reviews."""
    folder = tmp_path_factory.mktemp("blog")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FABRIC_LADDER_DATA", str(archive.resolve().parent))
        patch.chdir(folder)
        download_dataset()
        df = load_dataset_into_to_dataframe()
        partition_dataset(df)
    return folder, df


def test_the_blogs_calls_give_the_blogs_splits(partitioned, monkeypatch, tmp_path):
    folder, _ = partitioned
    monkeypatch.chdir(folder)
    files = {"train": "train.csv", "validation": "val.csv", "test": "test.csv"}
    imdb = hf.load_dataset("csv", data_files=files, cache_dir=str(tmp_path))
    for split, size in (("train", 35_000), ("validation", 5_000), ("test", 10_000)):
        assert len(IMDBDataset(imdb, partition_key=split)) == size
        labels = Counter(imdb[split]["label"])
        assert set(labels) == {0, 1}
        assert min(labels.values()) > 0.48 * size
    few = hf.DatasetDict({split: part.select(range(40)) for split, part in imdb.items()})
    tokenizer = module._train_tokenizer(few["train"], 400)

    def tokenize_text(batch):
        return tokenizer(batch["text"], truncation=True, padding=True, max_length=64)

    tokenized = few.map(tokenize_text, batched=True, batch_size=None)
    tokenized.set_format("torch", columns=["input_ids", "attention_mask", "label"])
    dataset = IMDBDataset(tokenized, partition_key="train")
    batch = next(iter(torch.utils.data.DataLoader(dataset, batch_size=12, shuffle=True)))
    assert {name: tuple(column.shape) for name, column in batch.items()} == {
        "label": (12,),
        "input_ids": (12, 64),
        "attention_mask": (12, 64),
    }


def test_the_csv_files_hold_the_shuffled_frame(partitioned):
    folder, df = partitioned
    parts = [pd.read_csv(folder / f"{name}.csv", keep_default_na=False) for name in ("train", "val", "test")]
    assert all(list(part.columns) == ["index", "text", "label"] for part in parts)
    expected = df.sample(frac=1, random_state=1).reset_index()
    whole = pd.concat(parts, ignore_index=True)
    assert whole["text"].tolist() == expected["text"].tolist()
    assert whole["label"].tolist() == expected["label"].tolist()
    assert sorted(path.name for path in folder.iterdir()) == ["test.csv", "train.csv", "val.csv"]


def test_nothing_is_downloaded_where_archive_or_folder_is(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FABRIC_LADDER_DATA", raising=False)
    (tmp_path / "data").mkdir()
    (tmp_path / "aclImdb_v1.tar.gz").touch()
    assert download_dataset() == Path("aclImdb_v1.tar.gz"), "the blog's own place"
    (tmp_path / "data" / "aclImdb").mkdir()
    assert download_dataset("data") == Path("data/aclImdb")


@pytest.fixture(scope="module")
def unpacked(archive, tmp_path_factory):
    """The folder `aclImdb` with 60 real reviews of each of the four kinds, and some that do not count."""
    home = tmp_path_factory.mktemp("unpacked")
    left = Counter()
    with tarfile.open(archive, "r|gz") as tar:
        for entry in tar:
            kind = os.path.dirname(entry.name)
            if re.fullmatch(r"aclImdb/(train|test)/(pos|neg)", kind) and entry.isfile() and left[kind] < 60:
                left[kind] += 1
                path = home / entry.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tar.extractfile(entry).read())
    assert sum(left.values()) == 240
    (home / "aclImdb/README").write_text("read me", encoding="utf-8")
    (home / "aclImdb/train/unsup").mkdir()
    (home / "aclImdb/train/unsup/0_0.txt").write_text("without a label", encoding="utf-8")
    return home / "aclImdb"


def test_the_split_is_that_of_the_blogs_own_code(unpacked):
    """The blog's own lines, for the installed pandas: one row at a time, and an index of zeros."""
    df = pd.DataFrame()
    for split in ("test", "train"):
        for sentiment, label in (("pos", 1), ("neg", 0)):
            path = unpacked / split / sentiment
            for name in sorted(os.listdir(path)):
                with open(path / name, encoding="utf-8") as file:
                    row = pd.DataFrame([[file.read(), label]], columns=["review", "sentiment"])
                df = pd.concat([df, row], ignore_index=False)
    df.columns = ["text", "label"]
    np.random.seed(0)
    df = df.reindex(np.random.permutation(df.index))
    expected = df.sample(frac=1, random_state=1).reset_index()

    parts = module._imdb_parts(module._read_imdb(unpacked, 240))
    assert [len(part) for part in parts] == [168, 24, 48]
    got = pd.concat(parts)
    assert got["text"].tolist() == expected["text"].tolist()
    assert got["label"].tolist() == expected["label"].tolist()


@pytest.mark.parametrize("prefix", ["", "./"])
def test_an_archive_reads_like_the_unpacked_folder(unpacked, tmp_path, prefix):
    files = [path for path in unpacked.rglob("*") if path.is_file()]
    np.random.default_rng(0).shuffle(files)
    with tarfile.open(tmp_path / "own.tar.gz", "w:gz") as tar:
        for path in files:
            tar.add(path, prefix + str(path.relative_to(unpacked.parent)))
    frame = module._read_imdb(tmp_path / "own.tar.gz", 240)
    pd.testing.assert_frame_equal(frame, module._read_imdb(unpacked, 240))


def test_imdb_is_tokenised_from_the_archive(archive, tmp_path, partitioned):
    _, df = partitioned
    settings = DataSettings(data_dir=str(archive.parent), cache_dir=str(tmp_path), model=MODEL, max_length=100)
    got = load_datasets(replace(settings, train_samples=100, validation_samples=20, test_samples=30))
    assert [len(got.splits[split]) for split in SPLITS] == [100, 20, 30]
    assert got.class_names == ["negative", "positive"]
    label_of = dict(zip(df["text"], df["label"], strict=True))
    starts = {}
    for text, label in label_of.items():
        starts.setdefault(text[:40], set()).add(label)
    for row in got.splits["test"]:
        start = got.tokenizer.decode(row["input_ids"], clean_up_tokenization_spaces=False)[:40]
        assert row["labels"] in starts[start], "every text kept its own label"


# ----------------------------------------------------------------------------------------------------------------------
# Files
# ----------------------------------------------------------------------------------------------------------------------

ODD = [
    "None",
    "NA",
    "nan",
    "null",
    'with "quotes", commas; and\ttabs',
    "two\nlines",
    "café 很好 🎬",
    "  spaces  ",
    "1.50",
]


def table(rows=60, start=0):
    """Texts that are all different, and labels 0 and 1."""
    texts = ODD[: max(0, len(ODD) - start)]
    texts += [f"review {start + index}: {'good' if index % 2 else 'bad'}" for index in range(rows - len(texts))]
    return pd.DataFrame({"text": texts, "label": [index % 2 for index in range(rows)]})


WRITERS = {
    "texts.csv": lambda frame, path: frame.to_csv(path, index=False),
    "texts.json": lambda frame, path: frame.to_json(path, orient="records"),
    "texts.jsonl": lambda frame, path: frame.to_json(path, orient="records", lines=True),
    "texts.parquet": lambda frame, path: frame.to_parquet(path, index=False),
    "byte_order_mark.csv": lambda frame, path: frame.to_csv(path, index=False, encoding="utf-8-sig"),
    "line_ends.csv": lambda frame, path: frame.to_csv(path, index=False, lineterminator="\r\n"),
    "indented.json": lambda frame, path: frame.to_json(path, orient="records", indent=2, force_ascii=False),
}


def write(frame, path):
    path.parent.mkdir(parents=True, exist_ok=True)
    WRITERS.get(path.name, WRITERS[f"texts{path.suffix.lower()}"])(frame, path)
    return path


@pytest.fixture
def load(tmp_path):
    """Load a file or folder with a cache of the test's own."""

    def load(dataset, **values):
        values = {"cache_dir": str(tmp_path / "cache"), "data_dir": str(tmp_path), "model": MODEL} | values
        return load_datasets(DataSettings(dataset=str(dataset), **values))

    return load


def texts_of(datasets, split):
    return [datasets.tokenizer.decode(row, clean_up_tokenization_spaces=False) for row in rows_of(datasets, split)]


def rows_of(datasets, split):
    return [tuple(row) for row in datasets.splits[split]["input_ids"][:]]


def test_what_load_datasets_returns(tmp_path, load):
    got = load(write(table(), tmp_path / "texts.csv"), max_length=5)
    for split in SPLITS:
        part = got.splits[split]
        assert set(part.column_names) == {"input_ids", "labels", "length"}
        assert part["length"][:] == [len(row) for row in part["input_ids"][:]]
        assert max(part["length"][:]) == 5
        assert set(part["labels"][:]) == {0, 1}
    assert got.tokenizer.pad_token_id == 0
    assert len(got.tokenizer) <= 1024
    assert got.class_names == ["0", "1"]


def test_every_format_gives_the_same_tokens(tmp_path, load):
    got = {name: load(write(table(), tmp_path / name)) for name in [*WRITERS, "CAPITALS.CSV"]}
    first = got["texts.csv"]
    texts = [text for split in SPLITS for text in texts_of(first, split)]
    assert sorted(texts) == sorted(table()["text"]), "a text stays as it is, and `None` and `NA` are texts"
    for name, datasets in got.items():
        assert datasets.fingerprint == first.fingerprint, name
        assert all(datasets.splits[split][:] == first.splits[split][:] for split in SPLITS), name


def test_a_split_is_seeded_disjoint_and_whole(tmp_path, load):
    path = write(table(100), tmp_path / "texts.csv")
    one, again = (load(path, cache_dir=str(tmp_path / name)) for name in ("one", "again"))
    assert [len(one.splits[split]) for split in SPLITS] == [70, 10, 20]
    assert sorted(text for split in SPLITS for text in texts_of(one, split)) == sorted(table(100)["text"])
    assert one.fingerprint == again.fingerprint
    other = load(path, split_seed=2)
    assert set(texts_of(other, "test")) != set(texts_of(one, "test"))


@pytest.mark.parametrize("names", [("train.csv", "val.csv", "test.csv"),
                                   ("Train.jsonl", "validation.parquet", "TEST.json"),
                                   ("train-00000.csv", "dev.csv", "test_1.csv")])  # fmt: skip
def test_a_folder_is_told_apart_by_its_names(tmp_path, load, names):
    sizes = (30, 12, 14)
    for number, (name, rows) in enumerate(zip(names, sizes, strict=True)):
        write(table(rows, start=100 * number), tmp_path / "folder" / name)
    (tmp_path / "folder" / "notes.txt").write_text("not read", encoding="utf-8")
    got = load("folder")
    assert [len(got.splits[split]) for split in SPLITS] == list(sizes)
    assert texts_of(got, "test") == table(14, start=200)["text"].tolist()


def test_several_training_files_are_one_split(tmp_path, load):
    for number in range(3):
        write(table(20, start=100 * (number + 1)), tmp_path / "folder" / f"part{number}.csv")
    got = load("folder")
    assert [len(got.splits[split]) for split in SPLITS] == [42, 6, 12]


def test_validation_and_test_files_are_taken_as_they_are(tmp_path, load):
    path = write(table(50), tmp_path / "texts.csv")
    write(table(10, start=100), tmp_path / "own" / "v.jsonl")
    write(table(20, start=200), tmp_path / "own" / "t.parquet")
    both = load(path, validation_file="own/v.jsonl", test_file=str(tmp_path / "own" / "t.parquet"))
    assert [len(both.splits[split]) for split in SPLITS] == [50, 10, 20]
    assert texts_of(both, "validation") == table(10, start=100)["text"].tolist()
    one = load(path, test_file="own/t.parquet")
    assert [len(one.splits[split]) for split in SPLITS] == [45, 5, 20], "only what is missing is split off"


def test_smaller_samples_lie_in_larger_ones(tmp_path, load):
    """With a fixed tokenizer, as a trained one follows the training texts."""
    path = write(table(400), tmp_path / "texts.csv")
    load(path).tokenizer.save_pretrained(tmp_path / "tokenizer")
    sizes = [(20, 5, 10), (100, 20, 40), (None, None, None)]
    names = ("train_samples", "validation_samples", "test_samples")
    got = [load(path, tokenizer=str(tmp_path / "tokenizer"), **dict(zip(names, some, strict=True))) for some in sizes]
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
@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_class_names_come_from_the_labels_and_reach_the_model(tmp_path, load, labels, names, kind):
    frame = table(60, start=100).rename(columns={"text": "review"})
    frame["stars"] = [labels[index % len(labels)] for index in range(60)]
    path = write(frame.drop(columns="label"), tmp_path / f"texts.{kind}")
    got = load(path, text_column="review", label_column="stars")
    assert got.class_names == names
    name_of = dict(zip(frame["review"], frame["stars"].map(str), strict=True))
    for split in SPLITS:
        numbers = got.splits[split]["labels"][:]
        assert [names[number] for number in numbers] == [name_of[text] for text in texts_of(got, split)]
    config = build_model(Settings(model=MODEL, from_scratch=True), got).config
    assert config.id2label == dict(enumerate(names))
    assert config.num_labels == len(names)


GOOD = "text,label\n" + "".join(f"review {index},{index % 2}\n" for index in range(20))
JSON = [{"text": f"review {index}", "label": index % 2} for index in range(20)]
REFUSED = {
    "empty text": ("a.csv", GOOD.replace("review 3", "  "), {}, r"a\.csv: empty text in 1 of 20 rows \(row 4\)"),
    "null text": ("a.json", [*JSON, {"label": 1}], {}, r"empty text in 1 of 21 rows \(row 21\)"),
    "null label": ("a.jsonl", [*JSON, {"text": "a"}], {}, r"no label in 1 of 21 rows \(row 21\)"),
    "numbers": ("a.csv", GOOD.replace("review", ""), {}, r"column 'text' holds int64, not text"),
    "lists": ("a.json", [{"text": ["a"], "label": 1}] * 9, {}, r"column 'text' holds list.*, not text"),
    "list labels": ("a.json", [{"text": "a", "label": [1]}] * 9, {}, r"column 'label' holds list.*, not integers"),
    "no label column": ("a.csv", GOOD, {"label_column": "stars"}, r"no column 'stars', only text, label: set --text"),
    "header alone": ("a.csv", "text,label\n", {}, r"a\.csv"),
    "white space alone": ("a.csv", "\n\n", {}, r"a\.csv cannot be read as csv"),
    "two rows": ("a.csv", "text,label\na,0\nb,1\n", {}, r"2 texts are too few to be split"),
    "three rows": ("a.csv", "text,label\na,0\nb,1\nc,0\n", {}, r"single label"),
    "one class": ("a.csv", "text,label\n" + "a,x\n" * 9, {}, r"the same label, 'x'"),
    "one class left": ("a.csv", GOOD, {"train_samples": 1}, r"single label: raise --train_samples"),
    "UTF-16": ("a.csv", GOOD.encode("utf-16"), {}, r"not UTF-8 \(byte 0xff\): convert it"),
    "a number": ("a.json", "17", {}, r"a\.json"),
    "a list of numbers": ("a.json", "[1, 2]", {}, r"a\.json"),
    "no such validation file": ("a.csv", GOOD, {"validation_file": "b.csv"}, r"no validation file b\.csv"),
    "itself as a folder": ("b/test.csv", GOOD, {"dataset": "b"}, r"b holds no training file \(\.csv, "),
    "folder and file": ("b/a.csv", GOOD, {"dataset": "b", "test_file": "b/a.csv"}, r"go with a --dataset that is a"),
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
        r"needs a config with vocab_size",
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
    with pytest.raises(DatasetError, match=pattern) as error:
        load(values.pop("dataset", path), **values)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 700
    assert [path for path in (tmp_path / "cache").glob("tokenised/*") if path.suffix != ".lock"] == []


def test_parquet_without_rows_is_refused(tmp_path, load):
    with pytest.raises(DatasetError, match=r"texts\.parquet holds no rows"):
        load(write(table().iloc[:0], tmp_path / "texts.parquet"))


@pytest.mark.parametrize("kind", ["row groups", "large strings", "categories", "class labels"])
def test_parquet_of_any_make_gives_the_same_tokens(tmp_path, load, kind):
    frame, path = table(), tmp_path / "texts.parquet"
    names = ["0", "1"]
    if kind == "row groups":
        frame.to_parquet(path, index=False, row_group_size=7)
    elif kind == "large strings":
        columns = [pa.array(frame["text"], pa.large_string()), pa.array(frame["label"])]
        pq.write_table(pa.table(columns, names=["text", "label"]), path)
    elif kind == "categories":
        frame.astype({"text": "category"}).to_parquet(path, index=False)
    else:
        features = hf.Features({"text": hf.Value("string"), "label": hf.ClassLabel(names=names)})
        hf.Dataset.from_pandas(frame, features=features).to_parquet(path)
    assert load(path).class_names == names
    assert load(path).fingerprint == load(write(table(), tmp_path / "texts.csv")).fingerprint


STARTS = """
import sys, threading, time
from pathlib import Path
from types import SimpleNamespace
from fabric_ladder import Settings, build_dataloaders
from local_dataset_utilities import load_datasets

def held():  # bytes that are the process's own, mapped files left out
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) * 1024

def watch():
    global peak
    while True:
        peak = max(peak, held())
        time.sleep(0.002)

def start(name):
    settings = Settings(dataset=name, model=sys.argv[1], cache_dir="cache", accelerator="cpu", batch_size=16)
    settings.micro_batch_size, settings.eval_batch_tokens, settings.max_length = 16, 1024, 64
    one = SimpleNamespace(global_rank=0, world_size=1)
    loaders = build_dataloaders(one, load_datasets(settings), settings)
    return [next(iter(loader)) for loader in loaders]

peak = 0
threading.Thread(target=watch, daemon=True).start()
start("few.parquet")
for _ in ("first", "second"):
    peak = before = held()
    start("many.parquet")
    print(peak - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux, which tells memory from mapped files")
def test_a_large_file_is_never_in_memory(tmp_path):
    """100,000 texts of 200 bytes, one row group as pandas writes it, after a start on 2,000 of them."""
    words = ["".join(letter * 8 for letter in letters) for letters in itertools.permutations("abcd")]
    chosen = np.array(words, object)[np.random.default_rng(0).integers(len(words), size=(6, 100_000))]
    frame = pd.DataFrame({"text": [" ".join(row) for row in chosen.T], "label": np.arange(100_000) % 2})
    frame.to_parquet(tmp_path / "many.parquet", index=False)
    frame[:2000].to_parquet(tmp_path / "few.parquet", index=False)
    assert frame["text"].str.len().sum() > 19e6
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "src")])}
    command = [sys.executable, "-c", STARTS, MODEL]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = map(int, done.stdout.split())
    assert first < 50e6, "a row group, or lists of lengths and rows, would take 110 MB"
    assert second < 5e6, "50 bytes a text"


def test_files_with_unlike_kinds_of_labels_are_refused(tmp_path, load):
    write(table(20), tmp_path / "folder" / "numbers.csv")
    write(table(20).replace({"label": {0: "bad", 1: "good"}}), tmp_path / "folder" / "words.csv")
    with pytest.raises(DatasetError, match="label"):
        load("folder")


def test_numbers_and_words_as_labels_of_one_file_are_refused_or_read(tmp_path, load):
    rows = [{"text": f"review {index}", "label": "none" if index == 9 else index % 2} for index in range(20)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with suppress(DatasetError):
        assert load(tmp_path / "a.jsonl").class_names == ["0", "1", "none"], "as from a CSV file"


def test_one_column_cannot_be_text_and_label(tmp_path, load):
    with pytest.raises(DatasetError, match="label_column"):
        load(write(table(), tmp_path / "texts.csv"), label_column="text")


@pytest.mark.parametrize("dataset", ["synthetic", "imdb"])
def test_own_test_files_of_other_data_are_refused(archive, load, dataset):
    with pytest.raises(DatasetError, match="go with a --dataset that is a file"):
        load(dataset, data_dir=str(archive.parent), test_file="a.csv", train_samples=50, test_samples=20)


@pytest.mark.parametrize("broken", ["half a tar", "half a gzip", "noise", "nothing"])
def test_a_damaged_archive_is_refused(tmp_path, broken):
    path = tmp_path / "aclImdb_v1.tar.gz"
    with tarfile.open(path, "w:gz") as tar:
        for number in range(9):
            (tmp_path / "review").write_bytes(np.random.default_rng(number).bytes(700))
            tar.add(tmp_path / "review", f"aclImdb/train/pos/{number}_9.txt")
    whole = path.read_bytes()
    contents = {"half a gzip": whole[: len(whole) // 2], "noise": b"noise" * 999, "nothing": b""}
    path.write_bytes(contents.get(broken, gzip.compress(gzip.decompress(whole)[:5000])))
    with pytest.raises(DatasetError, match=r"aclImdb_v1\.tar\.gz is damaged \(.+\): delete it and get it again"):
        load_dataset_into_to_dataframe(tmp_path)


# ----------------------------------------------------------------------------------------------------------------------
# The cache
# ----------------------------------------------------------------------------------------------------------------------


def files_of(folder):
    """Every file and folder with its inode and its time of change."""
    paths = sorted(folder.rglob("*"))
    return {path: (path.stat().st_ino, path.stat().st_mtime_ns) for path in paths}


def test_a_second_call_only_maps_the_first_ones_files(tmp_path, load):
    path = write(table(), tmp_path / "texts.csv")
    first = load(path)
    before = files_of(tmp_path / "cache")
    assert not [name for name in before if "unfinished" in name.name]
    stamp = path.stat()
    path.write_bytes(b"?" * stamp.st_size)  # could no longer be read as a table
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = load(path)
    assert files_of(tmp_path / "cache") == before
    assert second.fingerprint == first.fingerprint
    for split in SPLITS:
        assert second.splits[split][:] == first.splits[split][:]
        mapped = [Path(file["filename"]) for file in second.splits[split].cache_files]
        assert mapped
        assert all(file.is_relative_to(tmp_path / "cache") for file in mapped)
    probe = ["a text", "another one"]
    assert second.tokenizer(probe)["input_ids"] == first.tokenizer(probe)["input_ids"]


def test_a_changed_file_is_read_again(tmp_path, load):
    path = write(table(), tmp_path / "texts.csv")
    first = load(path)
    changed = table()
    changed.loc[20, "text"] = changed.loc[20, "text"].replace("bad", "dab").replace("good", "doog")
    write(changed, path)
    assert load(path).fingerprint != first.fingerprint


@pytest.mark.parametrize("values", [{"max_length": 8}, {"split_seed": 2}, {"train_samples": 30}])
def test_other_settings_get_other_tokens(tmp_path, load, values):
    path = write(table(), tmp_path / "texts.csv")
    first, other = load(path), load(path, **values)
    assert first.fingerprint != other.fingerprint
    assert load(path).fingerprint == first.fingerprint


def test_the_fingerprint_is_of_the_content_not_of_the_path(tmp_path, load):
    one = load(write(table(), tmp_path / "here" / "texts.csv"))
    other = load(write(table(), tmp_path / "there" / "other.csv"), cache_dir=str(tmp_path / "cache2"))
    assert one.fingerprint == other.fingerprint
    changes = {"text": "another text", "label": 1}
    for number, (column, value) in enumerate(changes.items()):
        changed = table()
        changed.loc[30, column] = value
        assert load(write(changed, tmp_path / f"{number}.csv")).fingerprint != one.fingerprint, column


def test_a_failed_call_leaves_nothing_and_does_not_stand_in_the_way(tmp_path, load):
    path = tmp_path / "texts.csv"
    write(pd.DataFrame({"text": ["a", "b"], "stars": [0, 1]}), path)
    with pytest.raises(DatasetError, match="no column 'label', only text, stars"):
        load(path)
    assert [
        name for name in (tmp_path / "cache").rglob("*") if name.suffix != ".lock" and name.name != "tokenised"
    ] == []
    write(table(), path)
    assert len(load(path).splits["train"]) == 42


PROCESS = """
import sys, time
from pathlib import Path
from local_dataset_utilities import DataSettings, load_datasets
own, go = Path(sys.argv[1]), Path("go")
own.touch()
while not go.exists():
    time.sleep(0.001)
got = load_datasets(DataSettings(dataset="texts.csv", model=sys.argv[2], cache_dir="cache"))
print(got.fingerprint, len(got.splits["train"]))
"""


def test_two_processes_may_fill_an_empty_cache_at_once(tmp_path):
    write(table(2000), tmp_path / "texts.csv")
    commands = [[sys.executable, "-c", PROCESS, name, MODEL] for name in ("one", "other")]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    options = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "env": environment}
    both = [subprocess.Popen(command, **options) for command in commands]
    while not all((tmp_path / command[-2]).exists() for command in commands):
        assert all(process.poll() is None for process in both)
        time.sleep(0.01)
    (tmp_path / "go").touch()
    printed = [process.communicate(timeout=120) for process in both]
    assert printed[0] == printed[1]
    assert re.fullmatch(r"[0-9a-f]{20} 1400\n", printed[0][0]), printed
    assert [path.name for path in (tmp_path / "cache" / "tokenised").iterdir() if path.is_dir()] != []
    assert list((tmp_path / "cache").rglob("unfinished-*")) == []
    facts = list((tmp_path / "cache").rglob("facts.json"))
    assert [json.loads(path.read_text())["class_names"] for path in facts] == [["0", "1"]], "one of them did the work"


# ----------------------------------------------------------------------------------------------------------------------
# Synthetic reviews, and the module alone
# ----------------------------------------------------------------------------------------------------------------------


def test_synthetic_reviews_depend_on_the_seed_alone():
    assert synthetic_reviews(50, 3) == synthetic_reviews(50, 3)
    assert synthetic_reviews(50, 3)[0] != synthetic_reviews(50, 4)[0]


def test_synthetic_reviews_are_balanced_and_spread_like_imdbs():
    texts, labels = synthetic_reviews(5000, 1)
    assert 0.47 < np.mean(labels) < 0.53
    assert len(set(texts)) > 4950
    assert all(re.match(r"[A-Z].*[.!?\w]$", text, re.DOTALL) for text in texts)
    assert not [text for text in texts if "{" in text or "|" in text or "  " in text]
    words = np.array([len(text.split()) for text in texts])
    assert words.min() > 2
    assert 0.5 < np.log(words).std() < 0.8
    assert words.max() > 5 * np.median(words)


def test_some_synthetic_labels_are_wrong():
    """A review that ends with advice has no doubtful verdict."""
    texts, labels = synthetic_reviews(5000, 1)
    sure = []
    for text, label in zip(texts, labels, strict=True):
        against, in_favour = (any(text.endswith(words) for words in some.split("|")) for some in module.ADVICE)
        sure += [label == in_favour] * (against or in_favour)
    assert len(sure) > 1000
    assert 0.94 < np.mean(sure) < 0.99


def test_the_spread_of_synthetic_lengths_is_imdbs(partitioned):
    real = partitioned[1]["text"].iloc[::25].str.split().str.len()
    made = pd.Series(synthetic_reviews(2000, 1)[0]).str.split().str.len()
    assert np.log(made).std() == pytest.approx(np.log(real).std(), abs=0.08)


def test_more_synthetic_texts_of_one_split_leave_the_others_alone(load):
    sizes = {"train_samples": 50, "test_samples": 50}
    few, more = (load("synthetic", validation_samples=size, **sizes) for size in (500, 501))
    assert sorted(texts_of(few, "test")) == sorted(texts_of(more, "test"))


ALONE = """
import sys
sys.modules["fabric_ladder"] = None  # importing it would now fail
import local_dataset_utilities as module
print(module.__file__)
print(len(module.synthetic_reviews(7, 0)[0]))
sizes = dict(train_samples=20, validation_samples=6, test_samples=8)
settings = module.DataSettings(dataset="synthetic", model="model.json", cache_dir="cache", max_length=50, **sizes)
print(*(len(split) for split in module.load_datasets(settings).splits.values()))
"""


def test_the_module_works_alone(tmp_path):
    shutil.copy(ROOT / "local_dataset_utilities.py", tmp_path)
    shutil.copy(MODEL, tmp_path / "model.json")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [sys.executable, "-c", ALONE]
    process = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stderr[-2000:]
    assert process.stdout.split("\n") == [str(tmp_path / "local_dataset_utilities.py"), "7", "20 6 8", ""]
    assert process.stderr == ""
