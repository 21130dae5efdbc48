"""The cache is made once, by one process. It is made again if anything that affects the tokens changes."""

import json
import os
import re
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pandas as pd
import pytest
from filelock import FileLock
from support.data_files import BLOOM, SPLITS, assert_mapped, cached, files_of, load_in, table, write_table
from support.helpers import ROOT, finished, run_script

from fabric_ladder.errors import UserError

FILL = ROOT / "tests" / "support" / "fill_cache.py"


@pytest.fixture
def load(tmp_path):
    """Load a file or folder with a cache of the test's own."""
    return partial(load_in, tmp_path, model=BLOOM)


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


def test_what_a_killed_process_left_is_removed_but_not_what_one_works_on(tmp_path, load):
    home = tmp_path / "cache" / "tokenised"
    for name in ("unfinished-dead-x1", "unfinished-busy-x2"):
        (home / name).mkdir(parents=True)
        (home / name / "mapped.arrow").write_text("half")
    with FileLock(home / "busy.lock"):
        load(write_table(table(), tmp_path / "texts.csv"))
    assert [path.name for path in home.glob("unfinished-*")] == ["unfinished-busy-x2"]


def test_a_changed_file_is_read_again(tmp_path, load):
    path = write_table(table(), tmp_path / "texts.csv")
    first = load(path)
    changed = table()
    changed.loc[20, "text"] = changed.loc[20, "text"].replace("bad", "dab").replace("good", "doog")
    write_table(changed, path)
    assert load(path).fingerprint != first.fingerprint


@pytest.mark.parametrize("values", [{"max_length": 8}, {"split_seed": 2}, {"train_samples": 30}])
def test_other_settings_get_other_tokens(tmp_path, load, values):
    path = write_table(table(), tmp_path / "texts.csv")
    first, other = load(path), load(path, **values)
    assert first.fingerprint != other.fingerprint
    assert load(path).fingerprint == first.fingerprint


def test_the_fingerprint_is_of_the_content_not_of_the_path(tmp_path, load):
    one = load(write_table(table(), tmp_path / "here" / "texts.csv"))
    other = load(write_table(table(), tmp_path / "there" / "other.csv"), cache_dir=str(tmp_path / "cache2"))
    assert one.fingerprint == other.fingerprint
    changes = {"text": "another text", "label": 1}
    for number, (column, value) in enumerate(changes.items()):
        changed = table()
        changed.loc[30, column] = value
        assert load(write_table(changed, tmp_path / f"{number}.csv")).fingerprint != one.fingerprint, column


def test_a_failed_call_leaves_nothing_and_does_not_stand_in_the_way(tmp_path, load):
    path = tmp_path / "texts.csv"
    write_table(pd.DataFrame({"text": ["a", "b"], "stars": [0, 1]}), path)
    with pytest.raises(UserError, match="no column 'label', only text, stars"):
        load(path)
    assert [path for path in (tmp_path / "cache").rglob("*") if path.suffix != ".lock"] == [
        tmp_path / "cache" / "tokenised"
    ]
    write_table(table(), path)
    assert len(load(path).splits["train"]) == 42


def test_two_processes_may_fill_an_empty_cache_at_once(tmp_path):
    write_table(table(2000), tmp_path / "texts.csv")
    names = ("one", "other")
    with ThreadPoolExecutor() as pool:
        both = [pool.submit(run_script, FILL, name, BLOOM, cwd=tmp_path) for name in names]
        while not all((tmp_path / name).exists() for name in names):
            assert not any(process.done() for process in both)
            time.sleep(0.01)
        (tmp_path / "go").touch()
        printed = [finished(process.result()) for process in both]
    assert printed[0] == printed[1]
    assert re.fullmatch(r"[0-9a-f]{20} 1400\n", printed[0]), printed
    (folder,) = cached(tmp_path)
    assert not list((tmp_path / "cache").rglob("unfinished-*"))
    assert json.loads((folder / "facts.json").read_text())["class_names"] == ["0", "1"]
    assert len(list((tmp_path / "cache").rglob("facts.json"))) == 1, "only one process did the work"
