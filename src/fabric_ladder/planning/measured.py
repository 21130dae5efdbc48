"""Measured accuracies and speeds, from `measured.json`, which benchmarks/evidence_tables.py writes."""

import json
import math
from pathlib import Path

FILE = Path(__file__).with_name("measured.json")
MEASURED = json.loads(FILE.read_text(encoding="utf-8"))
SPEEDS: dict[str, float] = MEASURED["speeds"]["samples_per_second"]  # by the names of candidates
WITHIN_NOISE = 5  # points: costs that differ by less count as equal, since the seeds of a rung do too


def numerics(settings: dict) -> list:
    """Return the settings that change what a run can learn. Runs in which they are equal reach the same accuracy."""
    in_32_bits = settings["lora"] or settings["kahan_summation"] or settings["block_steps"]
    return [
        not in_32_bits and settings["precision"].endswith("16-true"),
        settings["optimizer"].replace("adamw", "adam"),
        settings["lora"] and (settings["lora_targets"] or "default", settings["quantization"]),
        settings["train_blocks"] if settings["block_steps"] is None else "in turn",
        settings["float8"],
        settings["batch_size"] == 1,
        settings.get("deepspeed") is not None,
    ]


def accuracy_cost(settings: dict) -> dict | None:
    """Return the record of the measured cost in accuracy, with `points` and `words`; None: it was not measured."""
    key = json.loads(json.dumps(numerics(settings)))
    return next((cost for cost in MEASURED["accuracy"] if cost["numerics"] == key), None)


def cost_rank(settings: dict) -> tuple[float, float]:
    """Return what orders accuracies: the cost in steps of `WITHIN_NOISE`, and the cost at the best learning rate.

    0 is no measured loss, and infinity an accuracy that was not measured.
    """
    cost = accuracy_cost(settings)
    return (math.ceil(cost["points"] / WITHIN_NOISE), cost["best"]) if cost else (math.inf, math.inf)
