"""Compare rungs with their peers on this machine's CPU.

    python benchmarks/against_peers.py [--part minilm bloom attention] [--reviews N] [--repeats 5] [--threads 2]
    python benchmarks/against_peers.py --part minilm bloom --measure cuts    rung 2, from one sample at a time to all
    python benchmarks/against_peers.py --part minilm bloom --measure rung_1  rung 1 against a bare loop
    python benchmarks/against_peers.py --part bloom --measure checkpointing  what checkpointing costs (rungs 5, 7, 21)

Parts:
    minilm     The pretrained all-MiniLM-L6-v2 on IMDb, up to 512 tokens.
    bloom      A BLOOM of 6 layers from its config, up to 1,024 tokens.
    attention  The same BLOOM forward and backward, `--attention fused` against `eager`, at 256 to 2,048 tokens.

The sides of `minilm` and `bloom` are the peers of peers.py and the ladder: an unchanged script of src/, see `LADDER`.
They take turns in fresh processes, each turn beginning with another side, and the median of the repeats counts. Sides
that differ in weights, tokens, steps or threads are refused, and so is a test loss other than the bare loop's.
transformers has only eager attention for BLOOM, so only the ladder and the bare loop have another.

A part's name in the results file ends with the CPU's vectors unless they are AVX-512.

Peak memory is that of the process since the first batch, validation included. The training is too short for its
accuracy to mean more than that the sides learn equally.
"""

import argparse
from functools import partial
from itertools import chain, product
from pathlib import Path

import common  # first import: it makes the project importable
import torch
from common import (
    BASE,
    BLOOM,
    MEASURES,
    draw_reviews,
    model_options,
    part_parser,
    peer_command,
    rung_command,
    take_turns,
)

from fabric_ladder.techniques.advice import explain_errors

OUT = common.RESULTS / "against_peers.json"
PEERS = ("blog", "trainer", "trainer_best", "accelerate", "bare")
LADDER = {  # the fastest cuts on two cores
    "minilm": ("2_grad_accum",),
    "minilm bf16-mixed": ("4_mixed_precision", "--micro_batch_tokens", "1024"),
    "bloom": ("2_grad_accum", "--micro_batch_tokens", "1024"),
}
BEST = {  # of Trainer on two cores, found by trying one of the switches of peers.py after the other
    "minilm": ("micro_batch_1", "evaluate_1"),
    "minilm bf16-mixed": ("micro_batch_2", "group_by_length", "evaluate_1"),
    "bloom": ("micro_batch_1", "group_by_length", "evaluate_1"),
}
CUTS = [f"--micro_batch_size {size}" for size in (1, 2, 4, 16)]
CUTS += [f"--micro_batch_tokens {tokens}" for tokens in (512, 1024, 2048, 4096)]
KEEPING = ("5_low_precision", "7_grad_checkpointing", "21_selective_checkpointing")  # all activations, none, some
TOLERANCES = {"parameters": 0, "tokens": 0, "updates": 0, "threads": 0, "weights": 1e-6, "test_loss": 1e-4}


def check_alike(figures: dict[str, list[dict]], *free: str) -> None:
    """Raise RuntimeError if a figure of `TOLERANCES` differs by more than it allows; those named in `free` may."""
    for name, tolerance in TOLERANCES.items():
        values = {side: [run[name] for run in runs if name in run] for side, runs in figures.items()}
        every = list(chain.from_iterable(values.values()))
        if name not in free and every and max(every) - min(every) > tolerance * max(every):
            raise RuntimeError(f"the sides differ in {name}: {values}")


def duel(part: str, args: argparse.Namespace, folder: Path) -> dict:
    """Measure all sides of `minilm` or `bloom`."""
    options, conditions = draw_reviews(part, args.reviews, folder, args.precision)
    ours, best = (known.get(f"{part} {args.precision}", known[part]) for known in (LADDER, BEST))
    ladder = rung_command(options, *ours)
    peers = {side: peer_command(side, options) for side in ("blog", "trainer", "accelerate")}
    peers |= {"trainer_best": peer_command("trainer", options, *best), "bare": peer_command("bare", ladder[1:])}
    commands = {side: command for side, command in peers.items() if side not in args.without} | {"ladder": ladder}
    return {"conditions": conditions | {"trainer_best": best, "ladder": ours}} | _race(commands, args)


def compare_first(part: str, args: argparse.Namespace, folder: Path) -> dict:
    """Measure rung 1, one sample per step, against a bare loop."""
    options, conditions = draw_reviews(part, args.reviews, folder, args.precision)
    ladder = rung_command([*options, "--batch_size", "1"], "1_batch_size_1")
    return {"conditions": conditions} | _race({"bare": peer_command("bare", ladder[1:]), "ladder": ladder}, args)


def _race(commands: dict[str, list[str]], args: argparse.Namespace) -> dict:
    """Run all sides in turns; return their figures and the ratios of the ladder's medians to those of the others."""
    turns = take_turns(commands, args.repeats, args.threads)
    check_alike(turns["repeats"])
    medians = turns["medians"]
    ratios = {
        f"{side}: {name}": medians["ladder"][name] / values[name]
        for side, values in medians.items()
        for name in (*MEASURES, "cpu_seconds")
        if side != "ladder"
    }
    return turns | {"ratios": ratios}


def compare_rungs(rungs: dict[str, list[str]], part: str, args: argparse.Namespace, folder: Path) -> dict:
    """Measure rungs, with their options, that compute the same gradient."""
    options, conditions = draw_reviews(part, args.reviews, folder, args.precision)
    sides = {name: rung_command(options, *words) for name, words in rungs.items()}
    turns = take_turns(sides, args.repeats, args.threads)
    check_alike(turns["repeats"], *(["test_loss"] if part == "minilm" else []))  # each cut draws its dropout masks
    return {"conditions": conditions} | turns


def compare_attention(_: str, args: argparse.Namespace, folder: Path) -> dict:
    """Measure `attention`."""
    options = [*BASE, "--accelerator", "cpu", *model_options("bloom", folder)]
    script = [str(Path(__file__).with_name("operations.py")), "attention-cost"]
    lengths = (256, 512, 1024, 2048)
    sides = {
        f"{attention} {tokens}": [*script, "--attention", attention, "--tokens", str(tokens), *options]
        for tokens, attention in product(lengths, ("eager", "fused"))
    }
    turns = take_turns(sides, args.repeats, args.threads)
    ratios = {}
    for tokens in lengths:
        eager, fused = (turns["medians"][f"{attention} {tokens}"] for attention in ("eager", "fused"))
        if abs(eager["loss"] - fused["loss"]) > 1e-4:
            raise RuntimeError(f"at {tokens} tokens the losses differ: {eager['loss']} and {fused['loss']}")
        ratios[f"seconds of eager / fused at {tokens}"] = eager["seconds"] / fused["seconds"]
        ratios[f"peak memory of fused / eager at {tokens}"] = fused["peak_memory_bytes"] / eager["peak_memory_bytes"]
    return {"conditions": {"model": BLOOM, "rows": 1, "precision": "32-true"}} | turns | {"ratios": ratios}


DUELS = {
    "sides": duel,
    "rung_1": compare_first,
    "cuts": partial(compare_rungs, {cut: ["2_grad_accum", *cut.split()] for cut in CUTS}),
    "checkpointing": partial(compare_rungs, {rung: [rung, "--micro_batch_tokens", "2048"] for rung in KEEPING}),
}


def main() -> None:
    """Measure the chosen parts."""
    parser = part_parser(__doc__, ["minilm", "bloom", "attention"], 5, OUT)
    parser.add_argument("--measure", choices=DUELS, default="sides", help="of minilm and bloom, see above")
    parser.add_argument("--reviews", type=int, default=320, help="for training (default: %(default)s)")
    parser.add_argument("--without", nargs="+", choices=PEERS, default=[], help="peers to leave out, to save time")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true", help="of all sides")
    args = parser.parse_args()
    explain_errors()
    torch.set_num_threads(args.threads)
    measures = {}
    for part in args.part:
        words, measure = [part], compare_attention
        if part != "attention":
            kind = args.measure, args.precision, torch.backends.cpu.get_cpu_capability()
            words += [word for word in kind if word not in ("sides", "32-true", "AVX512")]
            measure = DUELS[args.measure]
        measures[" ".join(words)] = partial(measure, part, args)
    common.run_parts(measures, args.out)


if __name__ == "__main__":
    main()
