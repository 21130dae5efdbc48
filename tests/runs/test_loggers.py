"""Trackers get the figures of metrics.csv, plotted against the samples seen."""

import csv
import importlib.util
import io
import json
import sqlite3
from contextlib import closing

import pytest
from support.helpers import SMALL, SRC, finished, run_script, settings_for

from fabric_ladder import UserError
from fabric_ladder.runs.loggers import PACKAGES, RunLog, check_logger
from fabric_ladder.runs.record import RunRecord

SHORT = [*SMALL, "--micro_batch_size", "4"]
TAGS = {
    "loss": "train/loss",
    "learning_rate": "train/learning_rate",
    "samples_per_second": "train/samples_per_second",
    "train_accuracy": "train/accuracy",
    "validation_loss": "val/loss",
    "validation_accuracy": "val/accuracy",
    "test_loss": "test/loss",
    "test_accuracy": "test/accuracy",
}
TRACKERS = ("tensorboard", "trackio", "mlflow")


def skip_without(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"needs {package}")


def rows(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))


def read_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def read_trackio(folder):
    """Return the newest run of the database in `TRACKIO_DIR`, from its documented tables."""
    drawn = {}
    with closing(sqlite3.connect(folder.parents[2] / "trackio" / "fabric-ladder.db")) as database:
        name = f"{folder.parent.name}/{folder.name}"
        newest = "SELECT run_id FROM metrics WHERE run_name = ? ORDER BY id DESC LIMIT 1"
        query = f"SELECT step, metrics FROM metrics WHERE run_id = ({newest}) ORDER BY id"
        for step, figures in database.execute(query, [name]):
            for tag, value in json.loads(figures).items():
                drawn.setdefault(tag, []).append((step, value))
    return drawn


def read_mlflow(folder):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.parents[1] / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fabric-ladder").experiment_id
    run = client.search_runs([experiment], order_by=["attributes.start_time DESC"])[0]
    assert run.info.run_name == f"{folder.parent.name}/{folder.name}"
    assert run.info.status == "FINISHED"
    assert run.data.params["batch_size"] == "16"
    history = {tag: client.get_metric_history(run.info.run_id, tag) for tag in run.data.metrics}
    return {tag: [(metric.step, metric.value) for metric in metrics] for tag, metrics in history.items()}


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """Return the folder and the printed lines of a run with all trackers that need no account."""
    for package in TRACKERS:
        skip_without(package)
    cwd = tmp_path_factory.mktemp("tracked")
    options = [*SHORT, "--logger", "csv,tensorboard, trackio,mlflow"]
    places = {"TRACKIO_DIR": cwd / "trackio", "MLFLOW_TRACKING_URI": ""}
    process = run_script(SRC / "2_grad_accum.py", *options, cwd=cwd, **places)
    return cwd / "runs" / "2_grad_accum" / "1", finished(process)


@pytest.mark.slow
@pytest.mark.parametrize("tracker", TRACKERS)
def test_a_tracker_draws_the_figures_of_the_csv_file(tracked, tracker):
    folder, stdout = tracked
    assert (folder / "log.txt").read_text(encoding="utf-8") == stdout
    drawn = {"tensorboard": read_tensorboard, "trackio": read_trackio, "mlflow": read_mlflow}[tracker](folder)
    for name, tag in TAGS.items():
        written = [(int(row["samples"]), float(row[name])) for row in rows(folder) if row[name]]
        assert [step for step, _ in drawn[tag]] == [samples for samples, _ in written], name
        assert [value for _, value in drawn[tag]] == pytest.approx([value for _, value in written], rel=1e-6), name
    assert [step for step, _ in drawn["train/loss"]] == [16, 32, 48, 64, 80, 96]
    assert all("/" in tag for tag in drawn)


def test_a_run_that_goes_on_is_drawn_from_its_checkpoint(tmp_path, monkeypatch):
    """Trackers drop the points after the checkpoint. Trackers with a database have the whole curve in a new run."""
    skip_without("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))  # the package reads it when it is imported
    folder = tmp_path / "runs" / "rung" / "1"
    settings = settings_for(tmp_path, logger="trackio")
    before = RunLog(folder, settings)
    for step in (1, 2, 3):
        before.write(step, 16 * step, {"loss": float(step)})
    before.close()
    after = RunLog(folder, settings, [(1, 16, {"loss": 1.0})])
    after.write(2, 32, {"loss": 0.5})
    after.close()
    assert read_trackio(folder) == {"train/loss": [(16, 1.0), (32, 0.5)]}
    assert [(row["step"], row["loss"]) for row in rows(folder)] == [("1", "1.0"), ("2", "0.5")]


@pytest.mark.slow
def test_weights_and_biases_keeps_a_run_without_a_network(tmp_path):
    pytest.importorskip("wandb", reason="needs wandb")
    offline = {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}
    stdout = finished(run_script(SRC / "2_grad_accum.py", *SHORT, "--logger", "wandb", cwd=tmp_path, **offline))
    assert "Test accuracy" in stdout
    assert list((tmp_path / "runs" / "2_grad_accum" / "1" / "wandb").glob("offline-run-*/run-*.wandb"))


def test_an_unknown_or_missing_logger_is_refused(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"--logger neptune: expected one or several of csv, tensorboard, .*commas"):
        check_logger(settings_for(tmp_path, logger="csv,neptune"))
    check_logger(settings_for(tmp_path, logger="['csv', 'csv']"))  # a list in a YAML file
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for package in PACKAGES:
        with pytest.raises(UserError, match=rf"--logger {package} needs a package: pip install {package}(-skinny)?=="):
            check_logger(settings_for(tmp_path, logger=f"csv,{package}"))


def test_a_tracker_that_cannot_start_prints_one_line_and_leaves_nothing(tmp_path, monkeypatch, fabric):
    """Weights & Biases has no login here."""
    pytest.importorskip("wandb", reason="needs wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setattr("sys.stdin", io.StringIO())
    with pytest.raises(UserError, match=r"^--logger wandb cannot start: log in or configure it, or leave it out \("):
        RunRecord(fabric, settings_for(tmp_path, logger="wandb")).open()
    assert [*(tmp_path / "runs").rglob("*")] == [tmp_path / "runs" / "test"]


class Broken:
    """A tracker whose service has stopped."""

    def log_metrics(self, values, step):
        raise ConnectionResetError("the service is gone")


def test_a_tracker_that_fails_later_does_not_stop_the_run(tmp_path, capsys):
    log = RunLog(tmp_path / "runs" / "test" / "1", settings_for(tmp_path))
    log._trackers["broken"] = Broken()
    log.write(1, 16, {"loss": 1.0})
    log.write(2, 32, {"loss": 0.5})
    log.close()
    assert [row["loss"] for row in rows(tmp_path / "runs" / "test" / "1")] == ["1.0", "0.5"]
    notice = "--logger broken failed (the service is gone): it gets no more figures; metrics.csv has them all\n"
    assert capsys.readouterr().err == notice
