"""Check what a trainer must not get wrong, here and in Trainer and accelerate, with the same small models and samples.

    python benchmarks/correctness.py [--out FILE]

Questions:
    cut      Is the gradient of 16 samples the same in one pass and in 16 passes?
    window   Is the gradient of the last step right, for which only 4 samples are left?
    resume   Does a run that stopped after 3 of 6 optimizer steps end like an uninterrupted one, with dropout?

`cut` and `window` are asked for a classifier (a mean over samples) and for a language model (a mean over trained
tokens, of which each sample has another number). An optimizer of plain gradient descent makes the change of the weights
the gradient. The answer is the distance from the gradient of one pass, relative to its length. Rounding gives 1e-6.
`resume` compares the weights bit by bit.

Sides: rung 2; transformers' Trainer with its defaults except for the sizes; the loop of accelerate's examples.
"""

import argparse
import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import common  # first import: it makes the project importable
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from common import MODELS, RESULTS
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.optim import SGD
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments

from fabric_ladder import parse_settings
from fabric_ladder.models.configs import MODELS as CLASSES
from fabric_ladder.models.configs import load_config, silence_loading
from local_dataset_utilities import load_datasets

OUT = RESULTS / "correctness.json"
BATCH = 16
SAMPLES = {"cut": 16, "window": 20, "resume": 96, "resume, no dropout": 96}
TASKS = {
    "classifier": "--task text-classification".split(),
    "language model": "--task instruction-tuning --train_on_inputs true".split(),
}
DROPOUT = {"resume": 0.1, "resume, no dropout": 0.0}
RATE = 0.1
STOP = 3  # optimizer steps before the run stops
SGD_OPTIONS = f"--optimizer sgd --learning_rate {RATE}".split()
Weights = dict[str, Tensor]


class Work:
    """A model from a folder, and its samples.

    Args:
        folder: Gets the model and the tokenizer.
        kind: One of `TASKS`.
        question: One of `SAMPLES`.
    """

    def __init__(self, folder: Path, kind: str, question: str):
        self.folder = folder / f"{kind}, {question}"
        config = str(MODELS / "llama-tiny.json")
        samples = f"--train_samples {SAMPLES[question]} --validation_samples 8 --test_samples 8".split()
        self.options = ["--config", "quickstart.yaml", *TASKS[kind], *samples, "--max_length", "256"]
        self.options += ["--batch_size", str(BATCH), "--accelerator", "cpu", "--threads", "1"]
        settings = parse_settings([*self.options, "--model", config, "--from_scratch", "true"])
        data = load_datasets(settings)
        silence_loading()
        loaded = load_config(config)
        loaded.attention_dropout = DROPOUT.get(question, 0.0)
        loaded.pad_token_id = data.tokenizer.pad_token_id
        torch.manual_seed(0)
        self.model_class = CLASSES[settings.task]
        self.model_class.from_config(loaded).save_pretrained(self.folder)
        data.tokenizer.save_pretrained(self.folder)
        self.options += ["--model", str(self.folder), "--from_scratch", "false"]
        self.split = data.splits["train"].select_columns(["input_ids", "labels"])
        collator = DataCollatorForSeq2Seq if kind == "language model" else DataCollatorWithPadding
        self.collate = collator(data.tokenizer)

    def model(self) -> nn.Module:
        """Return the model with its initial weights, in train mode."""
        return self.model_class.from_pretrained(self.folder).train()


def weights_of(model: nn.Module) -> Weights:
    """Return a copy of a model's weights."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


# Sides: each returns the weights after every optimizer step, from the initial ones on


def ladder(work: Work, micro_batch: int) -> list[Weights]:
    """Return the weights of rung 2."""
    with tempfile.TemporaryDirectory() as runs:
        options = [*work.options, *SGD_OPTIONS, "--micro_batch_size", str(micro_batch), "--runs_dir", runs]
        rung([*options, "--save_every", "1", "--keep", "99"])
        checkpoints = sorted(Path(runs).glob("*/1/checkpoints/step-*"))
        return [weights_of(work.model()), *map(read_checkpoint, checkpoints)]


def read_checkpoint(folder: Path) -> Weights:
    """Return the weights in a checkpoint of a rung."""
    tensors: Weights = {}
    for file in sorted((folder / "state").rglob("*.safetensors")):
        tensors |= load_file(file)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}


def rung(options: list[str]) -> str:
    """Run rung 2 and return its output."""
    return common.run_child([str(common.ROOT / "src" / "2_grad_accum.py"), *options], threads=1)


class Recorder(TrainerCallback):
    """Keeps the weights after every step of Trainer, and stops it after some steps."""

    def __init__(self, model: nn.Module, stop: int | None = None):
        self.model = model
        self.stop = stop
        self.found = [weights_of(model)]

    def on_step_end(self, args, state, control, **_) -> None:
        """Keep the weights."""
        self.found.append(weights_of(self.model))
        if state.global_step == self.stop:
            control.should_save = control.should_training_stop = True


def trainer(
    work: Work, folder: str, micro_batch: int, stop: int | None = None, resume: bool = False, plain: bool = True
) -> list[Weights]:
    """Train by Trainer in a folder.

    Args:
        work: The model and the samples.
        folder: Gets the checkpoint.
        micro_batch: Samples of a pass.
        stop: Optimizer steps before it saves a checkpoint and stops.
        resume: Continue from the checkpoint.
        plain: Use plain gradient descent in place of Trainer's Adam.
    """
    model = work.model()
    arguments = TrainingArguments(
        output_dir=folder, num_train_epochs=1, seed=123, learning_rate=1e-3, lr_scheduler_type="constant",
        max_grad_norm=0.0, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        per_device_train_batch_size=micro_batch, gradient_accumulation_steps=BATCH // micro_batch,
    )  # fmt: skip
    recorder = Recorder(model, stop)
    optimizers = (SGD(model.parameters(), RATE), None) if plain else (None, None)
    trained = Trainer(model, arguments, work.collate, work.split, callbacks=[recorder], optimizers=optimizers)
    with redirect_stdout(io.StringIO()):  # it prints its own figures
        trained.train(resume_from_checkpoint=resume)
    return recorder.found


def accelerate_loop(
    work: Work, folder: str, micro_batch: int, stop: int | None = None, resume: bool = False, plain: bool = True
) -> list[Weights]:
    """Train by the loop of accelerate's examples; the arguments are those of `trainer`."""
    set_seed(123)
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # otherwise a resumed run draws another order
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=BATCH // micro_batch, dataloader_config=order)
    model = work.model()
    loader = DataLoader(work.split, shuffle=True, batch_size=micro_batch, collate_fn=work.collate)
    optimizer = SGD(model.parameters(), RATE) if plain else torch.optim.AdamW(model.parameters(), 1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = 0
    if resume:
        accelerator.load_state(folder)
        steps = STOP
        loader = accelerator.skip_first_batches(loader, STOP * BATCH // micro_batch)
    found = [weights_of(model)]
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**inputs).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps += 1
            found.append(weights_of(model))
            if steps == stop:
                accelerator.save_state(folder)
                break
    return found


def in_new_folder(side: Callable[..., list[Weights]]) -> Callable[[Work, int], list[Weights]]:
    """Return a side that trains in a new folder."""

    def train(work: Work, micro_batch: int) -> list[Weights]:
        with tempfile.TemporaryDirectory() as folder:
            return side(work, folder, micro_batch)

    return train


# Answers


def distance(found: list[Weights], expected: list[Weights]) -> float:
    """Return how far the last step is from the expected one, relative to its length."""
    steps = [{name: side[-1][name] - side[-2][name] for name in side[-1]} for side in (found, expected)]
    error = sum((steps[0][name] - step).square().sum() for name, step in steps[1].items())
    return float((error / sum(step.square().sum() for step in steps[1].values())).sqrt())


def resume_ladder(work: Work) -> bool:
    """Return whether rung 2 resumes bit by bit."""
    ends = []
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as stopped:
        options = [*work.options, "--micro_batch_size", "4", "--save_every", str(STOP), "--keep", "99"]
        rung([*options, "--runs_dir", whole])
        rung([*options, "--runs_dir", stopped])
        home = Path(stopped) / "2_grad_accum" / "1"
        first, *later = sorted((home / "checkpoints").iterdir())
        rung([*options, "--runs_dir", stopped, "--resume", str(first)])
        for runs in (whole, stopped):
            ends.append(read_checkpoint(sorted(Path(runs).glob("*/1/checkpoints/step-*"))[-1]))
        assert later, "there is a later checkpoint, which the resumed run replaces"
    return equal(*ends)


def resume_other(work: Work, run: Callable[..., list[Weights]]) -> bool:
    """Return whether Trainer or accelerate's loop resumes bit by bit, each in the way that its documents describe."""
    with tempfile.TemporaryDirectory() as folder:
        whole = run(work, folder, 4, plain=False)
        run(work, folder, 4, stop=STOP, plain=False)
        resumed = run(work, folder, 4, resume=True, plain=False)
    return equal(whole[-1], resumed[-1])


def equal(first: Weights, second: Weights) -> bool:
    """Return whether all weights have the same bits."""
    return all(torch.equal(weight, second[name]) for name, weight in first.items())


SIDES = {"rung 2": ladder, "Trainer": in_new_folder(trainer), "accelerate": in_new_folder(accelerate_loop)}
RESUME = {
    "rung 2": resume_ladder,
    "Trainer": lambda work: resume_other(work, trainer),
    "accelerate": lambda work: resume_other(work, accelerate_loop),
}


def main() -> None:
    """Ask all questions, print the answers and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="results file (default: %(default)s)")
    args = parser.parse_args()
    common.check_storable(args.out)
    answers: dict[str, dict[str, float | bool]] = {side: {} for side in SIDES}
    torch.set_num_threads(1)  # equal runs give equal bits
    with tempfile.TemporaryDirectory() as folder:
        for kind in TASKS:
            for question in ("cut", "window"):
                work = Work(Path(folder), kind, question)
                for side, train in SIDES.items():
                    answers[side][f"{question}, {kind}"] = distance(train(work, 1), train(work, BATCH))
        for question in DROPOUT:
            work = Work(Path(folder), "classifier", question)
            for side, resumes in RESUME.items():
                answers[side][question] = resumes(work)
    common.print_table(["", *answers["rung 2"]], [[side, *row.values()] for side, row in answers.items()])
    common.write_result(args.out, "answers", common.environment(torch.device("cpu")) | {"sides": answers})


if __name__ == "__main__":
    main()
