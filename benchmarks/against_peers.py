"""Compare rungs with their peers on this machine's CPU; exit status 1 when a target is missed.

    python benchmarks/against_peers.py [--part minilm bloom attention] [--reviews N] [--repeats 5] [--threads 2]
    python benchmarks/against_peers.py --part minilm bloom --measure switches --repeats 1    Trainer, switch by switch
    python benchmarks/against_peers.py --part minilm bloom --measure cuts    rung 2, from one sample at a time to all

Parts:
    minilm     The pretrained all-MiniLM-L6-v2 on IMDb, up to 512 tokens.
    bloom      The BLOOM of against_blog.py, 6 layers from its config, up to 1,024 tokens.
    attention  The same BLOOM forward and backward, `--attention fused` against `eager`, at 256 to 2,048 tokens.

Sides of `minilm` and `bloom`: the blog's recipe (blog_recipe.py), Trainer with its defaults, Trainer with its best
switches, accelerate's plain loop, a bare PyTorch loop (peers.py), and the ladder: an unchanged script of src/ with at
most one more option, see `LADDER`. All have the same initial weights, reviews, effective batch of 16 reviews,
precision, Adam, number of optimizer steps and threads. They take turns in fresh processes, and the median of the
repeats counts. Weights, tokens, steps and threads of all sides must be equal, and the ladder's test loss must equal
that of the bare loop. The peers get tokenized texts; the blog pads all to the longest, and
its padding is not timed. Trainer and accelerate draw batches of their own and pad them to their longest; the ladder
sorts within its effective batch. transformers has eager attention only for BLOOM, so has every peer but the bare loop.

Peak memory is that of the process since the first batch, validation included, on all sides. The
recorded accuracy only shows that the sides learn equally: the training is too short for more.
"""

import argparse
import shlex
import sys
from functools import partial
from itertools import chain
from pathlib import Path

import common  # first import: it makes the project importable
import torch
from against_blog import BLOOM, model_options, prepare
from common import MEASURES, CannotMeasureError, alternate, medians, part_parser, run_parts, rung_command

OUT = common.RESULTS / "against_peers.json"
# for training: so many that a run's speed repeats within 5 %; half as many for validation and for the test
REVIEWS = {"minilm": 320, "bloom": 320}
PEERS = ("blog", "trainer", "trainer_best", "accelerate", "bare")
LADDER = {  # the fastest cuts on two cores; 1,024 tokens: a long review, or several that are shorter
    "minilm": ("2_grad_accum",),
    "minilm bf16-mixed": ("4_mixed_precision", "--micro_batch_tokens", "1024"),  # its own default on a CPU
    "bloom": ("2_grad_accum", "--micro_batch_tokens", "1024"),
}
BEST = {  # of Trainer on two cores, by --measure switches
    "minilm": ("micro_batch_1", "evaluate_1"),
    "minilm bf16-mixed": ("micro_batch_2", "group_by_length", "evaluate_1"),
    "bloom": ("micro_batch_1", "group_by_length", "evaluate_1"),
}
SIZES = ("micro_batch_16", "micro_batch_4", "micro_batch_2", "micro_batch_1")
SWITCHES = (  # what --measure switches tries, one group after the other; of a group at most one can be on
    SIZES,
    ("group_by_length",),
    SIZES,  # again: texts of like length pad little
    ("no_nan_filter",),
    ("foreach_adam",),
    ("compile",),
    ("evaluate_1", "evaluate_4", "evaluate_32"),  # judged by the samples/s of the evaluation
)
CUTS = (*(("--micro_batch_size", str(size)) for size in (1, 2, 4, 16)),
        *(("--micro_batch_tokens", str(tokens)) for tokens in (512, 1024, 2048, 4096)))  # fmt: skip
LENGTHS = (256, 512, 1024, 2048)
SPEED, MEMORY = "samples_per_second", "peak_memory_bytes"
ALIKE = {"parameters": 0, "tokens": 0, "updates": 0, "threads": 0, "weights": 1e-6, "test_loss": 1e-4}  # and tolerance
TARGETS = {  # (ratio, "min" or "max", bound); ratios are ladder / peer
    "training": [
        (f"trainer: {SPEED}", "min", 1.3),
        (f"trainer_best: {SPEED}", "min", 1.0),
        (f"trainer_best: {MEMORY}", "max", 1.0),
        (f"bare: {SPEED}", "min", 0.97),
    ],
    "attention": [
        ("seconds of eager / fused at 1024", "min", 1.0),
        ("peak memory of fused / eager at 1024", "max", 0.999),
        ("seconds of eager / fused at 2048", "min", 1.2),
    ],
}


def check_alike(figures: dict[str, list[dict]], *free: str) -> None:
    """Refuse sides that did different work; figures named in `free` may differ.

    Raises:
        RuntimeError: They differ in one of `ALIKE` by more than its relative tolerance.
    """
    for name, tolerance in ALIKE.items():
        if name in free:
            continue
        values = {side: [run[name] for run in runs if name in run] for side, runs in figures.items()}
        every = list(chain.from_iterable(values.values()))
        if every and max(every) - min(every) > tolerance * max(every):
            raise RuntimeError(f"the sides differ in {name}: {values}")


def take_turns(commands: dict[str, list[str]], args: argparse.Namespace) -> dict[str, list[dict]]:
    """Return the figures of every side's repeats."""
    sides = {side: partial(common.run_command, command, args.threads) for side, command in commands.items()}
    return alternate(args.repeats, **sides)


def draw(part: str, args: argparse.Namespace, folder: Path) -> tuple[list[str], dict]:
    """Draw the reviews; return the settings of all sides, and facts."""
    common.imdb_archive()
    reviews = args.reviews or REVIEWS[part]
    if reviews % 16:
        raise CannotMeasureError("--reviews must be a multiple of 16, the effective batch")
    options, facts = prepare(part, reviews, reviews // 2, folder, tested=reviews // 2)
    return [*options, "--precision", args.precision], facts | {"precision": args.precision}


def duel(part: str, args: argparse.Namespace, folder: Path) -> dict:
    """Measure all sides of `minilm` or `bloom`."""
    options, facts = draw(part, args, folder)
    ours, best = (known.get(f"{part} {args.precision}", known[part]) for known in (LADDER, BEST))
    ladder = rung_command(options, *ours)
    commands = {
        "blog": common.blog_command(folder / "texts", options),
        "trainer": common.peer_command("trainer", options),
        "trainer_best": common.peer_command("trainer", options, *best),
        "accelerate": common.peer_command("accelerate", options),
        "bare": common.peer_command("bare", ladder[1:]),
        "ladder": ladder,
    }
    commands = {side: command for side, command in commands.items() if side not in args.without}
    figures = take_turns(commands, args)
    check_alike(figures)
    middle = medians(figures)
    ratios = {
        f"{side}: {name}": middle["ladder"][name] / values[name]
        for side, values in middle.items()
        for name in MEASURES
        if side != "ladder"
    }
    return {
        "conditions": facts | {"trainer_best": best, "ladder": ours},
        "commands": {side: common.shown(command) for side, command in commands.items()},
        "repeats": figures,
        "medians": middle,
        "ratios": ratios,
    }


def find(part: str, args: argparse.Namespace, folder: Path) -> dict:
    """Find the fastest switches of Trainer, group by group."""
    tried = {}

    def measure(*switches: str) -> dict:
        name = " ".join(["trainer", *switches])
        tried.update(medians(take_turns({name: common.peer_command("trainer", options, *switches)}, args)))
        return tried[name]

    options, facts = draw(part, args, folder)
    best, chosen = measure(), ()
    for group in SWITCHES:
        for switch in group:
            switches = (*(other for other in chosen if other not in group), switch)
            figures = measure(*switches)
            name = f"evaluation_{SPEED}" if switch.startswith("evaluate") else SPEED
            if figures[name] > best[name]:
                best, chosen = figures, switches
    print(f"Trainer's best: {' '.join(chosen) or 'its defaults'}")
    return {"conditions": facts | {"trainer_best": chosen}, "medians": tried, "ratios": {}}


def cut_by_cut(part: str, args: argparse.Namespace, folder: Path) -> dict:
    """Measure rung 2 from one sample at a time to the whole effective batch; the cut changes no gradient."""
    options, facts = draw(part, args, folder)
    commands = {shlex.join(cut): rung_command(options, "2_grad_accum", *cut) for cut in CUTS}
    figures = take_turns(commands, args)
    check_alike(figures, *(["test_loss"] if part == "minilm" else []))  # another cut draws other dropout masks
    middle = medians(figures)
    alone = middle[shlex.join(CUTS[0])]
    ratios = {f"{cut}: {name}": run[name] / alone[name] for cut, run in middle.items() for name in (SPEED, MEMORY)}
    return {"conditions": facts, "repeats": figures, "medians": middle, "ratios": ratios}


def duel_of_attention(_: str, args: argparse.Namespace, folder: Path) -> dict:
    """Measure `attention`."""
    options = [*common.BASE, "--accelerator", "cpu", *model_options("bloom", folder)]
    script = [str(Path(__file__).with_name("operations.py")), "attention-cost"]
    commands = {
        f"{attention} {tokens}": [*script, "--attention", attention, "--tokens", str(tokens), *options]
        for tokens in LENGTHS
        for attention in ("eager", "fused")
    }
    figures = take_turns(commands, args)
    middle, ratios = medians(figures), {}
    for tokens in LENGTHS:
        eager, fused = middle[f"eager {tokens}"], middle[f"fused {tokens}"]
        if abs(eager["loss"] - fused["loss"]) > 1e-4:
            raise RuntimeError(f"at {tokens} tokens the losses differ: {eager['loss']} and {fused['loss']}")
        ratios[f"seconds of eager / fused at {tokens}"] = eager["seconds"] / fused["seconds"]
        ratios[f"peak memory of fused / eager at {tokens}"] = fused[MEMORY] / eager[MEMORY]
    return {
        "conditions": {"model": BLOOM, "rows": 1, "precision": "32-true"},
        "commands": {side: common.shown(command) for side, command in commands.items()},
        "repeats": figures,
        "medians": middle,
        "ratios": ratios,
    }


def main() -> int:
    """Measure the chosen parts and return the exit status."""
    parser = part_parser(__doc__, PARTS, 5, OUT)
    parser.add_argument("--measure", choices=("sides", *OTHERS), default="sides", help="of minilm and bloom, see above")
    parser.add_argument("--reviews", type=int, help=f"for training; default: {REVIEWS}")
    parser.add_argument("--without", nargs="+", choices=PEERS, default=[], help="peers to leave out, to save time")
    parser.add_argument("--precision", choices=("32-true", "bf16-mixed"), default="32-true", help="of all sides")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    measures, targets = {}, {}
    for part in args.part:
        words, measure, judged = [part], PARTS[part], TARGETS["attention" if part == "attention" else "training"]
        if part != "attention" and args.measure != "sides":
            words, measure, judged = [part, args.measure], OTHERS[args.measure], []
        if part != "attention" and args.precision != "32-true":
            words.append(args.precision)
        measures[name := " ".join(words)] = partial(measure, part, args)
        targets[name] = judged
    return run_parts(measures, args.out, targets)


PARTS = {"minilm": duel, "bloom": duel, "attention": duel_of_attention}
OTHERS = {"switches": find, "cuts": cut_by_cut}

if __name__ == "__main__":
    sys.exit(main())
