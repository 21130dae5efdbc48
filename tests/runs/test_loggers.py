"""Live curves: the figures of metrics.csv, against the samples seen."""

import csv

import pytest
from support.helpers import SMALL, SRC, finished, run_script, without_package

SHORT = [*SMALL, "--micro_batch_size", "4"]


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def test_tensorboard_draws_what_the_csv_file_has(tmp_path):
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard")
    stdout = finished(run_script(SRC / "2_grad_accum.py", *SHORT, "--logger", "tensorboard", cwd=tmp_path))
    folder = tmp_path / "runs" / "2_grad_accum" / "1"
    assert (folder / "log.txt").read_text(encoding="utf-8") == stdout
    events = reader.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    names = ("loss", "learning_rate", "samples_per_second", "peak_memory_bytes", "validation_accuracy", "test_loss")
    for name in names:
        drawn = [(event.step, event.value) for event in events.Scalars(name)]
        written = [(int(row["samples"]), float(row[name])) for row in rows(folder) if row[name]]
        assert [step for step, _ in drawn] == [samples for samples, _ in written], name
        assert [value for _, value in drawn] == pytest.approx([value for _, value in written], rel=1e-6), name
    assert [event.step for event in events.Scalars("loss")] == [16, 32, 48, 64, 80, 96]


def test_weights_and_biases_keeps_a_run_without_a_network(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb")
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    stdout = finished(run_script(SRC / "2_grad_accum.py", *SHORT, "--logger", "wandb", cwd=tmp_path, **offline))
    assert "Test accuracy" in stdout
    assert list((tmp_path / "runs" / "2_grad_accum" / "1" / "wandb").glob("offline-run-*/run-*.wandb"))


@pytest.mark.parametrize("package", ["tensorboard", "wandb"])
def test_without_its_package_the_line_says_what_to_install(tmp_path, package):
    process = run_script(
        SRC / "2_grad_accum.py", "--logger", package, cwd=tmp_path, **without_package(tmp_path, package)
    )
    assert process.returncode == 2
    line = f"error: --logger {package} needs a package: pip install {package}=="
    assert process.stderr.splitlines()[-1].startswith(line)
    assert not (tmp_path / "runs").exists()
