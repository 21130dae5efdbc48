"""Predict the memory that docs/will_it_fit.md shows, and write it to docs/fit/data.js.

    python docs/fit/build.py [MODEL ...] [--rungs RUNG ...]     # names as in MODELS and ROWS; without names: all
    python docs/fit/build.py --rest                             # all but the peaks: GPUs, overheads, CPU memory, order

Each model takes two minutes on one core for each task. The figures of all other models and rungs stay as they are.

The figures are those of `predict_memory` with an effective batch of 16 samples (32 for micro-batches of 16, so that
gradients accumulate) and evaluation batches of 4,096 tokens. Two shortcuts save time:

- Techniques that differ only in the optimizer share their passes, see `_Passes`.
- The peak is the maximum over moments that grow linearly with the micro-batch. If the same moment is the peak for 2 and
  for 16 samples, the peaks for 4 and 8 samples lie on the line between them.
"""

import argparse
import subprocess
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context

import stored
import torch
import transformers

from fabric_ladder.data.hub import find_shipped_config
from fabric_ladder.ladder import CHECKPOINTING, ON_HOST
from fabric_ladder.models.layers import meta_model
from fabric_ladder.planning.candidates import Candidate, read_candidates, read_settings
from fabric_ladder.planning.gpus import ANY, GPUS, Gpu, find_gpu
from fabric_ladder.planning.overhead import ANY_GPU, assume
from fabric_ladder.planning.plan import HOST_MEMORY, find_samples
from fabric_ladder.planning.planner import Samples, host_bytes
from fabric_ladder.planning.predict import blank_datasets, largest_batches
from fabric_ladder.planning.rehearsal import Rehearsal, rehearsal_key, rehearse, to_rehearse
from fabric_ladder.rungs import script_defaults
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import trains_adapters, used
from fabric_ladder.techniques.memory import ON_DEVICE, Peak, count_parameters

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
ATTENTION = ("--lora_targets", "attention")
ROWS = (  # rung, options, technique in words, whether it suits a GPU that only emulates bfloat16
    ("2_grad_accum", (), "32-bit weights and Adam", True),
    ("4_mixed_precision", (), "Mixed precision", True),
    ("4_mixed_precision", CHECKPOINTING, "Mixed precision, checkpointing", True),
    ("5_low_precision", (), "Pure bfloat16", False),
    ("6_lean_optimizer", CHECKPOINTING, "bfloat16 with SGD, checkpointing", False),
    ("7_grad_checkpointing", (), "Pure bfloat16, checkpointing", False),
    ("11_fsdp_cpu_offload", CHECKPOINTING, "Weights in CPU memory (FSDP), checkpointing", False),
    ("13_lora", ATTENTION, "LoRA adapters on attention", True),
    ("13_lora", (*ATTENTION, *CHECKPOINTING), "LoRA adapters on attention, checkpointing", True),
    ("14_qlora", ATTENTION, "LoRA adapters on attention, 4-bit weights", True),
    ("14_qlora", (*ATTENTION, *CHECKPOINTING), "LoRA adapters on attention, 4-bit weights, checkpointing", True),
    ("16_bf16_that_learns", (), "bfloat16 with Kahan summation", False),
    ("16_bf16_that_learns", CHECKPOINTING, "bfloat16 with Kahan summation, checkpointing", False),
    (
        "17_step_in_backward",
        (*ON_HOST, *CHECKPOINTING),
        "Step in backward, optimizer in CPU memory, checkpointing",
        False,
    ),
    ("18_low_bit_optimizer", (), "8-bit Adam", False),
    ("18_low_bit_optimizer", CHECKPOINTING, "8-bit Adam, checkpointing", False),
    ("19_optimizer_offload", CHECKPOINTING, "Optimizer in CPU memory, checkpointing", False),
    ("26_stateless", CHECKPOINTING, "bfloat16 with SinkGD, checkpointing", False),
    ("29_streamed_training", (), "Blocks and optimizer in CPU memory, checkpointing", False),
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
        sizes = {"batch_size": size if whole else effective_batch(size), "micro_batch_size": size}
        shape = replace(settings, max_length=length, micro_batch_tokens=None, **sizes)
        alone = whole or trains_adapters(settings) or settings.precision != "bf16-true" or settings.strategy != "single"
        if alone:
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
        return self.known[name].peak(settings, *largest_batches(settings, tokens, self.samples.image_size))


def takes_whole_batch(rung: str) -> bool:
    """Return whether a rung takes the effective batch in one micro-batch, without gradients to add to."""
    return "step_in_backward" in script_defaults(rung)


def effective_batch(size: int) -> int:
    """Return the effective batch of the commands with micro-batches of this many samples."""
    return max(16, 2 * size)


def read_rows(task: str) -> dict[tuple[int, int], Candidate]:
    """Return the planner's candidates by the number of the row and by the size of the micro-batch; 1, 2 and 16."""
    name, _, lengths = next(model for model in MODELS.values() if task in model[1])
    found = {}
    for number, (rung, options, *_) in enumerate(ROWS):
        for size in (1, 2, 16):
            sizes = ["--micro_batch_size", str(size), "--batch_size", str(effective_batch(size))]
            if takes_whole_batch(rung):
                sizes = ["--batch_size", str(size)]
            words = ["--model", str(find_shipped_config(name)), "--max_length", str(lengths[0] or 1024), *sizes]
            [found[number, size]], _ = read_candidates([(rung, options)], [*words, "--task", task], 1)
    return found


def order_rows(candidates: dict[tuple[int, int], Candidate]) -> list[list[int]]:
    """Return the planner's rank of each row for each of SIZES: the best is 0, equal ranks have equal numbers."""
    ranks = {key: (candidate.trains, *candidate.rank) for key, candidate in candidates.items()}
    places = sorted({*ranks.values()})
    return [[places.index(ranks[row, size if size in (1, 16) else 2]) for size in SIZES] for row in range(len(ROWS))]


def count_host(name: str, candidates: dict[tuple[int, int], Candidate]) -> list[int]:
    """Return the CPU memory of each row in MB, which does not depend on the length and on the micro-batch."""
    found, counts = [], None
    for row in range(len(ROWS)):
        settings = replace(candidates[row, 2].settings, model=str(find_shipped_config(name)))
        counts = counts or count_parameters(meta_model(settings))
        # FSDP keeps weights, gradients and both moments in 32 bits there
        peak = Peak(0, 0, 0, 0, 0, 0, 16 * counts.all * settings.offload, "training")
        for technique in used(settings):
            peak = technique.add_memory(peak, counts, settings)
        found.append(round(host_bytes(candidates[row, 2].rung, settings, counts, peak) / 1e6))
    return found


def predict_model(name: str, task: str, lengths: tuple[int, ...], rungs: list[str]) -> dict[str, dict[str, list]]:
    """Return the peaks of a model by length and by key of the row, as `_peaks` has them; `rungs`: of these alone."""
    torch.set_num_threads(1)
    found = {str(length): {} for length in lengths}
    for gpu in (ANY, OLD):
        with ExitStack() as stack:
            passes = None
            # FSDP comes last: the others must not see its process group
            for number, (rung, options, _, suits) in sorted(enumerate(ROWS), key=lambda row: "fsdp" in row[1][0]):
                if rungs and rung not in rungs:
                    continue
                if gpu is OLD and (not suits or rung == "2_grad_accum"):
                    continue  # 32-bit weights take the same memory on all GPUs
                words = ["--model", name, "--task", task, "--max_length", str(lengths[-1] or 1024), *options]
                settings = read_settings(rung, words, 1, gpu)
                samples, _ = find_samples(settings, 2)
                passes = passes or _Passes(samples, gpu, stack)
                for length in lengths:
                    row = _peaks(passes, settings, length)
                    found[str(length)][f"{number}{'old' if gpu is OLD else ''}"] = row
    return found


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
    parser.add_argument("--rungs", nargs="+", default=[], choices=[rung for rung, *_ in ROWS])
    parser.add_argument("--rest", action="store_true")
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
                path = str(find_shipped_config(name))
                tasks[pool.submit(predict_model, path, task, lengths, arguments.rungs)] = (label, task)
        for done in as_completed(tasks):
            label, task = tasks[done]
            model = kept.setdefault(label, {"name": MODELS[label][0], "tasks": {}})
            for length, rows in done.result().items():
                known = model["tasks"].setdefault(task, {}).setdefault(length, {})
                known |= rows
            if arguments.rungs:
                model["rungs"] = model.get("rungs", {}) | dict.fromkeys(arguments.rungs, made)
            else:
                model["made"] = made
                model.pop("rungs", None)
            _write(kept, planned)
            print(label, task, flush=True)


def describe_plans() -> dict:
    """Return the order of the rows for each task, and for each model and task the CPU memory of each row."""
    rows = {task: read_rows(task) for task in (TEXTS, ANSWERS, IMAGES)}
    host = {label: {task: count_host(name, rows[task]) for task in tasks} for label, (name, tasks, _) in MODELS.items()}
    return {"order": {task: order_rows(candidates) for task, candidates in rows.items()}, "host": host}


def _write(models: dict, planned: dict) -> None:
    bounds = [ANY_GPU, *dict.fromkeys(assume(gpu.capability) for gpu in GPUS)]
    data = {
        "overhead": [[[each.context, each.workspace, each.fragmentation] for each in bound] for bound in bounds],
        "gpus": [_gpu(gpu, bounds.index(assume(gpu.capability))) for gpu in GPUS],
        "host_memory": HOST_MEMORY / 1e9,
        "sizes": SIZES,
        "rows": [_row(*row) for row in ROWS],
        **planned,
        "models": {label: models[label] for label in MODELS if label in models},
    }
    stored.write(data)


def _row(rung: str, options: tuple[str, ...], title: str, suits: bool) -> dict:
    """Return a row of the form; `whole`: the effective batch is one micro-batch; `all`: all weights are trained."""
    facts = {"suits": suits, "whole": takes_whole_batch(rung), "all": not script_defaults(rung).get("lora")}
    return {"rung": rung, "options": " ".join(options), "title": title} | {
        key: int(fact) for key, fact in facts.items()
    }


def _gpu(gpu: Gpu, bound: int) -> list:
    """Return a GPU of the form: name, memory in GB, whether it only emulates bfloat16, the number of its overhead."""
    return [gpu.name, gpu.memory // 10**6 / 1000, int(gpu.capability < (8, 0)), bound]


if __name__ == "__main__":
    main()
