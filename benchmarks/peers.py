"""The peers of against_peers.py and harvest.py: other people's ways to train on the same reviews.

- `trainer`: transformers' Trainer with its defaults: random batches of 8, two to an optimizer step, padded to their
  longest, Adam fused. `--switches` turns more on, see `SWITCHES`.
- `accelerate`: the loop of accelerate's own examples: `Accelerator.accumulate`, a DataLoader with random batches padded
  to their longest, batches of 32 for evaluation.
- `blog`: the recipe of rasbt/gradient-accumulation-blog. Every review is padded to the maximum length and goes through
  the model alone, also in evaluation. The training accuracy is counted after every review, in eval mode. The blog steps
  after reviews 1, n + 1, 2n + 1, … and so loses the last n - 1; here it steps at the end of each window.
- `bare`: forward, backward and step on the ladder's own micro-batches, made beforehand and kept in memory. It prints,
  logs and loads nothing, and has the ladder's attention and optimizer.

All get tokenized texts, the initial weights of a rung with the same settings, the same Adam at a constant rate without
clipping, 32-bit matrix multiplications in the same precision (`--matmul_precision`), and one epoch. Nothing is saved.
The clock and the memory's peak start at the first batch; evaluation has a clock of its own.

As a script, it takes the settings of the rungs and `--side`, `--switches` and `--out`, and writes its figures as JSON:
`python benchmarks/peers.py --side trainer --out FILE [--switches group_by_length …] [--batch_size 16 …]`.
"""

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
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
from fabric_ladder.data.splits import TextDatasets
from fabric_ladder.environment import peak_memory, reset_peak_memory
from fabric_ladder.models.configs import load_config, silence_loading
from fabric_ladder.models.cpu_bfloat16 import restore_bfloat16
from local_dataset_utilities import load_datasets

MICRO_BATCH = 8  # Trainer's default, which goes twice into an effective batch of 16
EVALUATED_AT_ONCE = 32  # in accelerate's examples
SWITCHES = {  # of Trainer; bf16 follows --precision, and a fused Adam is the default since transformers 5
    **{f"micro_batch_{size}": {"per_device_train_batch_size": size} for size in (1, 2, 4, 16)},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "no_nan_filter": {"logging_nan_inf_filter": False},  # the filter waits for every loss
    "foreach_adam": {"optim": "adamw_torch"},
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

    def _take(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(perf_counter())

    def on_train_begin(self, *_, **__) -> None:
        """Start the clock and the peak of the memory."""
        reset_peak_memory(self.device)
        self._take()

    def on_step_end(self, *_, **__) -> None:
        """Count an optimizer step."""
        self.steps += 1
        if self.steps == self.half:
            self._take()

    def on_train_end(self, *_, **__) -> None:
        """Stop the clock."""
        self._take()

    def figures(self, batch_size: int, counts: tuple[int, int, int]) -> dict:
        """Return steps, seconds and rates; `late` is the second half of the steps, when everything is warm."""
        (samples, tokens, padded), seconds = counts, self.times[-1] - self.times[0]
        late = samples - self.half * batch_size, self.times[-1] - self.times[-2]
        return {
            "updates": self.steps,
            "samples": samples,
            "tokens": tokens,
            "padding": 1 - tokens / padded,
            "training_seconds": seconds,
            "samples_per_second": samples / seconds,
            "tokens_per_second": tokens / seconds,
            "late_samples_per_second": late[0] / late[1],
        }


def trainer_arguments(settings: Settings, switches: list[str], folder: str, **more) -> TrainingArguments:
    """Return the arguments of Trainer with some of `SWITCHES`."""
    options = {"per_device_train_batch_size": MICRO_BATCH}
    for switch in switches:
        options |= SWITCHES[switch]
    accumulation = settings.batch_size // options["per_device_train_batch_size"]
    arguments = TrainingArguments(
        output_dir=folder, num_train_epochs=1, seed=settings.seed, learning_rate=settings.learning_rate,
        lr_scheduler_type="constant", max_grad_norm=0.0,
        save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=settings.accelerator == "cpu",
        bf16=settings.precision == "bf16-mixed", fp16=settings.precision == "16-mixed",
        **options | {"gradient_accumulation_steps": accumulation} | more,
    )  # fmt: skip
    if settings.accelerator == "cuda":
        arguments._n_gpu = 1  # else it shares a larger batch out to all GPUs
    return arguments


def measure_trainer(settings: Settings, datasets: TextDatasets, model: nn.Module, switches: list[str]) -> dict:
    """Train, validate and test by Trainer."""
    splits, counting = datasets.splits, Counting(datasets)
    clock = Clock(torch.device(settings.accelerator), len(splits["train"]) // settings.batch_size)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            model, trainer_arguments(settings, switches, folder), counting, splits["train"], splits["validation"],
            processing_class=datasets.tokenizer, callbacks=[clock],
        )  # fmt: skip

        def test() -> dict[str, float]:
            tested = trainer.predict(splits["test"])
            return {"test_accuracy": float((tested.predictions.argmax(1) == tested.label_ids).mean())}

        trainer.train()
        figures = clock.figures(settings.batch_size, counting.counts.tolist())
        return figures | closing(clock, datasets, trainer.evaluate, test)


def measure_accelerate(settings: Settings, datasets: TextDatasets, model: nn.Module, _: list[str]) -> dict:
    """Train, validate and test by the loop of accelerate's examples."""
    counting = Counting(datasets)
    accelerator = Accelerator(
        cpu=settings.accelerator == "cpu",
        gradient_accumulation_steps=settings.batch_size // MICRO_BATCH,
        mixed_precision="bf16" if settings.precision == "bf16-mixed" else "no",
    )
    loaders = [
        DataLoader(
            datasets.splits[split].select_columns(["input_ids", "labels"]), shuffle=split == "train",
            batch_size=MICRO_BATCH if split == "train" else EVALUATED_AT_ONCE, collate_fn=counting,
        ) for split in ("train", "validation", "test")
    ]  # fmt: skip
    optimizer = build_optimizer(settings, model)
    model, optimizer, *loaders = accelerator.prepare(model, optimizer, *loaders)

    def evaluate(loader: DataLoader) -> dict[str, float]:
        model.eval()
        right = 0
        for inputs in loader:
            with torch.no_grad():
                outputs = model(**inputs)
            found, labels = accelerator.gather_for_metrics((outputs.logits.argmax(dim=-1), inputs["labels"]))
            right += (found == labels).sum()
        return {"test_accuracy": float(right) / len(loader.dataset)}

    clock = Clock(accelerator.device, len(datasets.splits["train"]) // settings.batch_size)
    clock.on_train_begin()
    model.train()
    for inputs in loaders[0]:
        with accelerator.accumulate(model):
            accelerator.backward(model(**inputs).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            clock.on_step_end()
    clock.on_train_end()
    figures = clock.figures(settings.batch_size, counting.counts.tolist())
    return figures | closing(clock, datasets, lambda: evaluate(loaders[1]), lambda: evaluate(loaders[2]))


def measure_blog(settings: Settings, datasets: TextDatasets, model: nn.Module, _: list[str]) -> dict:
    """Train, validate and test by the blog's recipe."""
    columns = ["input_ids", "attention_mask", "labels"]

    def pad(samples: dict) -> dict:
        ids = {"input_ids": samples["input_ids"]}
        return datasets.tokenizer.pad(ids, padding="max_length", max_length=settings.max_length)

    fabric = Fabric(accelerator=settings.accelerator, devices=1, precision=settings.precision)
    fabric.launch()
    padded = {
        split: rows.map(pad, batched=True).with_format("torch", columns) for split, rows in datasets.splits.items()
    }
    loaders = [DataLoader(rows, shuffle=split == "train") for split, rows in padded.items()]
    train_loader, *evaluated = fabric.setup_dataloaders(*loaders)
    model, optimizer = fabric.setup(model, build_optimizer(settings, model))

    def new_accuracy() -> torchmetrics.Metric:
        return torchmetrics.Accuracy(task="multiclass", num_classes=2).to(fabric.device)

    @torch.no_grad()
    def evaluate(loader: DataLoader) -> dict[str, float]:
        model.eval()
        accuracy = new_accuracy()
        for batch in loader:
            accuracy.update(model(**batch).logits.argmax(1), batch["labels"])
        return {"test_accuracy": accuracy.compute().item()}

    clock = Clock(fabric.device, len(train_loader) // settings.batch_size)
    clock.on_train_begin()
    accuracy = new_accuracy()
    for number, batch in enumerate(train_loader, start=1):
        model.train()
        outputs = model(**batch)
        fabric.backward(outputs.loss / settings.batch_size)
        if number % settings.batch_size == 0 or number == len(train_loader):
            optimizer.step()
            optimizer.zero_grad()
            clock.on_step_end()
        model.eval()
        with torch.no_grad():
            accuracy.update(outputs.logits.argmax(1), batch["labels"])
    clock.on_train_end()
    tokens, samples = sum(datasets.splits["train"]["length"][:]), len(train_loader)
    figures = clock.figures(settings.batch_size, (samples, tokens, samples * settings.max_length))
    return figures | closing(clock, datasets, lambda: evaluate(evaluated[0]), lambda: evaluate(evaluated[1]))


def measure_bare(settings: Settings, datasets: TextDatasets, model: nn.Module, _: list[str]) -> dict:
    """Train, validate and test with PyTorch alone, on the ladder's micro-batches."""
    fabric = Fabric(accelerator=settings.accelerator, devices=1)  # the loaders need a rank
    if settings.precision == "bf16-mixed":
        model.forward = torch.autocast(fabric.device.type, torch.bfloat16)(model.forward)
    loaders = build_dataloaders(fabric, datasets, settings)
    batches, *evaluated = [fabric.to_device(list(loader)) for loader in loaders]
    model.to(fabric.device)
    optimizer = build_optimizer(settings, model)

    @torch.no_grad()
    def evaluate(micro_batches: list) -> dict[str, float]:
        """Return loss and accuracy; the device is synchronized only at the end."""
        model.eval()
        totals = torch.zeros(2, device=fabric.device)
        for part in micro_batches:
            outputs = model(**part.inputs)
            right = (outputs.logits.argmax(1) == part.inputs["labels"]).sum()
            totals += torch.stack([outputs.loss.float() * part.items, right.float()])
        loss, accuracy = (totals / sum(part.items for part in micro_batches)).tolist()
        return {"test_loss": loss, "test_accuracy": accuracy}

    seed_everything(settings.seed, verbose=False)
    iter(loaders[0])  # draws a random number, as in the ladder, so that dropout is the same
    clock = Clock(fabric.device, len(batches))
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
    counts = sum(part.items for part in parts), sum(part.tokens for part in parts), sum(part.padded for part in parts)
    figures = clock.figures(settings.batch_size, counts)
    return figures | closing(clock, datasets, lambda: evaluate(evaluated[0]), lambda: evaluate(evaluated[1]))


def closing(clock: Clock, datasets: TextDatasets, validate: Callable[[], object], test: Callable[[], dict]) -> dict:
    """Validate and test, and return the figures that follow the training."""
    start = perf_counter()
    validate()
    seconds = perf_counter() - start
    return {
        "evaluation_seconds": seconds,
        "evaluation_samples_per_second": len(datasets.splits["validation"]) / seconds,
        "peak_memory_bytes": peak_memory(clock.device),
        "threads": torch.get_num_threads(),
        **test(),
    }


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
    facts = {"parameters": sum(weights.numel() for weights in model.parameters()), "weights": common.checksum(model)}
    if settings.precision == "bf16-true":
        model.to(torch.bfloat16)
    facts |= common.precisions(asdict(settings))
    return facts | SIDES[side](settings, datasets, model, switches)


SIDES = {"trainer": measure_trainer, "accelerate": measure_accelerate, "blog": measure_blog, "bare": measure_bare}

if __name__ == "__main__":
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--side", choices=SIDES, required=True)
    parser.add_argument("--switches", nargs="*", choices=SWITCHES, default=[])
    parser.add_argument("--out", type=Path, required=True)
    own, options = parser.parse_known_args()
    if own.side != "bare":  # the bare loop is the upper limit of the ladder
        common.reset_malloc()
    settings = parse_settings(options, batch_size=16)
    if own.side != "bare":
        restore_bfloat16()
    figures = measure(settings, own.side, own.switches)
    own.out.write_text(json.dumps(figures), encoding="utf-8")
