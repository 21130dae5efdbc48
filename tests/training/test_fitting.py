"""The longest batch is tried first and leaves no trace. `auto` finds a size that fits into memory."""

import re
import sys
from dataclasses import replace

import numpy as np
import pytest
from support.devices import run_ranks
from support.helpers import MODELS, SRC, finished, settings_for
from support.resuming import assert_same, run_here
from support.training import SIZES, limited, read, run_training
from support.training import losses as trained

from fabric_ladder import UserError, parse_settings
from fabric_ladder.data.sampler import EffectiveBatchSampler
from fabric_ladder.runs.prediction import Prediction
from fabric_ladder.settings import FULL_PASS, Settings
from fabric_ladder.training import fitting, loop


@pytest.mark.slow
def test_auto_halves_until_it_fits_and_the_gradient_stays(tmp_path):
    """The run gets less memory until fewer tokens fit; how much this is depends on the machine."""
    chosen, losses = [], []
    for room in (0, *range(24, 8, -2)):  # MB
        cwd = tmp_path / str(room)
        options = ("--micro_batch_tokens", "auto", "--batch_size", "48")
        stdout = finished(*limited(cwd, (room,), "2_grad_accum", *options))
        assert " · batch 48 in micro-batches of auto tokens · " in stdout
        chosen.append(int(re.search(r"^Micro-batches of (\d+) tokens fit\nEpoch: ", stdout, re.M)[1]))
        figures, record = read(cwd, "2_grad_accum")
        losses.append(figures)
        assert record["settings"]["micro_batch_tokens"] == "auto"
        assert record["results"]["fitted_micro_batch_tokens"] == chosen[-1]
        if chosen[-1] < chosen[0]:
            break
    assert chosen[0] >= 2 * chosen[-1]
    assert losses[-1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_all_ranks_use_the_size_that_fits_the_rank_with_the_least_memory(tmp_path):
    """One rank gets less memory until fewer tokens than a rank's whole share fit."""
    # eager attention's matrices need memory
    options = ("--micro_batch_tokens", "auto", "--attention", "eager", "--batch_size", "96")
    chosen, losses = [], []
    for room in (0, *range(30, 12, -3)):  # MB
        cwd = tmp_path / str(room)
        for process in limited(cwd, (0, room), "9_ddp", *options):
            finished(process)
        figures, record = read(cwd, "9_ddp")
        losses.append(figures)
        chosen.append(record["results"]["fitted_micro_batch_tokens"])
        if chosen[-1] < chosen[0]:
            break
    assert chosen[0] >= 2 * chosen[-1]
    assert losses[-1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.slow
def test_no_rank_waits_for_one_without_memory_for_its_first_pass(tmp_path):
    """DDP would broadcast the buffers in the first pass, which this rank does not reach."""
    options = ("--micro_batch_tokens", "auto", "--attention", "eager", "--model", MODELS / "llama-tiny.json")
    other, poor = limited(tmp_path / "two", (0, 5), "9_ddp", *options)
    assert (other.returncode != 0, poor.returncode) == (True, 2), "the other one may end by itself or by its watch"
    assert "in a batch of 1 x" in poor.stderr


def test_a_batch_that_cannot_fit_fails_in_the_first_minute_with_advice(tmp_path):
    (process,) = limited(tmp_path, (4,), "2_grad_accum", "--micro_batch_size", 16)  # its tensors alone need 7 MB
    assert (process.returncode, "Loss:" in process.stdout) == (2, False)
    line = process.stderr.splitlines()[-1]
    assert re.match(
        r"error: out of memory \(.*DefaultCPUAllocator.*\) in a batch of 16 x \d+ tokens in training,", line
    )
    found = re.search(
        r", at a peak of 0\.\d\d GB\. Next to try: (python .*?) \(the same [^;]*; --activ[^;]*; (python .*?), which",
        line,
    )
    smaller, rung = (words.split() for words in found.groups())
    assert (smaller[1].endswith("2_grad_accum.py"), smaller[-2:]) == (True, ["--micro_batch_size", "8"])
    assert "16" not in smaller[smaller.index("--micro_batch_size") :]
    assert rung[1].endswith("5_low_precision.py")
    assert "--precision" not in rung, "the next rung decides the size"
    assert rung[rung.index("--train_samples") + 1] == "96"


@pytest.mark.parametrize("name", ["2_grad_accum", pytest.param("13_lora", marks=pytest.mark.slow)])
def test_the_trial_changes_no_bit_of_a_run_or_of_a_resumed_run(tmp_path, monkeypatch, name):
    more = ["--save_every", 100, "--micro_batch_size", 4]
    (tmp_path / "whole").mkdir()
    run_here(name, tmp_path / "whole", *more)
    monkeypatch.setattr(fitting, "HARD_LIMITS", ("cpu",))
    tried, real = [], fitting._try
    monkeypatch.setattr(fitting, "_try", lambda *args: tried.append(real(*args)))
    for place in ("Batch 0003/", None):
        run_here(name, tmp_path, *more, "--resume", "auto", at=place)
    assert tried == [None, None]
    assert_same(tmp_path / "runs" / name / "1", tmp_path / "whole" / "runs" / name / "1")


def test_a_resumed_run_keeps_the_size_that_auto_chose(tmp_path):
    """The resumed run equals an uninterrupted run bit by bit, and a run with this number on its command line."""
    more = ["--save_every", 100, "--micro_batch_tokens"]
    (tmp_path / "whole").mkdir()
    _, text = run_here("2_grad_accum", tmp_path / "whole", *more, "auto")
    whole = tmp_path / "whole" / "runs" / "2_grad_accum"
    for place in ("Batch 0003/", None):
        run_here("2_grad_accum", tmp_path, *more, "auto", "--resume", "auto", at=place)
    assert_same(tmp_path / "runs" / "2_grad_accum" / "1", whole / "1")
    _, repeated = run_here("2_grad_accum", tmp_path / "whole", *more, re.search(r"of (\d+) tokens fit", text)[1])
    assert re.findall("Loss: .*", repeated) == re.findall("Loss: .*", text)


def test_auto_starts_from_the_predicted_size(tmp_path, monkeypatch):
    """The losses stay the same. Sharded ranks do not halve the size. Without a prediction they use one sample."""
    options = {"batch_size": 8, "log_every": 8}
    whole = trained(run_training(tmp_path, **options)[0])
    monkeypatch.setattr(Prediction, "line", lambda *_: "")
    monkeypatch.setattr(Prediction, "figures", lambda _: {})
    for sharded, found, chosen in (
        (False, {"micro_batch_tokens": 40}, 40),
        (True, {"micro_batch_tokens": 40}, 40),
        (True, {"problem": "none"}, 1),
    ):
        monkeypatch.setattr(Settings, "shards_weights", property(lambda _, shards=sharded: shards))
        monkeypatch.setattr(loop, "predict", lambda *_, found=found: Prediction(found))
        run, _ = run_training(tmp_path, micro_batch_tokens="auto", **options)
        assert run.record.values["results"]["fitted_micro_batch_tokens"] == chosen
        assert trained(run) == pytest.approx(whole, rel=1e-5)


def test_out_of_memory_in_the_trial_names_the_line(tmp_path, monkeypatch):
    def allocate(*_, **__):
        raise MemoryError

    monkeypatch.setattr(fitting, "HARD_LIMITS", ("cpu",))
    monkeypatch.setattr(fitting, "accumulate_gradients", allocate)
    with pytest.raises(MemoryError) as error:
        run_training(tmp_path)
    assert error.traceback[-1].name == "allocate"


@pytest.mark.slow
def test_sharded_ranks_also_try_the_longest_batch_and_change_no_bit(tmp_path, monkeypatch):
    """FSDP2 on two ranks is compared with the rung itself, which tries no batch on CPUs."""
    (tmp_path / "plain").mkdir()
    tried, plain = (
        limited(tmp_path / "tried", (0, 0), "10_fsdp"),
        run_ranks(SRC / "10_fsdp.py", 2, *SIZES, cwd=tmp_path / "plain"),
    )
    for process in (*tried, *plain):
        finished(process)
    assert read(tmp_path / "tried", "10_fsdp")[0] == read(tmp_path / "plain", "10_fsdp")[0]


@pytest.mark.parametrize("values", [{"micro_batch_size": 3}, {"micro_batch_tokens": 60, "pad_to_multiple_of": 8}])
@pytest.mark.parametrize(("ranks", "full_pass", "skewed"), [(1, 50, True), (3, FULL_PASS, False)])
def test_the_heaviest_batches_are_found_without_making_batches(tmp_path, values, ranks, full_pass, skewed):
    """The result is compared with all plans of the epoch. The last effective batch is a short one."""
    random = np.random.default_rng(5)
    lengths = random.lognormal(2.7, 0.7, 997).clip(3, 90).astype(int) if skewed else random.integers(3, 90, 101)
    settings = replace(settings_for(tmp_path, batch_size=8, **values), full_pass=full_pass)
    loader = EffectiveBatchSampler(lengths, np.ones_like(lengths), settings, 0, ranks)
    multiple = settings.pad_to_multiple_of

    def weights(plan):
        return [len(part.rows) * -(-max(lengths[part.rows]) // multiple) * multiple for part in plan.parts]

    plans, found = list(loader), loader.heaviest()
    assert 1 <= len(found) <= 3
    assert max(max(weights(plan)) for plan in found) == max(max(weights(plan)) for plan in plans)
    if ranks == 1:  # otherwise another rank may have the largest one
        later = [max(max(weights(plan)[1:], default=0) for plan in some) for some in (found, plans)]
        assert later[0] == later[1]
    assert max(lengths[plan.rows].max() for plan in found) == lengths.max()
    assert {str(plan) for plan in found} <= set(map(str, plans))


def test_auto_is_refused_where_weights_are_sharded(monkeypatch):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    with pytest.raises(UserError, match=r"--micro_batch_tokens auto: weights are sharded, .*; give a number"):
        parse_settings(["--micro_batch_tokens", "auto"], devices="auto", batch_size=16, strategy="fsdp")
