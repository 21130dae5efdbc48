"""The rules of the leaderboard, each of which a run's record and log keep or break."""

import math
import re
from collections.abc import Iterator
from pathlib import PurePath
from typing import NamedTuple

import common  # noqa: F401  first of all: it makes the project importable without an installation

from fabric_ladder.comparing.logs import LogParser
from fabric_ladder.comparing.sources import FIGURES, FORMAT


class Category(NamedTuple):
    """What the runs of one table have in common.

    Attributes:
        task: Of the settings.
        dataset: Of the settings.
        models: Names of the pretrained model, without what stands before the last slash.
        parameters: Of the model with its head; adapters may add some.
        train_samples: Of the whole training split.
        test_samples: Of the whole test split.
        accuracy: Of the test, at least.
        all_trained: Whether every parameter must be trained.
        settings: Other settings with the values that they may have.
    """

    task: str
    dataset: str
    models: tuple[str, ...]
    parameters: int
    train_samples: int
    test_samples: int
    accuracy: float
    all_trained: bool
    settings: dict[str, tuple]


CATEGORIES = {  # the sizes of the splits are those that the published scripts take
    "minutes": Category(
        "text-classification", "imdb", ("bloom-560m",), 559_216_640, 35_000, 10_000, 0.87, False, {}
    ),
    "memory": Category(
        "image-classification", "uoft-cs/cifar10", ("vit-large-patch16-224", "vit-large-patch16-224-in21k"),
        303_311_882, 45_000, 10_000, 0.95, True, {"image_size": (224, None)},
    ),
}  # fmt: skip
PRINTED = ("elapsed_seconds", "peak_memory_bytes", "test_accuracy")  # figures of run.json, with two digits in a log


class Entry(NamedTuple):
    """What is handed in.

    Attributes:
        record: Of run.json.
        log: Text of log.txt.
        origin: Of entry.json; empty where there is none.
    """

    record: dict
    log: str
    origin: dict


def value_at(record: object, *path: str) -> object:
    """Return what lies at a path of nested objects, None where there is nothing."""
    for key in path:
        record = record.get(key) if isinstance(record, dict) else None
    return record


def number(record: dict, *path: str) -> float | None:
    """Return the finite number at a path, None where there is none."""
    value = value_at(record, *path)
    plain = isinstance(value, int | float) and not isinstance(value, bool)
    return value if plain and math.isfinite(value) else None


def text_at(record: dict, *path: str) -> str:
    """Return the text at a path, an empty one where there is none."""
    value = value_at(record, *path)
    return value if isinstance(value, str) else ""


def broken_rules(entry: Entry, category: Category) -> Iterator[str]:
    """Yield a line for each rule that a run breaks."""
    yield from _finished(entry.record)
    yield from _model_and_data(entry.record, category)
    yield from _whole_splits(entry.record, category)
    yield from _one_epoch(entry.record)
    yield from _figures(entry.record, category)
    yield from _log(entry, category)
    yield from _origin(entry)


def _finished(record: dict) -> Iterator[str]:
    if record.get("format") != FORMAT:
        yield f"format: run.json has {record.get('format')!r:.40}, this version reads {FORMAT}"
    if record.get("status") != "finished":
        yield f"finished: the run's status is {record.get('status')!r:.40}"
    if record.get("log_lost"):
        yield "finished: the log ends before the run did, which could not write it"
    if record.get("resumed"):
        yield "finished: in one go, and this run was stopped and resumed"


def _model_and_data(record: dict, category: Category) -> Iterator[str]:
    settings, results = (value_at(record, part) for part in ("settings", "results"))
    for name, wanted in ({"task": (category.task,), "dataset": (category.dataset,)} | category.settings).items():
        if (value := value_at(settings, name)) not in wanted:
            yield f"{name}: must be {wanted[0]}, and is {value!r:.80}"
    model = text_at(settings, "model")
    if PurePath(model).name not in category.models:
        yield f"model: must be {category.models[0]}, and is {model!r:.80}"
    if value_at(settings, "from_scratch") is not False:
        yield "model: must start from the pretrained weights, and starts from random ones"
    if value_at(settings, "load") is not None:
        yield "model: must start from the pretrained weights, and starts from a checkpoint (--load)"
    parameters, trained = (number(results, name) for name in ("parameters", "trainable_parameters"))
    if parameters is None or parameters < category.parameters:
        yield f"model: must have {category.parameters:,} parameters or more, and has {_shown(parameters)}"
    if category.all_trained and trained != parameters:
        yield f"model: all parameters must be trained, and {_shown(trained)} of {_shown(parameters)} are"


def _whole_splits(record: dict, category: Category) -> Iterator[str]:
    settings, results = (value_at(record, part) for part in ("settings", "results"))
    for name in ("train_samples", "validation_samples", "test_samples"):
        if value_at(settings, name) is not None:
            yield f"whole splits: {name} must not be set, and is {value_at(settings, name)!r:.40}"
    wanted, tested = category.train_samples, category.test_samples
    if (found := number(record, "data", "train_samples")) != wanted:
        yield f"whole splits: the training split has {wanted:,} samples, and the run's {_shown(found)}"
    if (found := number(results, "test_samples")) != tested:
        yield f"whole splits: the test split has {tested:,} samples, and the run's {_shown(found)}"
    speed, seconds = number(results, "samples_per_second"), number(results, "training_seconds")
    if speed is None or seconds is None or abs(speed * seconds - wanted) > 0.5:
        seen = None if speed is None or seconds is None else speed * seconds
        yield f"whole splits: an epoch is {wanted:,} samples, and samples/s times seconds give {_shown(seen)}"
    confusion = value_at(results, "classes", "confusion")
    try:
        counted = sum(map(sum, confusion))
        right = sum(row[index] for index, row in enumerate(confusion))
    except (TypeError, IndexError):
        yield "whole splits: run.json has no confusion matrix of the test"
        return
    if counted != tested:
        yield f"whole splits: the test split has {tested:,} samples, and the confusion matrix {counted:,}"
    accuracy = number(results, "test_accuracy")
    if counted and accuracy is not None and abs(right / counted - accuracy) > 1e-6:
        yield f"metric: the confusion matrix gives {right / counted:.2%}, and test_accuracy is {accuracy:.2%}"


def _one_epoch(record: dict) -> Iterator[str]:
    if (epochs := value_at(record, "settings", "epochs")) != 1:
        yield f"one epoch: epochs must be 1, and is {epochs!r:.40}"
    done = value_at(record, "results", "epochs")
    if not isinstance(done, list) or len(done) != 1:
        yield f"one epoch: the results must be of 1, and are of {len(done) if isinstance(done, list) else 'none'}"
    if skipped := value_at(record, "results", "skipped_batches"):
        yield f"one epoch: {skipped!r:.40} effective batches were left out"


def _figures(record: dict, category: Category) -> Iterator[str]:
    accuracy = number(record, "results", "test_accuracy")
    if accuracy is None or not 0 <= accuracy <= 1:
        yield "metric: run.json has no test_accuracy between 0 and 1"
    elif accuracy < category.accuracy:
        yield f"metric: the test accuracy must be at least {category.accuracy:.0%}, and is {accuracy:.2%}"
    for what, name in {"minutes": "elapsed_seconds", "peak memory": "peak_reserved_bytes"}.items():
        if (value := number(record, "results", name)) is None or value <= 0:
            yield f"{what}: run.json has no {name}" + ", which a run on a GPU records" * (what == "peak memory")
    reserved, allocated = (number(record, "results", f"peak_{kind}_bytes") for kind in ("reserved", "memory"))
    if reserved and allocated and reserved < allocated:
        yield "peak memory: less was reserved than allocated (peak_reserved_bytes, peak_memory_bytes)"


def _log(entry: Entry, category: Category) -> Iterator[str]:
    runs = LogParser("log.txt", "log.txt").parse(entry.log)
    if len(runs) != 1 or runs[0].unfinished:
        yield f"log: log.txt must hold the lines of one finished run, and holds {len(runs)}, finished or not"
        return
    for name in PRINTED:
        printed, factor = FIGURES[name]
        recorded, logged = number(entry.record, "results", name), runs[0].figures.get(printed)
        if recorded is not None and (logged is None or abs(recorded * factor - logged) > 0.005 + 1e-6):
            yield f"log: {name} is {recorded * factor:.2f} in run.json, and {_shown(logged)} in log.txt"
    last = runs[0].losses[-1].samples if runs[0].losses else None
    if last != category.train_samples:
        yield f"log: its last loss must be of sample {category.train_samples:,}, and is of {_shown(last)}"


def _origin(entry: Entry) -> Iterator[str]:
    if not text_at(entry.record, "hardware", "gpu"):
        yield "hardware: must be a CUDA GPU that run.json names"
    if not re.fullmatch(r"[0-9a-f]{7,40}", text_at(entry.origin, "commit")):
        yield "commit: entry.json beside run.json must name the code's, 7 to 40 hexadecimal digits"
    if not text_at(entry.origin, "by").strip():
        yield "by: entry.json beside run.json must name whose run it is"


def _shown(value: float | None) -> str:
    return "none" if value is None else f"{value:,.10g}"
