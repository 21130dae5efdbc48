"""The peers of against_peers.py and harvest.py: other people's ways to train on the same reviews.

- `trainer`: transformers' Trainer with its defaults; `--switches` turns more on, see `SWITCHES`.
- `accelerate`: the loop of accelerate's own examples, with batches of 32 for evaluation.
- `blog`: the recipe of rasbt/gradient-accumulation-blog. Every review is padded to the maximum length and goes through
  the model alone, also in evaluation. The training accuracy is counted after every review, in eval mode. The blog steps
  after reviews 1, n + 1, 2n + 1, … and so loses the last n - 1; here it steps at the end of each window.
- `bare`: forward, backward and step on the ladder's own micro-batches, made beforehand and kept in memory, with the
  ladder's attention and optimizer.

All get tokenized texts, the initial weights of a rung with the same settings, the same Adam at a constant rate without
clipping, 32-bit matrix multiplications in the same precision (`--matmul_precision`), and one epoch. Nothing is saved.
The clock and the memory's peak start at the first batch. Each side returns its samples, tokens and padded tokens, and a
function that evaluates a split.

    python benchmarks/peers.py --side trainer --out FILE [--switches group_by_length …] [settings of a rung]
"""

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import common  # first import: it makes the project importable
import torch
import torchmetrics
from accelerate import Accelerator
from lightning import Fabric, seed_everything
from torch import nn
from torch.utils.data import DataLoader
from transformers import DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

from fabric_ladder import Settings, build_dataloaders, build_model, build_optimizer, parse_settings
from fabric_ladder.data.load import load_datasets
from fabric_ladder.data.splits import TextDatasets
from fabric_ladder.environment import peak_memory, reset_peak_memory
from fabric_ladder.models.configs import load_config, silence_loading
from fabric_ladder.models.cpu_bfloat16 import restore_bfloat16

Evaluate = Callable[[str], dict[str, float]]
MICRO_BATCH = 8  # Trainer's default, which goes twice into an effective batch of 16
EVALUATED_AT_ONCE = 32  # in accelerate's examples
SWITCHES = {  # of Trainer; bf16 follows --precision, and a fused Adam is the default since transformers 5
    **{f"micro_batch_{size}": {"per_device_train_batch_size": size} for size in (1, 2, 4, 16)},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "no_nan_filter": {"logging_nan_inf_filter": False},  # the filter waits for every loss
    "compile": {"torch_compile": True},
    **{f"evaluate_{size}": {"per_device_eval_batch_size": size} for size in (1, 4, 32)},
}


class Counting:
    """Pads a batch to its longest text and counts samples, tokens and padded tokens."""

    def __init__(self, datasets: TextDatasets):
        self.collate = DataCollatorWithPadding(datasets.tokenizer)
        self.counts = torch.zeros(3, dtype=torch.int64)

    def __call__(self, samples: list[dict]) -> dict:
        """Return `input_ids` and `attention_mask` (samples, length), and `labels` (samples,)."""
        batch = self.collate(samples)
        mask = batch["attention_mask"]
        self.counts += torch.tensor([len(mask), int(mask.sum()), mask.numel()])
        return batch


class Clock(TrainerCallback):
    """Takes the times of the training: at its beginning, after half of its steps and at its end."""

    def __init__(self, device: torch.device, steps: int):
        self.device, self.half, self.times, self.steps = device, steps // 2, [], 0

    def on_train_begin(self, *_, **__) -> None:
        """Start the clock and the peak of the memory."""
        reset_peak_memory(self.device)
        self.on_train_end()

    def on_step_end(self, *_, **__) -> None:
        """Count an optimizer step."""
        self.steps += 1
        if self.steps == self.half:
            self.on_train_end()

    def on_train_end(self, *_, **__) -> None:
        """Take the time."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(perf_counter())

    def figures(self, batch_size: int, counts: list[int]) -> dict:
        """Return steps, seconds and rates; `late` is the second half of the steps, when everything is warm."""
        (samples, tokens, padded), seconds = counts, self.times[-1] - self.times[0]
        return {
            "updates": self.steps,
            "samples": samples,
            "tokens": tokens,
            "padding": 1 - tokens / padded,
            "training_seconds": seconds,
            "samples_per_second": samples / seconds,
            "tokens_per_second": tokens / seconds,
            "late_samples_per_second": (samples - self.half * batch_size) / (self.times[-1] - self.times[-2]),
        }


def run_trainer(
    settings: Settings, datasets: TextDatasets, model: nn.Module, clock: Clock, switches: list[str], folder: str
) -> tuple[list[int], Evaluate]:
    """Train by Trainer."""
    options = {"per_device_train_batch_size": MICRO_BATCH}
    for switch in switches:
        options |= SWITCHES[switch]
    accumulation = settings.batch_size // options["per_device_train_batch_size"]
    arguments = TrainingArguments(
        output_dir=folder, num_train_epochs=1, seed=settings.seed, learning_rate=settings.learning_rate,
        lr_scheduler_type="constant", max_grad_norm=0.0,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=settings.accelerator == "cpu",
        bf16=settings.precision == "bf16-mixed", fp16=settings.precision == "16-mixed",
        **options, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    if settings.accelerator == "cuda":
        arguments._n_gpu = 1  # else it shares a larger batch out to all GPUs
    splits, counting = datasets.splits, Counting(datasets)
    trainer = Trainer(
        model, arguments, counting, splits["train"], splits["validation"],
        processing_class=datasets.tokenizer, callbacks=[clock],
    )  # fmt: skip

    def evaluate(split: str) -> dict[str, float]:
        if split == "validation":
            return trainer.evaluate()
        tested = trainer.predict(splits["test"])
        return {"test_accuracy": float((tested.predictions.argmax(1) == tested.label_ids).mean())}

    trainer.train()
    return counting.counts.tolist(), evaluate


def run_accelerate(
    settings: Settings, datasets: TextDatasets, model: nn.Module, clock: Clock, *_
) -> tuple[list[int], Evaluate]:
    """Train by the loop of accelerate's examples."""
    counting = Counting(datasets)
    accelerator = Accelerator(
        cpu=settings.accelerator == "cpu",
        gradient_accumulation_steps=settings.batch_size // MICRO_BATCH,
        mixed_precision="bf16" if settings.precision == "bf16-mixed" else "no",
    )
    loaders = {
        split: accelerator.prepare(DataLoader(
            datasets.splits[split].select_columns(["input_ids", "labels"]), shuffle=split == "train",
            batch_size=MICRO_BATCH if split == "train" else EVALUATED_AT_ONCE, collate_fn=counting,
        )) for split in ("train", "validation", "test")
    }  # fmt: skip
    model, optimizer = accelerator.prepare(model, build_optimizer(settings, model))

    @torch.no_grad()
    def evaluate(split: str) -> dict[str, float]:
        model.eval()
        answers = ((model(**inputs).logits.argmax(dim=-1), inputs["labels"]) for inputs in loaders[split])
        right = [found == labels for found, labels in map(accelerator.gather_for_metrics, answers)]
        return {"test_accuracy": torch.cat(right).float().mean().item()}

    clock.on_train_begin()
    model.train()
    for inputs in loaders["train"]:
        with accelerator.accumulate(model):
            accelerator.backward(model(**inputs).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            clock.on_step_end()
    clock.on_train_end()
    return counting.counts.tolist(), evaluate


def run_blog(
    settings: Settings, datasets: TextDatasets, model: nn.Module, clock: Clock, *_
) -> tuple[list[int], Evaluate]:
    """Train by the blog's recipe."""
    columns = ["input_ids", "attention_mask", "labels"]

    def pad(samples: dict) -> dict:
        ids = {"input_ids": samples["input_ids"]}
        return datasets.tokenizer.pad(ids, padding="max_length", max_length=settings.max_length)

    fabric = Fabric(accelerator=settings.accelerator, devices=1, precision=settings.precision)
    fabric.launch()
    loaders = {}
    for split, rows in datasets.splits.items():
        padded = rows.map(pad, batched=True).with_format("torch", columns)
        loaders[split] = fabric.setup_dataloaders(DataLoader(padded, shuffle=split == "train"))
    model, optimizer = fabric.setup(model, build_optimizer(settings, model))

    def new_accuracy() -> torchmetrics.Metric:
        return torchmetrics.Accuracy(task="multiclass", num_classes=2).to(fabric.device)

    @torch.no_grad()
    def evaluate(split: str) -> dict[str, float]:
        model.eval()
        accuracy = new_accuracy()
        for batch in loaders[split]:
            accuracy.update(model(**batch).logits.argmax(1), batch["labels"])
        return {"test_accuracy": accuracy.compute().item()}

    clock.on_train_begin()
    accuracy, samples = new_accuracy(), len(loaders["train"])
    for number, batch in enumerate(loaders["train"], start=1):
        model.train()
        outputs = model(**batch)
        fabric.backward(outputs.loss / settings.batch_size)
        if number % settings.batch_size == 0 or number == samples:
            optimizer.step()
            optimizer.zero_grad()
            clock.on_step_end()
        model.eval()
        with torch.no_grad():
            accuracy.update(outputs.logits.argmax(1), batch["labels"])
    clock.on_train_end()
    return [samples, sum(datasets.splits["train"]["length"][:]), samples * settings.max_length], evaluate


def run_bare(
    settings: Settings, datasets: TextDatasets, model: nn.Module, clock: Clock, *_
) -> tuple[list[int], Evaluate]:
    """Train with PyTorch alone, on the ladder's micro-batches."""
    fabric = Fabric(accelerator=settings.accelerator, devices=1)  # the loaders need a rank
    if settings.precision == "bf16-mixed":
        model.forward = torch.autocast(fabric.device.type, torch.bfloat16)(model.forward)
    loaders = build_dataloaders(fabric, datasets, settings)
    batches, validation, test = [fabric.to_device(list(loader)) for loader in loaders]
    model.to(fabric.device)
    optimizer = build_optimizer(settings, model)

    @torch.no_grad()
    def evaluate(split: str) -> dict[str, float]:
        """Return loss and accuracy; the device is synchronized only at the end."""
        model.eval()
        micro_batches = validation if split == "validation" else test
        totals = torch.zeros(2, device=fabric.device)
        for part in micro_batches:
            outputs = model(**part.inputs)
            right = (outputs.logits.argmax(1) == part.inputs["labels"]).sum()
            totals += torch.stack([outputs.loss.float() * part.items, right.float()])
        loss, accuracy = (totals / sum(part.items for part in micro_batches)).tolist()
        return {"test_loss": loss, "test_accuracy": accuracy}

    seed_everything(settings.seed, verbose=False)
    iter(loaders[0])  # draws a random number, as in the ladder, so that dropout is the same
    clock.on_train_begin()
    model.train()
    for step in batches:
        for micro_batch in step.micro_batches:
            (model(**micro_batch.inputs).loss * micro_batch.weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        clock.on_step_end()
    clock.on_train_end()
    parts = [part for step in batches for part in step.micro_batches]
    return [sum(getattr(part, name) for part in parts) for name in ("items", "tokens", "padded")], evaluate


SIDES = {"trainer": run_trainer, "accelerate": run_accelerate, "blog": run_blog, "bare": run_bare}


def measure(settings: Settings, side: str, switches: list[str]) -> dict:
    """Train for one epoch, validate and test, and return the figures that `common.run_rung` returns of a rung."""
    if len(switches) and side != "trainer":
        raise ValueError(f"{side} has no switches")
    if side != "bare" and load_config(settings.model).model_type == "bloom":
        settings = replace(settings, attention="eager")  # transformers has no other
    seed_everything(settings.seed, verbose=False)
    torch.set_float32_matmul_precision(settings.matmul_precision)
    datasets = load_datasets(settings)
    silence_loading()
    model = build_model(settings, datasets)
    weights = sum(float(each.detach().abs().sum(dtype=torch.float64)) for each in model.parameters())  # their checksum
    facts = {"parameters": sum(each.numel() for each in model.parameters()), "weights": weights}
    facts |= {name: getattr(settings, name) for name in common.PRECISIONS} | {"threads": torch.get_num_threads()}
    if settings.precision == "bf16-true":
        model.to(torch.bfloat16)
    clock = Clock(torch.device(settings.accelerator), len(datasets.splits["train"]) // settings.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        counts, evaluate = SIDES[side](settings, datasets, model, clock, switches, folder)
        start = perf_counter()
        evaluate("validation")
        facts |= clock.figures(settings.batch_size, counts) | {"evaluation_seconds": perf_counter() - start}
        speed = len(datasets.splits["validation"]) / facts["evaluation_seconds"]
        facts |= {"evaluation_samples_per_second": speed, "peak_memory_bytes": peak_memory(clock.device)}
        return facts | evaluate("test")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--switches", nargs="*", choices=SWITCHES, default=[])
    parser.add_argument("--out", type=Path, required=True)
    own, options = parser.parse_known_args()
    if own.side != "bare":  # the bare loop is the upper limit of the ladder
        os.environ["MALLOC_"] = ""  # glibc's own settings; rungs tune glibc, which is part of their speed
    settings = parse_settings(options, batch_size=16)
    if own.side != "bare":
        restore_bfloat16()
    figures = measure(settings, own.side, own.switches)
    own.out.write_text(json.dumps(figures), encoding="utf-8")
