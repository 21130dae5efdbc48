"""Predict the memory that docs/will_it_fit.md shows, and write it to docs/fit/data.js.

    python docs/fit/build.py [MODEL ...] [--rungs RUNG ...]     # names as in MODELS and ROWS; without names: all
    python docs/fit/build.py --missing                          # those that are not stored; 30 s for each row
    python docs/fit/build.py --rest                             # all but the peaks: GPUs, overheads, CPU memory, order

Each model takes five minutes on one core for each task. The figures of all other models and rungs stay as they are.

The figures are those of `predict_memory` with an effective batch of 16 samples (32 for micro-batches of 16, so that
gradients accumulate) and evaluation batches of 4,096 tokens. The page adds the shares of several GPUs (`shares`) and
the ranks of adapters (`count_adapters`). Two shortcuts save time:

- Techniques that differ only in the optimizer share their passes, see `_Passes`.
- The peak is the maximum over moments that grow linearly with the micro-batch. If the same moment is the peak for 2 and
  for 16 samples, the peaks for 4 and 8 samples lie on the line between them.
"""

import argparse
import json
import subprocess
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import stored
import torch
import transformers

from fabric_ladder.data.hub import find_shipped_config
from fabric_ladder.errors import UserError
from fabric_ladder.ladder import ADAM_IN_4_BITS, CHECKPOINTING, FAST, IN_4_BITS, LEAN, ON_HOST, row_of
from fabric_ladder.models.layers import meta_model
from fabric_ladder.options import own_rate, script_defaults
from fabric_ladder.planning.candidates import Candidate, read_candidates, read_settings
from fabric_ladder.planning.gpus import ANY, GPUS, Gpu, find_gpu
from fabric_ladder.planning.measured import MEASURED, accuracy_cost
from fabric_ladder.planning.overhead import ANY_GPU, NCCL, assume
from fabric_ladder.planning.plan import HOST_MEMORY, find_samples
from fabric_ladder.planning.planner import Samples, host_bytes
from fabric_ladder.planning.predict import blank_datasets, largest_batches
from fabric_ladder.planning.rehearsal import Rehearsal, rehearsal_key, rehearse, to_rehearse
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import trains_adapters, trains_all, used
from fabric_ladder.techniques.build import build_model
from fabric_ladder.techniques.memory import ON_DEVICE, Counts, Peak, bytes_of_weight, count_parameters

TEXTS, ANSWERS, IMAGES = "text-classification", "instruction-tuning", "image-classification"
SHORT, LONG = (128, 256, 512), (512, 1024, 2048)  # tokens
SIZES = (1, 2, 4, 8, 16)  # samples of a micro-batch
OLD = find_gpu("T4")  # stands for all GPUs that only emulate bfloat16
MODELS = {  # label: name on the Hub, tasks, lengths
    "BERT base": ("google-bert/bert-base-cased", (TEXTS,), SHORT),
    "BERT large": ("google-bert/bert-large-cased", (TEXTS,), SHORT),
    "ModernBERT base": ("answerdotai/ModernBERT-base", (TEXTS,), LONG),
    "ViT large": ("google/vit-large-patch16-224", (IMAGES,), (0,)),
    "GPT-2": ("openai-community/gpt2", (TEXTS,), (256, 512, 1024)),
    "BLOOM 560m": ("bigscience/bloom-560m", (TEXTS,), (256, 512, 1024)),
    "Qwen3 0.6B": ("Qwen/Qwen3-0.6B", (ANSWERS,), LONG),
    "Qwen3 4B": ("Qwen/Qwen3-4B", (ANSWERS,), LONG),
    "Qwen3 8B": ("Qwen/Qwen3-8B", (ANSWERS,), (*LONG, 4096)),
    "Qwen3 14B": ("Qwen/Qwen3-14B", (ANSWERS,), LONG),
    "Qwen3 32B": ("Qwen/Qwen3-32B", (ANSWERS,), LONG),
    "Llama 3.2 1B": ("meta-llama/Llama-3.2-1B", (ANSWERS,), LONG),
    "Llama 3.1 8B": ("meta-llama/Llama-3.1-8B", (ANSWERS,), (*LONG, 4096)),
    "Llama 3.1 70B": ("meta-llama/Llama-3.1-70B", (ANSWERS,), LONG),
    "Mistral 7B": ("mistralai/Mistral-7B-v0.1", (TEXTS, ANSWERS), LONG),
    "Gemma 2 2B": ("google/gemma-2-2b", (ANSWERS,), LONG),
}
SHAPE = """model_type hidden_size n_embd num_hidden_layers n_layer num_attention_heads num_key_value_heads
intermediate_size vocab_size""".split()  # identify a pasted config.json
GPU_COUNTS = (1, 2, 4, 8)
LORA_RANKS = (4, 8, 16, 32, 64)  # beyond, activations grow more than the form computes
TARGETS = ("attention", "all-linear")
ATTENTION = ("--lora_targets", "attention")


class Row(NamedTuple):
    """A technique of the form. The figures have the numbers of the rows as keys, so new rows come last.

    Attributes:
        rung: The script's name.
        options: Options as words of a command line.
        title: The technique in words.
        old: Its figures on a GPU that only emulates bfloat16: `own`, `same` as on all GPUs, or empty: it does not suit.
        base: The row with the memory of its passes, to which `shares` are added; None: it has figures of its own.
        texts: Whether it is only for text classification, whose measured speed makes it the planner's choice.
    """

    rung: str
    options: tuple[str, ...]
    title: str
    old: str = ""
    base: int | None = None
    texts: bool = False

    @property
    def several(self) -> bool:
        """Whether the form has it on several GPUs; all other techniques are shown on one GPU of a machine."""
        defaults = script_defaults(self.rung)
        return "strategy" in defaults and "offload" not in defaults

    @property
    def single(self) -> bool:
        """Whether it runs on one GPU."""
        return not self.several or self.options in row_of(self.rung).planned(1)

    def suits(self, task: str, words: list[str]) -> bool:
        """Return whether the form has it for a task and a model; some models cannot be packed."""
        try:
            read_settings(self.rung, [*words, *self.options], 1 if self.single else 2)
        except UserError:
            return False
        return task == TEXTS or not self.texts

    def facts(self, one_by_one: Candidate, measured: Candidate) -> dict:
        """Return what the form needs, of text classification with micro-batches of one and of two samples."""
        settings = measured.settings
        flags = {"whole": takes_whole_batch(self.rung), "all": trains_all(settings), "adapters": bool(settings.lora),
                 "single": self.single, "several": self.several}  # fmt: skip
        costs = [accuracy_cost(vars(each.settings)) for each in (one_by_one, measured)]
        rate = own_rate(vars(settings) | {"from_scratch": False}) or settings.learning_rate
        facts = {"rung": self.rung, "options": " ".join(self.options), "title": self.title, "old": self.old}
        facts |= {"base": self.base, "speed": measured.speed, "costs": [cost and cost["words"] for cost in costs]}
        return facts | {"rate": f"{rate:g}"} | {name: int(flag) for name, flag in flags.items()}


ROWS = (
    Row("2_grad_accum", (), "32-bit weights and Adam", "same"),
    Row("4_mixed_precision", (), "Mixed precision", "own"),
    Row("4_mixed_precision", CHECKPOINTING, "Mixed precision, checkpointing", "own"),
    Row("5_low_precision", (), "Pure bfloat16"),
    Row("6_lean_optimizer", CHECKPOINTING, "bfloat16 with SGD, checkpointing"),
    Row("7_grad_checkpointing", (), "Pure bfloat16, checkpointing"),
    Row("11_fsdp_cpu_offload", CHECKPOINTING, "Weights in CPU memory (FSDP), checkpointing"),
    Row("13_lora", ATTENTION, "LoRA adapters on attention", "own"),
    Row("13_lora", (*ATTENTION, *CHECKPOINTING), "LoRA adapters on attention, checkpointing", "own"),
    Row("14_qlora", ATTENTION, "LoRA adapters on attention, 4-bit weights", "own"),
    Row("14_qlora", (*ATTENTION, *CHECKPOINTING), "LoRA adapters on attention, 4-bit weights, checkpointing", "own"),
    Row("16_bf16_that_learns", (), "bfloat16 with Kahan summation"),
    Row("16_bf16_that_learns", CHECKPOINTING, "bfloat16 with Kahan summation, checkpointing"),
    Row("17_step_in_backward", (*ON_HOST, *CHECKPOINTING), "Step in backward, optimizer in CPU memory, checkpointing"),
    Row("18_low_bit_optimizer", (), "8-bit Adam"),
    Row("18_low_bit_optimizer", CHECKPOINTING, "8-bit Adam, checkpointing"),
    Row("19_optimizer_offload", CHECKPOINTING, "Optimizer in CPU memory, checkpointing"),
    Row("26_stateless", CHECKPOINTING, "bfloat16 with SinkGD, checkpointing"),
    Row("29_streamed_training", (), "Blocks and optimizer in CPU memory, checkpointing"),
    Row(
        "11_fsdp_cpu_offload", (*LEAN, *CHECKPOINTING), "Weights in CPU memory (FSDP), bfloat16 with SGD, checkpointing"
    ),
    Row("13_lora", (), "LoRA adapters on all linear layers", "own"),
    Row("13_lora", CHECKPOINTING, "LoRA adapters on all linear layers, checkpointing", "own"),
    Row("14_qlora", (), "LoRA adapters on all linear layers, 4-bit weights", "own"),
    Row("14_qlora", CHECKPOINTING, "LoRA adapters on all linear layers, 4-bit weights, checkpointing", "own"),
    Row("24_streamed_layers", (*IN_4_BITS, *CHECKPOINTING), "4-bit blocks in CPU memory with adapters, checkpointing"),
    Row("25_block_by_block", CHECKPOINTING, "One block at a time, checkpointing"),
    Row("21_selective_checkpointing", (), "Pure bfloat16, selective checkpointing"),
    Row("20_activation_offload", (), "Pure bfloat16, checkpoints in CPU memory"),
    Row("9_ddp", (), "Mixed precision on each GPU (DDP)", "own", base=1),
    Row("9_ddp", CHECKPOINTING, "Mixed precision on each GPU (DDP), checkpointing", "own", base=2),
    Row("10_fsdp", CHECKPOINTING, "Weights and optimizer sharded (FSDP), checkpointing"),
    Row("12_deepspeed_zero", ("--deepspeed", "zero2", *CHECKPOINTING), "DeepSpeed ZeRO 2, checkpointing"),
    Row("12_deepspeed_zero", ("--deepspeed", "zero3", *CHECKPOINTING), "DeepSpeed ZeRO 3, checkpointing", base=31),
    Row(
        "12_deepspeed_zero",
        ("--deepspeed", "zero3_offload", *CHECKPOINTING),
        "DeepSpeed ZeRO 3 in CPU memory, checkpointing",
        base=31,
    ),
    Row("18_low_bit_optimizer", ADAM_IN_4_BITS, "4-bit Adam"),
    Row("18_low_bit_optimizer", (*ADAM_IN_4_BITS, *CHECKPOINTING), "4-bit Adam, checkpointing"),
    Row("15_packing", (), "Mixed precision, packed texts", "own", texts=True),
    Row("16_bf16_that_learns", FAST, "bfloat16 with Kahan summation, packed texts, compiled", texts=True),
    Row("10_fsdp", (), "Weights and optimizer sharded (FSDP)"),
)


class _Passes:
    """Rehearsals of a model's techniques, which share their passes if only the optimizer differs.

    With SGD the peak is that of the passes, since the optimizer step has weights and gradients alone. Another optimizer
    adds its state to every moment, and the moment of its own step.
    """

    def __init__(self, samples: Samples, gpu: Gpu, stack: ExitStack):
        self.datasets = blank_datasets(samples.classes, samples.image_size)
        self.samples, self.gpu, self.stack = samples, gpu, stack
        self.known: dict[str, Rehearsal] = {}

    def peak(self, settings: Settings, length: int, size: int) -> Peak:
        """Return the peak with micro-batches of `size` samples of `length` tokens."""
        whole = settings.step_in_backward  # the effective batch is one micro-batch
        sizes = {"batch_size": size if whole else effective_batch(size, settings.ranks), "micro_batch_size": size}
        shape = replace(settings, max_length=length, micro_batch_tokens=None, **sizes)
        alone = whole or trains_adapters(settings) or settings.block_steps or settings.strategy != "single"
        if alone or settings.precision != "bf16-true":
            return self._rehearse(settings, shape, length)
        plain = {"optimizer": "sgd", "kahan_summation": False}
        peak = self._rehearse(replace(to_rehearse(settings), **plain), replace(to_rehearse(shape), **plain), length)
        smallest = replace(shape, batch_size=2, micro_batch_size=1, eval_batch_tokens=max(64, self.samples.length))
        tiny = self._rehearse(settings, smallest, 2)
        peak = peak._replace(optimizer_state=peak.optimizer_state + tiny.optimizer_state)
        return tiny if tiny.phase == "optimizer" and tiny.total > peak.total else peak

    def _rehearse(self, key: Settings, settings: Settings, length: int) -> Peak:
        """Return the peak of settings, in the rehearsal that all settings with the same `key` share."""
        name = rehearsal_key(key)
        if name not in self.known:
            self.known[name] = self.stack.enter_context(rehearse(key, self.datasets, self.gpu.capability))
        tokens = self.samples.length if self.samples.image_size else length
        peak = self.known[name].peak(settings, *largest_batches(settings, tokens, self.samples.image_size))
        added = shares(settings, self.known[name].counts)  # the form adds them again, for its number of GPUs
        return peak._replace(
            **{part: max(0, getattr(peak, part) - share) for part, share in zip(ON_DEVICE, added, strict=False)}
        )


def takes_whole_batch(rung: str) -> bool:
    """Return whether a rung takes the effective batch in one micro-batch, without gradients to add to."""
    return "step_in_backward" in script_defaults(rung)


def effective_batch(size: int, gpus: int = 1) -> int:
    """Return the effective batch of the commands with micro-batches of this many samples on each GPU."""
    return max(16, 2 * size * gpus)


def shares(settings: Settings, counts: Counts) -> list[int]:
    """Return the bytes that sharding adds on each GPU to the passes: by the parts of a peak, and the least total."""
    if settings.deepspeed:
        nothing = Peak(0, 0, 0, 0, 0, 0, 0, "training")
        [zero] = [technique for technique in used(settings) if technique.setting == "deepspeed"]
        # other moments than the passes decide if these take little memory
        least = zero.add_memory(nothing, counts, settings).total
        added = zero.add_memory(nothing._replace(activations=10**15), counts, settings)
        return [added.parameters, added.gradients, added.optimizer_state, 0, 0, added.other, least]
    if settings.strategy == "fsdp" and not settings.offload:
        return [round(each * counts.all / settings.ranks) for each in (4, 4, 8)] + [0] * 4
    return [0] * 7


def read_rows(task: str) -> dict[tuple[int, int], Candidate]:
    """Return the planner's candidates by the number of the row and by the size of the micro-batch; 1, 2 and 16.

    Techniques for several GPUs have two. Rows that do not suit the task are left out.
    """
    words, found = _words(next(label for label, model in MODELS.items() if task in model[1]), task), {}
    for number, row in enumerate(ROWS):
        if not row.suits(task, words):
            continue
        gpus = 1 + row.several
        for size in (1, 2, 16):
            sizes = ["--micro_batch_size", str(size), "--batch_size", str(effective_batch(size, gpus))]
            if takes_whole_batch(row.rung):
                sizes = ["--batch_size", str(size)]
            [found[number, size]], _ = read_candidates([(row.rung, row.options)], [*words, *sizes], gpus)
    return found


def _words(label: str, task: str) -> list[str]:
    """Return a model with its shortest length, and the task, as words of a command line."""
    name, _, lengths = MODELS[label]
    return ["--model", str(find_shipped_config(name)), "--max_length", str(lengths[0] or 1024), "--task", task]


def order_rows(candidates: dict[tuple[int, int], Candidate], gpus: int, lora_rank: int) -> list[list[int]]:
    """Return the planner's rank of each row for each of SIZES: the best is 0, equal ranks have equal numbers.

    A row without candidates has None.
    """
    ranks = {}
    for (number, size), candidate in candidates.items():
        changes = {"devices": gpus if ROWS[number].several else 1}
        if candidate.settings.lora:
            changes["lora_rank"] = lora_rank
        changed = candidate._replace(settings=replace(candidate.settings, **changes))
        ranks[number, size] = changed.rank
    places = sorted({*ranks.values()})
    known = [[ranks.get((row, size if size in (1, 16) else 2)) for size in SIZES] for row in range(len(ROWS))]
    return [[rank and places.index(rank) for rank in ranks_of_row] for ranks_of_row in known]


def describe_model(label: str, task: str, candidates: dict[tuple[int, int], Candidate]) -> dict:
    """Return in MB what does not depend on the length and on the micro-batch.

    Returns:
        `host`: the CPU memory of each row, empty if it does not suit the model, `shares`: what sharding adds to it,
        both for each of GPU_COUNTS, and `adapters`: for adapters on attention and on all linear layers, their weights
        for each rank, and their number.
    """
    words = _words(label, task)
    path = words[1]
    found = {"host": [], "shares": {}, "adapters": [count_adapters(words, targets) for targets in TARGETS]}
    model = deepcopy(meta_model(replace(candidates[0, 2].settings, model=path)))
    counted = [count_parameters(model), count_parameters(model.requires_grad_(False))]  # trained, and frozen
    for number, row in enumerate(ROWS):
        if not row.suits(task, words):
            found["host"].append([])
            continue
        settings = replace(candidates[number, 2].settings, model=path)
        counts = counted[bool(settings.lora)]
        sizes, added = [], []
        for gpus in GPU_COUNTS if row.several else (1,):
            settings = replace(settings, devices=gpus)
            # FSDP keeps weights, gradients and the optimizer's state there
            kept = 2 * bytes_of_weight(settings) + (8 if settings.optimizer == "adam" else 0)
            peak = Peak(0, 0, 0, 0, 0, 0, kept * counts.all * settings.offload // gpus, "training")
            for technique in used(settings):
                peak = technique.add_memory(peak, counts, settings)
            sizes.append(round(host_bytes(row.rung, settings, counts, peak) / 1e6))
            added.append([round(part / 1e6) for part in shares(settings, counts)])
        found["host"].append(sizes)
        if any(map(any, added)):
            found["shares"][str(number)] = added
    return found


def count_adapters(words: list[str], targets: str) -> list[int]:
    """Return the adapters' weights for each rank, and the number of layers with adapters."""
    trained = []
    for rank in (1, 2):
        settings = read_settings("13_lora", [*words, "--lora_targets", targets, "--lora_rank", str(rank)])
        with torch.device("meta"):
            made = build_model(settings, blank_datasets(2, 224 if settings.task == IMAGES else None))
        trained.append(count_parameters(made).trained)
    return [trained[1] - trained[0], sum(name.endswith("lora_A.default.weight") for name, _ in made.named_parameters())]


def predict_model(name: str, task: str, lengths: tuple[int, ...], keys: set[str]) -> dict[str, dict[str, list]]:
    """Return the peaks of a model by length and by key of the row, as `_peaks` has them; `keys`: of these."""
    torch.set_num_threads(1)
    found = {str(length): {} for length in lengths}
    together = [number for number, row in enumerate(ROWS) if "fsdp" not in row.rung]
    alone = [[number] for number, row in enumerate(ROWS) if "fsdp" in row.rung]  # each has a process group of its own
    for gpu, group in product((ANY, OLD), [together, *alone]):
        with ExitStack() as stack:
            passes = None
            for number in group:
                key, row = f"{number}{'old' if gpu is OLD else ''}", ROWS[number]
                if key not in keys:
                    continue
                words = ["--model", name, "--task", task, "--max_length", str(lengths[-1] or 1024), *row.options]
                settings = read_settings(row.rung, words, 1 if row.single else 2, gpu)
                samples, _ = find_samples(settings, 2)
                passes = passes or _Passes(samples, gpu, stack)
                for length in lengths:
                    found[str(length)][key] = _peaks(passes, settings, length)
    return found


def list_keys(host: list[list[int]], rungs: list[str]) -> set[str]:
    """Return the keys of the figures of some rungs, or of all; `host`: as `describe_model` returns it."""
    own = {str(number): row for number, row in enumerate(ROWS)
           if row.base is None and host[number] and (not rungs or row.rung in rungs)}  # fmt: skip
    return {*own, *(f"{number}old" for number, row in own.items() if row.old == "own")}


def _peaks(passes: _Passes, settings: Settings, length: int) -> list[list[int]]:
    """Return for each of SIZES the peak in MB: weights, gradients, optimizer, activations, logits, other."""
    peaks = {size: passes.peak(settings, length, size) for size in (1, 2, 16)}
    for size in (4, 8):
        peaks[size] = _between(peaks[2], peaks[16], size) or passes.peak(settings, length, size)
    return [[round(getattr(peaks[size], part) / 1e6) for part in ON_DEVICE] for size in SIZES]


def _between(two: Peak, sixteen: Peak, size: int) -> Peak | None:
    """Return the peak for a size between 2 and 16 samples, or None if the two peaks are different moments."""
    kept = ("parameters", "gradients", "optimizer_state", "phase")
    if any(getattr(two, part) != getattr(sixteen, part) for part in kept):
        return None
    for part in ("activations", "logits", "other"):
        small, large = getattr(two, part), getattr(sixteen, part)
        grows = bool(small) and (part == "activations" or abs(large / small - 8) < 0.05)
        if large != small and not grows:
            return None
    middle = {
        part: round(getattr(two, part) + (getattr(sixteen, part) - getattr(two, part)) * (size - 2) / 14)
        for part in ON_DEVICE
    }
    return two._replace(**middle)


def main() -> None:
    """Predict the named models, or all, and write the data of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", choices=[[], *MODELS])
    parser.add_argument("--rungs", nargs="+", default=[], choices=[row.rung for row in ROWS])
    parser.add_argument("--missing", action="store_true", help="only figures that are not stored")
    parser.add_argument("--rest", action="store_true", help="all but the peaks")
    arguments = parser.parse_args()
    wanted = [] if arguments.rest else arguments.models or list(MODELS)
    kept = stored.read()["models"] if stored.DATA.exists() else {}
    kept = {label: model for label, model in kept.items() if label in MODELS}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
    made = {"commit": commit.stdout.strip(), "torch": torch.__version__, "transformers": transformers.__version__}
    planned = describe_plans()
    _write(kept, planned)
    with ProcessPoolExecutor(2, get_context("fork")) as pool:
        tasks = {}
        for label in wanted:
            name, model_tasks, lengths = MODELS[label]
            for task in model_tasks:
                keys = list_keys(planned["facts"][label][task]["host"], arguments.rungs)
                if arguments.missing:
                    keys -= kept.get(label, {}).get("tasks", {}).get(task, {}).get(str(lengths[-1]), {}).keys()
                if keys:
                    path = str(find_shipped_config(name))
                    tasks[pool.submit(predict_model, path, task, lengths, keys)] = (label, task)
        for done in as_completed(tasks):
            label, task = tasks[done]
            model = kept.setdefault(label, {"name": MODELS[label][0], "tasks": {}, "made": []})
            known = model["tasks"].setdefault(task, {})
            replaced = all(known.get(length, {}).keys() <= rows.keys() for length, rows in done.result().items())
            for length, rows in done.result().items():
                known[length] = known.get(length, {}) | rows
            model["made"] = [each for each in model["made"] if each != made and not replaced] + [made]
            _write(kept, planned)
            print(label, task, flush=True)


def describe_plans() -> dict:
    """Return the rows, their order for each task, GPUs and adapters' ranks, and the facts of each model and task."""
    candidates = {task: read_rows(task) for task in (TEXTS, ANSWERS, IMAGES)}
    usual = Settings.lora_rank
    return {
        "rows": [row.facts(*(candidates[TEXTS][number, size] for size in (1, 2))) for number, row in enumerate(ROWS)],
        "order": {
            task: [[order_rows(rows, gpus, rank) for rank in (usual, 2 * usual)] for gpus in (1, 2)]
            for task, rows in candidates.items()
        },
        "facts": {
            label: {task: describe_model(label, task, candidates[task]) for task in tasks}
            for label, (_, tasks, _) in MODELS.items()
        },
    }


def _write(models: dict, planned: dict) -> None:
    bounds = [ANY_GPU, *dict.fromkeys(assume(gpu.capability) for gpu in GPUS)]
    for model in models.values():
        config = json.loads(find_shipped_config(model["name"]).read_text(encoding="utf-8"))
        model["shape"] = {name: config[name] for name in SHAPE if name in config}
    data = {
        "overhead": [[[each.context, each.workspace, each.fragmentation] for each in bound] for bound in bounds],
        "nccl": NCCL,
        "gpus": [_gpu(gpu, bounds.index(assume(gpu.capability))) for gpu in GPUS],
        "gpu_counts": GPU_COUNTS,
        "host_memory": HOST_MEMORY / 1e9,
        "sizes": SIZES,
        "lora_ranks": LORA_RANKS,
        "lora_rank": Settings.lora_rank,
        "measured": MEASURED["speeds"]["of"],
        **planned,
        "models": {label: models[label] for label in MODELS if label in models},
    }
    stored.write(data)


def _gpu(gpu: Gpu, bound: int) -> list:
    """Return a GPU of the form: name, memory in GB, whether it only emulates bfloat16, the number of its overhead."""
    return [gpu.name, gpu.memory // 10**6 / 1000, int(gpu.capability < (8, 0)), bound]


if __name__ == "__main__":
    main()
