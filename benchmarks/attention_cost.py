"""One attention of BLOOM, forward and backward, at one length: seconds and peak memory, in a process of its own.

    python benchmarks/attention_cost.py --out FILE --attention fused --tokens 1024 [--rows 1] [--passes 3] [--model …]

The rows are full: without padding both ways do the same work. The loss shows that they compute the same.
"""

import argparse
import json
import statistics
from pathlib import Path
from time import perf_counter

import common  # noqa: F401 - first of all: it makes the project importable without an installation
import torch
from lightning import seed_everything

from fabric_ladder import Settings, build_model, parse_settings
from fabric_ladder.environment import peak_memory, reset_peak_memory
from fabric_ladder.planning.predict import blank_datasets


def measure(settings: Settings, tokens: int, rows: int, passes: int) -> dict:
    """Return the median seconds of a forward and a backward pass, after a warm-up, and the peak memory in bytes.

    The gradients are kept between the passes, as between the micro-batches of an effective batch.
    """
    device = torch.device(settings.accelerator)
    seed_everything(settings.seed, verbose=False)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    model = build_model(settings, blank_datasets(2)).to(device)
    if settings.precision == "bf16-true":
        model.to(torch.bfloat16)
    ids = torch.randint(4, model.config.vocab_size, (rows, tokens), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.arange(rows, device=device) % 2}
    reset_peak_memory(device)
    seconds = []
    for _ in range(1 + passes):
        start = perf_counter()
        loss = model(**inputs).loss
        loss.backward()
        value = loss.item()  # waits for the device
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(perf_counter() - start)
    return {
        "seconds": statistics.median(seconds[1:]),
        "peak_memory_bytes": peak_memory(device),
        "loss": value,
        "threads": torch.get_num_threads(),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--out", type=Path, required=True)
    own, options = parser.parse_known_args()
    settings = parse_settings([*options, "--max_length", str(own.tokens)])
    figures = measure(settings, own.tokens, own.rows, own.passes)
    own.out.write_text(json.dumps(figures), encoding="utf-8")
