"""What computing activations again costs: none, all, or all but attention and matrix products; and their offload.

    python benchmarks/checkpointing.py [--tokens 512] [--rows 4] [--turns 5] [--threads 1] [settings of the model]

One forward and one backward pass of a model with random weights in bfloat16, in turns; the fastest of each counts. By
default a BLOOM of 4 layers, 512 wide. On a CPU seconds are the process's own, which others on it hardly change.
"""

import argparse
import json
import tempfile
from pathlib import Path
from time import perf_counter, process_time

import common  # first of all: it makes the project importable without an installation
import torch
from torch import nn

from fabric_ladder import Settings, build_model, parse_settings
from fabric_ladder.planning.predict import blank_datasets

SHAPE = {"model_type": "bloom", "vocab_size": 1024, "hidden_size": 512, "n_layer": 4, "n_head": 8}
CHECKPOINTED = ["--activation_checkpointing", "true"]
SIDES = {
    "all activations kept": [],
    "checkpointing": CHECKPOINTED,
    "activation offload": [*CHECKPOINTED, "--activation_offload", "true"],
    "selective checkpointing": [*CHECKPOINTED, "--selective_checkpointing", "true"],
}


def build(settings: Settings) -> nn.Module:
    """Return the model of some settings with random weights, on their device."""
    torch.manual_seed(settings.seed)
    return build_model(settings, blank_datasets(2)).to(settings.accelerator, torch.bfloat16)


def measure(model: nn.Module, inputs: dict[str, torch.Tensor]) -> float:
    """Return the seconds of a forward and a backward pass."""
    on_gpu = inputs["input_ids"].is_cuda
    clock = perf_counter if on_gpu else process_time
    start = clock()
    model(**inputs).loss.backward()
    if on_gpu:
        torch.cuda.synchronize()
    return clock() - start


def main() -> None:
    """Measure each side in turns, and print seconds and ratios."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    own, options = parser.parse_known_args()
    torch.set_num_threads(own.threads)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "bloom.json"
        path.write_text(json.dumps(SHAPE), encoding="utf-8")
        options = ["--model", str(path), "--from_scratch", "true", "--max_length", str(own.tokens), *options]
        settings = {side: parse_settings([*options, *more]) for side, more in SIDES.items()}
        models = {side: build(each) for side, each in settings.items()}
    device = next(iter(settings.values())).accelerator
    ids = torch.randint(4, SHAPE["vocab_size"], (own.rows, own.tokens), device=device)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": torch.zeros_like(ids[:, 0])}
    turns = [{side: measure(model, inputs) for side, model in models.items()} for _ in range(1 + own.turns)][1:]
    best = {side: min(turn[side] for turn in turns) for side in SIDES}
    plain = best["all activations kept"]
    rows = [[side, f"{seconds:.3f}", f"{seconds / plain:.2f}"] for side, seconds in best.items()]
    common.print_table([f"{own.rows} x {own.tokens} tokens, {device}", "seconds", "of the first"], rows)


if __name__ == "__main__":
    main()
