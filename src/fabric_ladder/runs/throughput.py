"""Counts and clocks of a training: samples, tokens, seconds, peak memory, compilations."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter

import torch
from lightning import Fabric

from fabric_ladder.data.loaders import EffectiveBatch
from fabric_ladder.environment import peak_memory, reset_peak_memory
from fabric_ladder.runs.metrics import over_ranks
from fabric_ladder.techniques.compile import CompileClock


class Throughput:
    """Counts samples, tokens and seconds from the start of the training.

    Args:
        fabric: For the device and the ranks.
        state: The saved `state_dict` of a resumed run.
    """

    def __init__(self, fabric: Fabric, state: dict | None = None):
        self.fabric = fabric
        state = state or {}
        first = fabric.global_rank == 0  # it continues the sums of all ranks
        self.samples = state.get("samples", 0)
        self._tokens = state.get("tokens", 0) if first else 0
        self._padded = state.get("padded", 0) if first else 0
        self._excluded = state.get("excluded", 0.0)
        self._last_line = state.get("last_line", (0, 0.0))  # samples and seconds at the last line
        self._evaluated = state.get("evaluated", (0, 0.0))  # tokens and seconds
        device_peak, cpu_peak = state.get("peaks", (0, 0))
        self._peaks = device_peak, max(cpu_peak, peak_memory(torch.device("cpu")))  # includes making the model
        self.compiling = CompileClock(*state.get("compiled", ()))
        reset_peak_memory(fabric.device)
        self._start = perf_counter() - state.get("elapsed", 0.0)

    @property
    def elapsed(self) -> float:
        """Seconds of the training so far, over all parts of a resumed run."""
        return perf_counter() - self._start

    def count(self, batch: EffectiveBatch) -> None:
        """Count the samples of all ranks, and the tokens of this one."""
        self.samples += len(batch.samples)
        for micro_batch in batch.micro_batches:
            self._tokens += micro_batch.tokens
            self._padded += micro_batch.padded

    def count_evaluation(self, tokens: int, seconds: float) -> None:
        """Count the tokens of a validation, without padding and over all ranks, and its seconds."""
        self._evaluated = self._evaluated[0] + tokens, self._evaluated[1] + seconds

    @contextmanager
    def excluded(self) -> Iterator[None]:
        """Exclude the time of this block from the throughput."""
        start = perf_counter()
        yield
        self._excluded += perf_counter() - start

    def since_last_line(self) -> dict[str, float]:
        """Return samples/s since the last call, and the peak memory of this process so far."""
        now = self.elapsed - self._excluded
        samples, start = self._last_line
        self._last_line = self.samples, now
        return {
            "samples_per_second": (self.samples - samples) / (now - start),
            "peak_memory_bytes": peak_memory(self.fabric.device),
        }

    def state_dict(self) -> dict:
        """Return counts and seconds as plain values, to resume from. All ranks must call it."""
        tokens, padded = over_ranks(self.fabric, "sum", self._tokens, self._padded)
        return {
            "samples": self.samples,
            "tokens": tokens,
            "padded": padded,
            "excluded": self._excluded,
            "elapsed": self.elapsed,
            "last_line": self._last_line,
            "peaks": self._find_peaks(),
            "compiled": (self.compiling.seconds, self.compiling.graphs),
            "evaluated": self._evaluated,
        }

    def figures(self) -> dict[str, float]:
        """Stop the clock of compilations, and return seconds, rates and peaks of the training for run.json."""
        elapsed = self.elapsed
        self.compiling.stop()
        tokens, padded = over_ranks(self.fabric, "sum", self._tokens, self._padded)
        device, host = self._find_peaks()
        training = elapsed - self._excluded
        figures = {
            "elapsed_seconds": elapsed,
            "training_seconds": training,
            "samples_per_second": self.samples / training,
            "tokens_per_second": tokens / training,
            "padding": 1 - tokens / padded,
            "peak_memory_bytes": device,
            "peak_host_memory_bytes": host,
        }
        if self.fabric.device.type == "cuda":
            figures["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(self.fabric.device)
        if self._evaluated[0]:
            figures["evaluation_tokens_per_second"] = self._evaluated[0] / self._evaluated[1]
        if self.compiling.graphs:
            figures |= {"compile_seconds": self.compiling.seconds, "compiled_graphs": self.compiling.graphs}
        return figures

    def _find_peaks(self) -> list[int]:
        """Return the peak memory of the device and of the CPU in bytes, each the largest over all ranks."""
        own = peak_memory(self.fabric.device), peak_memory(torch.device("cpu"))
        return over_ranks(self.fabric, "max", *map(max, own, self._peaks))
