"""Write the tables of accuracy and memory into docs/, the planner's measured figures, and the picture of the ladder.

    python benchmarks/evidence_tables.py            writes them
    python benchmarks/evidence_tables.py --check    lists stale pages and writes nothing; exit status 1 if there are any

A table is between `<!-- runs:NAME -->` and `<!-- /runs -->`. Sources: the runs under results/runs/ (evidence.py),
results/memory_ladder.json (predicted bytes), results/longest_text.json and results/bag_of_words.json. Missing figures
are shown as a dash. The planner's accuracies and speeds, with those of results/gpu.json, go to
src/fabric_ladder/planning/measured.json.
"""

import json
import math
import shlex
import sys
from functools import cache
from itertools import pairwise
from pathlib import Path

import common  # first import: it makes the project importable
import evidence
from evidence import IMDB_2000, SETS
from matplotlib import rc_context
from matplotlib.figure import Figure
from scipy.stats import ttest_rel

from fabric_ladder.comparing.charts import STYLE
from fabric_ladder.comparing.matching import Row
from fabric_ladder.comparing.sources import read_sources
from fabric_ladder.errors import UserError
from fabric_ladder.options import script_defaults, without_options
from fabric_ladder.planning.candidates import NAMED, read_settings
from fabric_ladder.planning.measured import FILE, numerics
from fabric_ladder.rungs import RUNGS, parent
from fabric_ladder.runs.intervals import wilson_interval
from fabric_ladder.runs.speed import deciding
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.advice import explain_errors

GPU = common.RESULTS / "gpu.json"
PICTURE = common.ROOT / "docs" / "pictures" / "ladder.png"
NONE = "–"
ONE_SAMPLE = "--batch_size 1 --activation_checkpointing true"
PLAIN = ("", 1, "")
SIXTEEN = ("--micro_batch_size 16", 1, " with 16 texts at once")  # one text has few activations to save
PREDICTED = {  # options, GPUs and remark of the prediction for a rung; default: none, one GPU, none
    "10_fsdp": ("", 4, " on 4 GPUs"), "12_deepspeed_zero": ("--deepspeed zero3_offload", 1, " with zero3_offload"),
    "7_grad_checkpointing": SIXTEEN, "20_activation_offload": SIXTEEN, "21_selective_checkpointing": SIXTEEN,
    "24_streamed_layers": ("--lora_targets attention", 1, " with adapters on attention"),
    "17_step_in_backward": (ONE_SAMPLE, 1, " with one text per step, checkpointed"),
    "27_cuda_graphs": ("", 1, " and a pool"), "28_memory_budget": ("", 1, " or less, as stated"),
    "29_streamed_training": ("--batch_size 1", 1, " with one text per step"),
}  # fmt: skip
AS_ANOTHER = {
    "3_torch_compile": "2_grad_accum", "9_ddp": "4_mixed_precision", "15_packing": "4_mixed_precision",
    "28_memory_budget": "5_low_precision",
}  # fmt: skip


PAIRS = [  # what differs, and set and rung of both sides
    ("16 samples per step instead of one", "imdb_2000/2_grad_accum", "imdb_2000/1_batch_size_1"),
    ("adapters: IMDb, 2 classes, MiniLM", "imdb_2000/13_lora", "imdb_2000/2_grad_accum"),
    ("adapters: IMDb's stars, 5 classes, MiniLM", "ratings/13_lora", "ratings/2_grad_accum"),
    ("adapters: CIFAR-10, a small ViT from random weights", "cifar10/13_lora", "cifar10/2_grad_accum"),
    (
        "rounding error in 8 bits instead of 16",
        *(f"imdb_2000_{each}/16_bf16_that_learns" for each in ("8_bit_error", "cpu")),
    ),
]


@cache
def rows_of(set: str) -> dict[str, dict[float, Row]]:
    """Return a set's kept runs by rung and learning rate, each with all its seeds."""
    found = {}
    for rung in RUNGS:
        home = evidence.RUNS / set / rung.stem
        for path in sorted({run.parents[1] for run in home.glob("*/*/run.json")}):
            row = Row(read_sources([str(path)]))
            found.setdefault(rung.stem, {})[row.first.settings["learning_rate"]] = row
    return found


def best_row(set: str, rung: str) -> Row | None:
    """Return the row of the rate that the search chose, or None if there is none."""
    return rows_of(set).get(rung, {}).get(evidence.found_rate(set, rung))


def most_seeds(set: str, row: Row) -> Row:
    """Return a row, or that of the same rung and rate on a CPU if it has more seeds."""
    on_cpu = rows_of(f"{set}_cpu").get(row.first.name, {}).get(row.first.settings["learning_rate"], row)
    return max(row, on_cpu, key=lambda each: len(each.runs))


def mean(row: Row | None, figure: str, digits: int = 1) -> str:
    """Return a mean over the seeds, with the sample standard deviation where there are several."""
    value = row.mean(figure) if row else None
    if value is None:
        return NONE
    spread = row.spread(figure)
    return f"{value:.{digits}f}" + (f" ± {spread:.{digits}f}" if spread is not None else "")


def tested(row: Row) -> list[str]:
    """Return the test accuracy, Wilson's 95 % interval of it, and that of each seed."""
    each = ", ".join(f"{value:.1f}" for value in row.values("test_accuracy"))
    return [mean(row, "test_accuracy"), interval(*row.interval), each]


def interval(low: float, high: float) -> str:
    """Return an interval in percent."""
    return f"{low:.1f} to {high:.1f}"


def device(row: Row) -> str:
    """Return the device of a row's runs; refuse seeds of several devices."""
    names = {evidence.device(run.hardware) for run in row.runs}
    if len(names) > 1:
        raise UserError(f"{row.first.source} has seeds of several devices: {', '.join(sorted(names))}")
    return names.pop()


@cache
def own(set: str) -> dict[str, Row]:
    """Return each rung's row at its own learning rate."""
    found = {}
    for rung, rates in rows_of(set).items():
        for rate, runs in evidence.kept(set, rung).items():
            if not all("--learning_rate" in record["command"] for record in runs.values()):
                found[rung] = rates[rate]
    return found


def variants() -> list[tuple[str, str, str]]:
    """Return set, rung and name of the stored runs on 2,000 reviews, in the ladder's order."""
    found = []
    for rung in RUNGS:
        for name in (name for name in SETS if name.startswith("imdb_2000")):
            extra = " ".join(SETS[name].options[len(IMDB_2000) :])
            if rung.stem in rows_of(name):
                found.append((name, rung.stem, f"{rung.stem} `{extra}`" if extra else rung.stem))
    return found


def accuracies() -> list[str]:
    """Return the table of 2,000 reviews: each rung at its own learning rate, and at the best if that is another."""
    rows = []
    for set, rung, name in variants():
        for row, remark in ((own(set).get(rung), ""), (best_row(set, rung), ", found")):
            if row and (not remark or row is not own(set).get(rung)):
                rate = f"{row.first.settings['learning_rate']:g}{remark}"
                rows.append([name, rate, *tested(row), device(row)])
    header = ["rung", "learning rate", "test accuracy, %", "95 % interval", "each seed", "on"]
    return common.markdown_table(header, rows)


def whole() -> list[str]:
    """Return the table of all of IMDb, each rung at all its learning rates, with the classical baseline."""
    found = [row for set in ("imdb", "imdb_256") for rates in rows_of(set).values() for row in rates.values()]
    rows = [
        [row.first.name, f"{row.first.settings['learning_rate']:g}", str(row.first.settings["max_length"]),
         mean(row, "validation_accuracy", 2), mean(row, "test_accuracy", 2), interval(*row.interval), device(row)]
        for row in found
    ]  # fmt: skip
    if words := common.read_results(common.RESULTS / "bag_of_words.json").get("imdb"):
        (texts,) = {row.first.test_samples for row in found}
        for name in ("counts", "tf-idf"):
            bounds = interval(*(100 * share for share in wilson_interval(words[name], texts)))
            regression = f"logistic regression on {name.replace('counts', 'word counts')}"
            rows.append([regression, NONE, "all", NONE, f"{100 * words[name]:.2f}", bounds, "CPU"])
    header = ["rung", "learning rate", "tokens", "validation, %", "test, %", "95 % interval", "on"]
    return common.markdown_table(header, rows)


@cache
def predictions() -> dict[tuple[str, str, int], float]:
    """Return the predicted peaks of BLOOM-560m in GB by rung, options and GPUs."""
    entries = common.read_results(common.RESULTS / "memory_ladder.json")["bloom-560m"]["entries"]
    return {(each["rung"], each["options"], each["gpus"]): each["predicted"]["total"] / 1e9 for each in entries}


def predicted(rung: str) -> tuple[float, str]:
    """Return the predicted peak of a rung in GB, and its remark."""
    options, gpus, said = PREDICTED.get(rung, PLAIN)
    entry = AS_ANOTHER.get(rung, rung), options, gpus
    if entry not in predictions():
        raise UserError(
            f"{rung} is not predicted yet: add it to memory_ladder.csv, and run benchmarks/memory_ladder.py"
        )
    return predictions()[entry], said


def change(value: float, before: float) -> str:
    """Return by how much a figure differs from one before, in percent."""
    percent = round((value / before - 1) * 100)
    return f"{percent:+d} %" if percent else "0 %"


def ladder() -> list[str]:
    """Return the ladder from bottom to top: memory, its change, and accuracy."""
    rows, first = [], predicted(RUNGS[0].stem)[0]
    for rung in RUNGS:
        memory, said = predicted(rung.stem)
        to_parent = NONE
        if below := parent(rung):  # under the rung's own conditions if known
            before = predictions().get((below.stem, *PREDICTED.get(rung.stem, PLAIN)[:2]), predicted(below.stem)[0])
            to_parent = f"{change(memory, before)} ({below.stem.split('_')[0]})"
        found = [own("imdb_2000").get(rung.stem), best_row("imdb_2000", rung.stem)]
        accuracy = [mean(row and most_seeds("imdb_2000", row), "test_accuracy") for row in found]
        rows.append([rung.stem, f"{memory:.2f}{said}", to_parent, change(memory, first), *accuracy])
    header = ["rung", "GPU, GB", "change to its parent", "to rung 1", "test, %", "at its best rate, %"]
    return common.markdown_table(header, rows)


def parts() -> list[str]:
    """Return the table of all stored predictions in GB, by the parts of the memory."""
    names, rows = ["parameters", "gradients", "optimizer_state", "activations", "logits", "other", "total"], []
    for model, stored in common.read_results(common.RESULTS / "memory_ladder.json").items():
        for each in stored["entries"]:
            sizes = [f"{each['predicted'][name] / 1e9:.2f}" for name in names]
            rows.append([model, each["rung"], each["options"], str(each["gpus"]), *sizes])
    return common.markdown_table(["model", "rung", "options", "GPUs", *names], rows)


def differences() -> list[str]:
    """Return the table of rungs at their best learning rates, with the difference of the same seeds."""
    rows = []
    for name, *sides in PAIRS:
        found = []
        for set, rung in (side.split("/") for side in sides):
            row = best_row(set, rung) or own(set).get(rung)
            found.append(row and most_seeds(set, row))
        if None in found:
            rows.append([name, *[NONE] * 5])
            continue
        tests = [dict(zip(row.seeds, row.values("test_accuracy"), strict=True)) for row in found]
        pairs = [(tests[0][seed], tests[1][seed]) for seed in tests[0].keys() & tests[1].keys()]
        low, high = ttest_rel(*zip(*pairs, strict=True)).confidence_interval()
        points = sum(one - other for one, other in pairs) / len(pairs)
        accuracies = [f"{mean(row, 'test_accuracy')} ({row.first.name.split('_')[0]})" for row in found]
        rows.append([name, *accuracies, f"{points:+.1f}", f"{low:+.1f} to {high:+.1f}", str(len(pairs))])
    header = ["what differs", "test, % (rung)", "against, % (rung)", "points", "95 % interval", "seeds"]
    return common.markdown_table(header, rows)


def longest_texts() -> list[str]:
    """Return the table of the longest texts, in tokens: each cell without and with tiles."""
    found = common.read_results(common.RESULTS / "longest_text.json").get("llama-3.1-8b", {"rows": []})["rows"]
    sizes = [name for name in (found or [{}])[0] if name.endswith(" GB")]
    rows = []
    for whole, tiled in zip(found[::2], found[1::2], strict=True):
        numbers = [[f"{each[size]:,}" if each[size] else NONE for each in (whole, tiled)] for size in sizes]
        rung = f"{whole['way']} ({whole['rung'].split('_')[0]})" + whole["activation_offload"] * ", activation offload"
        rows.append([rung, *(NONE if cell == [NONE, NONE] else " → ".join(cell) for cell in numbers)])
    return common.markdown_table(["trained (rung)", *sizes], rows)


BLOCKS = {block.__name__: block for block in (whole, ladder, differences, longest_texts)}


def lost(row: Row, whole: Row) -> float:
    """Return by how many points the accuracy of a row is below another one; 0 within two standard errors."""
    points = whole.mean("test_accuracy") - row.mean("test_accuracy")
    variances = [(each.spread("test_accuracy") or whole.spread("test_accuracy")) ** 2 for each in (row, whole)]
    error = math.sqrt(variances[0] / len(row.runs) + variances[1] / len(whole.runs))
    return round(points, 2) if points > 2 * error else 0


def accuracy_costs() -> list[dict]:
    """Return what each kind of training costs in accuracy against rung 2, at the rung's own learning rate.

    The words also have the cost at the best rate and after half the steps.
    """
    whole, halved, found = own("imdb_2000")["2_grad_accum"], own("imdb_2000_halved"), {}
    for set, rung, _ in variants():
        if set.endswith(("_cpu", "_halved")) or rung not in own(set):
            continue
        row, best = (most_seeds(set, each) for each in (own(set)[rung], best_row(set, rung) or own(set)[rung]))
        points, least, remarks = lost(row, whole), lost(best, whole), "MiniLM"
        if (rate := best.first.settings["learning_rate"]) != row.first.settings["learning_rate"]:
            remarks += f"; {least:.2g} at --learning_rate {rate:g}"
        if set == "imdb_2000" and rung in halved:
            remarks += f"; {lost(halved[rung], halved['16_bf16_that_learns']):.2g} after half the steps"
        key = numerics(vars(Settings()) | row.first.settings)
        words = f"{points:.2g} points of accuracy ({remarks})" if points else ""
        cost = {"rung": rung, "numerics": key, "points": points, "best": min(points, least), "words": words}
        found.setdefault(str(key), cost)
    return list(found.values())


def speeds() -> dict:
    """Return the samples/s of the ladder's rungs after their start, by the planner's names of candidates."""
    harvest, found, settings = common.read_results(GPU), {}, {}
    for part, entry in harvest["entries"].items():
        words = shlex.split(entry.get("figures", {}).get("command", ""))
        timed = "late_samples_per_second" in entry.get("figures", {}) and words[1].startswith("src/")
        if timed and not part.startswith("memory:"):  # three at a time
            switches = [name for pair, name in NAMED.items() if pair in pairwise(words)]
            name = " ".join([Path(words[1]).stem, *switches])
            found.setdefault(name, round(entry["figures"]["late_samples_per_second"], 1))
            options = without_options(words[2:], ["tokenizer", "accelerator"])
            rung = Path(words[1]).stem
            on_gpu = {"micro_batch_tokens": script_defaults(rung)["micro_batch_tokens"]}  # this machine takes another
            settings.setdefault(name, deciding(vars(read_settings(rung, options)) | on_gpu))
    gpu = harvest["machine"]["hardware"]["gpu"]
    return {"of": f"BLOOM-560m on {gpu}", "gpu": gpu, "samples_per_second": found, "settings": settings}


def fill_pages(check: bool = False) -> list[Path]:
    """Write tables, the planner's measured figures and the picture; return changed texts. `check`: write nothing."""
    files = {"accuracies": accuracies(), "ladder": ladder(), "imdb": whole(), "memory_ladder": parts()}
    changed = common.fill_pages("runs", lambda name: BLOCKS[name](), check, files)
    measured = json.dumps({"accuracy": accuracy_costs(), "speeds": speeds()}, indent=1) + "\n"
    if common.update(FILE, lambda _: measured, check):
        changed.append(FILE)
    if not check:
        draw().savefig(PICTURE, dpi=160, metadata={"Software": None})
    return changed


def draw() -> Figure:
    """Return the picture of the ladder: the predicted memory of each rung as bars."""
    memory = {rung.stem: predicted(rung.stem)[0] for rung in RUNGS}
    with rc_context(STYLE):
        figure = Figure(figsize=(7, 4.6), layout="constrained")
        axes = figure.subplots()
        axes.bar_label(axes.barh(list(memory), list(memory.values()), height=0.6), fmt="%.2f", padding=3, fontsize=7)
        axes.set(xlabel="predicted peak of one GPU, GB (BLOOM-560m, micro-batch 1, 1,024 tokens)")
        axes.invert_yaxis()
        axes.grid(axis="x")
        axes.tick_params(length=0)
    return figure


def main() -> int:
    """Write, or with `--check` compare; return the exit status."""
    return common.fill_or_check(__doc__, fill_pages, "python benchmarks/evidence_tables.py")


if __name__ == "__main__":
    explain_errors()
    sys.exit(main())
