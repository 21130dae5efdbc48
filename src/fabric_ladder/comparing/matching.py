"""Decide which runs may be compared, and which runs are one row: one rung with several seeds."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fabric_ladder import settings
from fabric_ladder.comparing.logs import LoggedRun
from fabric_ladder.options import is_met, own_rate
from fabric_ladder.runs.intervals import wilson_interval
from fabric_ladder.runs.speed import HARDWARE
from fabric_ladder.settings import FACTS, INTERNAL, names

# The role of each setting in a comparison is written in settings.py. `ranks` counts devices times machines.
IGNORED = (*INTERNAL, *names(role=settings.SURROUNDINGS))
DATA = names(role=settings.DATA)  # covered by the fingerprint; named if fingerprints differ or are unknown
EQUAL = names(role=settings.EQUAL)
TECHNIQUE = (*names(role=settings.TECHNIQUE), "ranks")  # in the order of the column "what changed"
RUNG_DECIDES = names(rung_decides=True)  # may differ if the rungs set it; must be equal if a user sets it
WITHOUT_EFFECT = ("notices", *names(changes_figures=False))
PATHS = ("model", "dataset", "tokenizer", "validation_file", "test_file")


@dataclass
class Row:
    """Runs of one rung that differ only in their seed.

    Attributes:
        runs: At least one run.
        label: Unique name of the row.
        changed: Settings of the technique that differ from the first row's.
    """

    runs: list[LoggedRun]
    label: str = ""
    changed: str = ""

    @property
    def first(self) -> LoggedRun:
        """The run whose settings represent the row."""
        return self.runs[0]

    @property
    def confusion(self) -> pd.DataFrame | None:
        """Test samples by true (index) and predicted class, summed over the seeds, or None unless all runs have it."""
        if not all("confusion" in run.classes for run in self.runs):
            return None
        names = self.first.classes["names"]
        return sum(pd.DataFrame(run.classes["confusion"], names, names) for run in self.runs)

    @property
    def seeds(self) -> list[str]:
        """The known seeds."""
        return [str(run.settings["seed"]) for run in self.runs if "seed" in run.settings]

    def values(self, figure: str) -> list[float]:
        """Return the figure of every run that has it."""
        return [run.figures[figure] for run in self.runs if figure in run.figures]

    def mean(self, figure: str) -> float | None:
        """Return the mean over the seeds, or None unless all runs have the figure."""
        values = self.values(figure)
        return statistics.fmean(values) if len(values) == len(self.runs) else None

    def spread(self, figure: str) -> float | None:
        """Return the sample standard deviation (n - 1) over the seeds, or None for a single run."""
        values = self.values(figure)
        if len(values) != len(self.runs) or len(values) < 2 or not all(map(math.isfinite, values)):
            return None
        return statistics.stdev(values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval of the test accuracy in percent, or None if the size of the test set is unknown.

        For several seeds it is the interval of their mean. More seeds do not make the test set larger.
        """
        mean = self.mean("test_accuracy")
        sizes = {run.test_samples for run in self.runs}
        if mean is None or len(sizes) != 1 or not (n := sizes.pop()):
            return None
        low, high = wilson_interval(mean / 100, n)
        return low * 100, high * 100


def make_rows(runs: list[LoggedRun]) -> list[Row]:
    """Group the seeds of each rung into one row, and describe how each row differs from the first.

    A second run with the same seed becomes a separate row, because it would narrow the spread over the seeds.
    """
    rows: list[Row] = []
    for run in runs:
        seed = run.settings.get("seed")
        for row in rows:
            others = [other.settings.get("seed") for other in row.runs]
            if seed is not None and None not in others and seed not in others and _differ_only_in_seed(run, row.first):
                row.runs.append(run)
                break
        else:
            rows.append(Row([run]))
    for row, name in zip(rows, _labels(rows), strict=True):
        row.label = name
        row.changed = "; ".join(_changes(rows[0].first, row.first)) if row is not rows[0] else "reference"
        unknown = any("precision" not in run.settings for run in (rows[0].first, row.first))
        same = "no technique" if row.first.name == rows[0].first.name else "only the script"
        row.changed = row.changed or ("unknown" if unknown else same)
    return rows


def _labels(rows: list[Row]) -> list[str]:
    """Name each row by its rung. If rungs repeat, add the run's number or the whole source."""
    runs = [row.first for row in rows]
    forms = (
        [run.name for run in runs],
        [f"{run.name}/{Path(run.source).name}" for run in runs],
        [f"{run.name} ({run.source})" for run in runs],
        [f"{run.name} ({run.source}, {number})" for number, run in enumerate(runs, start=1)],
    )
    return [next(form[place] for form in forms if form.count(form[place]) == 1) for place in range(len(runs))]


def find_differences(rows: list[Row], rungs: Mapping[str, dict]) -> list[str]:
    """Return a phrase for each difference between rows that is not part of their technique.

    Args:
        rows: Rows to compare.
        rungs: Settings that each rung sets itself, by the rung's name.
    """
    runs = [row.first for row in rows]
    found = _phrase("seed", [", ".join(sorted(row.seeds, key=int)) or ... for row in rows])
    in_data = [phrase for name in DATA for phrase in _phrase(name, _values(runs, name))]
    if len({run.data for run in runs if run.data}) > 1:
        found.append(f"data ({'; '.join(in_data) or 'another content'})")
    elif not all(run.data for run in runs):
        found += in_data
    listed = {*IGNORED, *DATA, *TECHNIQUE, *EQUAL, "seed"}
    later = [name for run in runs for name in run.settings if name not in listed]  # settings of a later version
    decided = [name for name in RUNG_DECIDES if name != "batch_size"]  # see `find_warnings`
    for name in dict.fromkeys([*EQUAL, *decided, *later]):
        parts = (f"content of {name}", f"commit of {name}")
        in_files = [phrase for part in parts for phrase in _phrase(part, [run.contents.get(part, ...) for run in runs])]
        found += _phrase(name, _given_by_user(runs, name, rungs)) or in_files
    devices = [run.hardware.get("device", ...) for run in runs]
    parts = HARDWARE.get(next((device for device in devices if device is not ...), ""), ())
    in_device = [phrase for name in parts for phrase in _phrase(name, [_hardware(run, name) for run in runs])]
    found += _phrase("device", devices) or in_device
    packages = dict.fromkeys(name for run in runs for name in run.versions)
    return found + [
        phrase for name in packages for phrase in _phrase(name, [run.versions.get(name, ...) for run in runs])
    ]


def find_warnings(rows: list[Row], rungs: Mapping[str, dict]) -> list[str]:
    """Return warnings about other effective batches on the command line, and other numbers of training samples."""
    known = [row for row in rows if row.first.train_samples]
    exact = [row.first.train_samples for row in known if row.first.ours]
    fewest = [row.first.train_samples for row in known if not row.first.ours]
    samples = []
    if exact and max(exact + fewest) > min(exact):
        counts = (f"{row.label} {'' if row.first.ours else 'at least '}{row.first.train_samples:,}" for row in known)
        samples = [f"Warning: the runs have other numbers of training samples: {', '.join(counts)}."]
    phrases = _phrase("batch_size", _given_by_user([row.first for row in rows], "batch_size", rungs))
    return samples + [
        f"Warning: the effective batch differs by option ({phrase}), and so does the number of optimizer steps. "
        "Differences in loss and accuracy may come from it."
        for phrase in phrases
    ]


def differing_settings(rows: list[Row]) -> list[tuple[str, list[str]]]:
    """Return all settings that differ between rows, with each row's value as text."""
    runs = [row.first for row in rows]
    known = dict.fromkeys(name for run in runs for name in run.settings if name not in IGNORED)
    values = {name: _values(runs, name) for name in known}
    return [(name, list(map(show, each))) for name, each in values.items() if _phrase(name, each)]


def show(value) -> str:
    """Write a setting's value as on a command line, or a dash if it is unknown or has no effect."""
    return "–" if value is ... else settings.show(value)


def _values(runs: list[LoggedRun], name: str) -> list:
    """Return each run's value of a setting, or `...` if it is unknown or has no effect."""
    return [run.settings.get(name, ...) if _has_effect(name, run.settings) else ... for run in runs]


def _has_effect(name: str, values: Mapping) -> bool:
    """Return whether a setting has an effect on a run with these settings."""
    return name not in FACTS or is_met(FACTS[name].needs, values)


def _given_by_user(runs: list[LoggedRun], name: str, rungs: Mapping[str, dict]) -> list:
    """Return each run's value of a setting, or `...` if the rung set it.

    If one run overrides its rung, the values of all runs are returned.
    """
    values = _values(runs, name)
    if name not in RUNG_DECIDES:
        return values
    if name == "learning_rate":
        own = [own_rate(run.settings) or ... for run in runs]
    else:
        own = [rungs.get(run.name, {}).get(name, ...) for run in runs]
    pairs = list(zip(values, own, strict=True))
    overruled = any(value is not ... and mine not in (..., value) for value, mine in pairs)
    return values if overruled else [value if mine is ... else ... for value, mine in pairs]


def _hardware(run: LoggedRun, name: str):
    """Return a fact of the hardware, or `...` if it is unknown or if several ranks share the threads."""
    shared = name == "threads" and run.settings.get("ranks", 1) > 1
    return ... if shared else run.hardware.get(name, ...)


def _phrase(name: str, values: list) -> list[str]:
    """Return `name 1 / 2` if known values differ, else nothing; `...` is an unknown value."""
    known = [value for value in values if value is not ...]
    if name in PATHS:  # the folders of a user are ignored, and a log only has the last part
        short = any("/" not in str(value) for value in known)
        known = [value and "/".join(Path(value).parts[-1 if short else -3 :]) for value in known]
    distinct = list(dict.fromkeys(map(show, known)))
    return [f"{name} {' / '.join(distinct)}"] if len(distinct) > 1 else []


def _changes(first: LoggedRun, run: LoggedRun) -> list[str]:
    """Return the settings of the technique that differ from the first run's, with their new values.

    Settings that the first run does not use are listed unless they have their defaults.
    """
    changed = [name for name in TECHNIQUE if _phrase(name, _values([first, run], name))]
    defaults = vars(settings.Settings())
    for name in TECHNIQUE:
        known = name in defaults and run.settings.get(name, defaults[name]) != defaults[name]
        if known and _has_effect(name, run.settings) and not _has_effect(name, first.settings):
            changed.append(name)
    return [f"{name} {show(run.settings[name])}" for name in changed]


def _differ_only_in_seed(run: LoggedRun, other: LoggedRun) -> bool:
    """Return whether two runs are equal except for the seed and the figures."""
    compared = (run.settings.keys() | other.settings.keys()) - {*IGNORED, *DATA, "seed"}
    same = all(run.settings.get(name) == other.settings.get(name) for name in compared)
    # bytes differ from one start of a machine to the next; earlier versions recorded fewer facts
    facts = (run.hardware.keys() & other.hardware.keys()) - {"memory", "gpu_memory"}
    files = run.contents.keys() & other.contents.keys()
    parts = ("name", "data", "versions", "ours")
    return (
        same
        and all(run.hardware[name] == other.hardware[name] for name in facts)
        and all(run.contents[name] == other.contents[name] for name in files)
        and all(getattr(run, part) == getattr(other, part) for part in parts)
    )
