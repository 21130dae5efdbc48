"""What a run prints and leaves behind: the header, the blog's lines, log.txt, metrics.csv and run.json."""

import copy
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
from fabric_ladder.folder import RunFolder, check_writable
from fabric_ladder.hardware import CompileClock, describe_hardware, describe_versions, peak_memory, reset_peak_memory
from fabric_ladder.header import describe_parameters, parameters_line, title
from fabric_ladder.launch import launch
from fabric_ladder.metrics import Totals
from fabric_ladder.stopping import Stopper
from fabric_ladder.watch import RankWatch

T = TypeVar("T")
FRESH = {
    "samples": 0, "tokens": 0, "padded": 0, "beside": 0.0, "elapsed": 0.0, "paced": [0, 0.0], "peaks": [0, 0],
    "compiled": [0.0, 0], "lines": [], "rows": [],
}  # fmt: skip


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
        folder, state = resumed or (None, copy.deepcopy(FRESH))
        self.on_rank_zero(lambda: self._open_folder(folder, state))
        for notice in train_loader.dataset.notices:
            self.print(notice, log=not resumed)
        self.print(parameters_line(self.record["results"]), log=not resumed)
        first = self.fabric.global_rank == 0  # which goes on with the sums of all ranks
        self.samples = state["samples"]
        self._tokens, self._padded = (state["tokens"], state["padded"]) if first else (0, 0)
        self._beside, self._peaks, self._paced = state["beside"], state["peaks"], state["paced"]
        self._compile_clock = CompileClock(model)
        self._compile_clock.seconds, self._compile_clock.graphs = state["compiled"]
        self._peaks[1] = max(self._peaks[1], peak_memory(torch.device("cpu")))  # of making the model, too
        reset_peak_memory(self.fabric.device)
        self._start = perf_counter() - state["elapsed"]
        self.stopper = Stopper(self.settings.max_time, self._begun, self.fabric.world_size)

    def state(self) -> dict:
        """Return, as plain values, what a run needs to go on with lines and figures; all ranks must call it."""
        tokens, padded = self._sum(self._tokens, self._padded)
        return {
            "samples": self.samples,
            "tokens": tokens,
            "padded": padded,
            "beside": self._beside,
            "elapsed": perf_counter() - self._start,
            "paced": self._paced,
            "peaks": self._find_peaks(),
            "compiled": [self._compile_clock.seconds, self._compile_clock.graphs],
            "record": self.record,
            "lines": self._files.lines if self._files else [],
            "rows": self._files.rows if self._files else [],
        }

    @contextmanager
    def beside_training(self) -> Iterator[None]:
        """Leave what is done within out of the throughput."""
        start = perf_counter()
        yield
        self._beside += perf_counter() - start

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
        self._let_go()
        if self._watch:
            self.fabric.barrier()
            self._watch.stop()

    def progress(self, batches: Iterator[EffectiveBatch], done: int) -> Iterable[EffectiveBatch]:
        """Show a bar with the time left, on a terminal only; so many steps of the epoch are done before."""
        hidden = self.fabric.global_rank > 0 or not sys.stderr.isatty()
        return tqdm(batches, total=self.steps, initial=done, unit="batch", disable=hidden, leave=False)

    def count(self, batch: EffectiveBatch) -> None:
        """Count the samples of all ranks, and the tokens of this one."""
        self.samples += len(batch.samples)
        for micro_batch in batch.micro_batches:
            self._tokens += micro_batch.tokens
            self._padded += micro_batch.padded

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
        figures = {"loss": loss, "learning_rate": learning_rate, **self._pace()}
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
        elapsed = perf_counter() - self._start
        self._compile_clock.stop()
        tokens, padded = self._sum(self._tokens, self._padded)
        device, host = self._find_peaks()
        training = elapsed - self._beside
        figures = {
            "elapsed_seconds": elapsed,
            "training_seconds": training,
            "samples_per_second": self.samples / training,
            "tokens_per_second": tokens / training,
            "padding": 1 - tokens / padded,
            "peak_memory_bytes": device,
            "peak_host_memory_bytes": host,
        }
        self.print(f"Time elapsed {elapsed / 60:.2f} min")
        clock = self._compile_clock
        if clock.graphs:
            figures |= {"compile_seconds": clock.seconds, "compiled_graphs": clock.graphs}
            self.print(f"Compile time {clock.seconds / 60:.2f} min of it, {clock.graphs} graphs")
        self.print(
            f"Throughput {figures['samples_per_second']:.1f} samples/s, {figures['tokens_per_second']:.0f} tokens/s, "
            f"padding {figures['padding'] * 100:.1f}%"
        )
        self.print(f"Memory used: {device / 1e9:.2f} GB")
        self.print(f"Host memory used: {host / 1e9:.2f} GB, loading included")
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

    def _pace(self) -> dict[str, float]:
        """Return samples/s since the last such line, validation in between left out, and the peak memory so far."""
        now = perf_counter() - self._start - self._beside
        samples, start = self._paced
        self._paced = self.samples, now
        return {
            "samples_per_second": (self.samples - samples) / (now - start),
            "peak_memory_bytes": peak_memory(self.fabric.device),
        }

    def _log_row(self, step: int, **figures: float) -> None:
        if self._files:
            seconds = perf_counter() - self._start
            self._write(lambda: self._files.add_row(step, self.samples, seconds=seconds, **figures))

    def _open_folder(self, folder: Path | None, state: dict) -> None:
        """Open a new folder, or one to go on with, whose log has this run's first lines already."""
        self._files = RunFolder(self.settings, folder, state["lines"], state["rows"])
        if folder:
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

    def _sum(self, *counts: int) -> list[int]:
        """Add up counts over the ranks."""
        counts = torch.tensor(counts, dtype=torch.float64, device=self.fabric.device)
        return [int(count) for count in self.fabric.all_reduce(counts, reduce_op="sum").tolist()]

    def _find_peaks(self) -> list[int]:
        """Return the peak memory of the device and of the host so far, each the largest of all ranks, in bytes."""
        mine = peak_memory(self.fabric.device), peak_memory(torch.device("cpu"))
        peaks = torch.tensor([mine, self._peaks], dtype=torch.float64, device=self.fabric.device).amax(0)
        return [int(peak) for peak in self.fabric.all_reduce(peaks, reduce_op="max").tolist()]
