"""A full disk: refused before the training where it can be known, and at its end the result is kept elsewhere."""

import tempfile

import pytest
import torch
from support.export import tiny, words_tokenizer
from support.helpers import file_system, settings_for, token_datasets
from torch import nn

from fabric_ladder import UserError, build_dataloaders
from fabric_ladder.checkpoints.export import find_result, load_result
from fabric_ladder.checkpoints.room import check_room
from fabric_ladder.checkpoints.save import save


@pytest.fixture
def full_disk(tmp_path):
    """A run's folder on a file system of 1 MB that is full."""
    with file_system(tmp_path / "disk", 1024) as place:
        run = place / "2_grad_accum" / "1"
        run.mkdir(parents=True)
        (run / "filler").write_bytes(b"x" * 1_020_000)
        yield run


@pytest.fixture
def save_into(tmp_path, fabric):
    """Save a tiny model that Fabric has set up into a folder; return where it is, and its weights."""

    def save_into(folder, layout):
        datasets = token_datasets()
        datasets.tokenizer = words_tokenizer()
        data = build_dataloaders(fabric, datasets, settings_for(tmp_path))[0].dataset
        model = fabric.setup(tiny("llama"))
        optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters()))
        return save(fabric, layout, folder, model, optimizer, data), model.module.state_dict()

    return save_into


@pytest.mark.parametrize("layout", ["consolidated", "sharded"])
def test_on_a_full_disk_the_result_is_saved_on_another(monkeypatch, tmp_path, full_disk, save_into, layout, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "tempdir", str(full_disk))  # no other place than the current folder has room
    monkeypatch.setenv("HOME", str(full_disk))
    folder, weights = save_into(full_disk, layout)
    assert folder.parent.parent == tmp_path
    assert folder.parent.name.startswith("2_grad_accum-1-")
    told = capsys.readouterr().err
    assert f"Not saved in {full_disk} (" in told
    assert f"trying {folder.parent}" in told
    read = load_result(find_result(folder.parent)).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())
    assert [path.name for path in full_disk.iterdir()] == ["filler"]


@pytest.mark.parametrize("layout", ["consolidated", "sharded"])
def test_where_there_is_no_other_disk_one_line_says_so(monkeypatch, full_disk, save_into, layout):
    monkeypatch.chdir(full_disk)
    monkeypatch.setattr(tempfile, "tempdir", str(full_disk))
    monkeypatch.setenv("HOME", str(full_disk))
    with pytest.raises(UserError, match=f"^--save {layout}: the model could not be written into {full_disk} \\(.+\\)$"):
        save_into(full_disk, layout)
    assert [path.name for path in full_disk.iterdir()] == ["filler"]


def test_another_disk_that_is_full_too_keeps_no_empty_folder(monkeypatch, tmp_path, full_disk, save_into):
    with file_system(tmp_path / "other", 512) as other:
        (other / "filler").write_bytes(b"x" * 500_000)
        monkeypatch.chdir(other)
        monkeypatch.setattr(tempfile, "tempdir", str(full_disk))
        monkeypatch.setenv("HOME", str(full_disk))
        with pytest.raises(UserError, match=f"{full_disk} \\(.+\\).*{other}"):
            save_into(full_disk, "sharded")
        monkeypatch.chdir(tmp_path)
        assert [path.name for path in other.iterdir()] == ["filler"]


@pytest.mark.parametrize("layout", ["consolidated", "sharded"])
def test_a_result_takes_the_place_of_an_older_one_as_a_whole(tmp_path, save_into, layout):
    folder = tmp_path / "run"
    for name in ("model", "checkpoint", ".unfinished-save"):
        (folder / name).mkdir(parents=True)
        (folder / name / "old").write_text("of a run that died here")
    written, _ = save_into(folder, layout)
    assert written.parent == folder
    assert not (written / "old").exists()
    assert not (folder / ".unfinished-save").exists()


def test_what_could_not_be_saved_is_not_trained(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(10**7, 10**6, bias=False)  # 40 TB
    large = {"save": "consolidated"}, {"save": "sharded"}, {"save_every": 1}
    for values, size in zip(large, ("40000.00", "120000.00", "240000.00"), strict=True):
        with pytest.raises(UserError, match=f"needs {size} GB in --runs_dir .*, where .* GB are free: make room"):
            check_room(settings_for(tmp_path, **values), model)
        check_room(settings_for(tmp_path, **values), nn.Linear(2, 2))
    check_room(settings_for(tmp_path), model)
