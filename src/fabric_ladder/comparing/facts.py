"""What compared runs have trained, on which data and machine, and when."""

from fabric_ladder.comparing.logs import LoggedRun
from fabric_ladder.comparing.matching import Row
from fabric_ladder.runs.folder import short_name


def list_facts(rows: list[Row]) -> dict[str, str]:
    """Return the data set, model, samples, device, versions and date; different values are separated by slashes."""
    facts: dict[str, dict[str, None]] = {}
    for row in rows:
        for run in row.runs:
            for name, value in _facts(run).items():
                facts.setdefault(name, {})[value] = None
    return {name: " / ".join(values) for name, values in facts.items()}


def _facts(run: LoggedRun) -> dict[str, str]:
    """Return the known facts of a run."""
    ranks, hardware = run.settings.get("ranks", 1), run.hardware
    device = f"{ranks} x " * (ranks > 1) + str(hardware.get("gpu") or hardware.get("processor") or "")
    sizes = (("training", run.train_samples if run.ours else None), ("test", run.test_samples))
    facts = {
        "data set": short_name(run.settings.get("dataset", "")),
        "model": short_name(run.settings.get("model", "")),
        "samples": ", ".join(f"{number:,} {split} samples" for split, number in sizes if number),
        "device": f"{hardware['device']}: {device}" if "device" in hardware else "",
        "versions": ", ".join(f"{name} {version}" for name, version in run.versions.items()),
        "date": (run.begun or "")[:10],
    }
    return {name: value for name, value in facts.items() if value}


def title(rows: list[Row], facts: dict[str, str]) -> str:
    """Return a title: data set, model and compared rungs. `facts` are those of `list_facts`."""
    trained = " · ".join(facts[name] for name in ("data set", "model") if name in facts)
    labels = [row.label for row in rows]
    rungs = " against ".join(labels) if len(rows) < 3 else f"{labels[0]} and {len(rows) - 1} more"
    return f"{trained}: {rungs}" if trained else rungs
