"""One run of one script: the printed header, the blog's lines, and what is recorded of them."""

import math
import sys
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter

import torch
from lightning import Fabric
from torch import nn
from torch.utils.data import DataLoader

from fabric_ladder.data.hub import hash_files
from fabric_ladder.data.label_kind import Described, class_lines
from fabric_ladder.data.loaders import EffectiveBatch
from fabric_ladder.distributed.launch import command_line
from fabric_ladder.distributed.watch import running_watch
from fabric_ladder.environment import limit_memory
from fabric_ladder.errors import notebook_shell
from fabric_ladder.options import without_options
from fabric_ladder.runs.header import describe_parameters, parameters_line, title
from fabric_ladder.runs.intervals import wilson_interval
from fabric_ladder.runs.memory_history import MemoryHistory
from fabric_ladder.runs.metrics import Score
from fabric_ladder.runs.prediction import Prediction, start_planner
from fabric_ladder.runs.process import chosen_kernels
from fabric_ladder.runs.progress_bar import ProgressBar
from fabric_ladder.runs.record import RunRecord
from fabric_ladder.runs.speed import expected_time, find_speed, is_same_device
from fabric_ladder.runs.throughput import Throughput
from fabric_ladder.settings import Settings

FEW = 200  # test samples: with fewer, the interval of the accuracy is printed
LOG_EVERY = 4800  # samples between two printed losses, if an epoch has at least ten times as many


class Run:
    """Prints and records the figures of one run.

    Args:
        fabric: Launched.
        settings: The settings of the run.

    Attributes:
        begun: Start of the run, by `perf_counter`.
        record: The printed lines and run.json.
        planner: The process that predicts the memory, on rank 0.
        memory_history: Records the GPU's memory in the first steps, if it is asked to.

    Raises:
        UserError: `runs_dir` cannot be written, `memory_snapshot` cannot be recorded, or the GPU is below
            `gpu_memory_limit`.
    """

    def __init__(self, fabric: Fabric, settings: Settings):
        self.begun = perf_counter()
        self.fabric = fabric
        self.settings = settings
        self.record = RunRecord(fabric, settings)
        limit_memory(fabric.device, settings.gpu_memory_limit)
        self.planner = start_planner(fabric, settings)
        self._prediction: Prediction | None = None
        self._print_header()
        self.memory_history = MemoryHistory(fabric, settings.memory_snapshot)

    @property
    def folder(self) -> Path | None:
        """`runs/<script>/<n>` on rank 0, once training has started."""
        return self.record.folder

    def print(self, line: str, log: bool = True) -> None:
        """Print a line on rank 0. `log` also adds it to log.txt; leave it out for lines about this start only."""
        self.record.print(line, log)

    def start(
        self,
        model: nn.Module,
        train_loader: DataLoader,
        prediction: Prediction | None = None,
        resumed: tuple[Path, dict] | None = None,
    ) -> None:
        """Open the run's folder, print the size of the model and start the clocks.

        Args:
            model: Set up by Fabric.
            train_loader: The loader of the training data.
            prediction: The predicted peak memory, on rank 0.
            resumed: The folder of a resumed run and its saved `state_dict`.
        """
        data = train_loader.dataset
        described = describe_parameters(model)
        hardware = self.record.values["hardware"]  # a resumed record has that of the first start
        self.steps = len(train_loader)
        self.epoch_samples = len(data)
        self.log_every = self.settings.log_every or max(1, min(LOG_EVERY, self.epoch_samples // 10))
        self.record.add_results(**described, **(prediction.figures() if prediction else {}))
        if self.fabric.global_rank == 0:
            settings = self.settings
            self.record.add(contents={"model": hash_files(settings.model), "load": hash_files(settings.load)})
        facts = {"fingerprint": data.fingerprint, "train_samples": self.epoch_samples, "read": data.summary}
        self.record.add(data=facts)
        model_commit = getattr(getattr(model, "config", None), "_commit_hash", None)
        commits = {"dataset": data.commit, "model": model_commit}
        self.record.add(commits={name: commit for name, commit in commits.items() if commit})
        folder, state = resumed or (None, None)
        self.record.open(folder, state)
        if watch := running_watch():
            watch.last_words = self.lose_rank
        self._imbalance = data.imbalance
        self._prediction = prediction
        notices = getattr(model, "notices", ())
        lines = [*data.summary, *data.notices, *data.imbalance, *notices, parameters_line(described)]
        if prediction:
            lines.append(prediction.line(self.settings, hardware))
        if self.fabric.global_rank == 0 and not resumed and (line := self._expected_time()):
            lines.append(f"Expected: {line}")
        for line in lines:
            self.print(line, log=not resumed)
        self.throughput = Throughput(self.fabric, state)

    def state_dict(self) -> dict:
        """Return lines and figures as plain values, to resume from. All ranks must call it."""
        return self.throughput.state_dict() | self.record.state_dict()

    def progress_bar(self, batches: Iterator[EffectiveBatch], done: int) -> Iterable[EffectiveBatch]:
        """Show a progress bar with the time left and the memory in use, on a terminal only.

        Args:
            batches: The remaining effective batches of the epoch.
            done: The number of effective batches before them.
        """
        hidden = self.fabric.global_rank > 0 or not sys.stderr.isatty()
        options = {"total": self.steps, "initial": done, "unit": "batch", "disable": hidden, "leave": False}
        return ProgressBar(batches, device=self.fabric.device, **options)

    def log_loss(self, epoch: int, batch: int, seen: int, loss: float, learning_rate: float) -> None:
        """Print the mean loss per item since the last such line.

        Args:
            epoch: Counted from 0.
            batch: Optimizer steps of this epoch so far.
            seen: Samples of this epoch so far.
            loss: Mean over the items, not divided by the number of micro-batches.
            learning_rate: The learning rate after this step.
        """
        self.print(f"{self._place(epoch, batch, seen)} | Loss: {loss:.4f}")
        figures = {"loss": loss, "learning_rate": learning_rate, **self.throughput.since_last_line()}
        self._log_row(epoch * self.steps + batch, epoch=epoch + 1, **figures)

    def log_fit(self, tokens: int, new: bool) -> None:
        """Print and record the `micro_batch_tokens` that fit; `new`: unless the run has printed this number before."""
        self.record.add_results(fitted_micro_batch_tokens=tokens)
        self.record.write()
        self.print(f"Micro-batches of {tokens} tokens fit", log=new)

    def log_validation(self, epoch: int, batch: int, seen: int, score: Score) -> None:
        """Print the figures of a validation within an epoch; the arguments are those of `log_loss`."""
        figures = {"validation_loss": score.loss}
        if self._is_regression:
            line = f"Val MSE: {score.loss:.4f}"
            figures["validation_mse"] = score.loss
        else:
            line = f"Val loss: {score.loss:.4f} | Val acc.: {score.accuracy * 100:.2f}%"
            figures["validation_accuracy"] = score.accuracy
        self.print(f"{self._place(epoch, batch, seen)} | {line}")
        self._log_row(epoch * self.steps + batch, epoch=epoch + 1, **figures)

    def log_epoch(self, epoch: int, training: Score, validation: Score, step: int) -> None:
        """Print the accuracies of an epoch, or mean squared errors; it ends after optimizer step `step`."""
        if self._is_regression:
            line = f"Train MSE: {training.loss:.4f} | Val MSE: {validation.loss:.4f}"
            figures = {"train_mse": training.loss, "validation_mse": validation.loss}
        else:
            line = f"Train acc.: {training.accuracy * 100:.2f}% | Val acc.: {validation.accuracy * 100:.2f}%"
            figures = {"train_accuracy": training.accuracy, "validation_accuracy": validation.accuracy}
        if self._items_are_tokens:
            line += f" | Val perplexity: {validation.perplexity:.2f}"
        self.print(f"{self._epoch(epoch)} | {line}")
        figures["validation_loss"] = validation.loss
        self.record.values["results"]["epochs"].append(figures)
        self._log_row(step, epoch=epoch + 1, **figures)

    def log_early_stop(self, validations: int, metric: str) -> None:
        """Print that `patience` ended the training after N validations that were not better."""
        self.print(f"Stopped early: the validation {metric} was not better {validations} times in a row")
        self.record.add_results(stopped_early=True)

    def log_best(self, metric: str, value: float, place: str, known: bool) -> None:
        """Print and record which validation was the best; `known`: unless its weights could not be kept."""
        figure = f"{value:.4f}" if metric == "loss" else f"{value * 100:.2f}%"
        used = "its weights" if known else "its checkpoint could not be written, so the last weights"
        used += " are tested" + " and saved" * (self.settings.save != "no")
        self.print(f"Best validation {metric} {figure} at {place}: {used}")
        self.record.add_results(best_validation={"metric": metric, "value": value, "place": place, "used": known})

    def log_training(self, samples_hash: str) -> None:
        """Print time, throughput and peak memory of the training, and record the hash of its effective batches."""
        figures = self.throughput.figures()
        self.print(f"Time elapsed {figures['elapsed_seconds'] / 60:.2f} min")
        if seconds := figures.get("compile_seconds"):
            self.print(f"Compile time {seconds / 60:.2f} min of it, {figures['compiled_graphs']} graphs")
        self.print(
            f"Throughput {figures['samples_per_second']:.1f} samples/s, {figures['tokens_per_second']:.0f} tokens/s, "
            f"padding {figures['padding'] * 100:.1f}%"
        )
        self.print(f"Memory used: {figures['peak_memory_bytes'] / 1e9:.2f} GB")
        if self._prediction and self._prediction.figures():
            self.print(self._prediction.end_line(figures["peak_memory_bytes"], self.fabric.device.type == "cuda"))
        self.print(f"Host memory used: {figures['peak_host_memory_bytes'] / 1e9:.2f} GB, loading included")
        self.record.add_results(**figures, samples_hash=samples_hash)
        self.record.write()

    def log_test(
        self, score: Score, step: int, classes: dict | None = None, described: Described | None = None
    ) -> None:
        """Print the figures of the test, and record the run as finished.

        Args:
            score: The result of the test.
            step: Optimizer steps of the training.
            classes: From `describe_classes`.
            described: The results of another kind of labels than one class per sample.
        """
        items = {"instruction-tuning": "test_tokens", "token-classification": "test_words"}
        counted = items.get(self.settings.task, "test_samples")
        if self._is_regression:
            figures = {"test_mse": score.loss}
            self.print(f"Test MSE {score.loss:.4f}")
        else:
            figures = {"test_accuracy": score.accuracy}
            self.print(f"Test accuracy {score.accuracy * 100:.2f}%")
            if counted == "test_samples" and 0 < score.items < FEW:
                low, high = wilson_interval(score.accuracy, score.items)
                self.print(f"Test samples {score.items}, 95 % interval {low * 100:.2f}% to {high * 100:.2f}%")
        if classes and (len(classes["names"]) > 2 or self._imbalance):
            self.print(f"Test macro-F1 {classes['macro_f1'] * 100:.2f}%")
        if classes:
            self.record.add_results(classes=classes)
            for line in class_lines(classes):
                self.print(line)
        if described:
            self.record.add_results(**described.results)
            for line in described.lines:
                self.print(line)
        if self._items_are_tokens:
            self.print(f"Test loss {score.loss:.4f} per trained token, perplexity {score.perplexity:.2f}")
        figures["test_loss"] = score.loss
        self.record.add_results(**figures, **{counted: score.items})
        self._log_row(step, epoch=math.ceil(step / self.steps), **figures)
        self.record.add(status="finished")
        self.record.write()

    def log_stop(self, reason: str, position: str | None) -> None:
        """Print why the run stops and how to resume it, and record it as stopped.

        Args:
            reason: Name of a signal.
            position: Where the training is; None if no checkpoint could be written.
        """
        self._record_stop()
        place = f" {position}{self._resuming()}" if position else ""
        self.print(f"Stopped by {reason}{place}", log=False)

    def lose_rank(self) -> str:
        """Record the run as stopped after a rank has died, and return how to resume it, if it writes checkpoints."""
        self._record_stop()
        return self._resuming() if self.settings.save_every else ""

    def _record_stop(self) -> None:
        self.record.add(status="stopped")
        self.record.write()

    def _resuming(self) -> str:
        known = self.settings.resume in ("no", "auto")  # otherwise it may not be the newest run
        resume = "auto" if known else str(self.folder or self.settings.resume)
        words = [*without_options(sys.argv[1:], ["resume"]), "--resume", resume]
        command = 'parse_settings(resume="auto", …)' if notebook_shell() else command_line(Path(sys.argv[0]), words)
        return f"; go on with: {command}"

    def end_step(self) -> None:
        """Count an optimizer step for the history of memory, and print where its snapshot is written."""
        with self.throughput.excluded():
            if line := self.memory_history.end_step():
                self.print(line, log=False)

    def close(self) -> None:
        """Close the run's folder, and write the history of memory."""
        if line := self.memory_history.write():
            self.print(line, log=False)
        self.record.close()

    @property
    def _items_are_tokens(self) -> bool:
        """Whether losses and accuracies are means over trained tokens instead of samples."""
        return self.settings.task == "instruction-tuning"

    @property
    def _is_regression(self) -> bool:
        return self.settings.problem_type == "regression"

    def _print_header(self) -> None:
        record = self.record.values
        for notice in (*self.settings.notices, *getattr(self.fabric.strategy, "notices", ())):
            self.print(notice)
        self.print(" · ".join(f"{name} {number}" for name, number in record["versions"].items()))
        self.print(title(self.settings, record["hardware"], self.fabric.world_size))
        self.print(f"Torch CUDA available? {torch.cuda.is_available()}")
        if kernels := chosen_kernels(self.settings):
            self.record.add(attention_kernels=kernels)
            self.print(f"Attention kernels, the first that can: {', '.join(kernels)}")

    def _expected_time(self) -> str | None:
        is_same = partial(is_same_device, self.record.values["hardware"])
        speed = find_speed(self.settings, self.fabric.world_size, is_same)
        return expected_time(self.settings, speed, self.epoch_samples)

    def _epoch(self, epoch: int) -> str:
        return f"Epoch: {epoch + 1:04d}/{self.settings.epochs:04d}"

    def _place(self, epoch: int, batch: int, seen: int) -> str:
        width = max(5, len(str(self.epoch_samples)))
        samples = f"Samples {seen:0{width}d}/{self.epoch_samples:0{width}d}"
        return f"{self._epoch(epoch)} | Batch {batch:04d}/{self.steps:04d} | {samples}"

    def _log_row(self, step: int, **figures: float) -> None:
        self.record.add_row(step, self.throughput.samples, seconds=self.throughput.elapsed, **figures)
