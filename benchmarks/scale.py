"""Compare few texts with many, and start-up and evaluation with training; exit status 1 when a target is missed.

    python benchmarks/scale.py [--part throughput parquet startup evaluation] [--size 1.0] [--repeats 3] [--threads 2]

Parts:
    throughput  A small BLOOM on 1,000 reviews of IMDb, on all of it, and for five epochs: tokens/s, peak CPU memory.
    parquet     A million short texts in one row group of a Parquet file: memory of the first start and of the second.
    startup     All of IMDb, tokenized before: from the start to the first optimizer step, less the libraries' import.
    evaluation  MiniLM, 256 tokens: tokens/s of the evaluation over those of the training.

Each figure comes from an unchanged src/2_grad_accum.py in its own process. Another process watches a start until the
first loss is printed. Its memory excludes mapped files, which the system may drop. `--size 0.1` rehearses on a tenth of
the texts; these figures prove nothing.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread
from time import perf_counter, sleep

import common  # first import: it makes the project importable
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from against_blog import model_options
from common import CannotMeasureError, alternate, medians, part_parser, run_parts

import local_dataset_utilities as data
from fabric_ladder import parse_settings

OUT = common.RESULTS / "scale.json"
RUNG = "2_grad_accum"
LIBRARIES = "import datasets, lightning, pandas, platformdirs, torch, transformers"
BLOOM = {
    "model_type": "bloom", "vocab_size": 8192, "hidden_size": 32, "n_layer": 1, "n_head": 2, "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}  # fmt: skip
PARQUET_TEXTS, FEW_TEXTS = 1_000_000, 2000
WORDS = "the film plot is was good bad dull bright story ending actor scene music never very hardly quite again".split()
TARGETS = {  # (ratio, "min" or "max", bound)
    "throughput": [
        ("tokens/s of all reviews / of 1,000", "min", 0.9),
        ("tokens/s of five epochs / of one", "min", 0.9),
        ("host peak of all reviews / of 1,000", "max", 1.1),
        ("host peak of five epochs / of one", "max", 1.1),
    ],
    "parquet": [("bytes a text, first start", "max", 200.0), ("bytes a text, second start", "max", 50.0)],
    "startup": [("seconds beyond importing the libraries", "max", 10.0)],
    "evaluation": [
        ("evaluation / training, sample by sample", "min", 2.0),
        ("evaluation / training, 1,024 tokens at once", "min", 2.0),
    ],
}


def small_bloom(folder: Path, *more: str) -> list[str]:
    """Write the small model's config and return the settings that choose it."""
    (folder / "bloom.json").write_text(json.dumps(BLOOM), encoding="utf-8")
    model = ["--model", str(folder / "bloom.json"), "--from_scratch", "true"]
    return [*common.BASE, "--accelerator", "cpu", *model, *more]


def measure_throughput(folder: Path, size: float, repeats: int, threads: int) -> dict:
    """Train on 1,000 reviews ten times, on all 35,000 training reviews of the 50,000, and on these five times."""
    options = small_bloom(folder, "--max_length", "64", "--micro_batch_tokens", "1024", "--log_every", "1600")
    everything = data.load_datasets(parse_settings(options))
    everything.tokenizer.save_pretrained(folder / "tokenizer")  # all sides have the same tokens
    options += ["--tokenizer", str(folder / "tokenizer"), "--validation_samples", "200", "--test_samples", "200"]
    most = max(1000, round(size * len(everything.splits["train"])))

    def run(reviews: int, epochs: int) -> Callable[[], dict]:
        more = ["--train_samples", str(reviews), "--epochs", str(epochs)]
        return lambda: common.run_rung(RUNG, [*options, *more], threads)

    run(1000, 1)(), run(most, 1)()  # which fills the cache
    figures = alternate(repeats, few=run(1000, 10), all=run(most, 1), five=run(most, 5))
    middle, speed, peak = medians(figures), "tokens_per_second", "peak_host_memory_bytes"
    few, whole, five = (middle[name] for name in ("few", "all", "five"))
    ratios = {
        "tokens/s of all reviews / of 1,000": whole[speed] / few[speed],
        "tokens/s of five epochs / of one": five[speed] / whole[speed],
        "host peak of all reviews / of 1,000": whole[peak] / few[peak],
        "host peak of five epochs / of one": five[peak] / whole[peak],
    }
    conditions = {"model": BLOOM, "max_length": 64, "training_reviews": {"few": 1000, "all": most, "five": most}}
    return {"conditions": conditions, "repeats": figures, "medians": middle, "ratios": ratios}


def start_rung(options: list[str], threads: int) -> dict[str, float]:
    """Start the rung, stop it when its first loss is printed, and return seconds and memory in bytes."""
    held = []

    def watch() -> None:
        status = Path(f"/proc/{process.pid}/status")
        with suppress(OSError, KeyError):  # the process has ended
            while True:
                lines = dict(line.split(":", 1) for line in status.read_text().splitlines())
                held.append([int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "VmHWM")])
                sleep(0.005)

    with tempfile.TemporaryDirectory(prefix="fabric-ladder-runs-") as runs:
        options = [*options, "--runs_dir", runs, "--log_every", "1"]
        command = [sys.executable, str(common.ROOT / "src" / f"{RUNG}.py"), *options]
        environment, begun = common.child_environment(threads), perf_counter()
        with subprocess.Popen(
            command, env=environment, cwd=common.ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            watcher = Thread(target=watch)
            watcher.start()
            stepped = next((perf_counter() for line in process.stdout if "| Loss:" in line), None)
            process.kill()
            errors = process.stderr.read()
        watcher.join()
    if stepped is None:
        raise RuntimeError(f"the start failed: {(errors.strip().splitlines() or ['no message'])[-1]}")
    own, peak = (max(values) for values in zip(*held, strict=True))
    return {"seconds": stepped - begun, "own_memory_bytes": own, "peak_memory_bytes": peak}


def write_texts(path: Path, count: int) -> int:
    """Write short texts with labels as one row group, and return their bytes."""
    rng, words, schema = np.random.default_rng(0), np.array(WORDS), {"text": pa.string(), "label": pa.int64()}
    texts = [" ".join(words[rng.integers(len(words), size=size)]) for size in rng.integers(5, 30, count)]
    table = pa.table({"text": texts, "label": rng.integers(0, 2, count)}, schema=pa.schema(schema))
    pq.write_table(table, path, row_group_size=count)
    return sum(map(len, texts))


def measure_parquet(folder: Path, size: float, repeats: int, threads: int) -> dict:
    """Start on few texts, on many, and on many once more, each with an empty cache but the last."""
    count = round(size * PARQUET_TEXTS)
    write_texts(folder / "few.parquet", FEW_TEXTS)
    total = write_texts(folder / "many.parquet", count)
    options = small_bloom(folder, "--max_length", "64", "--micro_batch_size", "16", "--batch_size", "16")

    def start(name: str) -> dict[str, float]:
        more = ["--dataset", str(folder / f"{name}.parquet"), "--cache_dir", str(folder / "cache")]
        return start_rung([*options, *more], threads)

    figures = {side: [start(name)] for side, name in (("few", "few"), ("first", "many"), ("second", "many"))}
    middle = medians(figures)
    ratios = {
        f"bytes a text, {side} start": (middle[side]["own_memory_bytes"] - middle["few"]["own_memory_bytes"]) / count
        for side in ("first", "second")
    }
    conditions = {"texts": count, "bytes_of_texts": total, "few_texts": FEW_TEXTS, "model": BLOOM, "max_length": 64}
    return {"conditions": conditions, "repeats": figures, "medians": middle, "ratios": ratios}


def measure_startup(folder: Path, size: float, repeats: int, threads: int) -> dict:
    """Start on all of IMDb, whatever `size`, and import the libraries alone."""
    options = [*common.BASE, "--accelerator", "cpu", *model_options("minilm", folder)]
    options += ["--batch_size", "1", "--micro_batch_size", "1"]  # the first step is short
    reviews = sum(map(len, data.load_datasets(parse_settings(options)).splits.values()))  # which fills the cache

    def import_libraries() -> dict[str, float]:
        begun = perf_counter()
        subprocess.run([sys.executable, "-c", LIBRARIES], env=common.child_environment(threads), check=True)
        return {"seconds": perf_counter() - begun}

    sides = {"libraries": import_libraries, "second_run": lambda: start_rung(options, threads)}
    figures = alternate(repeats, **sides)
    middle = medians(figures)
    seconds = middle["second_run"]["seconds"] - middle["libraries"]["seconds"]
    conditions = {"reviews": reviews, "model": "all-MiniLM-L6-v2", "max_length": 512, "libraries": LIBRARIES}
    ratios = {"seconds beyond importing the libraries": seconds}
    return {"conditions": conditions, "repeats": figures, "medians": middle, "ratios": ratios}


def measure_evaluation(folder: Path, size: float, repeats: int, threads: int) -> dict:
    """Train and evaluate, the training sample by sample and with micro-batches as large as the evaluation's."""
    counts = {"train_samples": max(16, round(64 * size)), "validation_samples": round(256 * size), "test_samples": 16}
    options = [*common.BASE, "--accelerator", "cpu", *model_options("minilm", folder), "--max_length", "256"]
    options += [part for name, count in counts.items() for part in (f"--{name}", str(count))]
    cuts = {"sample by sample": ["--micro_batch_size", "1"], "1,024 tokens at once": ["--micro_batch_tokens", "1024"]}
    sides = {
        name: lambda cut=cut: common.run_rung(RUNG, [*options, "--eval_batch_tokens", "1024", *cut], threads)
        for name, cut in cuts.items()
    }
    next(iter(sides.values()))()  # which fills the cache
    figures = alternate(repeats, **sides)
    middle = medians(figures)
    ratios = {
        f"evaluation / training, {name}": figure["evaluation_tokens_per_second"] / figure["tokens_per_second"]
        for name, figure in middle.items()
    }
    conditions = {"model": "all-MiniLM-L6-v2", "max_length": 256, "eval_batch_tokens": 1024} | counts
    return {"conditions": conditions, "repeats": figures, "medians": middle, "ratios": ratios}


MEASURES = {
    "throughput": measure_throughput,
    "parquet": measure_parquet,
    "startup": measure_startup,
    "evaluation": measure_evaluation,
}


def main() -> int:
    """Measure the chosen parts and return the exit status."""
    parser = part_parser(__doc__, MEASURES, 3, OUT)
    parser.add_argument("--size", type=float, default=1.0, help="share of the texts; below 1 for a rehearsal")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    def measure(part: str, folder: Path) -> dict:
        if part != "parquet":
            common.imdb_archive()
        elif not Path("/proc/self/status").exists():
            raise CannotMeasureError("only Linux separates memory from mapped files")
        return MEASURES[part](folder, args.size, args.repeats, args.threads)

    return run_parts({part: partial(measure, part) for part in args.part}, args.out, TARGETS)


if __name__ == "__main__":
    sys.exit(main())
