"""A full disk: the run is refused before training if the sizes show it, else one clear line is printed later."""

import contextlib
import re
import shutil
import subprocess

import pytest
import torch
from support.export import tiny, words_tokenizer
from support.helpers import file_system, settings_for, token_datasets
from support.resuming import checkpoints, run_rung_2
from torch import nn

from fabric_ladder import UserError, build_dataloaders
from fabric_ladder.checkpoints import store
from fabric_ladder.checkpoints.disk import check_disk_space
from fabric_ladder.checkpoints.export import find_result, load_result
from fabric_ladder.checkpoints.save import save


@pytest.fixture
def small_disk(tmp_path):
    """Mount a file system of 1.5 MB."""
    with file_system(tmp_path / "disk", 1500) as folder:
        yield folder


def fill(disk):
    with contextlib.suppress(OSError), open(disk / "filler", "wb", buffering=0) as filler:
        while filler.write(b"x" * 2**16):
            pass


@pytest.fixture
def save_into(tmp_path, fabric):
    """Save a tiny model that Fabric has set up; return the folder of the result and the weights."""

    def save_into(folder, layout):
        datasets = token_datasets()
        datasets.tokenizer = words_tokenizer()
        data = build_dataloaders(fabric, datasets, settings_for(tmp_path))[0].dataset
        model = fabric.setup(tiny("llama"))
        optimizer = fabric.setup_optimizers(torch.optim.Adam(model.parameters()))
        return save(fabric, layout, folder, model, optimizer, data), model.module.state_dict()

    return save_into


def test_a_full_disk_prints_one_line_and_leaves_nothing_unfinished(small_disk, save_into):
    fill(small_disk)
    with pytest.raises(UserError, match=f"^--save sharded: cannot write the model into {small_disk} \\(.+\\): free"):
        save_into(small_disk, "sharded")
    assert [path.name for path in small_disk.iterdir()] == ["filler"]


def test_a_result_replaces_an_older_one_completely(tmp_path, save_into):
    folder = tmp_path / "run"
    for name in ("model", "checkpoint", ".unfinished-save"):
        (folder / name).mkdir(parents=True)
        (folder / name / "old").write_text("left by a run that died here")
    written, weights = save_into(folder, "consolidated")
    assert written.parent == folder
    assert not (written / "old").exists()
    assert not (folder / ".unfinished-save").exists()
    read = load_result(find_result(written)).state_dict()
    assert all(torch.equal(read[name], tensor) for name, tensor in weights.items())


def test_results_that_do_not_fit_are_refused_before_training(tmp_path):
    with torch.device("meta"):
        model = nn.Linear(10**7, 10**6, bias=False)  # 40 TB
    large = {"save": "consolidated"}, {"save": "sharded"}, {"save_every": 1}
    for values, size in zip(large, ("40000.00", "120000.00", "240000.00"), strict=True):
        with pytest.raises(UserError, match=f"needs {size} GB in --runs_dir .*, and .* [GM]B are free: delete files"):
            check_disk_space(settings_for(tmp_path, **values), model, steps=9)
        check_disk_space(settings_for(tmp_path, **values), nn.Linear(2, 2), steps=9)
    check_disk_space(settings_for(tmp_path), model, steps=9)


KEEP = {"save_every": 3, "keep": 4}


@pytest.mark.parametrize(
    ("values", "existing", "count"),
    [
        ({"save_every": 1}, 0, 2),  # the newest stays until the next one is complete
        (KEEP, 0, 5),
        (KEEP | {"epochs": 2}, 0, 6),  # and the best one
        (KEEP | {"epochs": 2}, 4, 2),  # the resumed run's own are on the disk
        (KEEP | {"keep": 99}, 0, 7),  # the run writes no more
        ({"best_weights": True}, 0, 2),
    ],
)
def test_the_disk_needs_room_for_all_checkpoints_that_are_kept(tmp_path, values, existing, count):
    with torch.device("meta"):
        model = nn.Linear(10**7, 10**6, bias=False)  # 120 TB with Adam's state
    with pytest.raises(UserError, match=f"needs {count * 120_000}.00 GB in --runs_dir"):
        check_disk_space(settings_for(tmp_path, **values), model, 15, existing)


def test_a_resumed_run_needs_no_room_for_the_checkpoints_that_it_has(tmp_path):
    """The run keeps up to 11 checkpoints. It has 3, and there is space for 8.5 more."""
    with file_system(tmp_path / "disk", 50_000) as disk:
        options = ["--runs_dir", disk / "runs", "--save_every", 2, "--keep", 9]
        run_rung_2(tmp_path, *options, at="Batch 0006/")
        made = checkpoints(disk / "runs" / "2_grad_accum" / "1")
        assert len(made) == 3
        size = max(path.stat().st_size for path in made[-1].rglob("*"))
        (disk / "filler").write_bytes(bytes(shutil.disk_usage(disk).free - 17 * size // 2))
        assert run_rung_2(tmp_path, *options, "--resume", "auto", at="Batch 0008/")[0] == 143
        with pytest.raises(UserError, match=r"--save_every 2 --keep 9 needs .* MB in --runs_dir .* MB are free"):
            run_rung_2(tmp_path, *options)


def test_a_full_disk_costs_no_checkpoint_and_no_run(tmp_path):
    """Other files fill the disk. Then the run continues without new checkpoints, and the old ones stay complete."""
    with file_system(tmp_path / "disk", 20_000) as disk:
        more = ["--runs_dir", disk / "runs", "--save_every", 1, "--keep", 99]
        status, text = run_rung_2(tmp_path, *more, at="Batch 0003/", action=lambda: fill(disk))
        assert status == 0
        problems = re.findall(r"No checkpoint after step (\d+): (.*); the previous one is kept", text)
        assert problems
        assert all("No space left" in why or "is the disk full?" in why for _, why in problems), problems
        assert "Test accuracy" in text
        folder = disk / "runs" / "2_grad_accum" / "1"
        assert not list((folder / "checkpoints").glob(".*"))
        assert len(checkpoints(folder)) == 2
        for checkpoint in checkpoints(folder):
            store.check(checkpoint)


def test_a_model_that_did_not_fit_is_saved_by_resuming_once_there_is_space(tmp_path):
    with file_system(tmp_path / "disk", 20_000) as disk:
        options = ["--runs_dir", disk / "runs", "--save", "consolidated", "--save_every", 100]
        with pytest.raises(UserError, match=r"No space left.*: free space and add --resume auto: the last check"):
            run_rung_2(tmp_path, *options, at="0002/0002 | Batch 0003/", action=lambda: fill(disk))
        (disk / "filler").unlink()
        status, text = run_rung_2(tmp_path, *options, "--resume", "auto")
        assert status == 0
        assert "Resumed from " in text
        saved = disk / "runs" / "2_grad_accum" / "1" / "model" / "model.safetensors"
        assert f"Saved {saved.parent}" in text
        assert saved.stat().st_size > 10**5


def test_a_disk_without_space_for_a_first_line_is_refused(tmp_path, small_disk):
    fill(small_disk)
    with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
        run_rung_2(tmp_path, "--runs_dir", small_disk / "runs")


def test_a_read_only_disk_is_refused_before_training(tmp_path, small_disk):
    run_rung_2(tmp_path, "--runs_dir", small_disk / "runs", at="Batch 0003/")
    subprocess.run(["mount", "-o", "remount,ro", small_disk], check=True)
    for more in ([], ["--resume", "auto"]):
        with pytest.raises(UserError, match=r"^cannot write --runs_dir .* \(Read-only file system\): choose another"):
            run_rung_2(tmp_path, "--runs_dir", small_disk / "runs", *more)
