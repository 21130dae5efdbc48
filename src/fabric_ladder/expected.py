"""What a run prints of its peak memory before and after it."""

from typing import NamedTuple

from fabric_ladder.errors import less_memory
from fabric_ladder.overhead import load_overhead
from fabric_ladder.tracker import ON_DEVICE, Peak

NAMES = {"parameters": "weights", "optimizer_state": "optimizer"}


class Expected(NamedTuple):
    """What is known of a run's peak before it.

    Attributes:
        peak: Of the tensors on each GPU; None if it could not be found.
        problem: Why not.
    """

    peak: Peak | None
    problem: str = ""

    def figures(self) -> dict:
        """Return what run.json keeps, in bytes."""
        if not self.peak:
            return {}
        parts = {kind: getattr(self.peak, kind) for kind in (*ON_DEVICE, "host")}
        return {"predicted_peak_bytes": self.peak.total, "predicted": parts | {"phase": self.peak.phase}}

    def line(self, settings, hardware: dict) -> str:
        """Return the line of the header; on a GPU that is too small, with what to try next."""
        if not self.peak:
            return f"Predicted peak: unknown ({self.problem})"
        parts = {NAMES.get(kind, kind): getattr(self.peak, kind) for kind in ON_DEVICE}
        text = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size >= 5e6)
        text = f"Predicted peak: {self.peak.total / 1e9:.2f} GB" + f" ({text})" * bool(text)
        if "gpu" not in hardware:
            return f"{text} of tensors on a GPU"
        overhead = load_overhead(settings.cache_dir, hardware["gpu"]).beside(self.peak.total)
        needed, there = self.peak.total + overhead, hardware["gpu_memory"]
        text += f"; {needed / 1e9:.2f} of {there / 1e9:.2f} GB with CUDA's own"
        return text if needed <= there else f"{text}, so it may not fit. Next to try: {less_memory(settings)}"

    def end_line(self, measured: int, of_gpu: bool) -> str:
        """Return the line that compares, after the training; `measured` in bytes."""
        text, gap = f"Memory predicted: {self.peak.total / 1e9:.2f} GB", measured - self.peak.total
        if of_gpu:
            return f"{text}, measured {gap / 1e9:+.2f} GB ({gap / measured:+.1%})"
        return f"{text} of tensors, the process {gap / 1e9:+.2f} GB: libraries, data, working memory"
