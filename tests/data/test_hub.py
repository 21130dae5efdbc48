"""Configs and data sets from folders and the Hub."""

import json
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import datasets as hf
import pytest
from support.data_files import BLOOM, SPLITS, cached, load_in, texts_of
from transformers import AutoConfig

from fabric_ladder.data import hub
from fabric_ladder.data.hub import hash_files, load_config, reachable
from fabric_ladder.errors import UserError


@pytest.fixture
def online(monkeypatch):
    """Simulate a Hub, because the tests do not use the network."""
    monkeypatch.setattr(hub, "_hub_answers", lambda: True)


def test_a_config_is_read_once_and_callers_get_copies(tmp_path, monkeypatch):
    reads = []
    read = AutoConfig.from_pretrained
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda name, **how: reads.append(name) or read(name, **how))
    path = tmp_path / "own.json"
    config = json.loads(Path(BLOOM).read_text(encoding="utf-8"))
    path.write_text(json.dumps(config))
    first = load_config(str(path))
    first.vocab_size = 7
    assert load_config(str(path)).vocab_size == config["vocab_size"]
    assert reads == [str(path)]
    path.write_text(json.dumps(config | {"vocab_size": 99}))
    assert load_config(str(path)).vocab_size == 99


def test_a_name_that_cannot_be_loaded_is_refused_in_one_line_with_the_cause(online):
    line = r"cannot load the model 'org/name': .*check the spelling and the network, .*\(not found\)$"
    with pytest.raises(UserError, match=line) as caught, reachable("org/name", "model"):
        raise OSError("not\nfound")
    assert isinstance(caught.value.__cause__, OSError)


@pytest.fixture
def glue(tmp_path, monkeypatch, online, commits):
    """Load a fake Hub data set with two configurations, whose test split does not have labels."""
    features = hf.Features({"sentence": hf.Value("string"), "label": hf.ClassLabel(names=["good", "bad"])})

    def read(name, configuration=None, revision=None, **options):
        assert name == "org/glue"
        assert revision in commits
        if configuration is None:
            raise ValueError("Config name is missing.\nPlease pick one among the available configs: ['cola', 'sst2']")
        assert configuration == "sst2"
        splits = {"train": 20, "validation": 6, "test": 8, "mismatched": 2}

        def rows(split, size):
            labels = [-1 if split == "test" else number % 2 for number in range(size)]
            return hf.Dataset.from_dict({"sentence": [f"{split} {n}" for n in range(size)], "label": labels}, features)

        return {split: rows(split, size) for split, size in splits.items()}

    monkeypatch.setattr(hf, "load_dataset", read)
    return partial(load_in, tmp_path, model=BLOOM, text_column="sentence")


@pytest.fixture
def commits(monkeypatch):
    """Return the newest commit of a data set on the Hub, in a list."""
    known = ["a" * 40]
    monkeypatch.setattr(hub.HfApi, "dataset_info", lambda *_, **options: SimpleNamespace(sha=known[0]))
    return known


def test_a_configuration_of_the_hub_and_a_test_without_labels(glue):
    got = glue("org/glue:sst2")
    assert got.class_names == ["good", "bad"]
    assert [len(got.splits[split]) for split in SPLITS] == [16, 6, 4]
    assert {text.split()[0] for text in texts_of(got, "test")} == {"train"}
    assert got.notices == [
        "org/glue:sst2: the splits mismatched are not used, only train, validation, test",
        "org/glue:sst2 (test) has no labels and is left out",
    ]
    with pytest.raises(UserError, match=r"org/glue:CONFIGURATION chooses a configuration \(.*\['cola', 'sst2'\]\)$"):
        glue("org/glue")


def test_a_data_set_is_cached_by_its_commit(glue, commits, tmp_path, monkeypatch):
    first = glue("org/glue:sst2")
    assert first.commit == "a" * 40
    assert len(cached(tmp_path)) == 1
    commits[0] = "b" * 40  # a commit is pushed to the main branch
    assert glue("org/glue:sst2").commit == "b" * 40
    assert len(cached(tmp_path)) == 2
    monkeypatch.setattr(hub, "_hub_answers", lambda: False)
    assert glue("org/glue:sst2").commit == "b" * 40, "without a network, the last commit in the cache is used"
    with pytest.raises(UserError, match="the Hub cannot be reached"):
        glue("org/glue:sst2", max_length=9)


def test_files_of_a_model_have_a_hash_even_if_they_are_damaged(tmp_path):
    """Random weights do not need them; the file is a pointer of Git LFS."""
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1")
    assert len(hash_files(str(tmp_path))) == 20
    assert hash_files("nobody/nothing") is None
