"""Records and checkpoints in which somebody wrote: one line, or none where an older run is meant."""

import json

import pytest
from support.helpers import settings_for

from fabric_ladder import UserError
from fabric_ladder.checkpoints import store
from fabric_ladder.checkpoints.resume import PROGRESS, find_checkpoint

WHOLE = {"position": {}, "settings": {}, "fingerprint": "x", "ranks": 1, "precision": {}, "run": {}}


def checkpoint(tmp_path, record, progress):
    """Write a run with a checkpoint whose manifest is right, as whoever changes the file on purpose would."""
    home = tmp_path / "runs" / "test" / "1"
    part = store.unfinished_folder(home / "checkpoints", "000000001")
    store.make_empty(part)
    (part / PROGRESS).write_text(progress)
    store.finish(part, None)
    (home / "run.json").write_text(record)
    return home


@pytest.mark.parametrize("record", ["[]", "null", "{}", '{"status": "finished"}', '{"status": 1, "settings": 1}', "x"])
def test_a_run_whose_record_is_none_is_not_gone_on_with(tmp_path, record):
    checkpoint(tmp_path, record, json.dumps(WHOLE))
    found = find_checkpoint(settings_for(tmp_path, resume="auto"), "x", 1)
    assert found.folder is None
    assert "there is no run to go on with" in found.notes[0]


@pytest.mark.parametrize(
    "progress", ["{}", "[]", "null", "5", "", "[" * 100_000, *(json.dumps(WHOLE | {part: 5.5}) for part in WHOLE)]
)
def test_a_progress_that_is_none_is_refused(tmp_path, progress):
    home = checkpoint(tmp_path, '{"status": "stopped", "settings": {}}', progress)
    for resume in ("auto", str(home)):
        with pytest.raises(UserError, match=r"progress\.json") as caught:
            find_checkpoint(settings_for(tmp_path, resume=resume), "x", 1)
        assert "\n" not in str(caught.value)
