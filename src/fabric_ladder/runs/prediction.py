"""The predicted peak memory of a run: printed in its header, and compared with the measured peak at its end.

The planner rehearses the run in a fresh interpreter without a GPU. So it leaves nothing in the run: no memory, no used
random numbers, no process group and no CUDA context. The cache keeps the result.
"""

import hashlib
import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch
from lightning import Fabric
from torch import nn
from torch.utils.data import DataLoader

from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.environment import compute_capability, describe_versions, read_size, write_whole
from fabric_ladder.places import CONFIGS, PACKAGE
from fabric_ladder.settings import Settings, names
from fabric_ladder.techniques.advice import less_memory
from fabric_ladder.techniques.memory import KINDS, ON_DEVICE
from fabric_ladder.techniques.memory_budget import stated_budget

PLANNER = "fabric_ladder.planning.predict"  # started as a module, never imported: the planner imports runs
TIMEOUT = 120  # seconds
BUDGET = 16_384  # tokens: the most that `micro_batch_tokens` `auto` takes, more than enough to keep a GPU busy


class Prediction:
    """The predicted peak of a run.

    Args:
        found: Bytes on each GPU: `total`, its parts (see `KINDS`), `needed`, which adds CUDA's own memory, and
            `workspace`, the part of that which PyTorch's peak includes; bytes of the CPU memory in `host`. With
            `micro_batch_tokens` `auto` also the number that fits. With a memory budget also the `blocks` of the model
            and the `kept_blocks`, which are not recomputed. If the prediction failed, only `problem`.
    """

    def __init__(self, found: dict):
        self.found = found

    def figures(self) -> dict:
        """Return the figures for run.json, in bytes."""
        if "problem" in self.found:
            return {}
        parts = {name: self.found[name] for name in (*ON_DEVICE, "workspace", "host", "phase") if name in self.found}
        return {"predicted_peak_bytes": self._comparable, "predicted": parts}

    @property
    def _comparable(self) -> int:
        """The bytes to compare with PyTorch's peak, which includes cuBLAS's workspace on a GPU."""
        return self.found["total"] + self.found.get("workspace", 0)

    def line(self, settings: Settings, hardware: dict) -> str:
        """Return the line of the header. For a GPU that is too small it names what to try next."""
        if "problem" in self.found:
            recomputed = ", so all blocks are recomputed" if settings.memory_budget else ""
            return f"Predicted peak: unknown ({self.found['problem']}){recomputed}"
        total = self.found["total"]
        needed = self.found.get("needed", total)
        parts = {kind.name: self.found[key] for key, kind in KINDS.items()}
        text = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size >= 5e6)
        text = f"Predicted peak: {total / 1e9:.2f} GB" + f" ({text})" * bool(text)
        text += " of tensors on a GPU" * ("gpu" not in hardware)
        if blocks := self.found.get("blocks"):
            text += f", recomputing {blocks - self.found['kept_blocks']} of {blocks} blocks"
        budget = stated_budget(settings)
        if budget is not None and needed > budget:
            text += f", still more than --memory_budget {settings.memory_budget}"
        limit = settings.gpu_memory_limit
        available = read_size(limit, "--gpu_memory_limit") if limit else hardware.get("gpu_memory")
        if available is None:
            return text
        text += f"; {needed / 1e9:.2f} of {available / 1e9:.2f} GB" + " with CUDA's own" * ("needed" in self.found)
        if needed <= available:
            return text
        phase = self.found["phase"]
        tries = less_memory(replace(settings, memory_budget=None), phase if phase == "training" else f"the {phase}")
        return f"{text}, so it may not fit. Next to try: {tries}"

    def end_line(self, measured: int, on_gpu: bool) -> str:
        """Return the line after the training, which compares the prediction with the `measured` bytes."""
        text = f"Memory predicted: {self._comparable / 1e9:.2f} GB"
        gap = measured - self._comparable
        if on_gpu:
            workspace = f"with {self.found['workspace'] / 1e9:.2f} for cuBLAS"
            return f"{text} {workspace}, measured {gap / 1e9:+.2f} GB ({gap / measured:+.1%})"
        return f"{text} of tensors, the process {gap / 1e9:+.2f} GB: libraries, data, working memory"


def start_planner(fabric: Fabric, settings: Settings) -> subprocess.Popen | None:
    """Start the planner's process on rank 0, if `predict_memory` is set.

    The process sees no GPU. It imports its libraries while the run loads its data and its model, and then waits for the
    question of `predict`. It ends with the run.
    """
    wanted = settings.predict_memory
    if wanted is None:
        wanted = fabric.device.type == "cuda" or bool(settings.gpu_memory_limit)
    limited = stated_budget(settings) is not None or fabric.device.type == "cuda"  # `auto` on a CPU is no limit
    wanted = wanted or (settings.memory_budget and limited)
    if fabric.global_rank or not wanted:
        return None
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)])
    return subprocess.Popen(
        [sys.executable, "-m", PLANNER],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )


def predict(
    planner: subprocess.Popen | None,
    fabric: Fabric,
    settings: Settings,
    model: nn.Module,
    train_loader: DataLoader,
    val_loader: DataLoader,
) -> Prediction | None:
    """Predict the peak memory of each device.

    Args:
        planner: Result of `start_planner`. Without it there is no prediction.
        fabric: For the device.
        settings: The settings of the run.
        model: Set up by Fabric; only its config is used.
        train_loader: Gives the effective batches that need the most memory.
        val_loader: Gives the batches of the evaluation that need the most memory.
    """
    if not planner:
        return None
    cuts = _cuts(settings, train_loader, val_loader)
    gpu = torch.cuda.get_device_name(fabric.device) if fabric.device.type == "cuda" else None
    free = _free_bytes(fabric.device) if gpu else None
    key = _key(settings, model.config.to_dict(), cuts, gpu, free)
    path = Path(settings.cache_dir) / "memory" / f"{key}.json"
    with suppress(OSError, ValueError):
        found = json.loads(path.read_text(encoding="utf-8"))
        planner.kill()
        planner.communicate()
        return Prediction(found)
    found = _ask(planner, (settings, cuts, model.config.num_labels, gpu, gpu and compute_capability(), free))
    if "problem" not in found:
        with suppress(OSError):  # without a cache the next run predicts again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(found))
    return Prediction(found)


def _ask(planner: subprocess.Popen, question: tuple) -> dict:
    try:
        answer, _ = planner.communicate(pickle.dumps(question), TIMEOUT)
        return json.loads(answer)
    except subprocess.TimeoutExpired:
        planner.kill()
        planner.communicate()
        return {"problem": f"not found within {TIMEOUT} seconds"}
    except (OSError, ValueError):
        return {"problem": "the rehearsal ended without an answer"}


def most_tokens(train_loader: DataLoader) -> int:
    """Return the largest `micro_batch_tokens` that `auto` considers: those of the largest micro-batch, up to `BUDGET`.

    With a memory budget no pass is larger than it must be to keep a GPU busy: kept activations save more time.
    Afterwards the loader's sampler cuts by this limit.
    """
    settings = train_loader.sampler.settings
    most = settings.full_pass if settings.memory_budget else BUDGET
    train_loader.sampler.cut_by_tokens(most)
    plans = train_loader.sampler.heaviest()
    return min(most, max(part.padded for plan in plans for part in train_loader.dataset[plan].micro_batches))


def _cuts(settings: Settings, train_loader: DataLoader, val_loader: DataLoader) -> list[tuple]:
    """Return the cuts to predict: `micro_batch_tokens`, and the batches of that cut that may need the most memory.

    The largest cut comes first, one sample at a time last. There is only one unless `micro_batch_tokens` is `auto`.
    """
    if settings.micro_batch_tokens != "auto":
        return [(None, *_largest(train_loader, val_loader))]
    sampler = train_loader.sampler
    tokens = most_tokens(train_loader)
    cuts = []
    while tokens > sampler.lengths.max():
        sampler.cut_by_tokens(tokens)
        cuts.append((tokens, *_largest(train_loader, val_loader)))
        tokens //= 2
    sampler.cut_by_tokens(1)
    return [*cuts, (1, *_largest(train_loader, val_loader))]


def _free_bytes(device: torch.device) -> int:
    """Return the bytes of the GPU that this process has or can have, rounded down so that equal runs agree."""
    free, total = torch.cuda.mem_get_info(device)
    limit = torch.cuda.get_per_process_memory_fraction(device) * total
    return int(min(free + torch.cuda.memory_reserved(device), limit)) // 2**28 * 2**28


def _largest(train_loader: DataLoader, val_loader: DataLoader) -> tuple[list[list[MicroBatch]], list[MicroBatch]]:
    """Return the effective batches and evaluation batches that may need the most memory, without values."""
    plans = train_loader.sampler.heaviest()
    training = [[each.without_values() for each in train_loader.dataset[plan].micro_batches] for plan in plans]
    return training, [val_loader.dataset[part].without_values() for part in val_loader.sampler.heaviest()]


def relevant(settings: Settings) -> dict[str, object]:
    """Return the settings that change the predicted memory; the shapes of the batches do so, too."""
    return {name: getattr(settings, name) for name in names(changes_memory=True)} | {"sharded": settings.shards_weights}


def _key(settings: Settings, config: dict, cuts: list, gpu: str | None, free: int | None) -> str:
    """Return a hash of everything that a prediction depends on.

    The hash covers settings, model, shapes, versions, measured overheads, the sources and configurations of this
    package, and every file that a setting names.
    """
    shapes = [
        [tokens, *([_shapes(micro_batch) for micro_batch in batch] for batch in (*training, evaluation))]
        for tokens, training, evaluation in cuts
    ]
    chosen = relevant(settings)
    named = [Path(value) for value in chosen.values() if isinstance(value, str)]
    own = [*sorted(PACKAGE.rglob("*.py")), *sorted(CONFIGS.rglob("*.json"))]
    files = hashlib.sha256()
    for path in [*own, Path(settings.cache_dir) / "memory" / "overhead.json", *named]:
        if os.path.isfile(path):  # `Path.is_file` fails on a value that is too long for a name
            files.update(path.read_bytes())
    parts = [chosen, config, shapes, gpu, free, describe_versions("peft", "torchao"), files.hexdigest()]
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _shapes(micro_batch: MicroBatch) -> list:
    return [micro_batch.masked, *(list(tensor.shape) for tensor in micro_batch.inputs.values())]
