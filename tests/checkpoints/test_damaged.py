"""Edited records and checkpoints are detected. A resumed run may change some settings and must not change others."""

import dataclasses
import json

import pytest
from support.helpers import settings_for

from fabric_ladder import UserError
from fabric_ladder.checkpoints import store
from fabric_ladder.checkpoints.resume import PROGRESS, find_checkpoint


def checkpoint(tmp_path, record, progress):
    """Write a run with a checkpoint that has a correct manifest."""
    home = tmp_path / "runs" / "test" / "1"
    part = store.unfinished_folder(home / "checkpoints", 1, "")
    store.make_empty(part)
    (part / PROGRESS).write_text(progress)
    store.finish(part, None)
    (home / "run.json").write_text(record)
    return home


def stopped(tmp_path, **values):
    """Write a stopped run with these settings."""
    settings = dataclasses.asdict(settings_for(tmp_path, **values))
    progress = {"settings": settings, "fingerprint": "x", "run": {"record": {}}}
    return checkpoint(tmp_path, json.dumps({"status": "stopped", "settings": settings}), json.dumps(progress))


@pytest.mark.parametrize("record", ["null", "x"])
def test_a_run_with_a_wrong_record_is_not_resumed(tmp_path, record):
    checkpoint(tmp_path, record, "{}")
    found = find_checkpoint(settings_for(tmp_path, resume="auto"), "x")
    assert found.folder is None
    assert "no run to resume" in found.notes[0]


@pytest.mark.parametrize("progress", ["{}", "[" * 100_000, '{"settings": 5}'])
def test_a_wrong_progress_file_is_refused(tmp_path, progress):
    checkpoint(tmp_path, '{"status": "stopped", "settings": {}}', progress)
    with pytest.raises(UserError, match=r"^--resume: cannot use \S+step-000000001 \(.*\)$"):
        find_checkpoint(settings_for(tmp_path, resume="auto"), "x")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            {"packing": True, "micro_batch_size": 8, "loss_chunk": 256},
            {"packing": True, "micro_batch_size": 4, "loss_chunk": 128},
        ),
        ({"activation_checkpointing": False}, {"activation_checkpointing": True}),
        ({}, {"micro_batch_size": 4, "num_workers": 1, "log_every": 8, "threads": 2, "save_every": 5, "devices": 2}),
    ],
)
def test_settings_that_change_memory_but_no_gradient_may_change(tmp_path, before, after):
    """The advice after an out-of-memory error prints commands that change these settings and add `--resume auto`."""
    stopped(tmp_path, **before)
    found = find_checkpoint(settings_for(tmp_path, resume="auto", **after), "x")
    assert found.folder is not None


@pytest.mark.parametrize(
    ("after", "difference"),
    [
        ({"learning_rate": 0.5}, "--learning_rate 0.1, not 0.5"),
        ({"train_samples": 61}, "--train_samples null, not 61"),
        ({"compile": True}, "--compile false, not true"),
        ({"name": "4_mixed_precision"}, "src/test.py, not src/4_mixed_precision.py"),
    ],
)
def test_settings_that_alter_the_run_are_refused(tmp_path, after, difference):
    folder = stopped(tmp_path, learning_rate=0.1)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    values = {"learning_rate": 0.1} | after
    with pytest.raises(UserError, match=f"was made with {difference}: use its values, or leave out --resume"):
        find_checkpoint(settings_for(tmp_path, resume=str(folder / "checkpoints"), **values), "x")
    with pytest.raises(UserError, match="was trained on other data: leave out --resume"):
        find_checkpoint(settings_for(tmp_path, resume="auto", learning_rate=0.1), "y")
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*") if path.name != ".lock"} == before
