"""Errors on rank 0, which all ranks must raise together."""

import pytest
from support.helpers import settings_for

from fabric_ladder import UserError
from fabric_ladder.runs.record import RunRecord


def test_a_file_that_cannot_be_read_is_not_reported_as_a_folder_that_cannot_be_written(tmp_path, fabric):
    record = RunRecord(fabric, settings_for(tmp_path))
    with pytest.raises(UserError) as caught:
        record.on_rank_zero((tmp_path / "missing.json").read_text)
    assert str(caught.value) == f"cannot use {tmp_path / 'missing.json'} (No such file or directory)"
