"""Which runs may be compared, and which are one row: the same rung with several seeds."""

import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from fabric_ladder.comparing.logs import LoggedRun

# Every setting but the seed is in one of four lists. Where a run was started and what it left behind; `ranks` counts
# devices and machines; what becomes of a NaN is without effect unless there is one, and then it is printed.
IGNORED = (
    "name config runs_dir data_dir cache_dir log_every save logger check_only accelerator threads save_every keep "
    "resume max_time devices num_nodes on_nan nan_limit predict_memory"
).split()
# What leaves a run's figures as they are, whatever else is asked of it.
WITHOUT_EFFECT = "notices check_only runs_dir logger save save_every keep resume max_time".split()
# What the data's fingerprint covers; named where fingerprints differ, or are unknown.
DATA = (
    "dataset text_column label_column column_names image_column validation_file test_file train_samples "
    "validation_samples test_samples split_seed tokenizer max_length image_size resize_to random_flip prompt_template "
    "train_on_inputs bad_samples"
).split()
LORA = "lora_rank lora_alpha lora_dropout lora_targets dora rslora".split()
RATES = ("sgd_learning_rate", "lora_learning_rate")
# In the order in which changes are told.
TECHNIQUE = (
    "batch_size optimizer kahan_summation step_in_backward optimizer_offload precision matmul_precision float8 "
    "micro_batch_size micro_batch_tokens packing pack_rows pad_to_multiple_of eval_batch_tokens loss_chunk "
    "activation_checkpointing activation_offload selective_checkpointing compile deterministic lora"
).split()
TECHNIQUE += [*LORA, *"quantization offload deepspeed ranks num_workers attention learning_rate schedule".split()]
# Of the technique where the rung itself sets them; given by hand, they must be alike.
OF_RUNGS = ("batch_size", "learning_rate", "schedule")
ALIKE = ("task", "model", "from_scratch", "load", "epochs", *RATES, "warmup_steps", "max_grad_norm")
HARDWARE = {"cuda": ("gpu",), "mps": ("processor",), "cpu": ("processor", "cores", "threads")}
ASKED = {"data": "the content of the data", "model": "model", "seed": "seed", "epochs": "epochs"}
ASKED |= {"batch_size": "effective batch", "learning_rate": "learning rate", "hardware": "hardware"}
ASKED |= {"versions": "versions"}  # what to name where a source does not tell it
Z95 = statistics.NormalDist().inv_cdf(0.975)


@dataclass
class Row:
    """Runs of one rung that differ in their seed alone.

    Attributes:
        runs: At least one.
        label: Its name, unlike those of other rows.
        changed: Settings of the technique that differ from the first row's.
    """

    runs: list[LoggedRun]
    label: str = ""
    changed: str = ""

    @property
    def first(self) -> LoggedRun:
        """The run whose settings stand for all."""
        return self.runs[0]

    @property
    def confusion(self) -> pd.DataFrame | None:
        """Test samples by true (index) and predicted class, summed over the seeds; None unless all runs have it."""
        if not all(run.classes for run in self.runs):
            return None
        names = self.first.classes["names"]
        return sum(pd.DataFrame(run.classes["confusion"], names, names) for run in self.runs)

    @property
    def seeds(self) -> list[str]:
        """The seeds that are known."""
        return [str(run.settings["seed"]) for run in self.runs if "seed" in run.settings]

    def values(self, figure: str) -> list[float]:
        """Return the figure of every run that has it."""
        return [run.figures[figure] for run in self.runs if figure in run.figures]

    def mean(self, figure: str) -> float | None:
        """Return the mean over the seeds, None unless all runs have the figure."""
        values = self.values(figure)
        return statistics.fmean(values) if len(values) == len(self.runs) else None

    def spread(self, figure: str) -> float | None:
        """Return the sample standard deviation (n - 1) over the seeds, None for a single run."""
        values = self.values(figure)
        if len(values) != len(self.runs) or len(values) < 2 or not all(map(math.isfinite, values)):
            return None
        return statistics.stdev(values)

    @property
    def interval(self) -> tuple[float, float] | None:
        """Wilson's 95 % interval of the test accuracy in percent, None where the test samples are not known.

        Of several seeds it is that of their mean on the one test set: the seeds do not make the test set larger.
        """
        mean, sizes = self.mean("test_accuracy"), {run.test_samples for run in self.runs}
        if mean is None or len(sizes) != 1 or not (n := sizes.pop()):
            return None
        low, high = wilson_interval(mean / 100, n)
        return low * 100, high * 100


def wilson_interval(share: float, n: int, z: float = Z95) -> tuple[float, float]:
    """Return the confidence interval of a binomial share, from 0 to 1.

    Formula: E. B. Wilson, Probable inference, the law of succession, and statistical inference, Journal of the American
    Statistical Association 22 (1927), 209-212, https://doi.org/10.1080/01621459.1927.10502953.

    Args:
        share: Share of successes, from 0 to 1.
        n: Number of trials, at least 1.
        z: Quantile of the normal distribution; the default gives 95 %.
    """
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, centre - half), min(1.0, centre + half)


def make_rows(runs: list[LoggedRun]) -> list[Row]:
    """Put the seeds of a rung into one row each, and say what changes from row to row.

    A second run of a seed is a row of its own: it would narrow the spread without telling anything about seeds.
    """
    rows: list[Row] = []
    for run in runs:
        seed = run.settings.get("seed")
        for row in rows:
            others = [other.settings.get("seed") for other in row.runs]
            if seed is not None and None not in others and seed not in others and _alike(run, row.first):
                row.runs.append(run)
                break
        else:
            rows.append(Row([run]))
    for row, name in zip(rows, _labels(rows), strict=True):
        row.label = name
        row.changed = "; ".join(_changes(rows[0].first, row.first)) if row is not rows[0] else "reference"
        untold = any("precision" not in run.settings for run in (rows[0].first, row.first))
        row.changed = row.changed or ("not told" if untold else "the script alone")
    return rows


def _labels(rows: list[Row]) -> list[str]:
    """Name each row by its rung; where several have one name, by the run's number too, or by the whole source."""
    runs = [row.first for row in rows]
    forms = (
        lambda number: runs[number].name,
        lambda number: f"{runs[number].name}/{Path(runs[number].source).name}",
        lambda number: f"{runs[number].name} ({runs[number].source})",
        lambda number: f"{runs[number].name} ({runs[number].source}, {number + 1})",
    )
    labels = []
    for run in runs:
        alike = [other for other, its in enumerate(runs) if its.name == run.name]
        form = next(form for form in forms if len(set(map(form, alike))) == len(alike))
        labels.append(form(len(labels)))
    return labels


def find_differences(rows: list[Row], rungs: Mapping[str, dict]) -> list[str]:
    """Return what differs between rows beyond their technique, a phrase for each.

    Args:
        rows: To be compared.
        rungs: By name, the settings that each rung sets itself.
    """
    runs = [row.first for row in rows]
    found = _phrase("seed", [", ".join(sorted(row.seeds, key=int)) or ... for row in rows])
    in_data = [phrase for name in DATA for phrase in _phrase(name, _values(runs, name))]
    if len({run.data for run in runs if run.data}) > 1:
        found.append(f"data ({'; '.join(in_data) or 'another content'})")
    elif not all(run.data for run in runs):
        found += in_data
    listed = {*IGNORED, *DATA, *TECHNIQUE, *ALIKE, "seed"}
    later = [name for run in runs for name in run.settings if name not in listed]  # of a later version
    for name in dict.fromkeys([*ALIKE, *OF_RUNGS, *later]):
        found += _phrase(name, _given(runs, name, rungs))
    devices = [run.hardware.get("device", ...) for run in runs]
    parts = HARDWARE.get(next((device for device in devices if device is not ...), ""), ())
    in_device = [phrase for name in parts for phrase in _phrase(name, [_hardware(run, name) for run in runs])]
    found += _phrase("device", devices) or in_device
    packages = dict.fromkeys(name for run in runs for name in run.versions)
    return found + [
        phrase for name in packages for phrase in _phrase(name, [run.versions.get(name, ...) for run in runs])
    ]


def find_unknown(rows: list[Row]) -> list[str]:
    """Return notices about what makes runs comparable and some of them do not tell."""
    told: dict[tuple, list[str]] = {}
    for row in rows:
        run = row.first
        known = run.settings | {"data": run.data, "hardware": run.hardware, "versions": run.versions}
        missing = tuple(text for name, text in ASKED.items() if not known.get(name) and known.get(name) != 0)
        if missing:
            told.setdefault(missing, []).append(row.label)
    return [
        f"Not told by {', '.join(labels)}: {', '.join(missing)}. Taken to be as in the other runs."
        for missing, labels in told.items()
    ]


def differing_settings(rows: list[Row]) -> list[tuple[str, list[str]]]:
    """Return all settings that differ between rows, with each row's value as text."""
    runs = [row.first for row in rows]
    names = dict.fromkeys(name for run in runs for name in run.settings if name not in IGNORED)
    values = {name: _values(runs, name) for name in names}
    return [(name, list(map(show, each))) for name, each in values.items() if _phrase(name, each)]


def show(value) -> str:
    """Write a setting's value as on a command line; a dash if it is not known, or without effect."""
    if value is ...:
        return "–"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _values(runs: list[LoggedRun], name: str) -> list:
    """Return each run's value of a setting: `...` where it is unknown or without effect, None where it is none."""

    def used(run: LoggedRun) -> bool:
        return bool(run.settings.get("lora")) if name in LORA else name not in RATES or name == _rate(run)

    return [run.settings.get(name, ...) if used(run) else ... for run in runs]


def _rate(run: LoggedRun) -> str | None:
    """Name the setting that takes the place of the learning rate of Adam on all weights."""
    of_lora = "lora_learning_rate" if run.settings.get("lora") else None
    return "sgd_learning_rate" if run.settings.get("optimizer") == "sgd" else of_lora


def _given(runs: list[LoggedRun], name: str, rungs: Mapping[str, dict]) -> list:
    """Return each run's value of a setting, `...` where it is the rung's own; once one is not, all are given."""
    values = _values(runs, name)
    if name not in OF_RUNGS:
        return values
    if name == "learning_rate":
        own = [run.settings.get(_rate(run), ...) for run in runs]
    else:
        own = [rungs.get(run.name, {}).get(name, ...) for run in runs]
    pairs = list(zip(values, own, strict=True))
    overruled = any(value is not ... and mine not in (..., value) for value, mine in pairs)
    return values if overruled else [value if mine is ... else ... for value, mine in pairs]


def _hardware(run: LoggedRun, name: str):
    """Return a fact of the hardware, `...` if unknown; several ranks share the threads out: no other hardware."""
    shared = name == "threads" and run.settings.get("ranks", 1) > 1
    return ... if shared else run.hardware.get(name, ...)


def _phrase(name: str, values: list) -> list[str]:
    """Return `name 1 / 2` if known values differ, else nothing; `...` stands for what is not known."""
    known = [value for value in values if value is not ...]
    if name in ("model", "dataset", "tokenizer", "validation_file", "test_file"):
        # One model in two homes is one. A log tells the last part alone.
        short = any("/" not in str(value) for value in known)
        known = [value and "/".join(Path(value).parts[-1 if short else -3 :]) for value in known]
    distinct = list(dict.fromkeys(map(show, known)))
    return [f"{name} {' / '.join(distinct)}"] if len(distinct) > 1 else []


def _changes(first: LoggedRun, run: LoggedRun) -> list[str]:
    """Name the settings of the technique that differ from the first run's, with their new values."""
    names = [name for name in TECHNIQUE if _phrase(name, _values([first, run], name))]
    if run.settings.get("lora") and first.settings.get("lora") is False:
        names += ["lora_rank"] if "lora_rank" in run.settings else []
        names += [name for name in ("dora", "rslora") if run.settings.get(name)]
    return [f"{name} {show(run.settings[name])}" for name in names]


def _alike(run: LoggedRun, other: LoggedRun) -> bool:
    """Whether two runs are the same in everything but the seed."""
    names = (run.settings.keys() | other.settings.keys()) - {*IGNORED, *DATA, "seed"}
    same = all(run.settings.get(name) == other.settings.get(name) for name in names)
    sizes = ("memory", "gpu_memory")  # in bytes, which differ from one start of a machine to the next
    devices = [{key: value for key, value in each.hardware.items() if key not in sizes} for each in (run, other)]
    parts = ("name", "data", "versions", "from_text", "ours")
    return same and devices[0] == devices[1] and all(getattr(run, part) == getattr(other, part) for part in parts)
