"""The duels on one GPU: BLOOM-560m's shape, random weights, reviews of IMDb up to 1,024 tokens, effective batch 16.

    python benchmarks/gpu_duels.py --part attention blog trainer      in parts of less than ten minutes each,
    python benchmarks/gpu_duels.py --part rung2                       as little as --only NAME, with --reviews fewer
    python benchmarks/gpu_duels.py --part rung3 rung4 rung5 batch64 profile
    python benchmarks/gpu_duels.py --rehearse      the same commands on the CPU, with a tiny model and 32 reviews

Parts:
    attention  Fused against eager, forward and backward, bf16, two rows of 256 to 2,048 tokens: time, peak memory.
    blog       The blog's recipe in the precisions of rungs 2, 4 and 5.
    trainer    transformers' Trainer, switch by switch: bf16 as autocast and as weights, TF32, length grouping,
               compile. The fastest of a precision is "Trainer's best" of it.
    rung2 …    Rungs 2 to 5 with one sample at a time, and with 4,096, 16,384 and 65,536 tokens.
    batch64    Rungs 4 and 5, effective batch 64.
    profile    The ten longest kinds of work of the fastest entry so far, in words; also as gpu_profile.txt.

Every entry is a process of its own, kept in the results file with its command; entries that are not run stay in it. An
entry that fails is recorded with its error. After the run, all entries on this GPU with as many reviews are judged; the
exit status is 1 when a target is missed.

`epoch_seconds` extrapolates to the 35,000 reviews of an epoch: the seconds of the training, with what torch.compile,
the trial of the longest batch and the first batches took, and for the reviews that are missing the rate of the second
half. `mfu` follows gpu_ladder.py; `late_mfu` is that of the second half, and is what is judged. Trainer's attention is
eager: transformers has no other for BLOOM. The ladder's entry that meets it is the fastest of the same precision with
no more peak memory.
"""

import argparse
import json
import shlex
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common  # first of all: it makes the project importable without an installation
import gpu_ladder
import numpy as np
import torch
from against_peers import LENGTHS, measure_side, rung_command
from duel import judge
from gpu_ladder import peak_flops, precision_of, training_flops

from fabric_ladder import parse_settings
from fabric_ladder.checks import mixed_precision
from local_dataset_utilities import DataSettings, load_datasets

OUT = common.RESULTS / "gpu_duels.json"
PROFILE = "gpu_profile.txt"
EPOCH = 35_000  # reviews
RUNGS = {"rung2": "2_grad_accum", "rung3": "3_torch_compile", "rung4": "4_mixed_precision", "rung5": "5_low_precision"}
CUTS = {"1_sample": ("--micro_batch_size", "1")} | {
    f"{tokens}_tokens": ("--micro_batch_tokens", str(tokens)) for tokens in (4096, 16384, 65536)
}
GROUPED = ("micro_batch_16", "group_by_length")
FAST = (*GROUPED, "no_nan_filter", "worker")
TRAINER = {  # name: switches; the precision is added
    "mixed": {"defaults": (), "16": GROUPED[:1], "grouped": GROUPED, "fast": FAST, "compiled": (*FAST, "compile")},
    "bf16-true": {"fast": FAST, "compiled": (*FAST, "compile")},
    "32-true": {"fast": (*FAST, "tf32")},
}
GPU_ONLY = ("tf32", "compile")  # compile works on a CPU too, but takes minutes
LADDER = tuple(RUNGS.values())  # how the names of its entries begin
PARTS = ("attention", "blog", "trainer", *RUNGS, "batch64", "profile")
COLUMNS = ("samples_per_second", "late_samples_per_second", "epoch_seconds", "peak_memory_GB", "mfu", "late_mfu")
TARGETS = [
    ("epoch of the blog's recipe / ladder, same precision", "min", 15.0),
    ("epoch of Trainer's best / ladder, same precision, no more peak memory", "min", 1.3),
    ("late MFU at effective batch 64", "min", 0.5),
    ("seconds of an epoch of 35,000 reviews, EXTRAPOLATED", "max", 60.0),
]


def entries(part: str, options: list[str], texts: Path, rehearse: bool) -> dict[str, list[str]]:
    """Return a part's entries: their names and commands."""
    if part == "profile":  # comes last, of what has been measured
        return {}
    if part == "attention":
        script = str(Path(__file__).with_name("attention_cost.py"))
        more = ["--rows", "2", "--passes", "2" if rehearse else "20", *options, "--precision", "bf16-true"]
        return {
            f"attention-{kind}-{tokens}": [script, "--kind", kind, "--tokens", str(tokens), *more]
            for tokens in LENGTHS
            for kind in ("eager", "fused")
        }
    if part == "blog":
        return {
            f"blog-{precision}": common.blog_command(texts, "max_length", [*options, "--precision", precision])
            for precision in ("32-true", mixed_precision(), "bf16-true")
        }
    if part == "trainer":
        runs = {}
        for precision, sets in TRAINER.items():
            precision = mixed_precision() if precision == "mixed" else precision
            for name, switches in sets.items():
                switches = [switch for switch in switches if not (rehearse and switch in GPU_ONLY)]
                command = common.peer_command("trainer", [*options, "--precision", precision], *switches)
                runs[f"trainer-{precision}-{name}"] = command
        return runs
    if part == "batch64":
        more = [*options, "--batch_size", "64"]
        return {
            f"{RUNGS[rung]}-{cut}-batch64": rung_command(more, RUNGS[rung], *CUTS[cut])
            for rung in ("rung4", "rung5")
            for cut in ("16384_tokens", "65536_tokens")
        }
    return {f"{RUNGS[part]}-{name}": rung_command(options, RUNGS[part], *cut) for name, cut in CUTS.items()}


def extrapolate(figures: dict, config: dict, lengths: np.ndarray, peak: float | None) -> None:
    """Add an epoch's seconds and the model FLOPs utilisation to the figures of a training.

    Raises:
        RuntimeError: It trained other texts.
    """
    if figures["tokens"] != lengths.sum():
        raise RuntimeError(f"{figures['tokens']} tokens were trained instead of {lengths.sum()}")
    late = figures.setdefault("late_samples_per_second", figures["samples_per_second"])  # the blog's rate is one
    flops = training_flops(figures["parameters"], config, lengths)
    begun = figures.get("seconds_to_last_step", figures["training_seconds"])
    figures["epoch_seconds"] = begun + (EPOCH - len(lengths)) / late
    figures["peak_memory_GB"] = figures["peak_memory_bytes"] / 1e9
    figures["mfu"] = flops / figures["training_seconds"] / peak if peak else None
    figures["late_mfu"] = flops / len(lengths) * late / peak if peak else None


def fastest(figures: dict[str, dict], *starts: str, precision: str = "") -> str | None:
    """Return the entry of the shortest epoch among those of effective batch 16 whose names start so."""
    chosen = [
        name
        for name in figures
        if name.startswith(starts) and not name.endswith("batch64") and precision in ("", precision_of(name))
    ]
    return min(chosen, key=lambda name: figures[name]["epoch_seconds"], default=None)


def compare(figures: dict[str, dict]) -> dict[str, float]:
    """Return the ratios that the entries so far allow: peer by peer, and those of the targets.

    The targets' precision is that of the ladder's fastest entry.
    """
    ratios, ours = {}, fastest(figures, *LADDER)
    for precision in sorted({precision_of(name) for name in figures if name.startswith(LADDER)}):
        for target, start in ((TARGETS[0][0], "blog-"), (TARGETS[1][0], "trainer-")):
            if not (peer := fastest(figures, start, precision=precision)):
                continue
            most = figures[peer]["peak_memory_bytes"] if start == "trainer-" else float("inf")
            lean = {name: run for name, run in figures.items() if run["peak_memory_bytes"] <= most}
            mine = fastest(lean, *LADDER, precision=precision)
            ratio = figures[peer]["epoch_seconds"] / figures[mine]["epoch_seconds"] if mine else 0.0
            ratios[f"epoch of {peer} / {mine or 'nothing as lean'}"] = ratio
            if precision == precision_of(ours):
                ratios[target] = ratio
    if large := [run["late_mfu"] for name, run in figures.items() if name.endswith("batch64") and run["late_mfu"]]:
        ratios[TARGETS[2][0]] = max(large)
    if ours:
        ratios[TARGETS[3][0]] = figures[ours]["epoch_seconds"]
    return ratios


def run_entry(command: list[str], finish: Callable[[dict], None]) -> dict:
    """Return an entry's figures, or its error."""
    try:
        figures = measure_side(command)
        finish(figures)
    except (common.ChildError, RuntimeError) as error:
        return {"failed": str(error)}
    return figures


def alike(out: Path, record: dict) -> dict[str, dict]:
    """Return the records of the results file that can be compared with this one: the same GPU, as many reviews."""
    records = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {}
    return {
        name: other
        for name, other in records.items()
        if "failed" not in other.get("figures", {"failed": None})
        and other["conditions"] == record["conditions"]
        and other["hardware"].get("gpu") == record["hardware"].get("gpu")
    }


def profile_fastest(records: dict[str, dict], record: dict, out: Path, rehearse: bool) -> None:
    """Profile the training of the ladder's fastest entry, and write the result in words."""
    trained = {name: other["figures"] for name, other in records.items() if not name.startswith("attention")}
    name = fastest(trained, *LADDER)
    if name is None:
        print("profile: none of the rungs' entries has run yet")
        return
    _, script, *options = shlex.split(records[name]["command of the entry"])
    options += ["--train_samples", "32" if rehearse else "640", "--validation_samples", "1", "--test_samples", "1"]
    command = [str(Path(__file__).with_name("profile_rung.py")), "--script", Path(script).stem, *options]
    with tempfile.TemporaryDirectory() as runs:
        found = common.run_script([*command, "--runs_dir", runs])
    common.write_result(out, "profile", record | {"entry": name, "profile": found})
    idle = 1 - found["busy_seconds"] / found["wall_seconds"]
    lines = [
        f"Where the time of {name} goes: {record['command']}, {record['date']}",
        f"{record['hardware'].get('gpu', 'CPU')}, torch {record['versions']['torch']}",
        f"Work takes {found['busy_seconds']:.2f} of {found['wall_seconds']:.2f} seconds; the device waits {idle:.0%}.",
        "",
        *(
            f"{row['share']:6.1%} {row['ms']:10.1f} ms {row['calls']:7} x  {row['words']}: {row['name'][:80]}"
            for row in found["top"]
        ),
    ]
    out.with_name(PROFILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines) + "\n", flush=True)


def judge_all(records: dict[str, dict], record: dict, out: Path) -> bool:
    """Print all entries and the targets that they allow to judge; return whether none is missed."""
    figures = {name: other["figures"] for name, other in records.items()}
    attention = {name: run for name, run in figures.items() if name.startswith("attention")}
    if attention:
        rows = [[name, run["seconds"] * 1e3, run["peak_memory_bytes"] / 1e9] for name, run in attention.items()]
        common.print_table(["forward and backward", "ms", "peak_memory_GB"], rows)
    trained = {name: run for name, run in figures.items() if name not in attention}
    common.print_table(["entry", *COLUMNS], [[name, *map(run.get, COLUMNS)] for name, run in trained.items()])
    verdict = {"ratios": compare(trained)}
    judge(verdict, [target for target in TARGETS if target[0] in verdict["ratios"]])
    for name, value in verdict["ratios"].items():
        print(f"  {name}: {value:.3f}")
    for target in verdict["targets"]:
        print(f"  target {'met' if target['met'] else 'MISSED'}: {target['ratio']}")
    common.write_result(out, "verdict", record | verdict)
    return verdict["passed"]


def main() -> int:
    """Run the chosen entries, judge all, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--only", nargs="+", metavar="NAME", help="of the chosen parts' entries")
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU: shows that the commands work")
    parser.add_argument("--reviews", type=int, help="training reviews (default: 2000; rehearsed: 32)")
    parser.add_argument(
        "--peak_tflops", nargs=2, type=float, metavar=("HALF", "TF32"), help="of a GPU not in the table"
    )
    parser.add_argument("--out", type=Path, help="results file; default: gpu_duels.json, rehearsed: none")
    args = parser.parse_args()
    if not args.rehearse and not torch.cuda.is_available():
        print("no CUDA GPU: not measured (--rehearse runs the same commands on the CPU)")
        return 0
    if common.imdb_archive() is None:
        print(f"skipped: the archive of IMDb is not in FABRIC_LADDER_DATA ({DataSettings().data_dir})")
        return 0
    reviews = args.reviews or (32 if args.rehearse else 2000)
    if reviews % 16:
        parser.error("--reviews must be a multiple of 16, the effective batch")
    options, model, device = gpu_ladder.job(args.rehearse, reviews)
    options += ["--log_every", str(reviews // 2), "--batch_size", "16"]
    config = json.loads(model.read_text(encoding="utf-8"))
    settings = parse_settings(options)
    lengths = np.asarray(load_datasets(settings).splits["train"]["length"][:])
    record = common.environment(device)
    peaks = peak_flops(record["hardware"].get("gpu", ""), args.peak_tflops)
    record["conditions"] = {"reviews": reviews, "model": model.name, "peak_flops": peaks, "rehearsal": args.rehearse}
    failed = False
    with tempfile.TemporaryDirectory() as scratch:
        out = args.out or (Path(scratch) / OUT.name if args.rehearse else OUT)
        common.save_texts(settings, Path(scratch) / "texts")
        commands = {}
        for part in args.part:
            commands |= entries(part, options, Path(scratch) / "texts", args.rehearse)
        if unknown := set(args.only or ()) - set(commands):
            parser.error(f"no entry {', '.join(sorted(unknown))}; there are {', '.join(commands)}")
        for name in args.only or commands:
            print(f"{name} …", file=sys.stderr, flush=True)
            peak = peaks and peaks["32" if precision_of(name) == "32-true" else "16"]
            training = not name.startswith("attention")
            finish = partial(extrapolate, config=config, lengths=lengths, peak=peak) if training else dict
            figures = run_entry(commands[name], finish)
            entry = {"command of the entry": common.shown(commands[name]), "figures": figures}
            common.write_result(out, name, record | entry)
            if "failed" in figures:
                print(f"{name} failed: {figures['failed']}", flush=True)
                failed = True
        records = alike(out, record)
        if "profile" in args.part:
            profile_fastest(records, record, out, args.rehearse)
        passed = judge_all(records, record, out)
    if args.rehearse:
        print("a rehearsal: not measured on a GPU")
        return int(failed)
    return int(failed or not passed)


if __name__ == "__main__":
    sys.exit(main())
