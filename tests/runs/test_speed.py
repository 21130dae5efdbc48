"""The expected time comes from a run like this one or from a measured speed on the same GPU, and from nothing else."""

import json
from dataclasses import replace

import pytest
from support.helpers import settings_for, token_datasets
from support.training import run_training

from fabric_ladder import Settings
from fabric_ladder.runs.speed import MEASURED, expected_time, find_speed, is_same_device

H100 = {"device": "cuda", "gpu": "NVIDIA H100 80GB HBM3", "processor": "AMD"}
BLOOM = Settings(name="4_mixed_precision", model="bigscience/bloom-560m", precision="bf16-mixed", batch_size=16,
                 max_length=1024, micro_batch_tokens="auto", train_samples=36_000, epochs=2)  # fmt: skip


def speed_of(settings, hardware=H100, ranks=1):
    return find_speed(settings, ranks, lambda other: is_same_device(hardware, other))


def test_a_run_gives_the_expected_time_of_the_next_one_like_it(tmp_path, capsys):
    first, _ = run_training(tmp_path)
    assert "Expected" not in capsys.readouterr().out
    rate = json.loads((first.folder / "run.json").read_text())["results"]["samples_per_second"]
    run_training(tmp_path, datasets=token_datasets(train=80), epochs=2, learning_rate=1e-3)
    [line] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("Expected: ")]
    time = f"{160 / rate / 60:.1f} min of training on 160 samples"
    assert line == f"Expected: {time}; {rate:.1f} samples/s in {first.folder}"
    run_training(tmp_path, max_length=77)
    assert "Expected: " not in capsys.readouterr().out


@pytest.mark.parametrize(
    "other",
    [
        {"model": "x/y"},
        {"micro_batch_size": 2},
        {"status": "stopped"},
        {"ranks": 2},
        {"hardware": H100 | {"gpu": "T4"}},
    ],
)
def test_another_run_gives_no_speed(tmp_path, other):
    settings = settings_for(tmp_path, name="2_grad_accum")
    folder = tmp_path / "runs" / "2_grad_accum"
    for number in (1, 2, 10):
        record = {"status": "finished", "begun": f"2026-11-{10 + number}", "settings": vars(settings) | {"seed": 7}}
        record |= {"ranks": 1, "hardware": H100, "results": {"samples_per_second": 10.0 * number}}
        (folder / str(number)).mkdir(parents=True)
        (folder / str(number) / "run.json").write_text(json.dumps(record))
    (folder / "3").mkdir()
    (folder / "3" / "run.json").write_text("{damaged")
    assert speed_of(settings) == (100.0, f"in {folder / '10'}"), "the newest"
    for path in folder.glob("*0/run.json"):
        path.unlink()
    for path in folder.glob("[12]/run.json"):
        record = json.loads(path.read_text())
        places = record["settings"] if other.keys() <= vars(settings).keys() else record
        places |= other
        path.write_text(json.dumps(record))
    assert speed_of(settings) is None


def test_a_measured_speed_is_for_its_model_rung_length_and_gpu():
    measured = json.loads(MEASURED.read_text())["speeds"]
    rate = measured["samples_per_second"]["4_mixed_precision"]
    found = speed_of(BLOOM)
    assert found == (rate, "measured with BLOOM-560m on NVIDIA H100 80GB HBM3 (benchmarks/results/gpu.json)")
    hours = 72_000 / rate / 3600
    assert expected_time(BLOOM, found, None).startswith(f"{hours * 60:.1f} min of training on 72,000 samples; {rate}")
    longer = expected_time(replace(BLOOM, epochs=20), found, None)
    assert longer.startswith(f"{hours * 10:.1f} h of training on 720,000 samples; ")
    assert " on 20 samples" in expected_time(replace(BLOOM, epochs=1), found, 20)
    assert " on 1,000 samples" in expected_time(replace(BLOOM, train_samples=None), found, None)
    for other in ({"model": "bigscience/bloom-1b1"}, {"max_length": 512}, {"compile": True}, {"name": "9_ddp"}):
        assert speed_of(replace(BLOOM, **other)) is None
    assert speed_of(BLOOM, H100 | {"gpu": "NVIDIA H200"}) is None
    assert speed_of(BLOOM, ranks=2) is None
    assert expected_time(BLOOM, None, 10) is None
