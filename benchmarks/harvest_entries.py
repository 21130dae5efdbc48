"""What a harvest measures, worst doubt first."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import common  # first of all: it makes the project importable without an installation
import memory_ladder
import numpy as np
from common import BASE, ROOT, blog_command, peer_command, rung_command
from mfu import extrapolate

from fabric_ladder import parse_settings
from fabric_ladder.planning.gpus import Gpu, match_gpu
from fabric_ladder.rungs import RUNGS
from local_dataset_utilities import load_datasets

OWN = "harvest_checks attention_kernels gradient_check profile_rung lora_7b chunked_loss embedding_gradients"
CHECKS, KERNELS, GRADIENTS, PROFILE, LORA, LOSS, ROWS = (str(ROOT / "benchmarks" / f"{own}.py") for own in OWN.split())
MODELS = ROOT / "configs" / "models"
H100 = 989.5  # TFLOP/s, of the GPU that the estimated seconds are guessed for
FAST = ("group_by_length", "no_nan_filter", "worker")  # Trainer's best switches
NUMBERS = {path.stem.split("_")[0]: path.stem for path in RUNGS}
Measured = dict[str, dict]


class Data(NamedTuple):
    """Reviews that are drawn: the settings that draw them, the tokens of each, and their texts for the blog."""

    options: list[str]
    lengths: np.ndarray
    texts: Path


class Job(NamedTuple):
    """Where and on what all entries run.

    Attributes:
        device: `cuda` or `cpu`.
        rehearse: As little as shows that the commands work.
        gpu: What the planner knows of the GPU; None: nothing.
        gpus: Their number, or how many processes stand for them.
        halves: Whether the GPU computes in bfloat16.
        reviews: What the ladder and Trainer are measured on.
        few: What the blog's recipe is measured on, which takes as long for every review.
        folder: Empty, until the harvest ends.
        conditions: What stands beside the figures.
    """

    device: str
    rehearse: bool
    gpu: Gpu | None
    gpus: int
    halves: bool
    reviews: Data
    few: Data
    folder: Path
    conditions: dict

    @property
    def slowness(self) -> float:
        """How many times as long as on an H100 an entry takes: a guess, since a fast GPU waits for its host."""
        return 0.0 if self.rehearse else max(1.0, (H100 / self.gpu.half) ** 0.5 if self.gpu else 4.0)

    @property
    def model(self) -> Path:
        """The config of the model that the speeds are of."""
        return MODELS / ("bloom-quickstart.json" if self.rehearse else "bloom-560m.json")


class Entry(NamedTuple):
    """One thing to measure.

    Attributes:
        name: Unique.
        command: A script with its options; or what returns it from the figures so far, None if they do not allow it.
        seconds: That it takes on an H100 beyond its start: a guess.
        complete: Adds to its figures.
        left_out: Why it cannot be measured here.
    """

    name: str
    command: list[str] | Callable[[Measured], list[str] | None]
    seconds: float = 20.0
    complete: Callable[[dict], dict] | None = None
    left_out: str = ""


def draw(job_options: list[str], reviews: int, folder: Path, tokenizer: Path | None = None) -> Data:
    """Draw reviews and keep their texts, and the tokenizer where it is not given: all draws have the same."""
    options = [*job_options, "--train_samples", str(reviews), "--validation_samples", str(-(-reviews // 10))]
    options += ["--test_samples", "32"] + (["--tokenizer", str(tokenizer)] if tokenizer else [])
    settings = parse_settings([*options, "--accelerator", "cpu"])  # this process holds no GPU
    datasets = load_datasets(settings)
    if tokenizer is None:
        datasets.tokenizer.save_pretrained(folder.with_name("tokenizer"))
        options += ["--tokenizer", str(folder.with_name("tokenizer"))]
    common.save_texts(settings, folder)
    return Data(options, np.asarray(datasets.splits["train"]["length"][:]), folder)


def prepare(machine: dict, folder: Path) -> Job:
    """Return what all entries share, with the reviews drawn.

    Args:
        machine: What `harvest_checks.py machine` says.
        folder: Empty; it stays until the end.
    """
    rehearse, hardware = machine["rehearsal"], machine["hardware"]
    gpu = match_gpu(hardware.get("gpu", ""))
    gpus = 2 if rehearse else machine["gpus"]
    halves = rehearse or tuple(machine["capability"]) >= (8, 0)
    job = Job(hardware["device"], rehearse, gpu, gpus, halves, None, None, folder, {})
    dataset = "synthetic" if rehearse or not common.has_imdb() else "imdb"
    options = [*BASE, "--dataset", dataset, "--accelerator", job.device, "--from_scratch", "true"]
    options += ["--model", str(job.model), "--max_length", "128" if rehearse else "1024"]
    options += ["--predict_memory", "false", "--log_every", "16" if rehearse else "1000"]
    reviews = draw(options, 32 if rehearse else 2000, folder / "texts")
    few = draw(options, 32 if rehearse else 480, folder / "few", folder / "tokenizer")
    conditions = {"dataset": dataset, "reviews": len(reviews.lengths), "reviews of the blog": len(few.lengths)}
    conditions |= {"mean tokens": float(reviews.lengths.mean()), "model": job.model.name}
    return job._replace(reviews=reviews, few=few, conditions=conditions)


def training(job: Job, data: Data, name: str, command: list[str], seconds: float) -> Entry:
    """Return an entry that trains these reviews."""
    config = json.loads(job.model.read_text(encoding="utf-8"))
    return Entry(name, command, seconds, lambda figures: extrapolate(figures, config, data.lengths, job.gpu))


def entries_of(job: Job) -> list[Entry]:
    """Return all entries, worst doubt first."""
    parts = (doubts, speeds, peers, larger_batches, memory, large_models, several_gpus)
    return [entry for part in parts for entry in part(job)]


def doubts(job: Job) -> list[Entry]:
    """Return what must be right before anything is fast: kernels, gradients, losses, resuming, running out."""
    small = ["--heads", "2", "--tokens", "64", "--passes", "1"] if job.rehearse else []
    more = ["--device", job.device, *(["--rehearse"] if job.rehearse else [])]
    seconds = {"losses": 90, "resume": 90, "memory": 30}
    found = [Entry("attention kernels", [KERNELS, *small], 20), Entry("gradients", [GRADIENTS], 20)]
    found += [Entry(name, [CHECKS, name, *more], each) for name, each in seconds.items()]
    return [*found, Entry("rank", [CHECKS, "rank", *more], 40, left_out="" if job.gpus > 1 else "one GPU here")]


def speeds(job: Job) -> list[Entry]:
    """Return the rungs on BLOOM-560m's shape."""
    options = job.reviews.options

    def entry(name: str, number: str, seconds: float, *more: str) -> Entry:
        return training(job, job.reviews, name, rung_command(options, NUMBERS[number], *more), seconds)

    one, many = ("--micro_batch_size", "1"), ("--micro_batch_tokens", "128" if job.rehearse else "16384")
    rows = ("--pack_rows", "4")
    found = [
        entry("5_low_precision, one sample", "5", 90, *one),
        entry("5_low_precision", "5", 90),
        entry("5_low_precision, compiled", "5", 120, "--compile", "true"),
        *(entry(NUMBERS[number], number, 120) for number in ("4", "15")),
        entry("15_packing, 4 rows", "15", 120, *rows),
        entry("15_packing, 4 rows, compiled", "15", 150, *rows, "--compile", "true"),
        *(entry(NUMBERS[number], number, 120) for number in "2 3 1 16 18 19 20 21".split()),
        entry("22_float8, compiled", "22", 150, "--compile", "true"),
        entry("5_low_precision, packed", "5", 60, "--packing", "true"),
        entry("5_low_precision, 16384 tokens", "5", 45, *many),
        entry("5_low_precision, 16384 tokens, compiled", "5", 75, *many, "--compile", "true"),
        entry("4_mixed_precision, 16384 tokens", "4", 60, *many),
    ]
    rehearsed = ["5_low_precision, one sample", "5_low_precision, packed", "4_mixed_precision, 16384 tokens"]
    rehearsed += ["15_packing, 4 rows"]
    return [each for each in found if not job.rehearse or each.name in rehearsed]


def peers(job: Job) -> list[Entry]:
    """Return the blog's recipe and Trainer in the ladder's precisions, and the blog untouched."""
    half = ["bf16-true", "bf16-mixed"] if job.halves else ["16-mixed"]
    roomy = job.gpu is not None and job.gpu.memory > 60e9  # eager attention takes 3 GB a row of 1,024 tokens in 16 bits
    found = []
    for precision in [half[0]] if job.rehearse else [*half, "32-true"]:
        more = ["--batch_size", "16", "--precision", precision]
        blog = blog_command(job.few.texts, [*job.few.options, *more])
        sizes = ([], ["micro_batch_1"]) if precision == "32-true" else (["micro_batch_16"], ["micro_batch_2"])
        switches = [*sizes[not roomy], *FAST]
        trainer = [*job.reviews.options, *more]
        found.append(training(job, job.few, f"blog, {precision}", blog, 60))
        name = f"Trainer, {precision}"
        found.append(training(job, job.reviews, name, peer_command("trainer", trainer, *switches), 90))
        if precision == half[0] and not job.rehearse:
            compiled = peer_command("trainer", trainer, *switches, "compile")
            found.append(training(job, job.reviews, f"{name}, compiled", compiled, 150))
    if not job.rehearse:
        command = [*blog, "--matmul_precision", "highest"]
        found.append(training(job, job.few, "blog, 32-true, no TF32", command, 60))
    return found


def rungs_of(figures: Measured) -> list[str]:
    """Return the rungs' entries on one GPU, of effective batch 16."""
    others = ("GPU", "batch 64")
    trained = [name for name, run in figures.items() if "epoch_seconds" in run and name[0].isdigit()]
    return [name for name in trained if not any(text in name for text in others)]


def fastest(figures: Measured) -> str | None:
    """Return the one of these that has the shortest epoch."""
    return min(rungs_of(figures), key=lambda name: figures[name]["epoch_seconds"], default=None)


def larger_batches(job: Job) -> list[Entry]:
    """Return an effective batch of 64, and the profile of the fastest rung."""
    found = []
    for rung in ("5",) if job.rehearse else ("5", "4"):
        for tokens in ("128",) if job.rehearse else ("16384", "65536"):
            command = rung_command(job.reviews.options, NUMBERS[rung], "--batch_size", "64")
            name = f"{NUMBERS[rung]}, batch 64, {tokens} tokens"
            found.append(training(job, job.reviews, name, [*command, "--micro_batch_tokens", tokens], 45))

    def profile(figures: Measured) -> list[str] | None:
        if (name := fastest(figures)) is None:
            return None
        chosen = next(entry for entry in speeds(job) if entry.name == name)
        script, *options = chosen.command
        samples = f"--train_samples {32 if job.rehearse else 160} --validation_samples 1 --test_samples 1".split()
        runs = ["--runs_dir", str(job.folder / "profiled")]
        return [PROFILE, "--script", Path(script).stem, *options, *samples, *runs]

    return [*found, Entry("profile of the fastest", profile, 60)]


def memory(job: Job) -> list[Entry]:
    """Return the GPU's overhead, and rungs whose measured peak stands beside the one that they predict."""
    found = [Entry("calibration", [CHECKS, "calibrate", "--device", job.device], 60)]
    rows = {"bloom-560m": [], "vit-large-16": []}
    for row in memory_ladder.ENTRIES["bloom-560m"]:
        if not row.options and row.gpus == 1 and row.rung.split("_")[0] in [*"12345678", *"13 16 18 19 20 21".split()]:
            rows["bloom-560m"].append(row)
    for row in memory_ladder.ENTRIES["vit-large-16"]:
        if row.rung.split("_")[0] in [*"2456"] and "16-mixed" not in row.options:
            rows["vit-large-16"].append(row)
    for model, chosen in rows.items():
        found += [memory_row(job, model, row) for row in (chosen[1:2] if job.rehearse else chosen)]
    return found


def memory_row(job: Job, model: str, row: memory_ladder.Entry) -> Entry:
    """Return the entry of a row of memory_ladder.py."""
    data = job.folder / model
    if not data.exists():
        data.mkdir()
        memory_ladder.make_data(model, data)
    options = [*memory_ladder.options_of(model), *memory_ladder.data_options(model, data), *row.options.split()]
    options += ["--eval_batch_tokens", memory_ladder.EVAL_TOKENS, "--accelerator", job.device]
    options += ["--predict_memory", "true"]
    if "--micro_batch_size" not in options:  # else the rung takes as many as fit
        options += ["--micro_batch_size", "1"]
    if job.rehearse:
        tiny = {"bloom-560m": "bloom-quickstart.json", "vit-large-16": "vit-small.json"}[model]
        options += ["--model", str(MODELS / tiny), "--train_samples", "16", "--validation_samples", "8"]
        options += ["--batch_size", "8", "--micro_batch_size", "1"]
        options += ["--image_size", "32", "--resize_to", "32"] if model.startswith("vit") else ["--max_length", "64"]
    return Entry(f"memory: {model}, {row.name}", rung_command(options, row.rung), 45)


def large_models(job: Job) -> list[Entry]:
    """Return adapters on 7 and 8 billion parameters, what is as large as a vocabulary, and wide heads."""
    models = {"bloom-7b1": "bloom-quickstart"} if job.rehearse else {"bloom-7b1": "bloom-7b1", "qwen3-8b": "qwen3-8b"}
    small = ["--accelerator", "cpu", "--tokens", "64", "--steps", "1", "--chunk", "16"] if job.rehearse else []
    found = []
    for name, config in models.items():
        shared = [LORA, "--model", str(MODELS / f"{config}.json"), "--weights", str(job.folder / name), *small]
        for rung in ("13_lora", "14_qlora"):
            for more in ([], ["--checkpointing"])[: 1 if job.rehearse else 2]:
                words = f"{name}, {rung}" + (", checkpointing" if more else "")
                found.append(Entry(words, [*shared, "--rung", rung, *more], 120, without_environment))
    tiny = ["--tokens", "64", "--width", "32", "--repeats", "1"] if job.rehearse else []
    for words, script in (("loss over the vocabulary", LOSS), ("embedding gradients", ROWS)):
        found.append(Entry(words, [script, *tiny], 40, without_environment))
    few = "--heads 2 --tokens 64 --width 136 --passes 1"
    wide = (few if job.rehearse else "--heads 32 --tokens 2048 --width 128 136").split()
    return [*found, Entry("attention of wide heads", [KERNELS, *wide], 20)]


def without_environment(figures: dict) -> dict:
    """Return a results file's parts without the versions and the hardware, which the harvest has."""
    kept = ("conditions", "entries", "shape", "figures")
    return {part: {name: run[name] for name in kept if name in run} for part, run in figures.items()}


def several_gpus(job: Job) -> list[Entry]:
    """Return the rungs of several GPUs on one and on all of them."""
    found = [Entry("all-reduce", [CHECKS, "nccl", "--device", job.device], 30)]
    for rung in ("9_ddp", "10_fsdp", "11_fsdp_cpu_offload", "12_deepspeed_zero"):
        counts = [job.gpus] if job.rehearse else sorted({1, 2, job.gpus} if rung == "9_ddp" else {job.gpus})
        for count in counts:
            command = rung_command(job.reviews.options, rung, "--devices", str(count))
            found.append(training(job, job.reviews, f"{rung}, {count} GPU" + "s" * (count > 1), command, 120))
    return [entry._replace(left_out="" if job.gpus > 1 else "one GPU here") for entry in found]
