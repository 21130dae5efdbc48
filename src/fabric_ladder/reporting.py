"""What a run prints and leaves behind: the header, the blog's lines, log.txt, metrics.csv and run.json."""

import dataclasses
import json
import os
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from time import perf_counter, strftime

import torch
from lightning import Fabric
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from tqdm import tqdm

from fabric_ladder.batching import EffectiveBatch
from fabric_ladder.errors import Checked, UserError
from fabric_ladder.hardware import CompileClock, describe_hardware, describe_versions, peak_memory, reset_peak_memory
from fabric_ladder.launch import launch
from fabric_ladder.loggers import RunLog
from fabric_ladder.metrics import Totals
from fabric_ladder.watch import RankWatch


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
        self.fabric, self.settings = fabric, settings
        if fabric.device.type == "cpu":  # DeepSpeed, loaded by transformers where it is installed, would print so
            os.environ.setdefault("DS_ACCELERATOR", "cpu")
        if settings.threads:
            torch.set_num_threads(settings.threads)
        self.folder: Path | None = None
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
        fabric.seed_everything(settings.seed, verbose=False)
        self._on_rank_zero(self._check_runs_dir)
        for notice in settings.notices:
            self.print(notice)
        self.print(" · ".join(f"{name} {number}" for name, number in self.record["versions"].items()))
        self.print(self._title())
        self.print(f"Torch CUDA available? {torch.cuda.is_available()}")

    def print(self, line: str) -> None:
        """Print a line on rank 0 and add it to log.txt."""
        if self.fabric.global_rank:
            return
        print(line, flush=True)
        self._unwritten.append(line)
        if self.folder:
            with open(self.folder / "log.txt", "a", encoding="utf-8") as log:
                log.writelines(f"{line}\n" for line in self._unwritten)
            self._unwritten.clear()

    def start(self, model: nn.Module, train_loader: DataLoader) -> None:
        """Open the run's folder, print the model's size and start the clocks."""
        parameters = list(model.parameters())
        results = self.record["results"]
        results["parameters"] = sum(map(_elements, parameters))
        results["trainable_parameters"] = sum(
            _elements(parameter) for parameter in parameters if parameter.requires_grad
        )
        results["parameter_bytes_of_a_rank"] = sum(_bytes_here(parameter) for parameter in parameters)
        results["dtypes"] = sorted({str(parameter.dtype) for parameter in parameters})
        self.steps = len(train_loader)
        self.epoch_samples = len(train_loader.dataset)
        self.record["data"] = {"fingerprint": train_loader.dataset.fingerprint, "train_samples": self.epoch_samples}
        self._on_rank_zero(self._open_folder)
        for notice in train_loader.dataset.notices:
            self.print(notice)
        count, trainable = results["parameters"], results["trainable_parameters"]
        digits, share = (1, "") if trainable == count else (3, f" ({trainable / count:.2%})")
        trained = f"{trainable / 1e6:.{digits}f} M trainable{share}"
        self.print(f"Parameters: {count / 1e6:.1f} M, {trained}, {', '.join(results['dtypes'])}")
        self.samples = self._tokens = self._padded = 0
        self._validating = 0.0
        self._compile_clock = CompileClock(model)
        self._host_peak = peak_memory(torch.device("cpu"))  # of making the model, too
        reset_peak_memory(self.fabric.device)
        self._start = perf_counter()
        self._paced = 0, self._start

    def progress(self, loader: Iterable[EffectiveBatch]) -> Iterable[EffectiveBatch]:
        """Show a bar with the time left, on a terminal only."""
        hidden = self.fabric.global_rank > 0 or not sys.stderr.isatty()
        return tqdm(loader, total=self.steps, unit="batch", disable=hidden, leave=False)

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

    def log_epoch(self, epoch: int, train_accuracy: float, validation: Totals, seconds: float) -> None:
        """Print an epoch's accuracies; `seconds` is the time that the validation took."""
        self._validating += seconds
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
        counts = torch.tensor([self._tokens, self._padded], dtype=torch.float64, device=self.fabric.device)
        tokens, padded = self.fabric.all_reduce(counts, reduce_op="sum").tolist()
        host = max(self._host_peak, peak_memory(torch.device("cpu")))
        peaks = torch.tensor([peak_memory(self.fabric.device), host], dtype=torch.float64, device=self.fabric.device)
        device, host = map(int, self.fabric.all_reduce(peaks, reduce_op="max").tolist())
        training = elapsed - self._validating
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
        self._write_record()

    def log_test(self, totals: Totals) -> None:
        """Print the test's figures, mark the run as finished, and let the ranks go."""
        self.print(f"Test accuracy {totals.accuracy * 100:.2f}%")
        if self._of_tokens:
            self.print(f"Test loss {totals.loss:.4f} per trained token, perplexity {totals.perplexity:.2f}")
        figures = {"test_accuracy": totals.accuracy, "test_loss": totals.loss}
        self.record["results"] |= figures | {"test_tokens" if self._of_tokens else "test_samples": totals.items}
        self.record["status"] = "finished"
        self._log_row(self.settings.epochs * self.steps, epoch=self.settings.epochs, **figures)
        self._write_record()
        if self.folder:
            self._log.close()
        if self._watch:
            self.fabric.barrier()
            self._watch.stop()

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

    def _title(self) -> str:
        settings, hardware = self.settings, self.record["hardware"]
        devices = f"{self.fabric.world_size} x " if self.fabric.world_size > 1 else ""
        model = Path(settings.model).name if Path(settings.model).exists() else settings.model
        dataset = Path(settings.dataset).name if Path(settings.dataset).exists() else settings.dataset
        if settings.micro_batch_tokens:
            cut = f"batch {settings.batch_size} in micro-batches of {settings.micro_batch_tokens} tokens"
        elif settings.packing:
            rows = f"{devices}{settings.micro_batch_size} row" + "s" * (settings.micro_batch_size > 1)
            cut = f"batch {settings.batch_size} packed, {rows} of up to {settings.max_length} tokens at once"
        else:
            share = -(-settings.batch_size // self.fabric.world_size)
            size = min(settings.micro_batch_size, share)
            cut = f"batch {settings.batch_size} = {devices}{-(-share // size)} x {size}"
        device = f"{hardware['device']}: {devices}{hardware.get('gpu', hardware['processor'])}"
        parts = [settings.name, dataset, model, f"seed {settings.seed}", cut, settings.precision, device]
        return " · ".join(parts)

    def _pace(self) -> dict[str, float]:
        """Return samples/s since the last such line, validation in between left out, and the peak memory so far."""
        now = perf_counter() - self._validating
        samples, start = self._paced
        self._paced = self.samples, now
        return {
            "samples_per_second": (self.samples - samples) / (now - start),
            "peak_memory_bytes": peak_memory(self.fabric.device),
        }

    def _log_row(self, step: int, **figures: float) -> None:
        if self.folder:
            self._log.write(step, self.samples, seconds=perf_counter() - self._start, **figures)

    def _check_runs_dir(self) -> None:
        """Try to write into the nearest folder that there is."""
        folder = Path(self.settings.runs_dir).absolute()
        while not folder.exists():
            folder = folder.parent
        with tempfile.TemporaryFile(dir=folder):
            pass

    def _open_folder(self) -> None:
        """Make the first free `runs/<script>/<n>`; a run that starts at the same time takes the next."""
        home = Path(self.settings.runs_dir) / self.settings.name
        home.mkdir(parents=True, exist_ok=True)
        number = 1 + max((int(path.name) for path in home.iterdir() if path.name.isdigit()), default=0)
        while True:
            try:
                (home / str(number)).mkdir()
                break
            except FileExistsError:
                number += 1
        self.folder = home / str(number)
        self._log = RunLog(self.folder, self.settings)
        self._write_record()

    def _write_record(self) -> None:
        if self.folder:
            temporary = self.folder / ".run.json"
            temporary.write_text(json.dumps(self.record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
            temporary.replace(self.folder / "run.json")

    def _on_rank_zero(self, action: Callable[[], None]) -> None:
        """Run `action` on rank 0; if it fails, every rank says so and none is left waiting."""
        problem = None
        if self.fabric.global_rank == 0:
            try:
                action()
            except OSError as error:
                problem = f"cannot write --runs_dir {self.settings.runs_dir} ({error.strerror}): choose another"
        if problem := self.fabric.broadcast(problem):
            raise UserError(problem)


def _elements(parameter: nn.Parameter) -> int:
    """Elements of the whole parameter: ZeRO-3 leaves an empty tensor in its place, 4-bit weights share bytes."""
    state = getattr(parameter, "quant_state", None)
    return state.shape.numel() if state else getattr(parameter, "ds_numel", parameter.numel())


def _bytes_here(parameter: nn.Parameter) -> int:
    """Bytes of this rank's share of a parameter."""
    here = parameter.to_local() if isinstance(parameter, DTensor) else getattr(parameter, "ds_tensor", parameter)
    return here.numel() * here.element_size()
