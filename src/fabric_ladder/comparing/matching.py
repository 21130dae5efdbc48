"""Which runs may be compared, and which are one row: the same rung with several seeds."""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

from fabric_ladder.comparing.logs import LoggedRun

# Where a run was started and what it left behind; `ranks` counts devices and machines; what becomes of a NaN is without
# effect unless there is one, and then it is printed; rates that `learning_rate` was taken from.
IGNORED = set(
    "name config runs_dir data_dir cache_dir log_every save logger check_only accelerator threads save_every keep "
    "resume max_time devices num_nodes on_nan nan_limit sgd_learning_rate lora_learning_rate "
    "predict_memory".split()
)
# What the data's fingerprint covers; named where fingerprints differ, or are unknown.
DATA = (
    "dataset text_column label_column column_names image_column validation_file test_file train_samples "
    "validation_samples test_samples split_seed tokenizer max_length prompt_template train_on_inputs bad_samples"
).split()
LORA = "lora_rank lora_alpha lora_dropout lora_targets dora rslora".split()
TECHNIQUE = (
    "optimizer precision matmul_precision micro_batch_size micro_batch_tokens packing pad_to_multiple_of "
    "eval_batch_tokens loss_chunk activation_checkpointing compile lora"
).split()
TECHNIQUE += [*LORA, *"quantization offload deepspeed ranks num_workers attention".split()]
# What another optimizer, or adapters, need to be tuned anew: then part of the technique, otherwise a difference.
TUNED = ("learning_rate", "schedule", "warmup_steps", "max_grad_norm")
HARDWARE = {"cuda": ("gpu",), "cpu": ("processor", "cores", "threads")}
ASKED = {"data": "the content of the data", "model": "model", "seed": "seed", "epochs": "epochs"}
ASKED |= {"batch_size": "effective batch", "learning_rate": "learning rate", "hardware": "hardware"}
ASKED |= {"versions": "versions"}  # what to name where a source does not tell it


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
        row.changed = row.changed or ("not told" if _untold(rows[0].first, row.first) else "the script alone")
    return rows


def _labels(rows: list[Row]) -> list[str]:
    """Name each row by its rung; where several have one name, by the run's number too, or by the whole source."""
    runs = [row.first for row in rows]
    shortest = [run.name for run in runs]
    longest = [f"{run.name} ({run.source})" for run in runs]
    candidates = [shortest, [f"{run.name}/{Path(run.source).name}" for run in runs], longest]
    labels: list[str] = []
    for index, name in enumerate(shortest):
        alike = [other for other, its in enumerate(shortest) if its == name]
        telling = (names for names in candidates if len({names[other] for other in alike}) == len(alike))
        first = label = next(telling, longest)[index]
        number = 2
        while label in labels:
            label, number = f"{first} ({number})", number + 1
        labels.append(label)
    return labels


def find_differences(rows: list[Row]) -> list[str]:
    """Return what differs between rows beyond their technique, a phrase for each."""
    runs = [row.first for row in rows]
    seeds = [sorted(run.settings["seed"] for run in row.runs if "seed" in run.settings) for row in rows]
    found = _phrases({"seed": [", ".join(map(str, each)) or ... for each in seeds]})
    in_data = _phrases({name: _settings(runs, name) for name in DATA})
    if len({run.data for run in runs if run.data}) > 1:
        found.append(f"data ({'; '.join(in_data) or 'another content'})")
    elif not all(run.data for run in runs):
        found += in_data
    known = {*IGNORED, *DATA, *TECHNIQUE, "seed"}
    for name in dict.fromkeys(name for run in runs for name in run.settings if name not in known):
        found += _untuned(runs, name) if name in TUNED else _phrases({name: _settings(runs, name)})
    devices = [run.hardware.get("device", ...) for run in runs]
    parts = HARDWARE.get(next((device for device in devices if device is not ...), ""), ())
    parts = {name: [run.hardware.get(name, ...) for run in runs] for name in parts}
    found += _phrases({"device": devices}) or _phrases(parts)
    packages = dict.fromkeys(name for run in runs for name in run.versions)
    return found + _phrases({name: [run.versions.get(name, ...) for run in runs] for name in packages})


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
    names = [name for name in dict.fromkeys(name for run in runs for name in run.settings) if name not in IGNORED]
    table = []
    for name in names:
        values = _settings(runs, name)
        if _phrases({name: values}):
            told = [show(value) if name in run.settings else "unknown" for run, value in zip(runs, values, strict=True)]
            table.append((name, told))
    return table


def show(value) -> str:
    """Write a setting's value as on a command line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return "none" if value is None else str(value)


def _settings(runs: list[LoggedRun], name: str) -> list:
    """Return each run's value of a setting: `...` where it is not known, None where it is known to be none."""
    # of adapters it means nothing where there are none
    return [run.settings.get(name, ...) if run.settings.get("lora") or name not in LORA else ... for run in runs]


def _phrases(values: dict[str, list]) -> list[str]:
    """Return `name 1 / 2` for each name whose known values differ; `...` stands for what is not known."""
    phrases = []
    for name, each in values.items():
        known = [value for value in each if value is not ...]
        if name in ("model", "dataset", "tokenizer", "validation_file", "test_file"):
            # One model in two homes is one. A log tells the last part alone.
            short = any("/" not in str(value) for value in known)
            known = [value and "/".join(Path(value).parts[-1 if short else -3 :]) for value in known]
        distinct = list(dict.fromkeys(map(show, known)))
        phrases += [f"{name} {' / '.join(distinct)}"] if len(distinct) > 1 else []
    return phrases


def _untuned(runs: list[LoggedRun], name: str) -> list[str]:
    """Return the phrase for runs of one optimizer, all with or all without adapters, that differ in a setting."""
    groups: dict[tuple, list] = {}
    for run in runs:
        groups.setdefault((run.settings.get("optimizer"), run.settings.get("lora")), []).append(run)
    return [phrase for group in groups.values() for phrase in _phrases({name: _settings(group, name)})][:1]


def _changes(first: LoggedRun, run: LoggedRun) -> list[str]:
    """Name the settings of the technique that differ from the first run's, with their new values."""
    pair = [first, run]
    tuned = [name for name in TUNED if not _untuned(pair, name)]
    names = [name for name in (*TECHNIQUE, *tuned) if _phrases({name: _settings(pair, name)})]
    if run.settings.get("lora") and first.settings.get("lora") is False:
        names += ["lora_rank"] if "lora_rank" in run.settings else []
        names += [name for name in ("dora", "rslora") if run.settings.get(name)]
    return [f"{name} {show(run.settings[name])}" for name in names]


def _untold(first: LoggedRun, run: LoggedRun) -> bool:
    return "precision" not in first.settings or "precision" not in run.settings


def _alike(run: LoggedRun, other: LoggedRun) -> bool:
    """Whether two runs are the same in everything but the seed."""
    names = (run.settings.keys() | other.settings.keys()) - IGNORED - set(DATA) - {"seed"}
    same = all(run.settings.get(name) == other.settings.get(name) for name in names)
    sizes = ("memory", "gpu_memory")  # in bytes, which differ from one start of a machine to the next
    devices = [{key: value for key, value in each.hardware.items() if key not in sizes} for each in (run, other)]
    parts = ("name", "data", "versions", "from_text", "ours")
    return same and devices[0] == devices[1] and all(getattr(run, part) == getattr(other, part) for part in parts)
