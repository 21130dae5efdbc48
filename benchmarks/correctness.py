"""Check what a trainer must not get wrong, here and in others, with the same small models and samples.

    python benchmarks/correctness.py [--out FILE]

Questions:
    cut      Is the gradient of 16 samples the same in one pass and in 16 passes?
    window   Is the gradient of the last step right, for which only 4 samples are left?
    drift    Over 12 steps, does the norm of the gradients stay the same in one pass and in 16 passes?
    resume   Does a run that stopped after 3 of 6 optimizer steps end like an uninterrupted one, with dropout?

`cut` and `window` are asked for a classifier (a mean over samples) and for a language model (a mean over trained
tokens, of which each sample has another number). An optimizer of plain gradient descent makes the change of the weights
the gradient. The answer is the distance from the gradient of one pass, relative to its length. Rounding gives 1e-6.
`drift` is the measure of TRL's own tests (huggingface/trl#5686): the mean over the steps of the difference with its
sign, which rounding leaves near 0 and a wrong division does not. It is relative to the mean norm.
`resume` compares the weights bit by bit.

Sides: rung 2; transformers' Trainer with its defaults except for the sizes; the loop of accelerate's examples; TRL's
`SFTTrainer`, which trains language models alone, and resumes by Trainer's code. Each
returns the weights at the beginning and after every optimizer step. It takes the work, a folder, the samples of a pass,
and for `resume` the steps after which it saves and stops, or whether it continues from there.
"""

import io
import shutil
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from itertools import pairwise
from pathlib import Path

import common  # first import: it makes the project importable
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import DataCollatorForSeq2Seq, DataCollatorWithPadding, Trainer, TrainerCallback, TrainingArguments
from trl import SFTConfig, SFTTrainer

from fabric_ladder import parse_settings
from fabric_ladder.data.load import load_datasets
from fabric_ladder.environment import describe_versions
from fabric_ladder.models.configs import MODELS, load_config, silence_loading

BATCH, STOP = 16, 3  # samples of a step; optimizer steps before the run stops
SAMPLES = {"cut": 16, "window": 20, "drift": 192, "resume": 96, "resume, no dropout": 96}
# of plain gradient descent: at 0.1 a gradient that is 16 times too long diverges; `window` is about the last step alone
RATES = {"drift": 0.01, "window": 1e-3}
TASKS = {
    "classifier": "--task text-classification".split(),
    "language model": "--task instruction-tuning --train_on_inputs true".split(),
}
Weights = dict[str, Tensor]


class Work:
    """A model in a folder, and its samples, for one of `TASKS` and of the questions in `SAMPLES`."""

    def __init__(self, folder: Path, kind: str, question: str):
        self.folder, self.resumes = folder / f"{kind}, {question}", question.startswith("resume")
        self.rate = RATES.get(question, 0.1)
        config = str(common.MODELS / "llama-tiny.json")
        self.options = ["--config", "quickstart.yaml", *TASKS[kind], "--train_samples", str(SAMPLES[question])]
        self.options += "--validation_samples 8 --test_samples 8 --max_length 256 --accelerator cpu --threads 1".split()
        self.options += ["--batch_size", str(BATCH)]
        settings = parse_settings([*self.options, "--model", config, "--from_scratch", "true"])
        data = load_datasets(settings)
        silence_loading()
        loaded = load_config(config)
        loaded.attention_dropout = 0.1 if question == "resume" else 0.0
        loaded.pad_token_id = data.tokenizer.pad_token_id
        torch.manual_seed(0)
        self.model_class = MODELS[settings.task]
        self.model_class.from_config(loaded).save_pretrained(self.folder)
        self.tokenizer = data.tokenizer
        self.tokenizer.save_pretrained(self.folder)
        self.options += ["--model", str(self.folder), "--from_scratch", "false"]
        self.split = data.splits["train"].select_columns(["input_ids", "labels"])
        collator = DataCollatorForSeq2Seq if kind == "language model" else DataCollatorWithPadding
        self.collate = collator(self.tokenizer)

    def model(self) -> nn.Module:
        """Return the model with its initial weights, in train mode."""
        return self.model_class.from_pretrained(self.folder).train()

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return the optimizer: plain gradient descent, or Adam for the questions about resuming."""
        weights = model.parameters()
        return torch.optim.AdamW(weights, lr=1e-3) if self.resumes else torch.optim.SGD(weights, lr=self.rate)


def weights_of(model: nn.Module) -> Weights:
    """Return a copy of a model's weights."""
    return {name: weight.detach().clone() for name, weight in model.named_parameters()}


def ladder(work: Work, folder: str, micro_batch: int, stop: int | None = None, resume: bool = False) -> list[Weights]:
    """Train by rung 2. It does not stop itself: its checkpoints after `stop` are removed."""
    options = [*work.options, "--micro_batch_size", str(micro_batch), "--runs_dir", folder, "--keep", "99"]
    options += [] if work.resumes else ["--optimizer", "sgd", "--learning_rate", str(work.rate)]
    options += ["--save_every", str(STOP if work.resumes else 1)]
    home = Path(folder) / "2_grad_accum" / "1" / "checkpoints"
    options += ["--resume", str(min(home.glob("step-*")))] if resume else []
    common.run_child([str(common.ROOT / "src" / "2_grad_accum.py"), *options], threads=1)
    for later in sorted(home.glob("step-*"))[1:] if stop else []:
        shutil.rmtree(later)
    return [weights_of(work.model()), *map(read_checkpoint, sorted(home.glob("step-*")))]


def read_checkpoint(folder: Path) -> Weights:
    """Return the weights in a checkpoint of a rung."""
    tensors: Weights = {}
    for file in sorted((folder / "state").rglob("*.safetensors")):
        tensors |= load_file(file)
    return {name.removeprefix("model."): tensor for name, tensor in tensors.items() if name.startswith("model.")}


class Recorder(TrainerCallback):
    """Keeps the weights after every step of Trainer, and stops it after some steps."""

    def __init__(self, model: nn.Module, stop: int | None):
        self.model, self.stop, self.found = model, stop, [weights_of(model)]

    def on_step_end(self, args, state, control, **_) -> None:
        """Keep the weights."""
        self.found.append(weights_of(self.model))
        if state.global_step == self.stop:
            control.should_save = control.should_training_stop = True


def trainer(
    work: Work,
    folder: str,
    micro_batch: int,
    stop: int | None = None,
    resume: bool = False,
    kind: type[Trainer] = Trainer,
    **more: object,
) -> list[Weights]:
    """Train by Trainer, or by a subclass of it with `more` arguments."""
    model = work.model()
    arguments = (SFTConfig if kind is SFTTrainer else TrainingArguments)(
        output_dir=folder, num_train_epochs=1, seed=123, learning_rate=1e-3, lr_scheduler_type="constant",
        max_grad_norm=0.0, save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True,
        per_device_train_batch_size=micro_batch, gradient_accumulation_steps=BATCH // micro_batch, **more,
    )  # fmt: skip
    recorder = Recorder(model, stop)
    optimizers = (None if work.resumes else work.optimizer(model), None)  # its own Adam
    trained = kind(
        model, arguments, work.collate, work.split, processing_class=work.tokenizer, callbacks=[recorder],
        optimizers=optimizers,
    )  # fmt: skip
    with redirect_stdout(io.StringIO()):  # it prints its own figures
        trained.train(resume_from_checkpoint=resume)
    return recorder.found


def sft_trainer(work: Work, folder: str, micro_batch: int) -> list[Weights]:
    """Train by TRL's SFTTrainer in 32 bits; checkpointing and packing change no gradient and are off."""
    return trainer(
        work, folder, micro_batch, kind=SFTTrainer, bf16=False, gradient_checkpointing=False, max_length=None
    )


def loop(work: Work, folder: str, micro_batch: int, stop: int | None = None, resume: bool = False) -> list[Weights]:
    """Train by the loop of accelerate's examples."""
    set_seed(123)
    order = DataLoaderConfiguration(use_seedable_sampler=True)  # otherwise a resumed run draws another order
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=BATCH // micro_batch, dataloader_config=order)
    model = work.model()
    loader = DataLoader(work.split, shuffle=True, batch_size=micro_batch, collate_fn=work.collate)
    model, optimizer, loader = accelerator.prepare(model, work.optimizer(model), loader)
    if resume:
        accelerator.load_state(folder)
        loader = accelerator.skip_first_batches(loader, STOP * BATCH // micro_batch)
    found = [weights_of(model)]
    for inputs in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(**inputs).loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            found.append(weights_of(model))
            if len(found) - 1 == stop:
                accelerator.save_state(folder)
                break
    return found


def drift(side: Callable[..., list[Weights]], work: Work) -> float:
    """Return the mean difference of the gradients' norms between 16 passes and one, relative to the mean norm."""
    norms = []
    for micro_batch in (1, BATCH):
        with tempfile.TemporaryDirectory() as folder:
            found = side(work, folder, micro_batch)
        norms.append(torch.tensor([length_of(after, before) for before, after in pairwise(found)]))
    return float((norms[0] - norms[1]).mean() / norms[1].mean())


def length_of(after: Weights, before: Weights) -> float:
    """Return the length of a step."""
    return float(sum((after[name] - weight).square().sum() for name, weight in before.items()).sqrt())


def distance(side: Callable[..., list[Weights]], work: Work) -> float:
    """Return how far the last step of passes with one sample is from that of one pass, relative to its length."""
    steps = []
    for micro_batch in (1, BATCH):
        with tempfile.TemporaryDirectory() as folder:
            *_, before, after = side(work, folder, micro_batch)
        steps.append({name: weight - before[name] for name, weight in after.items()})
    return length_of(steps[0], steps[1]) / length_of(steps[1], {name: 0 * step for name, step in steps[1].items()})


def resumes(side: Callable[..., list[Weights]], work: Work) -> bool:
    """Return whether a side resumes bit by bit, in the way that its documents describe."""
    with tempfile.TemporaryDirectory() as whole, tempfile.TemporaryDirectory() as folder:
        expected = side(work, whole, 4)[-1]
        side(work, folder, 4, stop=STOP)
        resumed = side(work, folder, 4, resume=True)[-1]
    return all(torch.equal(weight, resumed[name]) for name, weight in expected.items())


SIDES = {"rung 2": ladder, "Trainer": trainer, "accelerate": loop, "TRL": sft_trainer}


def main() -> None:
    """Ask all questions, print the answers and write them."""
    args = common.new_parser(__doc__, common.RESULTS / "correctness.json").parse_args()
    common.check_storable(args.out)
    answers: dict[str, dict[str, float | bool]] = {side: {} for side in SIDES}
    torch.set_num_threads(1)  # equal runs give equal bits
    with tempfile.TemporaryDirectory() as folder:
        for question in SAMPLES:
            for kind in ["classifier"] if question.startswith("resume") else TASKS:
                work = Work(Path(folder), kind, question)
                name = question if work.resumes else f"{question}, {kind}"
                ask = resumes if work.resumes else drift if question == "drift" else distance
                for side, train in SIDES.items():
                    if side != "TRL" or kind == "language model":
                        answers[side][name] = ask(train, work)
    rows = [[side, *map(row.get, answers["rung 2"])] for side, row in answers.items()]
    common.print_table(["", *answers["rung 2"]], rows)
    common.write_result(args.out, "answers", {"versions": describe_versions("trl"), "sides": answers})


if __name__ == "__main__":
    main()
