"""One run of one script: the header and the blog's lines, its clocks, and its end."""

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Protocol, TypeVar

import torch
from lightning import Fabric
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from fabric_ladder.data.loaders import EffectiveBatch
from fabric_ladder.distributed.launch import forget_launch
from fabric_ladder.distributed.preemption import StopRequest, exit_for
from fabric_ladder.distributed.watch import RankWatch, running_watch
from fabric_ladder.environment import compute_capability, notebook_shell
from fabric_ladder.models.kernels import attention_kernels, use_kernels
from fabric_ladder.runs.metrics import Totals
from fabric_ladder.runs.prediction import Prediction
from fabric_ladder.runs.record import RunRecord
from fabric_ladder.runs.report import describe_parameters, parameters_line, title
from fabric_ladder.runs.throughput import Throughput
from fabric_ladder.settings import Settings

LOG_EVERY = 4800  # samples between two printed losses, where an epoch has ten times as many
T = TypeVar("T")


class Stoppable(Protocol):
    """What evaluation needs of the checkpointer that the training leaves behind."""

    def stop(self) -> None:
        """Write a checkpoint, say how to resume, and end the process."""

    def finish(self) -> None:
        """Remove what only served to resume."""


class Run:
    """One run of one script, which prints and records its figures; from here on, a rank that dies ends the others.

    Args:
        fabric: Launched.
        settings: Of the run.

    Raises:
        UserError: `runs_dir` cannot be written.
    """

    def __init__(self, fabric: Fabric, settings: Settings):
        self.fabric, self.settings, self._begun = fabric, settings, perf_counter()
        forget_launch()
        self._watch = (running_watch() or RankWatch()) if settings.ranks > 1 else None
        if self._watch:
            self._watch.meet()
        if fabric.device.type == "cpu":  # DeepSpeed, loaded by transformers where it is installed, would print so
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if settings.threads:
            torch.set_num_threads(settings.threads)
        if settings.matmul_precision:
            torch.set_float32_matmul_precision(settings.matmul_precision)
        torch.use_deterministic_algorithms(settings.deterministic)
        self.record = RunRecord(fabric, settings)
        self.stop_request: StopRequest | None = None  # these three once training has started
        self.checkpointer: Stoppable | None = None
        self._prediction: Prediction | None = None
        for notice in (*settings.notices, *getattr(fabric.strategy, "notices", ())):
            self.print(notice)
        self.print(" · ".join(f"{name} {number}" for name, number in self.record.values["versions"].items()))
        self.print(title(settings, self.record.values["hardware"], fabric.world_size))
        self.print(f"Torch CUDA available? {torch.cuda.is_available()}")
        if fabric.device.type == "cuda" and settings.attention == "fused":
            self._choose_kernels()

    @property
    def folder(self) -> Path | None:
        """`runs/<script>/<n>` on rank 0, once training has started."""
        return self.record.folder

    def print(self, line: str, log: bool = True) -> None:
        """Print a line on rank 0 and, unless it is of this start of the run alone, add it to log.txt."""
        self.record.print(line, log)

    def start(
        self,
        model: nn.Module,
        train_loader: DataLoader,
        checkpointer: Stoppable,
        prediction: Prediction | None = None,
        resumed: tuple[Path, dict] | None = None,
    ) -> None:
        """Open the run's folder, print the model's size and start the clocks.

        Args:
            model: Set up by Fabric.
            train_loader: Knows the data.
            checkpointer: What a stop in the evaluation is left to.
            prediction: Of the peak memory, on rank 0.
            resumed: The folder of a run to go on with, and its `state_dict` so far.
        """
        described = describe_parameters(model)
        self.steps, self.epoch_samples = len(train_loader), len(train_loader.dataset)
        self.log_every = self.settings.log_every or max(1, min(LOG_EVERY, self.epoch_samples // 10))
        self.record.add_results(**described, **(prediction.figures() if prediction else {}))
        self.record.add(data={"fingerprint": train_loader.dataset.fingerprint, "train_samples": self.epoch_samples})
        folder, state = resumed or (None, None)
        self.record.open(folder, state)
        self._imbalance = train_loader.dataset.imbalance
        for notice in train_loader.dataset.notices + self._imbalance:
            self.print(notice, log=not resumed)
        self.print(parameters_line(described), log=not resumed)
        self.checkpointer, self._prediction = checkpointer, prediction
        if prediction:
            self.print(prediction.line(self.settings, self.record.values["hardware"]), log=not resumed)
        self.throughput = Throughput(self.fabric, model, state)
        self.stop_request = StopRequest(self.settings.max_time, self._begun, self.fabric.world_size)

    def state_dict(self) -> dict:
        """Return, as plain values, what a run needs to go on with lines and figures; all ranks must call it."""
        return self.throughput.state_dict() | self.record.state_dict()

    def progress_bar(self, batches: Iterator[EffectiveBatch], done: int) -> Iterable[EffectiveBatch]:
        """Show a bar with the time left, on a terminal only; so many steps of the epoch are done before."""
        hidden = self.fabric.global_rank > 0 or not sys.stderr.isatty()
        return tqdm(batches, total=self.steps, initial=done, unit="batch", disable=hidden, leave=False)

    def log_loss(self, epoch: int, batch: int, seen: int, loss: float, learning_rate: float) -> None:
        """Print the mean loss per item since the last such line.

        Args:
            epoch: Counted from 0.
            batch: Optimizer steps of this epoch so far.
            seen: Samples of this epoch so far.
            loss: Mean over the items, undivided by any number of micro-batches.
            learning_rate: After this step.
        """
        width = max(5, len(str(self.epoch_samples)))
        self.print(
            f"{self._epoch(epoch)} | Batch {batch:04d}/{self.steps:04d} "
            f"| Samples {seen:0{width}d}/{self.epoch_samples:0{width}d} | Loss: {loss:.4f}"
        )
        figures = {"loss": loss, "learning_rate": learning_rate, **self.throughput.since_last_line()}
        self._log_row(epoch * self.steps + batch, epoch=epoch + 1, **figures)

    def log_skipped(self, count: int, reason: str) -> None:
        """Print why an effective batch is left out, and record how many were."""
        self.record.add_results(skipped_batches=count)
        self.print(f"Skipped: {reason}")

    def log_fit(self, tokens: int, new: bool) -> None:
        """Print and record the `micro_batch_tokens` that fit; `new` unless the run has printed the same before."""
        self.record.add_results(fitted_micro_batch_tokens=tokens)
        self.record.write()
        self.print(f"Micro-batches of {tokens} tokens fit", log=new)

    def log_epoch(self, epoch: int, train_accuracy: float, validation: Totals) -> None:
        """Print an epoch's accuracies."""
        line = f"Train acc.: {train_accuracy * 100:.2f}% | Val acc.: {validation.accuracy * 100:.2f}%"
        if self._of_tokens:
            line += f" | Val perplexity: {validation.perplexity:.2f}"
        self.print(f"{self._epoch(epoch)} | {line}")
        figures = {
            "train_accuracy": train_accuracy,
            "validation_accuracy": validation.accuracy,
            "validation_loss": validation.loss,
        }
        self.record.values["results"]["epochs"].append(figures)
        self._log_row((epoch + 1) * self.steps, epoch=epoch + 1, **figures)

    def log_training(self, samples_hash: str) -> None:
        """Print time, throughput and peak memory of the training; `samples_hash` is of its effective batches."""
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

    def log_test(self, totals: Totals, classes: dict | None = None) -> None:
        """Print the test's figures, mark the run as finished, and release the ranks.

        Args:
            totals: Of the test.
            classes: From `describe_classes`.
        """
        self.print(f"Test accuracy {totals.accuracy * 100:.2f}%")
        if classes and (len(classes["names"]) > 2 or self._imbalance):
            self.print(f"Test macro-F1 {classes['macro_f1'] * 100:.2f}%")
        if classes:
            self.record.add_results(classes=classes)
        if self._of_tokens:
            self.print(f"Test loss {totals.loss:.4f} per trained token, perplexity {totals.perplexity:.2f}")
        figures = {"test_accuracy": totals.accuracy, "test_loss": totals.loss}
        self.record.add_results(**figures, **{"test_tokens" if self._of_tokens else "test_samples": totals.items})
        self._log_row(self.settings.epochs * self.steps, epoch=self.settings.epochs, **figures)
        self.record.add(status="finished")
        self.record.write()
        self._close()

    def stop(self, position: str | None) -> None:
        """Say how to resume, and end the process as requested. All ranks must call it.

        Args:
            position: Where the training is, if a checkpoint of it was written.
        """
        reason = self.stop_request.reason
        command = self.record.values["command"].replace(" --resume auto", "") + " --resume auto"
        if notebook_shell():
            command = 'parse_settings(resume="auto", …)'
        self.record.add(status="stopped")
        self.record.write()
        resume = f" {position}; go on with: {command}" if position else ""
        self.print(f"Stopped by {reason}{resume}", log=False)
        self._close()
        exit_for(reason, self.fabric.global_rank)

    def leave(self) -> None:
        """End the process: there is nothing to be done. All ranks must call it."""
        self._release_ranks()
        raise SystemExit(0)

    @contextmanager
    def released_on_error(self) -> Iterator[None]:
        """Release folder and signals if there is an error in this block: a notebook's kernel lives on."""
        try:
            yield
        except BaseException:
            self._release()
            raise

    @property
    def _of_tokens(self) -> bool:
        """Whether losses and accuracies are means over trained tokens, not over samples."""
        return self.settings.task == "instruction-tuning"

    def _choose_kernels(self) -> None:
        settings, cudnn = self.settings, torch.backends.cudnn.version()
        fixed = settings.task == "image-classification" or settings.pack_rows is not None
        kernels = attention_kernels(settings.precision, compute_capability(), cudnn, fixed, settings.deterministic)
        use_kernels(kernels)
        self.record.add(attention_kernels=kernels)
        self.print(f"Attention kernels, the first that can: {', '.join(kernels)}")

    def _epoch(self, epoch: int) -> str:
        return f"Epoch: {epoch + 1:04d}/{self.settings.epochs:04d}"

    def _log_row(self, step: int, **figures: float) -> None:
        self.record.add_row(step, self.throughput.samples, seconds=self.throughput.elapsed, **figures)

    def _release(self) -> None:
        """Restore the signal handlers, and close the folder."""
        if self.stop_request:
            self.stop_request.restore()
        self.record.close()

    def _release_ranks(self) -> None:
        if self._watch:
            self.fabric.barrier()
            self._watch.stop()

    def _close(self) -> None:
        """Release the folder, the signals and the ranks. All ranks must call it."""
        self.stop_request.close()
        self._release()
        self._release_ranks()
