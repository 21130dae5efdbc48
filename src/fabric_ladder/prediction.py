"""The peak memory of a run before its first step, printed in its header and compared with the measured one at its end.

The rehearsal runs in a forked process, so that nothing of it is left in the run: no memory, no random number drawn, no
process group. What it found is kept in the cache, and a second run of the same shape does not repeat it.
"""

import hashlib
import json
import multiprocessing
import os
import sys
from contextlib import suppress
from dataclasses import asdict, replace
from multiprocessing.connection import Connection
from pathlib import Path

import torch.distributed as dist
from lightning.fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from fabric_ladder.batching import MicroBatch
from fabric_ladder.expected import Expected
from fabric_ladder.formulas import Counts, in_4_bits, with_8_bit_adam, with_zero
from fabric_ladder.hardware import describe_versions
from fabric_ladder.memory import blank_datasets
from fabric_ladder.models import build_model
from fabric_ladder.rehearsal import enter_fork, rehearse
from fabric_ladder.tracker import Peak
from fabric_ladder.zero_config import read_deepspeed_config

PATIENCE = 120  # seconds
MATTERS = (  # settings that a rehearsal depends on, beside the shapes of its batches
    "task model precision optimizer max_grad_norm attention activation_checkpointing packing loss_chunk lora lora_rank "
    "lora_targets lora_dropout dora quantization offload deepspeed devices num_nodes"
).split()


def expect(run, model: nn.Module, train_loader: DataLoader, val_loader: DataLoader) -> Expected | None:
    """Predict the peak of a run on each device; None on all ranks but the first.

    Args:
        run: Its settings and its fabric.
        model: Set up by Fabric; only its config is looked at.
        train_loader: Knows the effective batches that need most.
        val_loader: Likewise those of the evaluation.
    """
    settings, fabric = run.settings, run.fabric
    if fabric.global_rank:
        return None
    if settings.micro_batch_tokens == "auto":
        return Expected(None, "--micro_batch_tokens auto tries what fits")
    if sys.platform != "linux":
        return Expected(None, "it takes a forked process, as Linux has it; scripts/plan_memory.py needs none")
    batches = _largest(train_loader, val_loader)
    ranks = settings.ranks if isinstance(fabric.strategy, ModelParallelStrategy) else None
    config = model.config.to_dict()
    task = (replace(settings, notices=[]), batches, ranks, model.config.num_labels)
    place = Path(settings.cache_dir).expanduser() / "memory" / f"{_key(settings, config, batches, ranks)}.json"
    with suppress(OSError, ValueError, LookupError, TypeError):
        return Expected(Peak(**json.loads(place.read_text(encoding="utf-8")), tensors=[]))
    expected = _in_fork(task)
    if expected.peak:
        with suppress(OSError):  # then the next run predicts again
            place.parent.mkdir(parents=True, exist_ok=True)
            part = place.with_suffix(f".{os.getpid()}")
            kept = {key: value for key, value in expected.peak._asdict().items() if key != "tensors"}
            part.write_text(json.dumps(kept), encoding="utf-8")
            part.replace(place)
    return expected


def rehearsed(settings):
    """Return the settings of the rehearsal whose figures `complete` completes.

    torch.compile is left out: it keeps at most what the same run keeps without it.
    """
    settings = replace(settings, compile=False, quantization="no", from_scratch=True)
    if settings.deepspeed:
        settings = replace(settings, deepspeed=None, precision="bf16-true", optimizer="sgd", devices=1, num_nodes=1)
    if settings.optimizer == "adam-8bit":
        settings = replace(settings, optimizer="sgd")
    return settings


def complete(settings, peak: Peak, counts: Counts) -> Peak:
    """Add what is known by formula only, and keep of the tensors those that hold most."""
    peak = peak._replace(tensors=peak.tensors[:8])
    if settings.optimizer == "adam-8bit":
        peak = with_8_bit_adam(peak, counts)
    if settings.quantization != "no":
        peak = in_4_bits(peak, counts)
    if settings.deepspeed:
        config = read_deepspeed_config(replace(settings, notices=[]))["zero_optimization"]
        peak = with_zero(peak, counts, config, settings.optimizer, settings.ranks)
    return peak


def _in_fork(task: tuple) -> Expected:
    here, there = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_predict, args=(there, *task), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(PATIENCE):
            return Expected(None, f"not found within {PATIENCE} seconds")
        return here.recv()
    except EOFError:
        return Expected(None, "the rehearsal ended without an answer")
    finally:
        process.kill()
        process.join()


def _predict(answer: Connection, settings, batches: tuple, ranks: int | None, classes: int) -> None:
    """Run in the forked process, which shares nothing with the run but what it reads."""
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), 1)
        os.dup2(nowhere.fileno(), 2)
    enter_fork()
    dist.distributed_c10d._world = dist.distributed_c10d._World()  # the run's connections to other ranks are not here
    training, evaluations = batches
    pixels = training[0].inputs.get("pixel_values")
    try:
        datasets = blank_datasets(classes, None if pixels is None else pixels.shape[-1])
        plain = rehearsed(settings)
        with rehearse(lambda: build_model(plain, datasets), plain, ranks) as rehearsal:
            peaks = [rehearsal.peak(training, evaluation) for evaluation in evaluations]
        peak = max(peaks, key=lambda each: each.total)
        answer.send(Expected(complete(settings, peak, rehearsal.counts)._replace(tensors=[])))
    except Exception as error:  # of whatever kind: a run that cannot be predicted may run
        answer.send(Expected(None, f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"))


def _largest(train_loader: DataLoader, val_loader: DataLoader) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """Return the micro-batches of training and the batches of the evaluation that may need most."""
    plans = train_loader.sampler.heaviest()
    training = [micro_batch for plan in plans for micro_batch in train_loader.dataset[plan].micro_batches]
    return training, [val_loader.dataset[part] for part in val_loader.sampler.heaviest()]


def _key(settings, config: dict, batches: tuple, ranks: int | None) -> str:
    """Name what a rehearsal depends on: settings, model, shapes, versions, and this package's own sources."""
    values = asdict(settings)
    shapes = [
        [each.masked, *(list(tensor.shape) for tensor in each.inputs.values())] for part in batches for each in part
    ]
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        sources.update(path.read_bytes())
    parts = [{name: values[name] for name in MATTERS}, config, shapes, ranks, describe_versions("peft")]
    parts.append(sources.hexdigest())
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]
