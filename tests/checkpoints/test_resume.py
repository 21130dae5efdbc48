"""A run resumes after it was stopped or killed or its checkpoint was damaged, and ends like an uninterrupted run."""

import contextlib
import json
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision import MixedPrecision
from support.devices import run_ranks
from support.helpers import SRC, finished
from support.resuming import (
    SIZES,
    Evil,
    assert_same,
    checkpoints,
    copy_until,
    lines_of,
    run_here,
    run_rung_2,
    start_fork,
    tensors_of,
    terminate,
)
from support.training import run_training

from fabric_ladder import UserError
from fabric_ladder.checkpoints import checkpointer, store
from fabric_ladder.checkpoints.resume import PROGRESS
from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.training import gradients, loop

SLOW = pytest.mark.slow
HOME = Path("runs", "2_grad_accum", "1")
EVERY_100 = ["--save_every", 100]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the folder of a run that nothing has stopped."""
    cwd = tmp_path_factory.mktemp("whole")
    assert run_rung_2(cwd, *EVERY_100)[0] == 0
    return cwd / HOME


def test_a_run_stopped_at_any_place_resumes_bit_by_bit(tmp_path, undisturbed, monkeypatch):
    """SIGTERM arrives after a printed line or with a micro-batch, of which a step has two."""
    calls, place = [], None

    def interrupted(run_model, module):
        def run(fabric, model, micro_batch, confusion=None):
            calls.append((module, confusion is not None))  # only the test has a confusion matrix
            if place == (*calls[-1], calls.count(calls[-1])):
                terminate()
            return run_model(fabric, model, micro_batch, confusion)

        return run

    for module in (gradients, loop):
        monkeypatch.setattr(module, "run_model", interrupted(module.run_model, module))
    for place, stopped in (
        ("Batch 0003/", "in epoch 1 after batch 3;"),
        ((gradients, False, 3), "in epoch 1 after batch 4;"),  # the first micro-batch of the second step
        ("Batch 0008/0008", "in epoch 1 after batch 8;"),
        ((loop, False, 2), "in epoch 1 after batch 8;"),  # in the validation
        ("0002/0002 | Batch 0006/", "in epoch 2 after batch 6;"),
        ((loop, True, 2), "after epoch 2;"),  # in the test
    ):
        calls.clear()
        printed = place if isinstance(place, str) else None
        status, text = run_rung_2(tmp_path, *EVERY_100, "--resume", "auto", at=printed)
        places = re.findall("^Stopped by SIGTERM (.*) go on with: .* --resume auto$", text, re.M)
        assert (status, places) == (143, [stopped])
    place = None
    status, text = run_rung_2(tmp_path, *EVERY_100, "--resume", "auto")
    assert (status, "Resumed from runs/" in text, "Time elapsed" in text) == (0, True, False), "only the test is left"
    assert_same(tmp_path / HOME, undisturbed)
    best = json.loads((tmp_path / HOME / "run.json").read_text())["best_checkpoint"]
    assert (tmp_path / HOME / best / "manifest.json").exists()


def test_a_checkpoint_of_a_later_epoch_leads_to_the_same_end(tmp_path):
    more = ["--save_every", 3, "--keep", 99, "--micro_batch_size", 4]
    run_here("2_grad_accum", tmp_path, *more)
    names = [path.name for path in checkpoints(tmp_path / HOME)]
    assert names == [f"step-{n:09d}{'-validated' * (n in (8, 16))}" for n in (3, 6, 8, 9, 12, 15, 16)]
    resume_copy(tmp_path / HOME, tmp_path / "again", names[3], [*more, "--num_workers", 2])


def resume_copy(whole, cwd, checkpoint, options):
    """Resume a copy of a finished run from one of its checkpoints; it must end like the run."""
    home = copy_until(checkpoint, whole, cwd)
    status, text = run_here(whole.parent.name, cwd, *options, "--resume", "auto")
    assert (status, f"Resumed from runs/{whole.parent.name}/1/checkpoints/{checkpoint}\n" in text) == (0, True)
    assert_same(home, whole)


def test_the_scale_of_a_loss_in_float16_is_resumed(tmp_path):
    """The first gradients overflow, so the scaler skips steps and lowers its scale; a CPU has a scaler too."""

    def enlarge(model, _):
        with torch.no_grad():
            model.score.weight.mul_(1e3)

    options = {
        "precision": "16-mixed",
        "save_every": 4,
        "keep": 9,
        "epochs": 3,
        "micro_batch_size": 8,
        "prepare": enlarge,
    }
    run, _ = run_training(tmp_path, plugin=MixedPrecision("16-mixed", "cpu"), **options)
    first, last = checkpoints(run.folder)[1::3]
    scales = [json.loads((each / PROGRESS).read_text())["precision"]["scale"] for each in (first, last)]
    assert 2**16 > scales[0] >= scales[1]
    weights = [tensors_of(each)["model.score.weight"] for each in (first, last)]
    assert not torch.equal(*weights), "later steps are taken"
    home = copy_until(first.name, run.folder, tmp_path / "again")
    run_training(tmp_path / "again", plugin=MixedPrecision("16-mixed", "cpu"), resume="auto", **options)
    assert_same(home, run.folder)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("13_lora", ()),
        ("18_low_bit_optimizer", ("--optimizer", "adam-4bit")),
        ("29_streamed_training", ()),
        # an evaluation has no backward pass, after which FSDP would free the gathered embedding and head
        pytest.param("10_fsdp", ("--devices", 1, "--epochs", 2, "--save_every", 100), marks=SLOW),
        pytest.param("2_grad_accum", ("--train_blocks", "none", "--optimizer", "adafactor"), marks=SLOW),
        pytest.param("11_fsdp_cpu_offload", ("--devices", 1), marks=SLOW),
        pytest.param("15_packing", ("--task", "instruction-tuning", "--max_length", 256), marks=SLOW),
        pytest.param("23_tiled_mlp", ("--mlp_tile", 64), marks=SLOW),
        pytest.param("25_block_by_block", ("--block_steps", 2), marks=SLOW),
        pytest.param("24_streamed_layers", ("--stream_layers", 1, "--stream_from", "files"), marks=SLOW),
        pytest.param("29_streamed_training", ("--stream_layers", 1), marks=SLOW),
        *(pytest.param(name, (), marks=SLOW) for name in (
            "14_qlora", "16_bf16_that_learns", "17_step_in_backward", "18_low_bit_optimizer", "19_optimizer_offload",
            "20_activation_offload", "21_selective_checkpointing", "24_streamed_layers", "26_stateless")),
    ],
)  # fmt: skip
def test_a_run_with_a_state_of_its_own_resumes_bit_by_bit(tmp_path, name, options):
    more = ["--epochs", 1, "--save_every", 5, "--keep", 9, *options]
    try:
        assert run_here(name, tmp_path, *more)[0] == 0
        whole = tmp_path / "runs" / name / "1"
        resume_copy(whole, tmp_path / "again", checkpoints(whole)[0].name, more)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_run_without_save_every_can_be_stopped_and_leaves_no_checkpoint_at_its_end(tmp_path):
    status, text = run_rung_2(tmp_path, at="Batch 0003/")
    assert status == 143
    assert "Stopped by SIGTERM in epoch 1 after batch 3; go on with: " in text
    home = tmp_path / HOME
    assert [path.name for path in checkpoints(home)] == ["step-000000003"]
    assert json.loads((home / "run.json").read_text())["status"] == "stopped"
    assert run_rung_2(tmp_path, "--resume", "auto")[0] == 0
    assert {path.name for path in home.iterdir()} == {"log.txt", "metrics.csv", "run.json"}
    resumed = json.loads((home / "run.json").read_text())["resumed"]
    assert [part["samples"] for part in resumed] == [24]
    status, text = run_rung_2(tmp_path, "--resume", "auto")
    assert status == 0
    assert text.endswith("has finished already; leave out --resume to start a new run\n")
    assert [path.name for path in home.parent.iterdir()] == ["1"]


def test_a_resumed_run_has_the_settings_of_its_newest_start(tmp_path, monkeypatch):
    """The first start's command would run out of memory again where the second start has smaller micro-batches."""
    read_state = checkpointer.read_state
    monkeypatch.setattr(checkpointer, "read_state", lambda *files: (time.sleep(0.3), read_state(*files)))
    for size, place in ((8, "Batch 0003/"), (2, "Batch 0006/"), (4, None)):
        more = ["--micro_batch_size", size, "--resume", "auto"]
        status, text = run_here("2_grad_accum", tmp_path, *more, at=place)
        assert (status, f"--micro_batch_size {size} --resume auto\n" in text) == ((143, True) if place else (0, False))
    record = json.loads((tmp_path / HOME / "run.json").read_text())
    assert record["settings"]["micro_batch_size"] == 4
    assert "--micro_batch_size 8" in record["command"]
    assert ["--micro_batch_size 2" in part["command"] for part in record["resumed"]] == [True, False]
    results = record["results"]
    assert results["elapsed_seconds"] - results["training_seconds"] > 0.6, "reading a checkpoint is no training"


def test_keep_keeps_the_newest_and_the_best(tmp_path):
    """With this learning rate the loss grows, so the first epoch is the best."""
    run_rung_2(tmp_path, "--save_every", 3, "--keep", 2, "--epochs", 3, "--learning_rate", 0.5)
    record = json.loads((tmp_path / HOME / "run.json").read_text())
    losses = [epoch["validation_loss"] for epoch in record["results"]["epochs"]]
    best = f"step-{8 * (1 + losses.index(min(losses))):09d}-validated"
    newest = ["step-000000021", "step-000000024-validated"]
    assert [path.name for path in checkpoints(tmp_path / HOME)] == sorted({best, *newest})
    assert record["best_checkpoint"] == f"checkpoints/{best}"


def test_a_start_without_save_every_leaves_the_checkpoints_that_an_earlier_one_keeps(tmp_path):
    """The stop in between writes a checkpoint of its own, which goes at the end."""
    home = tmp_path / HOME
    run_rung_2(tmp_path, "--save_every", 3, "--keep", 2, at="0002/0002 | Batch 0003/")
    kept = checkpoints(home)
    assert [path.name for path in kept] == ["step-000000008-validated", "step-000000009", "step-000000011"]
    assert run_rung_2(tmp_path, "--resume", "auto", at="0002/0002 | Batch 0006/")[0] == 143
    assert checkpoints(home) == [*kept, kept[0].with_name("step-000000014")]
    status, text = run_rung_2(tmp_path, "--resume", home, "--save", "consolidated")
    assert (status, checkpoints(home)) == (0, kept)
    assert json.loads((home / "run.json").read_text())["best_checkpoint"] == f"checkpoints/{kept[0].name}"
    status, text = run_rung_2(tmp_path, "--resume", kept[1], "--save_every", 3)
    assert f"Resumed from {kept[1]}; the next checkpoint removes the 1 after it\n" in text
    assert "--keep 1 removes checkpoints that --keep 2 has kept\n" in text
    assert kept[2] not in checkpoints(home)


def test_a_resumed_record_names_a_best_checkpoint_that_exists(tmp_path):
    """A checkpoint holds the record as it was before it, which names a checkpoint that is removed after it."""
    better = ["--learning_rate", 0.01]
    run_rung_2(tmp_path, *better, "--save_every", 8)
    (only,) = checkpoints(tmp_path / HOME)
    for more in ([], ["--save_every", 8]):
        assert run_rung_2(tmp_path, *better, "--resume", tmp_path / HOME, *more)[0] == 0
        assert json.loads((tmp_path / HOME / "run.json").read_text())["best_checkpoint"] == f"checkpoints/{only.name}"


def test_a_checkpoint_of_the_test_is_removed_with_its_branch(tmp_path):
    """The run goes on from an older checkpoint. Folders that the user has named stay and do not count."""
    for step, stage in ((8, "validated"), (16, "validated"), (16, "trained"), (16, "validated")):
        part = store.unfinished_folder(tmp_path, step, stage)
        store.make_empty(part)
        newest = store.finish(part, 0.5 if stage == "validated" else None)
        (tmp_path / "step-000000008-backup").mkdir(exist_ok=True)
        store.prune(newest, keep=9)
        assert store.newest_whole(tmp_path) == (newest, [])
    assert [path.name for path in store.list_steps(tmp_path)] == [f"step-0000000{n}-validated" for n in ("08", "16")]
    store.remove_all(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000000008-backup"]


@pytest.fixture(scope="module")
def stopped_once(tmp_path_factory):
    cwd = tmp_path_factory.mktemp("stopped")
    run_rung_2(cwd, "--save_every", 2, "--keep", 9, at="Batch 0006/")
    return cwd / "runs"


@pytest.fixture
def stopped(tmp_path, stopped_once):
    return shutil.copytree(stopped_once, tmp_path / "runs") / "2_grad_accum" / "1"


def test_a_run_can_resume_from_an_older_checkpoint(tmp_path, stopped):
    """Later checkpoints are removed, or the next run would take them for the newest ones."""
    older = stopped / "checkpoints" / "step-000000002"
    status, text = run_rung_2(tmp_path, "--save_every", 3, "--keep", 1, "--resume", older, at="Batch 0003/")
    assert (status, [path.name for path in checkpoints(stopped)]) == (143, ["step-000000003"])
    assert "Batch 0003/0008" in text, "the batch is printed again"
    assert len([line for line in lines_of(stopped) if "Epoch: 0001/0002 | Batch 0003/0008" in line]) == 1


def test_auto_resumes_the_run_of_the_same_settings(tmp_path, stopped):
    for name in ("²", "1a", "notes"):  # a digit, and not a number
        (stopped.parent / name).mkdir()
    holds = "import sys, filelock; lock = filelock.FileLock(sys.argv[1]); lock.acquire(); print(flush=True); input()"
    command = [sys.executable, "-c", holds, str(stopped / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        other.stdout.readline()
        status, text = run_rung_2(tmp_path, "--seed", 5, "--resume", "auto")
        other.communicate("\n")
    assert (status, "--resume auto: no run to resume" in text) == (0, True), "the other run is in progress"
    status, text = run_rung_2(tmp_path, "--seed", 5, "--resume", "auto")
    assert (status, "runs/2_grad_accum/2 has finished" in text) == (0, True)
    status, text = run_rung_2(tmp_path, "--resume", "auto")
    assert (status, "Resumed from runs/2_grad_accum/1/checkpoints/" in text) == (0, True)


TENSORS = "shard-00001-model-00001-of-00001.safetensors"


def damage(folder, name, kind):
    path = folder / "state" / name if (folder / "state" / name).exists() else folder / name
    data = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
    elif kind == "cut":
        path.write_bytes(data[:-9])
    elif kind == "flipped":
        data[len(data) // 2] ^= 4
        path.write_bytes(data)
    else:
        path.write_text(kind)


def test_damaged_checkpoints_are_skipped_with_a_reason(tmp_path, stopped):
    good, last = checkpoints(stopped)[-2:]
    assert store.newest_whole(last.parent)[0] == last
    damages = [(name, kind) for name in (TENSORS, PROGRESS, "rank-0.pt") for kind in ("missing", "cut", "flipped")]
    damages += [(store.MANIFEST, kind) for kind in ("missing", "cut", "[]", '{"format": 2, "files": [3]}')]
    for name, kind in damages:
        copy = last.with_name("whole")
        shutil.copytree(last, copy)
        damage(last, name, kind)
        found, skipped = store.newest_whole(last.parent)
        assert found == good, (name, kind)
        assert len(skipped) == 1
        assert skipped[0].startswith(f"{last} is skipped (")
        shutil.rmtree(last)
        copy.rename(last)
    damage(last, TENSORS, "flipped")
    status, text = run_rung_2(tmp_path, "--save_every", 2, "--resume", "auto")
    assert status == 0
    assert f"{last.relative_to(tmp_path)} is skipped (state/{TENSORS} is damaged: its size or checksum differs)" in text
    assert f"Resumed from {good.relative_to(tmp_path)}\n" in text
    damage(last := checkpoints(stopped)[-1], PROGRESS, "flipped")
    with pytest.raises(UserError, match=r"cannot be used; --resume auto finds an undamaged one \(progress.json is"):
        run_rung_2(tmp_path, "--resume", last)


def test_nothing_pickled_is_executed(tmp_path, stopped):
    """The manifest is correct, so the loader itself must refuse the file."""
    last = checkpoints(stopped)[-1]
    for name, content in (("rank-0.pt", None), (f"state/{TENSORS}", pickle.dumps(Evil()))):
        copy = last.with_name("whole")
        shutil.copytree(last, copy)
        if content is None:
            torch.save(Evil(), last / name)
        else:
            (last / name).write_bytes(content)
        (last / "manifest.json").unlink()
        part = last.with_name(".step-000000006.part")
        last.rename(part)
        store.finish(part, None)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            run_rung_2(tmp_path, "--resume", "auto")
        assert not (tmp_path / "executed").exists(), "the file is refused before it is unpickled"
        assert isinstance(caught.value, UserError)
        assert re.search(r"cannot read the state of the run|made with another .*, or damaged", str(caught.value))
        shutil.rmtree(last)
        copy.rename(last)


@SLOW
@pytest.mark.parametrize("name", ["9_ddp", "10_fsdp"])
def test_two_processes_end_with_a_checkpoint_and_resume_bit_by_bit(tmp_path, name):
    """Only the launcher gets SIGTERM. The checkpoint also resumes on one process, with other dropout masks."""
    more = [*SIZES, *map(str, EVERY_100), "--precision", "32-true"]
    for folder in ("whole", "stopped"):
        (tmp_path / folder).mkdir()
    for process in run_ranks(SRC / f"{name}.py", 2, *more, cwd=tmp_path / "whole"):
        finished(process)
    command = [sys.executable, str(SRC / f"{name}.py"), *more, "--devices", "2"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, cwd=tmp_path / "stopped", **pipes)
    for line in process.stdout:
        if "Batch 0003/0008" in line:
            process.send_signal(signal.SIGTERM)
            break
    stdout, stderr = process.communicate(timeout=100)
    assert process.returncode == 143, stderr
    assert "Stopped by SIGTERM in epoch 1 after batch" in stdout, stderr
    assert "rror" not in stderr
    home = tmp_path / "stopped" / "runs" / name / "1"
    (made,) = checkpoints(home)
    assert {f"rank-{rank}.pt" for rank in (0, 1)} <= {path.name for path in made.iterdir()}
    shutil.copytree(tmp_path / "stopped", tmp_path / "alone")
    for process in run_ranks(SRC / f"{name}.py", 2, *more, "--resume", "auto", cwd=tmp_path / "stopped"):
        finished(process)
    assert_same(home, tmp_path / "whole" / "runs" / name / "1")
    (process,) = run_ranks(SRC / f"{name}.py", 1, *more, "--resume", "auto", cwd=tmp_path / "alone")
    assert "The checkpoint is of 2 devices: dropout on 1 will differ" in finished(process)
    assert "Test accuracy" in process.stdout


def train_silently(cwd, arguments, options):
    with open(os.devnull, "w") as nothing, contextlib.redirect_stderr(nothing):
        sys.exit(run_rung_2(cwd, *arguments, **options)[0])


def test_a_second_interrupt_ends_the_run_immediately_and_a_run_in_use_is_refused(tmp_path):
    """Without Ctrl-C the first run would take minutes."""
    long, trains = ["--epochs", "500", "--save_every", "1"], multiprocessing.Event()
    process = start_fork(train_silently, tmp_path, long, {"at": "Batch 0003/", "action": trains.set})
    assert trains.wait(60)
    with pytest.raises(UserError, match=r"runs/2_grad_accum/1 belongs to a run that is still going on"):
        run_rung_2(tmp_path, *long, "--resume", "auto")
    os.kill(process.pid, signal.SIGSTOP)  # pause the process, or it might end before the second signal
    for _ in range(2):
        os.kill(process.pid, signal.SIGINT)
        os.kill(process.pid, signal.SIGCONT)
        time.sleep(0.002)
    process.join(30)
    assert process.exitcode in (-signal.SIGINT, 130)


KILLS = 10
LONGEST = 300  # maximum seconds for a start on a slow machine


def newest_run(cwd):
    """Return the folder of the last run. A run that was killed before its first checkpoint is not resumed."""
    folders = (cwd / "runs" / "2_grad_accum").glob("*")
    return max(folders, key=lambda path: int(path.name), default=cwd)


def writes(cwd):
    return any((newest_run(cwd) / "checkpoints").glob(".step-*.part"))


@SLOW
@pytest.mark.timeout(1800)
def test_ten_kills_at_random_moments_lose_nothing(tmp_path):
    """Each start resumes the killed run. The final result equals an uninterrupted run."""
    more = ["--save_every", 1, "--keep", 2, "--resume", "auto", "--epochs", 3]
    (tmp_path / "whole").mkdir()
    run_rung_2(tmp_path / "whole", *more)
    whole, draw = tmp_path / "whole" / HOME, random.Random(7)
    kills = while_writing = rounds = 0
    while kills < KILLS:
        cwd = tmp_path / str(rounds)
        cwd.mkdir()
        rounds += 1
        for _ in range(200):
            process = start_fork(train_silently, cwd, more, {})
            if kills == KILLS:
                process.join(LONGEST)
            elif kills % 2:
                process.join(draw.uniform(0.1, 1.0))
            else:  # kill it as soon as it writes a checkpoint
                end = time.monotonic() + LONGEST
                while process.is_alive() and not writes(cwd) and time.monotonic() < end:
                    time.sleep(0.001)
                assert time.monotonic() < end, f"no output within {LONGEST} seconds"
                time.sleep(draw.uniform(0, 0.01))
            if process.exitcode is None:
                assert kills < KILLS, f"the last start did not finish within {LONGEST} seconds"
                process.kill()
                process.join()
                kills += 1
                home = newest_run(cwd)
                while_writing += writes(cwd)
                newest, skipped = store.newest_whole(home / "checkpoints")
                assert not skipped, "every checkpoint with a final name must be complete"
                assert newest or not any((home / "checkpoints").glob("step-*"))
            else:
                assert process.exitcode == 0
                break
        assert_same(newest_run(cwd), whole)
        assert not [*cwd.rglob(".step-*"), *cwd.rglob(".lock")]
    assert while_writing >= 2, f"only {while_writing} kills happened while a checkpoint was written"


def with_lost_log(cwd, action, *arguments):
    """Remove the log during training by `action`; return the printed lines of the run, which must finish."""
    status, text = run_rung_2(cwd, "--log_every", 1, *arguments, at="Batch 0003/", action=action)
    assert (status, text.count("No more log: cannot write into ")) == (0, 1)
    assert "\nTest accuracy " in text
    assert "Batch 0008/0008" in text
    return text


def test_a_folder_that_vanishes_costs_only_the_log(tmp_path):
    """The model is still saved, and the checkpoint holds all log lines for a resumed run."""
    options = "--save", "consolidated", "--save_every", "100"
    text = with_lost_log(tmp_path, lambda: shutil.rmtree("runs"), *options)
    assert (tmp_path / re.search(r"^Saved (.*)$", text, re.MULTILINE)[1] / "model.safetensors").exists()
    progress = json.loads((checkpoints(tmp_path / HOME)[-1] / PROGRESS).read_text())
    lines = progress["run"]["lines"]
    assert len([line for line in lines if "Loss" in line]) == len(progress["run"]["rows"]) - 2 == 16


def test_a_run_whose_log_ends_early_is_left_out_of_comparisons(tmp_path):
    """Its run.json could be written again, so its status is `finished`."""
    folder = tmp_path / HOME

    def lose_log():
        (folder / "log.txt").unlink()
        (folder / "log.txt").mkdir()

    with_lost_log(tmp_path, lose_log)
    assert json.loads((folder / "run.json").read_text())["status"] == "finished"
    with pytest.raises(UserError, match="its log is incomplete"):
        read_sources([str(folder)])
