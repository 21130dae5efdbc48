"""The cache is made once, by one process. It is made again if anything that affects the tokens changes."""

import json
import multiprocessing
import os
import re

import pandas as pd
import pytest
from support.data_files import BLOOM, SPLITS, assert_mapped, cached, files_of, load_in, table, write_table
from support.helpers import file_system
from support.resuming import start_fork

from fabric_ladder.errors import UserError


def test_a_second_call_only_maps_the_first_ones_files(tmp_path, load):
    path = write_table(table(), tmp_path / "texts.csv")
    first = load(path)
    before = files_of(tmp_path / "cache")
    assert not [name for name in before if "unfinished" in name.name]
    stamp = path.stat()
    path.write_bytes(b"?" * stamp.st_size)  # this file can no longer be read as a table
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    second = load(path)
    assert files_of(tmp_path / "cache") == before
    assert second.fingerprint == first.fingerprint
    for split in SPLITS:
        assert second.splits[split][:] == first.splits[split][:]
    assert_mapped(second, tmp_path)
    probe = ["a text", "another one"]
    assert second.tokenizer(probe)["input_ids"] == first.tokenizer(probe)["input_ids"]


def test_files_and_settings_that_change_the_tokens_make_a_new_cache(tmp_path, load):
    path = write_table(table(), tmp_path / "texts.csv")
    first = load(path)
    changes = [{"max_length": 8}, {"split_seed": 2}, {"train_samples": 30}]
    assert len({first.fingerprint, *(load(path, **values).fingerprint for values in changes)}) == 4
    for column, value in (("text", "another text"), ("label", 1)):
        changed = table()
        changed.loc[30, column] = value
        assert load(write_table(changed, path)).fingerprint != first.fingerprint, column
    write_table(table(), path)
    assert load(path, cache_dir=str(tmp_path / "other")).fingerprint == first.fingerprint
    elsewhere = write_table(table(), tmp_path / "there" / "other.csv")
    assert load(elsewhere).fingerprint == first.fingerprint, "the fingerprint depends on the content alone"


def test_a_failed_or_killed_call_leaves_nothing_for_the_next(tmp_path, load):
    path = tmp_path / "texts.csv"
    write_table(pd.DataFrame({"text": ["a", "b"], "stars": [0, 1]}), path)
    with pytest.raises(UserError, match="no column 'label', only text, stars"):
        load(path)
    home = tmp_path / "cache" / "tokenised"
    (lock,) = home.iterdir()
    (home / f"unfinished-{lock.stem}" / "tokens").mkdir(parents=True)  # a killed process
    with pytest.raises(UserError, match="no column 'label', only text, stars"):
        load(path)
    assert list(home.iterdir()) == [lock]
    write_table(table(), path)
    assert len(load(path).splits["train"]) == 42


def test_a_full_disk_is_named_and_nothing_is_left(tmp_path):
    """Each size stops the work at another file: tables, the tokenizer, tokens, or the file that closes them."""
    values = {"dataset": write_table(table(), tmp_path / "texts.csv"), "model": BLOOM}
    for size in (4, 28, 40):
        with file_system(tmp_path / f"disk of {size}", size) as disk:
            home = disk / "cache" / "tokenised"
            line = rf"^cannot write {home} \(.*No space left .*\): set FABRIC_LADDER_CACHE to another folder$"
            with pytest.raises(UserError, match=line):
                load_in(tmp_path, **values, cache_dir=str(home.parent))
            assert not [path for path in home.iterdir() if path.suffix != ".lock"]
    with file_system(tmp_path / "disk", 2000) as disk:
        assert load_in(tmp_path, **values, cache_dir=str(disk / "cache")).fingerprint


def fill(folder, both, found):
    both.wait()
    got = load_in(folder, "texts.csv", model=BLOOM)
    found.put((got.fingerprint, len(got.splits["train"])))


def test_two_processes_can_fill_an_empty_cache_together(tmp_path):
    write_table(table(600), tmp_path / "texts.csv")
    both, found = multiprocessing.Barrier(2, timeout=60), multiprocessing.SimpleQueue()
    forks = [start_fork(fill, tmp_path, both, found) for _ in range(2)]
    for fork in forks:
        fork.join()
    assert [fork.exitcode for fork in forks] == [0, 0]
    fingerprint, size = found.get()
    assert found.get() == (fingerprint, size)
    assert re.fullmatch("[0-9a-f]{20}", fingerprint)
    assert size == 420
    (folder,) = cached(tmp_path)
    assert not list((tmp_path / "cache").rglob("unfinished-*"))
    assert json.loads((folder / "facts.json").read_text())["class_names"] == ["0", "1"]
    assert len(list((tmp_path / "cache").rglob("facts.json"))) == 1, "only one process did the work"
