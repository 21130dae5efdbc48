"""What a run prints and leaves behind: the header, the blog's lines, log.txt, metrics.csv and run.json."""

import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter, strftime
from typing import TypeVar

import torch
from lightning import Fabric
from torch import nn
from torch.utils.data import DataLoader
from tqdm import tqdm

from fabric_ladder.batching import EffectiveBatch
from fabric_ladder.errors import Checked, UserError
from fabric_ladder.expected import Expected
from fabric_ladder.folder import RunFolder, check_writable
from fabric_ladder.hardware import describe_hardware, describe_versions
from fabric_ladder.header import describe_parameters, parameters_line, title
from fabric_ladder.launch import launch
from fabric_ladder.metrics import Totals
from fabric_ladder.pace import Pace
from fabric_ladder.stopping import Stopper
from fabric_ladder.watch import RankWatch

T = TypeVar("T")


class Run:
    """One run of one script: its lines on stdout and its files in `runs/<script>/<n>/`, written by rank 0 alone.

    Launches the processes of all devices; from then on, a rank that dies ends the others.
    No file is written before training starts, so that a run refused for bad input leaves nothing behind.

    Raises:
        UserError: `runs_dir` cannot be written.
    """

    def __init__(self, fabric: Fabric, settings):
        if settings.check_only:
            raise Checked(settings)
        self._watch = RankWatch() if settings.ranks > 1 else None
        launch(fabric)
        if self._watch:
            self._watch.meet()
        self.fabric, self.settings, self._begun = fabric, settings, perf_counter()
        if fabric.device.type == "cpu":  # DeepSpeed, loaded by transformers where it is installed, would print so
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if settings.threads:
            torch.set_num_threads(settings.threads)
        if settings.matmul_precision:
            torch.set_float32_matmul_precision(settings.matmul_precision)
        self._files: RunFolder | None = None
        self.record = {
            "format": 1,
            "status": "running",
            "begun": strftime("%Y-%m-%dT%H:%M:%S%z"),
            "command": shlex.join([os.path.basename(sys.executable), *sys.argv]),
            "settings": {key: value for key, value in dataclasses.asdict(settings).items() if key != "notices"},
            "versions": describe_versions(*self._more_packages()),
            "hardware": describe_hardware(fabric.device),
            "ranks": fabric.world_size,
            "results": {"epochs": []},
        }
        self._unwritten: list[str] = []
        self.stopper: Stopper | None = None
        self.keeper = None  # of the checkpoints, once training has started
        self.expected: Expected | None = None  # of its peak memory, likewise
        fabric.seed_everything(settings.seed, verbose=False)
        self.on_rank_zero(lambda: check_writable(Path(settings.runs_dir)))
        for notice in settings.notices:
            self.print(notice)
        self.print(" · ".join(f"{name} {number}" for name, number in self.record["versions"].items()))
        self.print(title(settings, self.record["hardware"], fabric.world_size))
        self.print(f"Torch CUDA available? {torch.cuda.is_available()}")

    @property
    def folder(self) -> Path | None:
        """`runs/<script>/<n>` on rank 0, once training has started."""
        return self._files.path if self._files else None

    def print(self, line: str, log: bool = True) -> None:
        """Print a line on rank 0 and, unless it is of this start of the run alone, add it to log.txt."""
        if self.fabric.global_rank:
            return
        print(line, flush=True)
        if log:
            self._unwritten.append(line)
        if self._files and self._unwritten:
            lines, self._unwritten = self._unwritten, []
            self._write(lambda: self._files.append(lines))

    def start(self, model: nn.Module, train_loader: DataLoader, resumed: tuple[Path, dict] | None = None) -> None:
        """Open the run's folder, print the model's size and start the clocks.

        Args:
            model: Set up by Fabric.
            train_loader: Knows the data.
            resumed: The folder of a run to go on with, and its `state` so far.
        """
        self.record["results"] |= describe_parameters(model)
        self.steps = len(train_loader)
        self.epoch_samples = len(train_loader.dataset)
        self.record["data"] = {"fingerprint": train_loader.dataset.fingerprint, "train_samples": self.epoch_samples}
        folder, state = resumed or (None, None)
        self.on_rank_zero(lambda: self._open_folder(folder, state))
        for notice in train_loader.dataset.notices:
            self.print(notice, log=not resumed)
        self.print(parameters_line(self.record["results"]), log=not resumed)
        if self.expected:
            self.record["results"] |= self.expected.figures()
            self.print(self.expected.line(self.settings, self.record["hardware"]), log=not resumed)
        self.pace = Pace(self.fabric, model, state)
        self.stopper = Stopper(self.settings.max_time, self._begun, self.fabric.world_size)

    def state(self) -> dict:
        """Return, as plain values, what a run needs to go on with lines and figures; all ranks must call it."""
        kept = self._files
        return self.pace.state() | {
            "record": self.record,
            "lines": kept.lines if kept else [],
            "rows": kept.rows if kept else [],
        }

    def leave_finished(self) -> None:
        """End the process: there is nothing to be done. All ranks must call it."""
        if self._watch:
            self.fabric.barrier()
            self._watch.stop()
        raise SystemExit(0)

    @contextmanager
    def abandoned_on_error(self) -> Iterator[None]:
        """Let folder and signals go if there is an error within: a notebook's kernel lives on."""
        try:
            yield
        except BaseException:
            self._let_go()
            raise

    def _let_go(self) -> None:
        if self.stopper:
            self.stopper.restore()
        if self._files:
            self._files.close()

    def close(self) -> None:
        """Let the folder, the signals and the ranks go. All ranks must call it."""
        self.stopper.close()
        self._let_go()
        if self._watch:
            self.fabric.barrier()
            self._watch.stop()

    def progress(self, batches: Iterator[EffectiveBatch], done: int) -> Iterable[EffectiveBatch]:
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
        figures = {"loss": loss, "learning_rate": learning_rate, **self.pace.since_last_line()}
        self._log_row(epoch * self.steps + batch, epoch=epoch + 1, **figures)

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
        self.record["results"]["epochs"].append(figures)
        self._log_row((epoch + 1) * self.steps, epoch=epoch + 1, **figures)

    def log_training(self) -> None:
        """Print time, throughput and peak memory of the training."""
        figures = self.pace.figures()
        self.print(f"Time elapsed {figures['elapsed_seconds'] / 60:.2f} min")
        if seconds := figures.get("compile_seconds"):
            self.print(f"Compile time {seconds / 60:.2f} min of it, {figures['compiled_graphs']} graphs")
        self.print(
            f"Throughput {figures['samples_per_second']:.1f} samples/s, {figures['tokens_per_second']:.0f} tokens/s, "
            f"padding {figures['padding'] * 100:.1f}%"
        )
        self.print(f"Memory used: {figures['peak_memory_bytes'] / 1e9:.2f} GB")
        if self.expected and self.expected.peak:
            self.print(self.expected.end_line(figures["peak_memory_bytes"], self.fabric.device.type == "cuda"))
        self.print(f"Host memory used: {figures['peak_host_memory_bytes'] / 1e9:.2f} GB, loading included")
        self.record["results"] |= figures
        self.write_record()

    def log_test(self, totals: Totals) -> None:
        """Print the test's figures, mark the run as finished, and let the ranks go."""
        self.print(f"Test accuracy {totals.accuracy * 100:.2f}%")
        if self._of_tokens:
            self.print(f"Test loss {totals.loss:.4f} per trained token, perplexity {totals.perplexity:.2f}")
        figures = {"test_accuracy": totals.accuracy, "test_loss": totals.loss}
        self.record["results"] |= figures | {"test_tokens" if self._of_tokens else "test_samples": totals.items}
        self._log_row(self.settings.epochs * self.steps, epoch=self.settings.epochs, **figures)
        self.record["status"] = "finished"
        self.write_record()
        self.close()

    def write_record(self) -> None:
        """Write run.json, on rank 0."""
        if self._files:
            self._write(lambda: self._files.write_record(self.record))

    def on_rank_zero(self, action: Callable[[], T]) -> T:
        """Run `action` on rank 0 and return what it does to all; if it fails, every rank says so and none waits."""
        result = problem = None
        if self.fabric.global_rank == 0:
            try:
                result = action()
            except OSError as error:
                problem = f"cannot write --runs_dir {self.settings.runs_dir} ({error.strerror}): choose another"
            except UserError as error:
                problem = str(error)
        result, problem = self.fabric.broadcast((result, problem))
        if problem:
            raise UserError(problem)
        return result

    def _more_packages(self) -> list[str]:
        bits = self.settings.quantization != "no" or self.settings.optimizer == "adam-8bit"
        used = {"deepspeed": self.settings.deepspeed, "peft": self.settings.lora, "bitsandbytes": bits}
        return [name for name, is_used in used.items() if is_used]

    @property
    def _of_tokens(self) -> bool:
        """Whether losses and accuracies are means over trained tokens, not over samples."""
        return self.settings.task == "instruction-tuning"

    def _epoch(self, epoch: int) -> str:
        return f"Epoch: {epoch + 1:04d}/{self.settings.epochs:04d}"

    def _log_row(self, step: int, **figures: float) -> None:
        if self._files:
            pace = self.pace
            self._write(lambda: self._files.add_row(step, pace.samples, seconds=pace.elapsed, **figures))

    def _open_folder(self, folder: Path | None, state: dict | None) -> None:
        """Open a new folder, or one to go on with, whose log has this run's first lines already."""
        if folder is None:
            self._files = RunFolder(self.settings)
        else:
            self._files = RunFolder(self.settings, folder, state["lines"], state["rows"])
            self._unwritten.clear()
            this = {name: self.record[name] for name in ("begun", "command", "versions", "hardware", "ranks")}
            resumed = [*state["record"].get("resumed", []), this | {"samples": state["samples"]}]
            self.record = state["record"] | {"resumed": resumed}
        self._files.write_record(self.record)

    def _write(self, action: Callable[[], None]) -> None:
        """Write into the run's folder, or stop the run in one line."""
        try:
            action()
        except OSError as error:
            raise UserError(
                f"cannot write into {self.folder} ({error.strerror}), so the run stops: make room there, and go on "
                "from its last checkpoint, if it wrote any, by --resume auto"
            ) from error
