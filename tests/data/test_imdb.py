"""IMDb: the blog's four functions, with and without the package, and the reviews that every script reads."""

import hashlib
import os
import re
import shutil
import tarfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import datasets as hf
import numpy as np
import pandas as pd
import pytest
from support.data_files import BLOOM, SPLITS, cached
from support.helpers import ROOT, finished, run_script

import local_dataset_utilities as module
from fabric_ladder.data.load import load_datasets
from fabric_ladder.data.synthetic import synthetic_reviews
from fabric_ladder.data.tokens import train_tokenizer
from fabric_ladder.errors import UserError
from fabric_ladder.settings import DataSettings
from local_dataset_utilities import download_dataset, load_dataset_into_to_dataframe, partition_dataset


def test_an_existing_archive_or_folder_is_not_downloaded_again(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("FABRIC_LADDER_DATA", raising=False)
    (tmp_path / "data").mkdir()
    (tmp_path / "aclImdb_v1.tar.gz").touch()
    assert download_dataset() == Path("aclImdb_v1.tar.gz"), "the blog stores the archive here"
    (tmp_path / "data" / "aclImdb").mkdir()
    assert download_dataset("data") == Path("data/aclImdb")


def test_the_csv_files_are_byte_by_byte_those_of_the_blogs_own_code(unpacked, monkeypatch, tmp_path):
    """Run the blog's own lines, adapted to the installed pandas: one row at a time, and an index of zeros.

    The last review contains all kinds of line ends, quotes and a Unicode line separator.
    """
    shutil.copytree(unpacked, tmp_path / "aclImdb")
    (tmp_path / "aclImdb" / "train" / "neg" / "odd_1.txt").write_bytes('one\r\ntwo\rthree\n"four", \u2028café'.encode())
    unpacked = tmp_path / "aclImdb"
    monkeypatch.chdir(tmp_path)
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
    df_shuffled = df.sample(frac=1, random_state=1).reset_index()
    df_shuffled.iloc[:168].to_csv("train.csv", index=False, encoding="utf-8")
    df_shuffled.iloc[168:192].to_csv("val.csv", index=False, encoding="utf-8")
    df_shuffled.iloc[192:].to_csv("test.csv", index=False, encoding="utf-8")
    expected = {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")}
    assert len(expected) == 3

    for name in expected:
        (tmp_path / name).unlink()
    monkeypatch.setattr(module, "IMDB_REVIEWS", 241)
    partition_dataset(load_dataset_into_to_dataframe(tmp_path))
    assert {path.name: path.read_bytes() for path in tmp_path.glob("*.csv")} == expected


def test_imdb_is_tokenized_with_its_own_labels(unpacked, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "IMDB_REVIEWS", 240)
    df = load_dataset_into_to_dataframe(unpacked.parent)
    settings = DataSettings(data_dir=str(unpacked.parent), cache_dir=str(tmp_path), model=BLOOM, max_length=100)
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


def test_several_ranks_download_the_archive_once_and_tokenize_it_once(unpacked, monkeypatch, tmp_path):
    archive = tmp_path / "archive.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(unpacked, "aclImdb")
    content = archive.read_bytes()
    downloads = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            downloads.append(self.path)
            time.sleep(0.5)  # the other ranks arrive
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(module, "IMDB_URL", f"http://127.0.0.1:{server.server_port}/{module.IMDB_ARCHIVE}")
    monkeypatch.setattr(module, "IMDB_SHA256", hashlib.sha256(content).hexdigest())
    monkeypatch.setattr(module, "IMDB_BYTES", len(content))
    monkeypatch.setattr(module, "IMDB_REVIEWS", 240)
    settings = DataSettings(data_dir=str(tmp_path / "data"), cache_dir=str(tmp_path / "cache"), model=BLOOM)
    with ThreadPoolExecutor() as pool:
        got = list(pool.map(load_datasets, [settings] * 3))
    got.append(load_datasets(settings))
    server.shutdown()
    assert len(downloads) == 1
    assert len(cached(tmp_path)) == 1
    assert len({datasets.fingerprint for datasets in got}) == 1


def test_a_damaged_archive_is_refused(archive, tmp_path):
    with open(archive, "rb") as whole:
        half = whole.read(10**5)
    for content in (half, b"noise" * 999):
        (tmp_path / "aclImdb_v1.tar.gz").write_bytes(content)
        with pytest.raises(UserError, match=r"aclImdb_v1\.tar\.gz is damaged \(.+\): delete it and download it again"):
            load_dataset_into_to_dataframe(tmp_path)


FEW = """
import os, runpy, sys

sys.modules["fabric_ladder"] = None
import local_dataset_utilities as module

os.mkdir("empty")
os.chdir("empty")
try:
    module.download_dataset()
except ValueError as error:
    print(type(error).__module__, error)
os.chdir("..")
module.IMDB_REVIEWS = 240
sys.argv = ["blog_script.py", "tokenizer"]
runpy.run_path("blog_script.py", run_name="__main__")
"""
OFFLINE = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
OFFLINE |= {"no_proxy": "", "NO_PROXY": ""}
BATCH = ["attention_mask (12, 64) torch.int64", "input_ids (12, 64) torch.int64", "label (12,) torch.int64"]


@pytest.mark.slow
def test_the_blogs_script_runs_with_the_module_alone(tmp_path):
    """`fabric_ladder` cannot be imported. The script uses 240 reviews. A first download fails with a one-line error."""
    for path in (ROOT / "local_dataset_utilities.py", ROOT / "tests" / "support" / "blog_script.py"):
        shutil.copy(path, tmp_path)
    texts = hf.Dataset.from_dict({"text": synthetic_reviews(50, 1)[0]})
    train_tokenizer(texts, 400).save_pretrained(tmp_path / "tokenizer")
    environment = {"PYTHONPATH": "", "HF_HOME": str(tmp_path / "hub"), "FABRIC_LADDER_DATA": "", **OFFLINE}
    (tmp_path / "few.py").write_text(FEW)
    for number in range(240):
        folder = f"{('test', 'train')[number % 2]}/{('neg', 'pos')[number // 2 % 2]}"
        path = tmp_path / "aclImdb" / folder / f"{number}_5.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Review {number}. " + "A long film, I would say. " * 20, encoding="utf-8")
    process = run_script(tmp_path / "few.py", cwd=tmp_path, fresh=True, **environment)
    refusal, *printed = finished(process).splitlines()
    assert re.match(r"local_dataset_utilities IMDb is not in \S*/empty/data and cannot be downloaded", refusal)
    assert "(URLError): save https://ai.stanford.edu/" in refusal
    assert not list((tmp_path / "empty").iterdir())
    assert printed == ["240 168 24 48 14", *BATCH]
    frame = pd.concat(pd.read_csv(tmp_path / f"{name}.csv") for name in ("train", "val", "test"))
    assert sorted(frame["text"]) == sorted(path.read_text() for path in (tmp_path / "aclImdb").rglob("*.txt"))
