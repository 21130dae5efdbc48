"""Measured accuracies and speeds, from `measured.json`, which benchmarks/evidence_tables.py writes."""

import json
import math
from pathlib import Path

from fabric_ladder.ladder import LADDER
from fabric_ladder.settings import Settings

FILE = Path(__file__).with_name("measured.json")
MEASURED = json.loads(FILE.read_text(encoding="utf-8"))
SPEEDS: dict[str, float] = MEASURED["speeds"]["samples_per_second"]  # by the names of candidates
WITHIN_NOISE = 5  # points: a step in the order of costs, about as large as the spread of a rung's seeds
READ_HERE = """precision strategy optimizer kahan_summation train_blocks block_steps lora quantization
deepspeed""".split()  # settings of techniques that `numerics` reads
ADAPTERS = "lora_rank lora_alpha dora".split()  # settings that every measured run has by default


def numerics(settings: dict) -> list:
    """Return what decides which measured accuracy a run has. A technique that is not named here counts by itself."""
    in_32_bits = settings["lora"] or settings["kahan_summation"] or settings["block_steps"]
    return [
        not in_32_bits and settings["precision"].endswith("16-true"),
        settings["optimizer"].replace("adamw", "adam"),
        settings["lora"] and (settings["lora_targets"] or "attention", settings["quantization"]),  # null in older runs
        settings["train_blocks"] if settings["block_steps"] is None else "in turn",
        settings["batch_size"] == 1,
        settings.get("deepspeed") is not None,
        *(["8-bit"] if settings["kahan_summation"] == "8-bit" else []),
        *(row.setting for row in LADDER if row.setting in settings and not row.exact and row.setting not in READ_HERE
          and settings[row.setting] not in (False, None, "no")),
    ]  # fmt: skip


def accuracy_cost(settings: dict) -> dict | None:
    """Return the record of the measured cost in accuracy, with `points` and `words`; None: it was not measured."""
    others = [name for name in ("task", *ADAPTERS) if settings.get(name) != getattr(Settings, name)]
    if others:
        return None
    key = json.loads(json.dumps(numerics(settings)))
    return next((cost for cost in MEASURED["accuracy"] if cost["numerics"] == key), None)


def cost_rank(settings: dict) -> tuple[float, float]:
    """Return what orders accuracies: the cost in steps of `WITHIN_NOISE`, and the cost at the best learning rate.

    0 is no measured loss, and infinity an accuracy that was not measured. The costs were measured with text
    classification; their order holds for all tasks.
    """
    cost = accuracy_cost(settings | {"task": Settings.task})
    return (math.ceil(cost["points"] / WITHIN_NOISE), cost["best"]) if cost else (math.inf, math.inf)
