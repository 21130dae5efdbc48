"""Count what a training step makes a GPU do, for the rungs and for peers, and predict its speed from that.

    python benchmarks/roofline.py [--only TEXT …] [--batches 400]

Each side's own step runs on fake tensors. Its kernels, bytes, FLOPs and waits are counted (`counting.py`). `speed.py`
predicts seconds from the counts.

The work is effective batches of 16 reviews of IMDb with their real lengths, up to 1,024 tokens, and BLOOM-560m. Its
tokenizer is on the Hub, so MiniLM's counts the tokens, as in padding.py. The rungs cut micro-batches with their own
sampler; `micro_batch_tokens` `auto` is 16,384, the most that it takes on a GPU. Memory is not looked at.

Passes of two models, with 3 and 4 blocks, are counted in five shapes. The counts are linear in blocks. For N rows of a
width they are a constant and terms in N, the width, N x width and N x width². A test compares both with direct counts.

- `Trainer` and its switches are transformers' own Trainer, with the options of peers.py.
- `accelerate` is the loop of accelerate's examples, as in peers.py.

Rows with `compile` and the step of 4-bit Adam are counted by rules of fusion, since nothing is compiled here. Adam in
8 bits is left out: bitsandbytes has no fake kernels.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import common  # first import: it makes the project importable
import numpy as np
import peers
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from counting import Counter, total
from speed import BANDWIDTH, Work, device_seconds, host_seconds, seconds
from torch import nn
from transformers import PrinterCallback, Trainer, TrainerCallback
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.trainer_pt_utils import get_length_grouped_indices

from fabric_ladder import Settings, build_model, build_optimizer, parse_settings
from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.data.sampler import EffectiveBatchSampler
from fabric_ladder.environment import emulates
from fabric_ladder.errors import UserError
from fabric_ladder.models.configs import load_config
from fabric_ladder.models.layers import fewer_blocks
from fabric_ladder.planning.candidates import read_settings
from fabric_ladder.planning.cuda_kernels import CudaKernels
from fabric_ladder.planning.gpus import Gpu, find_gpu
from fabric_ladder.planning.predict import blank_datasets
from fabric_ladder.planning.rehearsal import FakeTensors, quiet_lightning, rehearse
from fabric_ladder.rungs import script_defaults
from fabric_ladder.techniques import adam_4bit
from fabric_ladder.techniques.advice import show_errors
from fabric_ladder.techniques.float8 import LEAST
from fabric_ladder.training.gradients import accumulate_gradients, find_broken_gradient
from local_dataset_utilities import load_datasets

OUT = common.RESULTS / "roofline.json"
PART = "bloom-560m"
MODEL = common.MODELS / "bloom-560m.json"
TOKENS = "16384"  # of a micro-batch: the most that `micro_batch_tokens` `auto` takes
SHAPES = [(2, 128), (2, 256), (4, 256), (3, 512), (5, 384)]  # rows and width
CLASSES = 2
BEST = "Trainer, best switches"


class Side(NamedTuple):
    """A way to train.

    Attributes:
        rung: A rung; empty: a peer.
        options: Options of the rung, or switches of Trainer and the precision.
    """

    rung: str
    options: str = ""

    @property
    def words(self) -> list[str]:
        """The words of the options."""
        return self.options.split()


SIDES = {
    "Trainer": Side("", "32-true"),
    "Trainer, bf16": Side("", "bf16-mixed"),
    "Trainer, bf16, micro-batch 16, compile": Side("", "bf16-mixed micro_batch_16 compile"),
    "Trainer, bf16, micro-batch 16, by length": Side("", "bf16-mixed group_by_length micro_batch_16"),
    BEST: Side("", "bf16-mixed group_by_length micro_batch_16 compile"),
    "accelerate": Side("", "32-true accelerate"),
    **{
        f"{rung} {options}".strip(): Side(rung, options)
        for rung, options in [
            ("2_grad_accum", ""),
            ("3_torch_compile", ""),
            ("4_mixed_precision", ""),
            ("4_mixed_precision", "--compile true"),
            ("5_low_precision", ""),
            ("5_low_precision", "--compile true"),
            ("7_grad_checkpointing", ""),
            ("7_grad_checkpointing", "--compile true"),
            ("15_packing", ""),
            ("15_packing", "--compile true"),
            ("15_packing", "--precision bf16-true --kahan_summation true --compile true"),
            ("16_bf16_that_learns", ""),
            ("16_bf16_that_learns", "--compile true"),
            ("17_step_in_backward", ""),
            ("17_step_in_backward", "--packing false"),
            ("18_low_bit_optimizer", "--optimizer adam-4bit"),
            ("21_selective_checkpointing", ""),
            ("21_selective_checkpointing", "--compile false"),
            ("22_float8", ""),
            ("22_float8", "--compile false"),
        ]
    },
}


class Counts(NamedTuple):
    """The counted work of a side.

    Attributes:
        first: Coefficients of the first pass of a step, for each term of `terms` and each number of `Work`.
        later: The same of a pass that adds to gradients.
        step: The optimizer step, with all that happens between two effective batches.
    """

    first: np.ndarray
    later: np.ndarray
    step: Work

    def of_pass(self, number: int, rows: int, width: int) -> Work:
        """Return the work of a pass of an effective batch, counted from 0."""
        return Work(*(terms(rows, width) @ (self.later if number else self.first)).tolist())


class Steps(NamedTuple):
    """A model's training: `run_pass(rows, width, first)` and then `run_step()` return their work."""

    run_pass: Callable[[int, int, bool], Work]
    run_step: Callable[[], Work]


def terms(rows: int, width: int) -> np.ndarray:
    """Return the terms in which the work of a pass is linear."""
    return np.array([1, rows, width, rows * width, rows * width**2], float)


# Counting


def count(settings: Settings, side: Side) -> Counts:
    """Count a side's step: passes of two models with a few blocks, and the optimizer step of the whole model.

    A step's number of launches is not linear in blocks.
    """
    with models(settings, side, all_blocks=True) as (whole,):
        whole.run_pass(*SHAPES[0], True)
        step = whole.run_step()
    with models(settings, side) as found:
        first, later = (
            solve([extrapolate(settings, [steps.run_pass(*shape, kind) for steps in found]) for shape in SHAPES])
            for kind in (True, False)
        )
    return Counts(first, later, step)


def extrapolate(settings: Settings, works: list[Work]) -> Work:
    """Return the work of a pass of the whole model, from those of two models with a few blocks."""
    if len(works) == 1:
        return works[0]
    config = load_config(settings.model)
    short, long = fewer_blocks(config)
    times = (config.num_hidden_layers - long) / (long - short)
    return Work(*(more + times * (more - fewer) for fewer, more in zip(*works, strict=True)))


def solve(works: list[Work]) -> np.ndarray:
    """Return the coefficients of `terms`, from the work of a pass in each of `SHAPES`."""
    return np.linalg.solve(np.array([terms(*shape) for shape in SHAPES]), np.array(works))


@contextmanager
def models(settings: Settings, side: Side, all_blocks: bool = False) -> Iterator[list[Steps]]:
    """Set up two models with a few blocks, or the whole model, on fake tensors."""
    if side.rung:
        with rehearse(settings, blank_datasets(CLASSES), all_blocks=all_blocks) as rehearsal:
            yield [_rung_steps(settings, steps) for steps in rehearsal.blocks]
        return
    fewer = None if all_blocks else fewer_blocks(load_config(settings.model))
    count_steps = _accelerate_steps if "accelerate" in side.words else _trainer_steps
    with quiet_lightning():
        yield [count_steps(settings, side.words, *_peer_model(settings, blocks)) for blocks in fewer or (None,)]


def _rung_steps(settings: Settings, steps) -> Steps:
    """Return a rung's passes and optimizer step: those of `training/loop.py`."""
    model, optimizer = steps.model, steps.optimizer.optimizer
    optimizer.parts = None  # a rehearsal steps 4-bit Adam's first part of each weight
    optimizer.single = False  # and Kahan's weights one by one
    optimizer.compiled = True  # 4-bit Adam, as on a CUDA GPU
    on_host = [state["step"] for state in optimizer.state.values() if "step" in state]
    if optimizer.param_groups[0].get("fused"):
        on_host = []
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]

    def run_pass(rows: int, width: int, first: bool) -> Work:
        if first:
            steps.optimizer.zero_grad()
        counter = Counter(model, on_host)
        parts = [micro_batch(settings, rows, width)]
        with steps.mode, counter, CudaKernels(), counter.compile(layers if settings.compile else []):
            accumulate_gradients(steps.fabric, steps.model, parts, steps.meter, optimizer=steps.optimizer)
        return counter.work()

    def run_step() -> Work:
        counter = Counter(model, on_host)
        step = counter.compiled(adam_4bit.step_part)
        with steps.mode, counter, CudaKernels(), patch.object(adam_4bit, "compiled_step", lambda: step):
            broken = find_broken_gradient(steps.fabric, steps.optimizer)
            steps.meter.commit(("", []), broken)
            if norm := settings.max_grad_norm:
                steps.fabric.clip_gradients(model, steps.optimizer, max_norm=norm, error_if_nonfinite=False)
            steps.optimizer.step()
        return counter.work()

    return Steps(run_pass, run_step)


def micro_batch(settings: Settings, rows: int, width: int) -> MicroBatch:
    """Return a micro-batch of meta tensors; packed, each row has two samples."""
    samples = 2 * rows if settings.packing else rows
    ids = torch.empty(rows, width, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "position_ids" if settings.packing else "attention_mask": ids}
    if settings.packing:
        inputs["spans"] = torch.empty(samples, 2, dtype=torch.long, device="meta")
    inputs["labels"] = torch.empty(samples, dtype=torch.long, device="meta")
    return MicroBatch(inputs, samples, 1.0, rows * width, rows * width, True)


def _peer_model(settings: Settings, blocks: int | None) -> tuple[nn.Module, FakeTensors]:
    """Return a model of transformers as it is, on fake tensors."""
    with torch.device("meta"):
        model = build_model(replace(settings, attention="eager"), blank_datasets(CLASSES), blocks)
    with FakeTensors() as mode:
        model.to_empty(device="cpu")
    return model, mode


def _trainer_steps(settings: Settings, words: list[str], model: nn.Module, mode: FakeTensors) -> Steps:
    """Return the passes and the optimizer step of transformers' Trainer; its second step is counted."""
    switches = [word for word in words[1:] if word != "compile"]
    works: list[Work] = []

    @cache
    def train(rows: int, width: int) -> list[Work]:
        AcceleratorState._reset_state(reset_partial_state=True)
        recorder = _Recorder(model, [model] if "compile" in words else [])
        with tempfile.TemporaryDirectory() as folder, mode, CudaKernels():
            more = {"max_steps": 2, "gradient_accumulation_steps": 2, "logging_strategy": "no"}
            arguments = peers.trainer_arguments(settings, switches, folder, **more)
            trainer = _FakeTrainer(model, arguments, train_dataset=[0], callbacks=[recorder])
            trainer.remove_callback(PrinterCallback)
            trainer.batches = [dict(micro_batch(settings, rows, width).inputs) for _ in range(4)]
            trainer.train()
        works[:] = recorder.works
        return recorder.works

    return Steps(lambda rows, width, first: train(rows, width)[0 if first else 1], lambda: works[-1])


class _FakeTrainer(Trainer):
    def get_train_dataloader(self) -> list[dict]:
        """Return the batches."""
        return self.batches


class _Recorder(TrainerCallback):
    """Keeps the work of each pass of a step of Trainer, and last that of the optimizer step."""

    def __init__(self, model: nn.Module, compiled: list[nn.Module]):
        self.model = model
        self.compiled = compiled
        self.works: list[Work] = []
        self.stack = ExitStack()

    def _open(self) -> None:
        self.counter = self.stack.enter_context(Counter(self.model))
        self.stack.enter_context(self.counter.compile(self.compiled))

    def on_step_begin(self, *_, **__) -> None:
        """Forget the step before."""
        self.works = []
        self._open()

    def on_substep_end(self, *_, **__) -> None:
        """Keep the work since the last call, and count further."""
        self.on_step_end()
        self._open()

    on_pre_optimizer_step = on_substep_end

    def on_step_end(self, *_, **__) -> None:
        """Keep the work since the last call."""
        self.stack.close()
        self.works.append(self.counter.work())


def _accelerate_steps(settings: Settings, _: list[str], model: nn.Module, mode: FakeTensors) -> Steps:
    """Return the passes and the optimizer step of `peers.measure_accelerate`."""
    AcceleratorState._reset_state(reset_partial_state=True)
    mixed = "bf16" if settings.precision == "bf16-mixed" else "no"
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, mixed_precision=mixed)
    with mode:
        model, optimizer = accelerator.prepare(model, build_optimizer(settings, model))

    def run_pass(rows: int, width: int, first: bool) -> Work:
        if first:
            optimizer.optimizer.zero_grad()
        counter = Counter(model)
        with mode, counter, CudaKernels(), accelerator.accumulate(model):
            inputs = micro_batch(settings, rows, width).inputs
            accelerator.backward(model(**{name: tensor.to("cpu") for name, tensor in inputs.items()}).loss)
        return counter.work()

    def run_step() -> Work:
        with mode:
            optimizer.optimizer.step()  # the first step makes the state
            with Counter(model) as counter:
                optimizer.optimizer.step()
        return counter.work()

    return Steps(run_pass, run_step)


# Work


def draw_lengths(samples: int, folder: Path) -> np.ndarray:
    """Return the tokens of reviews of IMDb for training, counted by MiniLM's tokenizer."""
    if not common.has_imdb():
        raise UserError(f"no {common.IMDB_ARCHIVE} in FABRIC_LADDER_DATA")
    tokenizer = ["--tokenizer", common.model_options("minilm", folder)[1], "--model", str(MODEL)]
    few = ["--train_samples", str(samples), "--validation_samples", "16", "--test_samples", "16"]
    options = [*common.BASE, "--accelerator", "cpu", "--from_scratch", "true", *tokenizer, *few]
    return np.asarray(load_datasets(parse_settings(options)).splits["train"]["length"][:])


def rung_batches(settings: Settings, lengths: np.ndarray) -> list[list[tuple[int, int]]]:
    """Return rows and width of the micro-batches of each effective batch of an epoch."""
    sampler = EffectiveBatchSampler(lengths, np.ones_like(lengths), settings, 0, 1)
    batches = []
    for plan in sampler:
        sizes = [
            (len(part.packs or part.rows), part.padded(lengths, settings.pad_to_multiple_of)) for part in plan.parts
        ]
        batches.append([(rows, padded // rows) for rows, padded in sizes])
    return batches


def peer_batches(side: Side, lengths: np.ndarray) -> list[list[tuple[int, int]]]:
    """Return rows and width of a peer's micro-batches, padded to their longest text."""
    size = 16 if "micro_batch_16" in side.words else peers.MICRO_BATCH
    draw = torch.Generator().manual_seed(0)
    if "group_by_length" in side.words:
        order = get_length_grouped_indices(lengths.tolist(), size, generator=draw)
    else:
        order = torch.randperm(len(lengths), generator=draw).tolist()
    widths = lengths[order].reshape(-1, 16 // size, size).max(-1)
    return [[(size, int(width)) for width in step] for step in widths]


def figures(counts: Counts, batches: list[list[tuple[int, int]]], tokens: int, gpus: list[Gpu]) -> dict:
    """Return the mean of a step's counts, and the predicted seconds of a step for each GPU."""
    passes = [[counts.of_pass(number, *shape) for number, shape in enumerate(batch)] for batch in batches]
    steps, flat = len(batches), [work for batch in passes for work in batch]
    whole = total([*flat, *[counts.step] * steps])
    padded = sum(rows * width for batch in batches for rows, width in batch)
    return {
        "passes": len(flat) / steps,
        "computed per token": padded / tokens,
        "kernels a pass": total(flat).kernels / len(flat),
        "step": {name: value / steps for name, value in whole._asdict().items()} | {"flops": whole.flops / steps},
        "optimizer": {"kernels": counts.step.kernels, "bytes": counts.step.moved},
        "host seconds": sum(map(host_seconds, [*flat, *[counts.step] * steps])) / steps,
        "H100 seconds": {name: value / steps for name, value in device_seconds(whole, find_gpu("H100")).items()},
        "seconds": {
            gpu.name: sum(seconds(work, gpu) for work in flat) / steps + seconds(counts.step, gpu) for gpu in gpus
        },
    }


def measure(side: Side, lengths: np.ndarray) -> dict:
    """Count a side and predict its speed."""
    settings = settings_of(side)
    batches = rung_batches(settings, lengths) if side.rung else peer_batches(side, lengths)
    counted = figures(count(settings, side), batches, int(lengths.sum()), able_gpus(settings))
    return {"options": side.options} | counted


def settings_of(side: Side, model: Path = MODEL) -> Settings:
    """Return a side's settings, as on a GPU."""
    if side.rung:
        words = ["--model", str(model), "--matmul_precision", "high", *side.options.split()]
        if script_defaults(side.rung).get("micro_batch_tokens") == "auto":
            words += ["--micro_batch_tokens", TOKENS]
        return read_settings(side.rung, words)
    words = ["--accelerator", "cpu", "--model", str(model), "--from_scratch", "true", "--precision", side.words[0]]
    return parse_settings([*common.BASE, *words], batch_size=16)


def able_gpus(settings: Settings) -> list[Gpu]:
    """Return the GPUs that compute in a precision; those without bfloat16 run `bf16-mixed` as `16-mixed`."""
    gpus = [find_gpu(name) for name in BANDWIDTH]
    if settings.precision == "bf16-true":
        gpus = [gpu for gpu in gpus if not emulates(settings.precision, gpu.capability)]
    return [gpu for gpu in gpus if not settings.float8 or gpu.capability >= LEAST]


def row(name: str, found: dict) -> list:
    """Return the main figures of a side: counts of a step, and the predicted ms of a step."""
    step, times = found["step"], found["seconds"]
    counted = [step["kernels"], found["passes"], step["moved"] / 1e9, step["flops"] / 1e12]
    return [name, *counted, *(1000 * times[gpu] if gpu in times else None for gpu in BANDWIDTH)]


def main() -> None:
    """Count the chosen sides, print and store them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="TEXT", help="sides whose name contains a TEXT")
    parser.add_argument("--batches", type=int, default=400, help="effective batches of 16 reviews")
    parser.add_argument(
        "--out", type=Path, help=f"results file; default: {OUT.relative_to(common.ROOT)}, without --only"
    )
    args = parser.parse_args()
    show_errors()
    out = args.out or (None if args.only else OUT)
    if out:
        common.check_storable(out)
    with tempfile.TemporaryDirectory() as folder:
        lengths = draw_lengths(16 * args.batches, Path(folder))
    sides = {}
    for name, side in SIDES.items():
        if not args.only or any(text in name for text in args.only):
            print(f"{name} …", file=sys.stderr, flush=True)
            sides[name] = measure(side, lengths)
    header = ["side", "kernels", "passes", "elementwise GB", "TFLOPs", *(f"ms, {gpu}" for gpu in BANDWIDTH)]
    common.print_table(header, [row(name, found) for name, found in sides.items()])
    if out:
        conditions = {"batches": args.batches, "mean tokens": float(lengths.mean()), "longest": int(lengths.max())}
        environment = common.environment(torch.device("cpu"))
        common.write_result(out, PART, environment | {"conditions": conditions, "sides": sides})


if __name__ == "__main__":
    main()
