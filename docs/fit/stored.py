"""The stored figures of docs/will_it_fit.md: data.js, which is JSON behind `const FIT = `."""

import json
from collections.abc import Iterator
from pathlib import Path

DATA = Path(__file__).parent / "data.js"
START = "const FIT = "


def read() -> dict:
    """Return the stored figures, with all numbers of each peak."""
    data = json.loads(DATA.read_text(encoding="utf-8").removeprefix(START).rstrip(";\n"))
    for rows in _rows(data):
        for key, peaks in rows.items():
            rows[key] = [[*peaks[0][: 6 - len(peak)], *peak] for peak in peaks]
    return data


def write(data: dict) -> None:
    """Write figures. A peak with the weights, gradients and optimizer state of the first one has only the rest."""
    data = json.loads(json.dumps(data))
    for rows in _rows(data):
        for key, peaks in rows.items():
            rows[key] = [peaks[0], *(peak[3:] if peak[:3] == peaks[0][:3] else peak for peak in peaks[1:])]
    DATA.write_text(f"{START}{json.dumps(data, separators=(',', ':'))};\n", encoding="utf-8")


def _rows(data: dict) -> Iterator[dict[str, list]]:
    """Yield the peaks by row, for each model, task and length."""
    for model in data["models"].values():
        for lengths in model["tasks"].values():
            yield from lengths.values()
