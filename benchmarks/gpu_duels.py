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

import shlex
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import common  # first of all: it makes the project importable without an installation
import torch
from against_peers import LENGTHS
from common import CannotMeasureError, peer_command, rung_command
from gpu_ladder import Job, blog_entries, precision_of, run

from fabric_ladder.environment import mixed_precision

OUT = common.RESULTS / "gpu_duels.json"
PROFILE = "gpu_profile.txt"
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
TARGETS = [
    ("epoch of the blog's recipe / ladder, same precision", "min", 15.0),
    ("epoch of Trainer's best / ladder, same precision, no more peak memory", "min", 1.3),
    ("late MFU at effective batch 64", "min", 0.5),
    ("seconds of an epoch of 35,000 reviews, EXTRAPOLATED", "max", 60.0),
]


def entries(job: Job, parts: list[str]) -> dict[str, list[str]]:
    """Return the names and commands of the parts' entries."""
    options, found = [*job.options, "--batch_size", "16"], {}
    if "attention" in parts:
        script = str(Path(__file__).with_name("attention_cost.py"))
        more = ["--rows", "2", "--passes", "2" if job.rehearsal else "20", *options, "--precision", "bf16-true"]
        found |= {
            f"attention-{attention}-{tokens}": [script, "--attention", attention, "--tokens", str(tokens), *more]
            for tokens in LENGTHS
            for attention in ("eager", "fused")
        }
    if "blog" in parts:
        found |= blog_entries(job)
    for precision, sets in TRAINER.items() if "trainer" in parts else ():
        precision = mixed_precision() if precision == "mixed" else precision
        for name, switches in sets.items():
            switches = [switch for switch in switches if not (job.rehearsal and switch in GPU_ONLY)]
            command = peer_command("trainer", [*options, "--precision", precision], *switches)
            found[f"trainer-{precision}-{name}"] = command
    for part in (part for part in RUNGS if part in parts):
        found |= {f"{RUNGS[part]}-{name}": rung_command(options, RUNGS[part], *cut) for name, cut in CUTS.items()}
    if "batch64" in parts:
        more = [*options, "--batch_size", "64"]
        found |= {
            f"{RUNGS[rung]}-{cut}-batch64": rung_command(more, RUNGS[rung], *CUTS[cut])
            for rung in ("rung4", "rung5")
            for cut in ("16384_tokens", "65536_tokens")
        }
    return found


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


def further(job: Job, parts: list[str], out: Path) -> dict[str, Callable[[Path], dict]]:
    """Return what follows the entries: the profile, where it is chosen, and the verdict on all that can be compared."""
    profile = {"profile": partial(profile_fastest, job, out)} if "profile" in parts else {}
    return profile | {"verdict": partial(judge_all, job, out)}


def profile_fastest(job: Job, out: Path, runs: Path) -> dict:
    """Profile the training of the ladder's fastest entry, and write the result in words."""
    records = job.records(out)
    name = fastest(trainings(records), *LADDER)
    if name is None:
        raise CannotMeasureError("none of the rungs' entries has run yet")
    _, script, *options = shlex.split(records[name]["command of the entry"])
    options += ["--train_samples", "32" if job.rehearsal else "640", "--validation_samples", "1", "--test_samples", "1"]
    command = [str(Path(__file__).with_name("profile_rung.py")), "--script", Path(script).stem, *options]
    found = common.run_command([*command, "--runs_dir", str(runs)])
    lines = [
        f"Where the time of {name} goes, on {job.gpu or 'CPU'}, torch {torch.__version__}",
        f"Work takes {found['busy_seconds']:.2f} of {found['wall_seconds']:.2f} seconds; "
        f"the device waits {1 - found['busy_seconds'] / found['wall_seconds']:.0%}.",
        "",
        *(
            f"{row['share']:6.1%} {row['ms']:10.1f} ms {row['calls']:7} x  {row['words']}: {row['name'][:80]}"
            for row in found["top"]
        ),
    ]
    out.with_name(PROFILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(lines) + "\n", flush=True)
    return {"conditions": job.conditions, "entry": name, "profile": found}


def judge_all(job: Job, out: Path, _: Path) -> dict:
    """Compare all entries so far, those of attention in a table."""
    records = job.records(out)
    rows = [
        [name, record["figures"]["seconds"] * 1e3, record["figures"]["peak_memory_bytes"] / 1e9]
        for name, record in records.items()
        if name.startswith("attention")
    ]
    common.print_table(["forward and backward", "ms", "peak_memory_GB"], rows)
    return {"conditions": job.conditions, "ratios": compare(trainings(records))}


def trainings(records: dict[str, dict]) -> dict[str, dict]:
    """Return the figures of all entries that train."""
    return {name: record["figures"] for name, record in records.items() if not name.startswith("attention")}


if __name__ == "__main__":
    sys.exit(run(__doc__, OUT, entries, PARTS, further, TARGETS))
