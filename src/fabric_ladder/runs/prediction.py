"""The peak memory of a run before its first step, printed in its header and compared with the measured one at its end.

It is rehearsed by the planner in a fresh interpreter that sees no GPU, so that nothing of it is left in the run: no
memory, no random number, no process group, and no CUDA context in a forked process. What it found is kept in the cache.
"""

import hashlib
import json
import os
import pickle
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import torch
from lightning import Fabric
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from fabric_ladder.advice import less_memory
from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.environment import compute_capability, describe_versions, write_whole
from fabric_ladder.settings import Settings

PACKAGE = Path(__file__).parents[1]
PLANNER = "fabric_ladder.planning.predict"  # started as a module, never imported: a run stands below the planner
TIMEOUT = 120  # seconds
BUDGET = 16_384  # tokens: the most that `micro_batch_tokens` `auto` takes, far above what keeps a GPU busy
PARTS = {
    "parameters": "weights", "gradients": "gradients", "optimizer_state": "optimizer", "activations": "activations",
    "logits": "logits", "other": "other",
}  # fmt: skip
RELEVANT = (  # see `relevant`
    "task model precision float8 optimizer kahan_summation step_in_backward optimizer_offload max_grad_norm attention "
    "activation_checkpointing activation_offload selective_checkpointing packing loss_chunk lora lora_rank "
    "lora_targets lora_dropout dora quantization offload deepspeed devices num_nodes"
).split()


class Prediction:
    """What is known of a run's peak before it.

    Args:
        found: Bytes on each GPU: `total`, its parts (see `PARTS`), what is `needed` with CUDA's own, and of the
            `host`; with `micro_batch_tokens` `auto` also the number that fits, and the total of `one_sample` at a time;
            or the `problem` that kept it from being found.
    """

    def __init__(self, found: dict):
        self.found = found

    def figures(self) -> dict:
        """Return what run.json keeps, in bytes."""
        if "problem" in self.found:
            return {}
        parts = {name: self.found[name] for name in (*PARTS, "host", "phase")}
        single = {"predicted_one_sample_bytes": self.found["one_sample"]} if "one_sample" in self.found else {}
        return {"predicted_peak_bytes": self.found["total"], "predicted": parts, **single}

    def line(self, settings: Settings, hardware: dict) -> str:
        """Return the line of the header; on a GPU that is too small, with what to try next."""
        if "problem" in self.found:
            return f"Predicted peak: unknown ({self.found['problem']})"
        total = self.found["total"]
        text = ", ".join(f"{name} {self.found[key] / 1e9:.2f}" for key, name in PARTS.items() if self.found[key] >= 5e6)
        text = f"Predicted peak: {total / 1e9:.2f} GB" + f" ({text})" * bool(text)
        single = ""
        if "one_sample" in self.found:
            single = f", {self.found['one_sample'] / 1e9:.2f} GB with one sample at a time"
        if "gpu" not in hardware:
            return f"{text} of tensors on a GPU{single}"
        needed, available = self.found["needed"], hardware["gpu_memory"]
        text += f"{single}; {needed / 1e9:.2f} of {available / 1e9:.2f} GB with CUDA's own"
        if needed <= available:
            return text
        phase = self.found["phase"]
        tries = less_memory(settings, phase if phase == "training" else f"the {phase}")
        return f"{text}, so it may not fit. Next to try: {tries}"

    def end_line(self, measured: int, of_gpu: bool) -> str:
        """Return the line that compares, after the training; `measured` in bytes."""
        text, gap = f"Memory predicted: {self.found['total'] / 1e9:.2f} GB", measured - self.found["total"]
        if of_gpu:
            return f"{text}, measured {gap / 1e9:+.2f} GB ({gap / measured:+.1%})"
        return f"{text} of tensors, the process {gap / 1e9:+.2f} GB: libraries, data, working memory"


def predict(
    fabric: Fabric, settings: Settings, model: nn.Module, train_loader: DataLoader, val_loader: DataLoader
) -> Prediction | None:
    """Predict the peak of a run on each device, where `predict_memory` asks for it; None on all ranks but the first.

    Args:
        fabric: Of the run.
        settings: Of the run.
        model: Set up by Fabric; only its config is looked at.
        train_loader: Knows the effective batches that need most.
        val_loader: Likewise those of the evaluation.
    """
    wanted = settings.predict_memory if settings.predict_memory is not None else fabric.device.type == "cuda"
    if fabric.global_rank or not wanted:
        return None
    cuts = _cuts(settings, train_loader, val_loader)
    ranks = settings.ranks if isinstance(fabric.strategy, ModelParallelStrategy) else None
    config = model.config.to_dict()
    gpu = torch.cuda.get_device_name(fabric.device) if fabric.device.type == "cuda" else None
    room = _room(fabric.device) if gpu else None
    key = _key(settings, config, cuts, ranks, gpu, room)
    path = Path(settings.cache_dir) / "memory" / f"{key}.json"
    with suppress(OSError, ValueError):
        return Prediction(json.loads(path.read_text(encoding="utf-8")))
    found = _ask_planner((settings, cuts, ranks, model.config.num_labels, gpu, gpu and compute_capability(), room))
    if "problem" not in found:
        with suppress(OSError):  # then the next run predicts again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, json.dumps(found))
    return Prediction(found)


def _ask_planner(question: tuple) -> dict:
    """Return what the planner's process answers; it imports this very package, and is shown no GPU."""
    path = os.pathsep.join([str(PACKAGE.parent), *filter(None, sys.path)])
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": path}
    try:
        process = subprocess.run(
            [sys.executable, "-m", PLANNER], input=pickle.dumps(question), env=environment, timeout=TIMEOUT,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return json.loads(process.stdout)
    except subprocess.TimeoutExpired:
        return {"problem": f"not found within {TIMEOUT} seconds"}
    except (OSError, ValueError):
        return {"problem": "the rehearsal ended without an answer"}


def most_tokens(train_loader: DataLoader) -> int:
    """Return what `micro_batch_tokens` `auto` begins with: the tokens of the largest micro-batch, at most `BUDGET`.

    The loader's sampler is left cut by `BUDGET`.
    """
    train_loader.sampler.cut_by_tokens(BUDGET)
    plans = train_loader.sampler.heaviest()
    return min(BUDGET, max(part.padded for plan in plans for part in train_loader.dataset[plan].micro_batches))


def _cuts(settings: Settings, train_loader: DataLoader, val_loader: DataLoader) -> list[tuple]:
    """Return what the effective batches may be cut into: `micro_batch_tokens`, and what may need most of each cut.

    Those that need most come first, one sample at a time last. Unless `micro_batch_tokens` is `auto`, there is one.
    """
    if settings.micro_batch_tokens != "auto":
        return [(None, *_largest(train_loader, val_loader))]
    sampler, tokens, cuts = train_loader.sampler, most_tokens(train_loader), []
    while tokens > sampler.lengths.max():
        sampler.cut_by_tokens(tokens)
        cuts.append((tokens, *_largest(train_loader, val_loader)))
        tokens //= 2
    sampler.cut_by_tokens(1)
    return [*cuts, (1, *_largest(train_loader, val_loader))]


def _room(device: torch.device) -> int:
    """Return the bytes of the GPU that this process has or can have, rounded down so that equal runs agree."""
    return (torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)) // 2**28 * 2**28


def _largest(train_loader: DataLoader, val_loader: DataLoader) -> tuple[list[list[MicroBatch]], list[MicroBatch]]:
    """Return the effective batches and the batches of the evaluation that may need most, without values."""
    plans = train_loader.sampler.heaviest()
    training = [_without_values(train_loader.dataset[plan].micro_batches) for plan in plans]
    return training, _without_values([val_loader.dataset[part] for part in val_loader.sampler.heaviest()])


def _without_values(batches: list[MicroBatch]) -> list[MicroBatch]:
    return [
        batch._replace(inputs={name: tensor.to("meta") for name, tensor in batch.inputs.items()}) for batch in batches
    ]


def relevant(settings: Settings) -> dict[str, object]:
    """Return the settings that a rehearsal depends on, beside the shapes of its batches."""
    names = [*RELEVANT, "max_length"] if settings.packing else RELEVANT  # which packing alone tells the model
    return {name: getattr(settings, name) for name in names}


def _key(settings: Settings, config: dict, cuts: list, ranks: int | None, gpu: str | None, room: int | None) -> str:
    """Name what a rehearsal depends on: settings, model, shapes, versions, and this package's own sources."""
    shapes = [
        [tokens, *([[each.masked, *(list(tensor.shape) for tensor in each.inputs.values())] for each in batch]
                   for batch in (*training, evaluation))]
        for tokens, training, evaluation in cuts
    ]  # fmt: skip
    sources = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*.py")):
        sources.update(path.read_bytes())
    parts = [relevant(settings), config, shapes, ranks, gpu, room, describe_versions("peft", "torchao")]
    parts.append(sources.hexdigest())
    files = [Path(settings.cache_dir) / "memory" / "overhead.json", Path(settings.deepspeed or "")]
    parts += [path.read_text(encoding="utf-8") for path in files if path.is_file()]  # what the planner reads, too
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
