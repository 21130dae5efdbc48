"""Fixtures for the data tests."""

import os
import re
import tarfile
from collections import Counter
from functools import partial

import pytest
from support.data_files import BLOOM, CHATML, LLAMA, load_in, rows, unigram, write_rows
from transformers import AutoTokenizer

from fabric_ladder.data.instructions import prompt_text


@pytest.fixture
def load(request, tmp_path):
    """Load data with the test's own cache. A module's `LOAD` is its loader and options; otherwise it loads texts."""
    loader, options = getattr(request.module, "LOAD", (load_in, {"model": BLOOM}))
    return partial(loader, tmp_path, **options)


@pytest.fixture(scope="session")
def tokenizers(minilm, tmp_path_factory):
    """Save three tokenizers: a trained byte-level BPE, MiniLM's WordPiece and a Unigram that adds <s> and </s>."""
    home = tmp_path_factory.mktemp("tokenizers")
    path = write_rows(rows(), home / "rows.jsonl")
    made = {
        "trained": load_in(home, path, task="instruction-tuning", model=LLAMA).tokenizer,
        "wordpiece": AutoTokenizer.from_pretrained(minilm),
        "unigram": unigram([text for row in rows() for text in (prompt_text(row["instruction"]), row["output"])]),
    }
    for name, tokenizer in made.items():
        tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
        tokenizer.chat_template = CHATML
        tokenizer.save_pretrained(home / name)
    return {name: str(home / name) for name in made}


@pytest.fixture(scope="session")
def unpacked(archive, tmp_path_factory):
    """Unpack into `aclImdb` 60 real reviews of each of the four kinds, and some files that must be ignored."""
    home = tmp_path_factory.mktemp("unpacked")
    left = Counter()
    with tarfile.open(archive, "r|gz") as tar:
        for entry in tar:
            folder = os.path.dirname(entry.name)
            if re.fullmatch(r"aclImdb/(train|test)/(pos|neg)", folder) and entry.isfile() and left[folder] < 60:
                left[folder] += 1
                path = home / entry.name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(tar.extractfile(entry).read())
                if sum(left.values()) == 240:
                    break
    assert sum(left.values()) == 240
    (home / "aclImdb/README").write_text("read me", encoding="utf-8")
    (home / "aclImdb/train/unsup").mkdir()
    (home / "aclImdb/train/unsup/0_0.txt").write_text("without a label", encoding="utf-8")
    return home / "aclImdb"
