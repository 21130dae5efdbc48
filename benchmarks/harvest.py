"""Measure on a GPU everything that docs/gpu.md shows, in pieces of as many minutes as you have.

    python benchmarks/harvest.py --minutes 8 [--out FILE]     measures what the file lacks; run it again to continue
    python benchmarks/harvest.py --again --only "memory: *"   measures again what older code measured
    python benchmarks/harvest.py --rehearse --out FILE        runs everything on the CPU with tiny sizes
    python benchmarks/harvest.py --fill [FILE]                fills the pages' tables, by default from all gpu*.json

No network is needed. The reviews come from IMDb's archive in FABRIC_LADDER_DATA; weights are random. The entries of
`FIRST` take about eight minutes and answer the most important questions; then come checks and peaks of memory, then
speeds. Each entry runs in its own process, forked from one that has imported the libraries, and is written to the file
immediately, with the commit of the code. On a large machine, entries that measure no time run together. An entry is
not started if its estimated time exceeds the time left. Failed entries are repeated last. The exit status is 1 if an
entry failed or a check did not pass.

Model FLOPs utilisation (MFU) follows appendix B of the PaLM paper (Chowdhery et al., 2022, arXiv:2204.02311). Training
on a token costs 6 N + 12 L H T floating-point operations, where N is the number of parameters without the embedding, L
the layers, H the hidden size and T the sequence length. Padding lowers the MFU. The peak is that of the precision of
the matrix multiplications.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from threading import Lock
from time import monotonic, strftime
from typing import NamedTuple

import common  # first import: it makes the project importable
import memory_ladder
import numpy as np
import torch
from common import BASE, MODELS, ROOT, peer_command, rung_command
from forking import run_together, start_forks

from fabric_ladder import parse_settings
from fabric_ladder.data.load import load_datasets
from fabric_ladder.environment import write_whole
from fabric_ladder.errors import UserError
from fabric_ladder.ladder import CHECKPOINTING
from fabric_ladder.planning.gpus import Gpu, match_gpu
from fabric_ladder.planning.overhead import assume, load_overhead
from fabric_ladder.rungs import RUNGS
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.advice import explain_errors

OUT = common.RESULTS / "gpu.json"
OPERATIONS = str(ROOT / "benchmarks" / "operations.py")
QUICKSTART = ["--config", str(ROOT / "configs" / "quickstart.yaml"), "--validation_samples", "40",
              "--test_samples", "40"]  # fmt: skip
STEPS = 50  # whose losses are compared with the CPU's
TOLERANCES = {"32-true": 0.01, "16 bits": 0.1}  # of the losses, which begin at 0.69
ON_ONE_GPU = [rung.stem for rung in RUNGS if rung.stem.split("_")[0] not in ("9", "10", "11", "12")]
ON_SEVERAL_GPUS = ["9_ddp", "10_fsdp", "11_fsdp_cpu_offload", "12_deepspeed_zero"]
PACKAGES = ("accelerate", "bitsandbytes", "peft", "torchao", "torchmetrics")  # of the entries
STOPPED = "stopped at the end of the minutes"
REPEATED = "5_low_precision, again"  # the first entry once more, for the spread
FAST, GRAPHS = "16_bf16_that_learns, packed, compiled", "16_bf16_that_learns, packed, graphs"
VARLEN = "16_bf16_that_learns, packed, varlen"
ONE_PASS = "4_mixed_precision, one pass a step"  # the cut of Trainer's entries
FULL = {"bloom-560m": "bloom-quickstart", "vit-large-16": "vit-small"}  # and rehearsed
FIRST = (
    "27_cuda_graphs", GRAPHS, "losses: 27_cuda_graphs", "15_packing", "Trainer, bf16-mixed, compiled",
    "Trainer, bf16-mixed", "16_bf16_that_learns, packed", VARLEN, "5_low_precision",
    "5_low_precision, graphs", "streamed gradients", "memory: bloom-560m, 27_cuda_graphs", "profile",
    "4_mixed_precision", ONE_PASS, "ceilings", "calibration",
)  # fmt: skip
VARIANTS = {  # further runs of a rung
    "3_torch_compile, packed": "--packing true --micro_batch_size 16",
    "5_low_precision, one sample": "--micro_batch_size 1",
    "5_low_precision, compiled": "--compile true",
    "5_low_precision, graphs": "--cuda_graphs true",
    REPEATED: "",
    ONE_PASS: "--micro_batch_size 16",
    "16_bf16_that_learns, packed": "--packing true",
    GRAPHS: "--packing true --cuda_graphs true",
    VARLEN: "--packing true --attention varlen",
    FAST: "--packing true --compile true",
    "22_float8, not compiled": "--compile false",
}
TRAINER = ("micro_batch_16", "group_by_length", "no_nan_filter")  # the fewest kernels and waits

CLAIMS = (  # large models with little memory: rung, model and options; the README and docs/gpu.md name the results
    ("24_streamed_layers", "llama-3.1-8b", "--quantization nf4 --max_length 512 --gpu_memory_limit 4GiB"),
    ("17_step_in_backward", "qwen3-8b", "--optimizer adam --optimizer_offload true"),
    ("29_streamed_training", "qwen3-8b", "--gpu_memory_limit 8GiB"),
    ("14_qlora", "qwen3-8b", ""),
    ("13_lora", "qwen3-8b", ""),
    ("24_streamed_layers", "qwen3-8b", ""),
)
WIDE = {"num_hidden_layers": 8, "intermediate_size": 27_648, "vocab_size": 32_000}  # 191 MB a block in 4 bits


class Job(NamedTuple):
    """The shared conditions of all entries."""

    device: str  # `cuda` or `cpu`
    rehearse: bool  # run tiny sizes
    gpu: Gpu | None  # the planner's data sheet
    gpus: int  # in a rehearsal: processes
    options: list[str]  # of the rungs: model and reviews
    lengths: np.ndarray  # tokens of each training review
    folder: Path  # scratch, with the reviews' texts


class Entry(NamedTuple):
    """Something to measure."""

    name: str  # the key in the file
    measure: Callable[[float], dict]  # takes a limit in seconds and returns figures
    seconds: float = 20.0  # expected
    alone: bool = True  # nothing runs at the same time, because seconds or the GPU's free memory are measured


# Model FLOPs utilisation


def peak_flops(gpu: Gpu, precision: str, matmul_precision: str) -> float:
    """Return the GPU's peak in FLOP/s for matrix multiplications with two settings."""
    if precision.startswith(("bf16", "16")):
        return gpu.half * 1e12
    tensor_cores = {"highest": gpu.plain, "high": gpu.single, "medium": gpu.half}
    return (tensor_cores[matmul_precision] if gpu.capability >= (8, 0) else gpu.plain) * 1e12


def add_rates(figures: dict, config: dict, lengths: np.ndarray, gpu: Gpu | None, gpus: int = 1) -> dict:
    """Return a training's figures with its MFU, if the GPU is known and all weights are trained; refuse other texts."""
    if figures["tokens"] != lengths.sum():
        raise RuntimeError(f"{figures['tokens']} tokens were trained instead of {lengths.sum()}")
    if not gpu or figures.get("trainable_parameters", figures["parameters"]) < figures["parameters"]:
        return figures
    without_embedding = figures["parameters"] - config["vocab_size"] * config["hidden_size"]
    attention = 12 * config["n_layer"] * config["hidden_size"] * (lengths.astype(float) ** 2).mean()
    flops = 6 * without_embedding * lengths.mean() + attention  # of a mean sample, by the formula above
    peak = peak_flops(gpu, figures["precision"], figures["matmul_precision"])
    return figures | {"mfu": flops * figures["samples_per_second"] / (gpus * peak)}


# Entries


def prepare(machine: dict, folder: Path) -> Job:
    """Draw the reviews and return the job of a machine."""
    rehearse = machine["rehearsal"]
    device = "cpu" if rehearse else "cuda"
    model, sizes = MODELS / "bloom-560m.json", "--max_length 1024 --log_every 128 --train_samples 1024"
    if rehearse:
        model, sizes = MODELS / "bloom-quickstart.json", "--max_length 128 --log_every 16 --train_samples 32"
    options = [*BASE, "--dataset", machine["dataset"], "--from_scratch", "true", "--model", str(model), *sizes.split()]
    options += ["--validation_samples", "4" if rehearse else "128", "--test_samples", "32"]
    datasets = load_datasets(parse_settings([*options, "--accelerator", "cpu"]))
    datasets.tokenizer.save_pretrained(folder / "tokenizer")
    options += ["--tokenizer", str(folder / "tokenizer"), "--accelerator", device]
    options += ["--predict_memory", "false"]  # it takes as long as a training; the entries of memory predict
    lengths = np.asarray(datasets.splits["train"]["length"][:])
    gpu = None if rehearse else match_gpu(machine["hardware"].get("gpu", ""))
    return Job(device, rehearse, gpu, 2 if rehearse else machine["gpus"], options, lengths, folder)


def entries_of(job: Job) -> list[Entry]:
    """Return all entries, those of `FIRST` first. A rehearsal has one of each kind."""
    rungs = ["2_grad_accum"] if job.rehearse else ON_ONE_GPU
    checks = [Entry(f"losses: {rung}", partial(losses, job, rung), 40, alone=False) for rung in rungs]
    found = [*kernels(job), *checks]
    found += [training(job, rung, rung_command(job.options, rung)) for rung in rungs]
    for name, more in {VARLEN: VARIANTS[VARLEN]}.items() if job.rehearse else VARIANTS.items():
        found.append(training(job, name, rung_command(job.options, name.split(",")[0], *more.split())))
    emulates = job.gpu and job.gpu.capability < (8, 0)  # the peers' bfloat16 would be refused
    precisions = ["16-mixed", "32-true"] if emulates else ["bf16-mixed", "bf16-true", "32-true"]
    for precision in ["32-true"] if job.rehearse else precisions:
        options = [*job.options, "--batch_size", "16", "--precision", precision]
        sides = {f"blog, {precision}": ("blog",), f"Trainer, {precision}": ("trainer", *TRAINER)}
        if precision.endswith("mixed"):
            sides[f"Trainer, {precision}, compiled"] = ("trainer", *TRAINER, "compile")
        for name, (side, *switches) in sides.items():
            found.append(training(job, name, peer_command(side, options, *switches)))
    samples = f"--train_samples {32 if job.rehearse else 160} --validation_samples 1".split()
    profiled = ["profile-rung", "--script", "5_low_precision", *job.options, *samples]
    found.append(command_entry("profile", [OPERATIONS, *profiled, "--runs_dir", str(job.folder / "profiled")]))
    found += [*memory(job), Entry("memory budget", partial(memory_budget, job), 120), *claims(job)]
    for rung in ON_SEVERAL_GPUS if job.gpus > 1 else []:
        if rung == "9_ddp" or not job.rehearse:
            command = rung_command(job.options, rung, "--devices", str(job.gpus))
            found.append(training(job, f"{rung}, {job.gpus} GPUs", command, job.gpus))
    place = {name: number for number, name in enumerate(FIRST)}
    usual = {entry.name: entry.name.replace(", 16-mixed", ", bf16-mixed") for entry in found}
    return sorted(found, key=lambda entry: (place.get(usual[entry.name], len(FIRST)), entry.alone))


def command_entry(name: str, command: list[str], seconds: float = 20.0, alone: bool = True) -> Entry:
    """Return an entry that runs a command and keeps its figures."""
    return Entry(name, lambda limit: {"command": common.shown(command)} | common.run_command(command, limit=limit),
                 seconds, alone)  # fmt: skip


def training(job: Job, name: str, command: list[str], gpus: int = 1) -> Entry:
    """Return an entry that trains on the job's reviews; without MFU for 8-bit matrix multiplications."""
    config = json.loads(Path(job.options[job.options.index("--model") + 1]).read_text(encoding="utf-8"))
    entry = command_entry(name, command, 25)
    gpu = None if name.startswith("22_float8") else job.gpu
    return entry._replace(measure=lambda limit: add_rates(entry.measure(limit), config, job.lengths, gpu, gpus))


def kernels(job: Job) -> list[Entry]:
    """Return kernel timings, gradients, and what the planner adds to the tensors."""
    small, wide, tiny = "", "--heads 32 --tokens 2048 --width 128 136", ""
    if job.rehearse:
        small = "--heads 2 --tokens 64 --repeats 1"
        wide, tiny = f"{small} --width 136", "--tokens 64 --width 32 --repeats 1"
    commands = {
        "ceilings": "ceilings", "attention": f"attention {small}", "gradients": "gradients",
        "attention of wide heads": f"attention {wide}", "loss": f"loss {tiny}", "embeddings": f"embeddings {tiny}",
    }  # fmt: skip
    found = [command_entry(name, [OPERATIONS, *command.split()], alone=name != "gradients")
             for name, command in commands.items()]  # fmt: skip
    return found if job.rehearse else [*found, Entry("calibration", calibrate)]


def calibrate(limit: float) -> dict:
    """Return the planner's overhead of this GPU, measured and assumed."""
    common.run_child([str(ROOT / "scripts" / "plan_memory.py"), "--calibrate"], limit=limit)
    name = common.run_command([OPERATIONS, "machine"])["hardware"]["gpu"]
    known = match_gpu(name)
    measured = load_overhead(Settings().cache_dir, name).expected
    return {"measured": measured._asdict(), "assumed": assume(known and known.capability).expected._asdict()}


def losses(job: Job, rung: str, limit: float) -> dict:
    """Compare a rung's first losses on the quickstart's model with the CPU's."""
    steps, batch = 4 if job.rehearse else STEPS, 1 if rung == "1_batch_size_1" else 16
    options = [*QUICKSTART, "--train_samples", str(batch * steps), "--save", "no", "--log_every", str(batch)]
    options += ["--predict_memory", "false", "--matmul_precision", "highest", "--threads", "4"]
    if "lora" in rung:
        options += ["--lora_dropout", "0"]  # each device draws other random numbers
    found = []
    for device in (job.device, "cpu"):
        record, rows = common.run_recorded(rung, [*options, "--accelerator", device], limit=limit)
        found.append(rows["loss"].dropna().tolist())
    gaps = [abs(mine - its) for mine, its in zip(*found, strict=True)]
    precision = record["settings"]["precision"]
    initial_weights_differ = rung == "8_init_on_device"  # they are drawn on the device
    right = initial_weights_differ or max(gaps) <= TOLERANCES["32-true" if precision == "32-true" else "16 bits"]
    return {"passed": right, "largest_difference": max(gaps), "first": gaps[0], "precision": precision}


def memory(job: Job) -> list[Entry]:
    """Return rungs on samples of full length, to compare the measured peak with the predicted one."""
    found = []
    for model, tiny in FULL.items():
        folder = job.folder / model
        folder.mkdir()
        memory_ladder.make_data(model, folder)
        rows = [row for row in memory_ladder.ENTRIES[model] if row.gpus == 1 and row.rung in ON_ONE_GPU
                and (model != "bloom-560m" or not row.options) and "16-mixed" not in row.options]  # fmt: skip
        for row in rows[1:2] if job.rehearse else rows:
            options = [*memory_ladder.options_of(model), *memory_ladder.data_options(model, folder)]
            options += f"--micro_batch_size 1 {row.options} --eval_batch_tokens {memory_ladder.EVAL_TOKENS}".split()
            options += ["--accelerator", job.device, "--predict_memory", "true"]
            if job.rehearse:
                size = "--image_size 32 --resize_to 32" if model.startswith("vit") else "--max_length 64"
                size += " --train_samples 16 --batch_size 8 --validation_samples 8 --micro_batch_size 1"
                options += ["--model", str(MODELS / f"{tiny}.json"), *size.split()]
            command = rung_command(options, row.rung)
            found.append(command_entry(f"memory: {model}, {row.name}", command, alone=False))
    return found


def memory_budget(job: Job, limit: float) -> dict:
    """Train within a budget between all blocks recomputed and none; compare peak and losses with the two ends.

    On a CPU the predicted peaks are compared.
    """
    model = "bloom-560m"
    options = [*memory_ladder.options_of(model), *memory_ladder.data_options(model, job.folder / model)]
    options += "--micro_batch_size 16 --log_every 16 --save no --predict_memory true --accelerator".split()
    options += [job.device]
    if job.rehearse:
        options += ["--model", str(MODELS / f"{FULL[model]}.json"), *"--max_length 256 --train_samples 32".split()]
    key = "predicted_peak_bytes" if job.rehearse else "peak_memory_bytes"
    runs: dict[str, dict] = {}
    all_losses, more = [], []
    for rung in ("5_low_precision", "28_memory_budget", "7_grad_checkpointing"):
        if rung.startswith("28"):
            stated = int(0.7 * runs["5_low_precision"]["peak_bytes"])
            more = ["--memory_budget", f"{stated / 1e9:.9f}GB"]
        record, rows = common.run_recorded(rung, [*options, *more], limit=limit)
        results, more = record["results"], []
        runs[rung] = {"peak_bytes": results[key], "samples_per_second": results["samples_per_second"]}
        all_losses.append(rows["loss"].dropna().tolist())
    without, within, with_all = (run["peak_bytes"] for run in runs.values())
    gap = max(abs(mine - its) for each in all_losses[1:] for mine, its in zip(each, all_losses[0], strict=True))
    right = with_all <= within <= stated < without and gap <= (0 if job.rehearse else TOLERANCES["16 bits"])
    return {"passed": right, "largest_difference": gap, "budget_bytes": stated, "runs": runs}


def claims(job: Job) -> list[Entry]:
    """Return runs of `CLAIMS`, and the check of streamed gradients. A step has one text of full length.

    The weights are random. A model is drawn on the GPU before its first run, which reads it as any other model.
    """
    texts = job.folder / "answers.jsonl"
    texts.write_text("".join(json.dumps({"instruction": "a b c", "output": "d e " * 2048}) + "\n" for _ in range(40)))
    shared = ["--tokenizer", "trained", "--task", "instruction-tuning", "--dataset", str(texts), *CHECKPOINTING]
    shared += "--batch_size 1 --train_samples 6 --validation_samples 1 --test_samples 1 --log_every 1".split()
    shared += ["--accelerator", job.device, "--predict_memory", "true"]

    def run(model: str, command: list[str], limit: float) -> dict:
        folder, name = job.folder / model, "qwen3-tiny" if job.rehearse else model.removesuffix(", wide")
        if not (folder / "config.json").exists():
            values = json.loads((MODELS / f"{name}.json").read_text(encoding="utf-8"))
            values |= WIDE if model.endswith(", wide") and not job.rehearse else {}
            (job.folder / "config.json").write_text(json.dumps(values))
            common.run_command([OPERATIONS, "random-weights", str(job.folder / "config.json"), str(folder)])
        command = [*command, "--model", str(folder)]
        return {"command": common.shown(command)} | common.run_command(command, limit=limit)

    found = []
    for rung, model, more in CLAIMS:
        length = "256" if job.rehearse else "1024"
        options = [*BASE, "--micro_batch_size", "1", "--max_length", length, *more.split(), *shared]
        name = f"claim: {rung}, {model} {more}".strip()
        found.append(Entry(name, partial(run, model, rung_command(options, rung)), 60))
    rung = "--lora true --lora_dropout 0 --quantization nf4 --stream_layers true --precision bf16-true".split()
    check = [OPERATIONS, "streamed", *BASE, *rung, *shared]
    found.insert(4, Entry("streamed gradients", partial(run, "llama-3.1-8b, wide", check), 60))
    return found


# The file


def identity(machine: dict) -> list:
    """Return the conditions that all figures of a file share: hardware, versions and reviews."""
    hardware = machine["hardware"]
    name = hardware.get("gpu") or hardware["processor"]
    return [name, machine["gpus"], machine["versions"], machine["rehearsal"], machine.get("dataset", "imdb")]


def run_all(
    entries: list[Entry], content: dict, out: Path, end: float = float("inf"), together: int = 1, again: bool = False
) -> int:
    """Measure what a file's content lacks until the time `end` of `monotonic`, and return the exit status.

    Entries that failed before come last. `together` neighbours run at the same time, if none has to be alone. `again`
    also measures what another commit measured; an old record stays until the new one is there. The file is written
    after each entry.
    """
    records, left_out = content["entries"], content["left_out"]
    failed_before = {name for name, record in records.items() if "failed" in record}
    commit = content["machine"]["commit"]
    old = {name for name, record in records.items() if again and "figures" in record and record["commit"] != commit}
    missing = [entry for entry in entries if entry.name not in records or entry.name in failed_before | old]
    missing.sort(key=lambda entry: entry.name in failed_before)
    lock = Lock()

    def write() -> None:
        write_whole(out, json.dumps(content, indent=1, ensure_ascii=False) + "\n")

    def store(entry: Entry) -> None:
        record, reason = measure(entry, end)
        with lock:
            left_out.pop(entry.name, None)
            if entry.name in old and "figures" not in record:
                print(f"kept as it was: {entry.name}: {reason or record['failed']}", file=sys.stderr)
            elif reason:
                left_out[entry.name] = reason
            else:
                records[entry.name] = record | {"commit": commit}
            write()

    for alone, group in groupby(missing, key=lambda entry: entry.alone):
        run_together(store, group, 1 if alone else together)
    write()
    problems = [name for name, record in records.items()
                if "failed" in record or not record["figures"].get("passed", True)]  # fmt: skip
    print(f"{len(records)} entries measured, {len(left_out)} left out: {out}")
    for name in problems:
        print(f"failed: {name}: {records[name].get('failed', 'the check did not pass')}")
    return int(bool(problems))


def measure(entry: Entry, end: float) -> tuple[dict, str]:
    """Return an entry's record and "", or {} and the reason why it was left out."""
    left, start = end - monotonic(), monotonic()
    if entry.seconds > left:
        return {}, f"needs about {entry.seconds:.0f} s, and {max(0.0, left):.0f} s were left"
    print(f"{entry.name} …", file=sys.stderr, flush=True)
    record = {"date": strftime("%Y-%m-%dT%H:%M:%S%z")}
    try:
        record["figures"] = entry.measure(min(left, 900.0))
    except common.ChildError as error:
        if error.status == 2 and "error: " in str(error) and "out of memory" not in str(error):
            return {}, str(error).split("error: ", 1)[1]  # the rung refuses these settings here
        record["failed"] = str(error)
    except subprocess.TimeoutExpired:
        if left < 900:
            return {}, STOPPED
        record["failed"] = "took more than 900 s"
    except (RuntimeError, LookupError, ValueError, TypeError) as error:
        record["failed"] = f"{type(error).__name__}: {error}"
    return record | {"seconds": round(monotonic() - start, 1)}, ""


def read_harvest(path: Path) -> dict:
    """Return a file's content; refuse a file of another program."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        identity(content["machine"]), content["left_out"].items()
        for record in content["entries"].values():
            record.setdefault("commit", content["machine"]["commit"])
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{path} is not a file of harvest.py ({type(error).__name__}: {error})") from error
    return content


# The tables of docs/gpu.md


SIZES = "predicted, GB | measured, GB | difference", "{predicted:.2f} | {measured:.2f} | {difference:+.1%}"
KERNELS = ("flash", "memory-efficient", "cuDNN", "math")
AS_CSV = ("checks", "profile", "attention", "memory", "speeds", "vocabulary")  # files of docs/tables/
TABLES = {  # header and row
    "checks": (
        "check | result | largest difference of losses", "{name} | {result} | {largest_difference:.1e}",
    ),
    "speeds": (
        f"BLOOM-560m | precision | samples/s | at the end | tokens/s | MFU | {SIZES[0]}",
        "{name} | {precision} | {samples_per_second:,.1f} | {late_samples_per_second:,.1f} | "
        "{tokens_per_second:,.0f} | {mfu:.1%} | " + SIZES[1],
    ),
    "summary": (
        "BLOOM-560m | precision | reviews/s at the end | over 1,024 reviews | peak, GB | reserved, GB",
        "{name} | {precision} | {late_samples_per_second:,.0f} | {samples_per_second:,.0f} | {measured:.1f} | "
        "{reserved:.1f}",
    ),
    "profile": ("kernel | share | ms | calls", "`{name:.60}` | {share:.1%} | {ms:.0f} | {calls}"),
    "memory": (f"full samples | {SIZES[0]}", "{name} | " + SIZES[1]),
    "claims": (
        f"one text in a step | tokens/s at the end | {SIZES[0]} | in CPU memory, GB",
        "{name} | {late_tokens:,.0f} | " + SIZES[1] + " | {host:.1f}",
    ),
    "vocabulary": (" | ms | peak, GB", "{name} | {ms:.1f} | {peak:.2f}"),
    "attention": (
        f"heads x width; ms | chosen | {' | '.join(KERNELS)}",
        "{heads} x {width}, {dtype} | {chosen} | " + " | ".join(f"{{{name}:.2f}}" for name in KERNELS),
    ),
}  # fmt: skip


def _place(name: str) -> tuple:
    """Return the place of an entry in a table of checks or of memory: the rungs by number, the others as measured."""
    kind, colon, rung = name.rpartition(": ")
    rung = rung.rpartition(", ")[2]
    number = rung.partition("_")[0]
    return (colon, kind, int(number)) if colon and number.isdigit() else ("", "", 0)


def rows_of(figures: dict[str, dict]) -> dict[str, list[dict]]:
    """Return the records of each table: figures with a name, and sizes in GB."""
    found = {name: [] for name in TABLES}
    for name, run in figures.items():
        predicted, measured = run.get("predicted_peak_bytes"), run.get("peak_memory_bytes")
        row = run | {"name": name, "predicted": predicted and predicted / 1e9, "measured": measured and measured / 1e9}
        row["difference"] = measured / predicted - 1 if predicted and measured else None
        if name.startswith("memory: "):
            found["memory"].append(row | {"name": name.removeprefix("memory: ")})
        elif name.startswith("claim: "):
            rate = run["late_samples_per_second"] * run["tokens_per_second"] / run["samples_per_second"]
            more = {"late_tokens": rate, "host": run["peak_host_memory_bytes"] / 1e9}
            found["claims"].append(row | more | {"name": name.removeprefix("claim: ")})
        elif "late_samples_per_second" in run:
            found["speeds"].append(row | {"reserved": run.get("peak_reserved_bytes", 0) / 1e9 or None})
        elif "passed" in run:
            found["checks"].append(row | {"result": "passed" if run["passed"] else "**failed**"})
        for kernel in run.get("rows", []):
            times = {side: kernel.get(side) and kernel[side] * 1e3 for side in KERNELS}
            found["attention"].append(kernel | times | {"heads": run["heads"]})
    for entry in ("loss", "embeddings"):
        for part, run in figures.get(entry, {}).items():
            for way, side in run["figures"].items() if isinstance(run, dict) else ():
                figure = {"name": f"{entry}, {part.partition(', ')[2]}: {way}", "ms": side["seconds"] * 1e3}
                found["vocabulary"].append(figure | {"peak": side["peak_bytes"] / 1e9})
    found["summary"] = sorted(found["speeds"], key=lambda run: -run["late_samples_per_second"])
    found["profile"] = figures.get("profile", {}).get("top", [])
    return found


def status_of(content: dict) -> str:
    """Return the sentence about the machine, the commits and what is not measured."""
    machine, records = content["machine"], content["entries"]
    left_out = content["left_out"] | {name: "failed" for name, record in records.items() if "failed" in record}
    versions = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "transformers"))
    late = [name for name, reason in left_out.items() if reason == STOPPED or reason.startswith("needs about ")]
    rest = [f"{name} ({reason})" for name, reason in left_out.items() if name not in late]
    rest += [f"{len(late)} of {len(records) + len(late)} entries, for lack of time"] if late else []
    made = sorted(Counter((record["date"][:10], str(record["commit"])) for record in records.values()).items())
    commits = ", ".join(f"{count} entries of commit {commit} ({date})" for (date, commit), count in made)
    status = f"{machine['gpus']} x **{machine['hardware']['gpu']}**, {versions}: {commits}."
    return status + (f" Not measured: {'; '.join(rest)}." if rest else "")


def tables(content: dict) -> dict[str, list[str]]:
    """Return the lines of each block of the pages."""
    figures = {name: record["figures"] for name, record in content["entries"].items() if "figures" in record}
    figures = dict(sorted(figures.items(), key=lambda item: _place(item[0])))
    rows = rows_of(figures)
    worst = max((run.get("largest_difference", 0.0) for run in rows["checks"]), default=0.0)
    verdict = f"{sum(run['passed'] for run in rows['checks'])} of {len(rows['checks'])} checks passed. "
    verdict += f"The largest difference of a loss is {worst:.1e}."
    made = {name: common.table(*TABLES[name], records) for name, records in rows.items()}
    return {"status": [status_of(content)], "verdict": [verdict]} | made


def fill_pages(path: Path, check: bool = False) -> list[Path]:
    """Fill the tables named after the file, e.g. `<!-- gpu:memory -->` for gpu.json, and write those of `AS_CSV`.

    A table without figures says "not measured". A rehearsal is refused.
    """
    blocks = {"status": ["Not measured on a GPU yet."]}
    if path != OUT or path.exists():
        content = read_harvest(path)
        if content["machine"]["rehearsal"]:
            raise UserError(f"{path} is a rehearsal on a CPU: measure on a GPU first")
        blocks = tables(content)
    files = {f"{path.stem}_{name}": blocks[name] for name in AS_CSV if blocks.get(name)}
    return common.fill_pages(path.stem, lambda name: blocks.get(name) or ["Not measured yet."], check, files)


def parse() -> argparse.Namespace:
    """Return the command line, or end with the reason why nothing can be measured."""
    parser = common.new_parser(__doc__, OUT)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="default: as many as it takes")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="entries whose name matches")
    parser.add_argument("--again", action="store_true", help="measure what another commit measured, too")
    parser.add_argument("--synthetic", action="store_true", help="measure on synthetic reviews, which are shorter")
    parser.add_argument("--rehearse", action="store_true", help="run on the CPU with tiny sizes")
    parser.add_argument("--fill", type=Path, nargs="?", const=OUT, metavar="FILE", help="fill the pages' tables")
    args = parser.parse_args()
    missing = [name for name in PACKAGES if find_spec(name) is None]
    for problem, message in (
        (not args.minutes > 0, f"--minutes {args.minutes}: must be positive"),
        (not args.rehearse and not torch.cuda.is_available(),
         "PyTorch finds no CUDA GPU; --rehearse runs everything on the CPU with tiny sizes"),
        (args.rehearse and args.out == OUT, "--rehearse needs --out FILE: its figures mean nothing"),
        (missing, f"packages are missing: pip install {' '.join(missing)}"),
        (not (args.rehearse or args.synthetic or common.has_imdb()),
         "FABRIC_LADDER_DATA has no aclImdb_v1.tar.gz; --synthetic measures on synthetic reviews"),
    ):  # fmt: skip
        if problem and not args.fill:
            parser.error(message)
    return args


def main() -> int:
    """Measure or fill the pages, and return the exit status."""
    explain_errors()
    args = parse()
    if args.fill:
        for path in [*sorted(common.RESULTS.glob("gpu*.json"))] if args.fill == OUT else [args.fill]:
            fill_pages(path)
        return 0
    common.check_storable(args.out)
    start_forks()
    end = monotonic() + 60 * args.minutes
    machine = common.run_command([OPERATIONS, "machine"]) | {"rehearsal": args.rehearse}
    machine["dataset"] = "synthetic" if args.rehearse or args.synthetic else "imdb"
    content = read_harvest(args.out) if args.out.exists() else {"entries": {}, "left_out": {}}
    if args.out.exists() and identity(content["machine"]) != identity(machine):
        raise UserError(f"{args.out} was measured with another GPU, versions or reviews: give another --out")
    with tempfile.TemporaryDirectory(prefix="harvest-") as scratch:
        job = prepare(machine, Path(scratch))
        chosen = [entry for entry in entries_of(job) if any(fnmatchcase(entry.name, pattern) for pattern in args.only)]
        if not chosen:
            raise UserError(f'no entry matches {" ".join(args.only)}; "memory: *" matches all peaks of memory')
        content = {"machine": machine} | content | {"machine": machine}
        # 4 CPU cores and 25 GB of GPU memory for each of the entries that run at the same time
        together = max(1, min((os.cpu_count() or 1) // 4, int(machine["hardware"].get("gpu_memory", 0) // 25e9)))
        status = run_all(chosen, content, args.out, end, together, args.again)
    if not args.rehearse:
        for name in ("checks", "memory", "speeds"):
            print("", *tables(content)[name], sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
