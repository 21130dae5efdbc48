"""Name the best values of a search by their validation."""

import statistics
from pathlib import Path

from fabric_ladder.errors import read_outside

Tried = list[
    tuple[dict[str, str], list[Path | None]]
]  # values of settings as words, and a folder per seed; None: failed


def best_line(rung: str, metric: str, tried: Tried) -> str:
    """Return a line with the best values of a rung by the mean validation `loss` or `accuracy` over the seeds."""
    means = {
        number: statistics.fmean(_validation(folder, metric) for folder in folders)
        for number, (_, folders) in enumerate(tried)
        if folders and all(folders)
    }
    if not means:
        return f"{rung}: no value has a result for every seed"
    best = (min if metric == "loss" else max)(means, key=means.get)
    values = tried[best][0]
    words = " ".join(f"--{name} {value}" for name, value in values.items())
    line = f"Best of {rung}: {words}, by the validation {metric} {means[best]:.4g}"
    return line + "".join(_at_the_edge(name, value, tried) for name, value in values.items())


def _validation(folder: Path, metric: str) -> float:
    """Return the validation of the tested weights of a finished run; an accuracy is in percent."""
    results = read_outside(folder / "run.json")["results"]
    best = results.get("best_validation")
    value = best["value"] if best else results["epochs"][-1][f"validation_{metric}"]
    return value * 100 if metric == "accuracy" else value


def _at_the_edge(name: str, value: str, tried: Tried) -> str:
    """Return a hint if the value is the smallest or the largest of at least three numbers."""
    try:
        numbers = sorted({float(values[name]) for values, _ in tried})
    except ValueError:
        return ""  # the values are not numbers
    if len(numbers) < 3 or float(value) not in (numbers[0], numbers[-1]):
        return ""
    side = "smallest" if float(value) == numbers[0] else "largest"
    return f"; {value} is the {side} --{name} tried, so try beyond it"
