"""The expected time of a run: by the speed of an earlier run like it, or of a measured one on its GPU, else unknown."""

import json
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from fabric_ladder.errors import UserError, read_outside
from fabric_ladder.places import PACKAGE
from fabric_ladder.runs.folder import UNNAMED, short_name
from fabric_ladder.settings import Settings, names

MEASURED = PACKAGE / "planning" / "measured.json"
HARDWARE = {"cuda": ("gpu",), "mps": ("processor",), "cpu": ("processor", "vectors", "cores", "threads")}
OTHERS = ("name", "dataset", "batch_size", "micro_batch_size", "micro_batch_tokens", "compile")
# hardware and ranks are compared instead of these
DECIDING = {*OTHERS, *names(changes_memory=True)} - {"model", "accelerator", "devices", "num_nodes"}


class Speed(NamedTuple):
    """Samples per second, and words about where they were measured."""

    samples_per_second: float
    source: str


def deciding(values: dict) -> dict:
    """Return the settings that decide the speed, where they differ from the defaults, and the model's name."""
    defaults = vars(Settings())
    model = short_name(values["model"])
    model = model if model.endswith(UNNAMED) else model.split("/")[-1].removesuffix(".json")
    found = {name: values.get(name, defaults[name]) for name in sorted(DECIDING)}
    return {"model": model} | {name: value for name, value in found.items() if value != defaults[name]}


def is_same_device(own: dict, other: dict) -> bool:
    """Return whether two descriptions of hardware agree in what decides the speed."""
    return all(own.get(name) == other.get(name) for name in ("device", *HARDWARE[own["device"]]))


def find_speed(settings: Settings, ranks: int, is_same: Callable[[dict], bool]) -> Speed | None:
    """Return the speed of the newest finished run of the same rung, model, data and device, or a measured one, or None.

    Args:
        settings: Of the run. Its `runs_dir` has the earlier runs.
        ranks: Number of ranks.
        is_same: Whether recorded hardware is the run's.
    """
    wanted = deciding(vars(settings))
    found = []
    for path in Path(settings.runs_dir).glob(f"{settings.name}/*/run.json"):
        with suppress(UserError, LookupError, TypeError, AttributeError):  # a damaged or foreign file
            record = read_outside(path)
            alike = record["status"] == "finished" and "resumed" not in record and record["ranks"] == ranks
            if alike and is_same(record["hardware"]) and deciding(record["settings"]) == wanted:
                speed = Speed(record["results"]["samples_per_second"], f"in {path.parent}")
                found.append((record["begun"], speed))
    if found:
        return max(found)[1]
    measured = json.loads(MEASURED.read_text(encoding="utf-8"))["speeds"]
    source = f"measured with {measured['of']} (benchmarks/results/gpu.json)"
    for name, values in measured["settings"].items():
        if ranks == 1 and values == wanted and is_same({"device": "cuda", "gpu": measured["gpu"]}):
            return Speed(measured["samples_per_second"][name], source)
    return None


def expected_time(settings: Settings, speed: Speed | None, samples: int | None) -> str | None:
    """Return the time of the training; None: there is no speed.

    Args:
        settings: Of the run.
        speed: From `find_speed`.
        samples: Training samples of an epoch; None: unknown, so `train_samples` or 1,000 count.
    """
    if speed is None:
        return None
    samples = samples or settings.train_samples
    count = samples * settings.epochs if samples else 1000
    hours = count / speed.samples_per_second / 3600
    time = f"{hours:.1f} h" if hours >= 1 else f"{hours * 60:.1f} min"
    return f"{time} of training on {count:,} samples; {speed.samples_per_second:.1f} samples/s {speed.source}"
