"""Peak memory of a run, predicted without a GPU and without allocating anything.

The project's own step (model, precision, FSDP, micro-batches, optimizer) runs on fake tensors (see `rehearsal`).
`PeakTracker` adds up their sizes. The techniques add by formula what cannot be rehearsed. The result predicts
`torch.cuda.max_memory_allocated()`. As a process of its own, this module serves a run (`runs/prediction.py`).

The result leaves out cuBLAS's workspaces (tens of MB), memory that kernels allocate, rounding by PyTorch's allocator,
and with CPU offload the shards of one block in transfer. The CUDA context and fragmentation are also left out.
"""

import json
import os
import pickle
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from operator import attrgetter

import numpy as np
import torch
from datasets import DatasetDict

from fabric_ladder.data.cutting import MicroBatchPlan, cut
from fabric_ladder.data.kinds import kind_of
from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.data.sampler import EVALUATED
from fabric_ladder.data.splits import ImageDatasets, ImageFormat, TextDatasets
from fabric_ladder.errors import first_line
from fabric_ladder.models.layers import find_blocks, meta_model
from fabric_ladder.planning.overhead import load_overhead
from fabric_ladder.planning.rehearsal import Rehearsal, rehearse
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import used
from fabric_ladder.techniques.memory import ON_DEVICE, Peak
from fabric_ladder.techniques.memory_budget import stated_budget

Capability = tuple[int, int] | None  # compute capability of a GPU; None: it computes in bfloat16


def predict_peak(
    settings: Settings,
    micro_batches: list[MicroBatch],
    evaluations: Sequence[MicroBatch] = (),
    classes: int = 2,
    capability: Capability = None,
) -> Peak:
    """Return the peak of a run: the larger of its second optimizer step and its evaluation.

    The first optimizer step creates the optimizer's state. `torch.compile` is left out: compiled code keeps at most the
    same tensors.

    Args:
        settings: Settings of the run.
        micro_batches: A rank's share of an effective batch. Only the shapes matter.
        evaluations: Batches of the evaluation.
        classes: Number of classes of a classifier.
        capability: Compute capability of the GPU.
    """
    return _highest_peak(settings, [micro_batches], evaluations, classes, capability)


def _highest_peak(
    settings: Settings,
    batches: list[list[MicroBatch]],
    evaluations: Sequence[MicroBatch],
    classes: int,
    capability: Capability,
) -> Peak:
    """Return the highest peak of several effective batches, which share a rehearsal."""
    with _rehearse_run(settings, batches[0], classes, capability) as rehearsal:
        return max((rehearsal.peak(settings, batch, evaluations) for batch in batches), key=attrgetter("total"))


def keep_most(
    least: Peak, peak_of: Callable[[int], Peak], blocks: int, needed: Callable[[Peak], int], budget: int | None
) -> tuple[int, Peak]:
    """Return the most blocks that can keep their activations within a memory budget, and the peak with them.

    The peak grows with each kept block, first slowly and then by the activations of a block. So every other guess lies
    on the line between the closest known peaks, and the others halve the numbers that are left.

    Args:
        least: The peak without kept blocks.
        peak_of: Rehearses the run with this number of kept blocks.
        blocks: Number of the model's blocks.
        needed: The bytes that a run with a peak needs.
        budget: Bytes; None: there is no limit.
    """
    fits = 0
    if budget is not None and needed(least) > budget:
        return fits, least
    exceeds, most = blocks, peak_of(blocks)
    if budget is None or needed(most) <= budget:
        return exceeds, most
    by_line = True
    while exceeds - fits > 1:
        low, high = needed(least), needed(most)
        kept = fits + (exceeds - fits) * (budget - low) // (high - low) if by_line else (fits + exceeds) // 2
        by_line = not by_line
        kept = min(max(kept, fits + 1), exceeds - 1)
        peak = peak_of(kept)
        if needed(peak) <= budget:
            fits, least = kept, peak
        else:
            exceeds, most = kept, peak
    return fits, least


def memory_limit(settings: Settings, room: int | None) -> int | None:
    """Return the smaller of the stated memory budget and the GPU's bytes (`room`); None: neither is known."""
    return min((size for size in (room, stated_budget(settings)) if size is not None), default=None)


def _rehearse_run(
    settings: Settings, micro_batches: list[MicroBatch], classes: int, capability: Capability
) -> AbstractContextManager[Rehearsal]:
    pixels = micro_batches[0].inputs.get("pixel_values")
    return rehearse(settings, blank_datasets(classes, None if pixels is None else pixels.shape[-1]), capability)


def largest_batches(
    settings: Settings, length: int, image_size: int | None = None, classes: int = 2
) -> tuple[list[MicroBatch], list[MicroBatch]]:
    """Return one rank's largest share of an effective batch and of the evaluation: all samples have full length.

    Args:
        settings: `task`, `devices`, `batch_size`, `micro_batch_size` or `micro_batch_tokens`, `eval_batch_tokens`,
            `pad_to_multiple_of`, `packing`, `max_length`.
        length: Tokens of a sample. An image has a token for each patch and one for the class.
        image_size: Side of an image in pixels; None: the samples are texts.
        classes: Number of outputs of a classifier or of a regression.

    Returns:
        Micro-batches of meta tensors, which have only a shape and a dtype, and one batch of the evaluation.
    """
    if image_size:
        settings = replace(settings, pad_to_multiple_of=1)
    kind = kind_of(settings, list(map(str, range(classes))))

    def make(plan: MicroBatchPlan) -> MicroBatch:
        items = samples = len(plan.rows)
        rows, lengths = len(plan.packs or plan.rows), np.full(plan.rows.max() + 1, length)
        padded = plan.padded(lengths, settings.pad_to_multiple_of)
        labels = {"labels": torch.empty(samples, dtype=torch.long, device="meta")}
        if kind:
            labels = kind.blank(samples, length)
        if image_size:
            inputs = {"pixel_values": torch.empty(samples, 3, image_size, image_size, device="meta")}
        else:
            ids = torch.empty(rows, padded // rows, dtype=torch.long, device="meta")
            inputs = {"input_ids": ids, "position_ids" if settings.packing else "attention_mask": ids}
        if settings.task == "instruction-tuning":  # at worst, every token but the first is trained
            items = samples * (length - 1)
            labels = {"labels": ids, "predicting": torch.empty(items, dtype=torch.long, device="meta")}
        elif settings.packing and not (kind and kind.per_token):
            inputs["spans"] = torch.empty(samples, 2, dtype=torch.long, device="meta")
        masked = rows > 1 or padded > samples * length  # several samples rarely have equal lengths
        return MicroBatch(inputs | labels, items, 1.0, samples * length, padded, masked, kind)

    def share(samples: int, size: int | None, tokens: int | None) -> list[MicroBatchPlan]:
        ones = np.ones(samples, int)
        return cut(settings, np.arange(samples), length * ones, ones, settings.ranks, size, tokens)[0]

    size, tokens = settings.micro_batch_size, settings.micro_batch_tokens
    if tokens == "auto":  # a run may take all samples in one micro-batch
        size, tokens = settings.batch_size, None
    evaluated = settings.eval_batch_tokens or EVALUATED
    training = [make(plan) for plan in share(settings.batch_size, size, tokens)]
    return training, [make(share(evaluated * settings.ranks, None, evaluated)[0])]


def blank_datasets(classes: int, image_size: int | None = None) -> TextDatasets | ImageDatasets:
    """Return data sets without samples for `build_model`: images if `image_size` is given, else texts."""
    names = [str(number) for number in range(classes)]
    if image_size:
        shape = ImageFormat(image_size, image_size, (0.5,) * 3, (0.5,) * 3, "bilinear", random_flip=False, tokens=0)
        return ImageDatasets(DatasetDict(), names, shape, "", [])
    return TextDatasets(DatasetDict(), names, _NoTokenizer(), "")


class _NoTokenizer:
    pad_token_id = 0
    eos_token_id = None

    def __len__(self) -> int:
        return 0

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [*range(len(tokens))]  # any rows take the same memory


def unpredictable(settings: Settings) -> str | None:
    """Return the reason if the memory of these settings cannot be predicted."""
    if settings.accelerator == "mps":
        return "no memory was measured on Apple silicon"
    return next(filter(None, (technique.unpredictable(settings) for technique in used(settings))), None)


def main() -> None:
    """Read a run's question from stdin and print the answer as JSON: `runs/prediction.py` starts this process."""
    answer = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries must not print into the answer
    try:
        found = _answer(*pickle.load(sys.stdin.buffer))
    except Exception as error:  # the run starts even if its prediction fails
        found = {"problem": f"{type(error).__name__}: {first_line(error, 160)}"}
    with answer:
        json.dump(found, answer)


def _answer(
    settings: Settings,
    cuts: list[tuple[int | None, list[list[MicroBatch]], list[MicroBatch]]],
    classes: int,
    gpu: str | None,
    capability: Capability,
    room: int | None,
) -> dict:
    """Return the peak of the first cut that fits, as `runs/prediction.py` reads it.

    Args:
        settings: Settings of the run.
        cuts: For each cut its `micro_batch_tokens`, the micro-batches of its largest effective batches, and the batches
            of its evaluation. The cuts are sorted by memory, largest first. The last cut has single samples.
        classes: Number of classes of a classifier.
        gpu: Name of the GPU; None: no GPU.
        capability: Compute capability of the GPU.
        room: Bytes of GPU memory that the run may use; None: the first cut is taken.
    """
    if reason := unpredictable(settings):
        return {"problem": reason}
    overhead = load_overhead(settings.cache_dir, gpu, capability).on(settings.ranks) if gpu else None
    needed = overhead.needed if overhead else attrgetter("total")
    room = room + overhead.expected.outside if overhead and room is not None else None
    limit = memory_limit(settings, room)
    with _rehearse_run(settings, cuts[0][1][0], classes, capability) as rehearsal:
        for each in cuts:
            tokens, batches, evaluations = each
            peak = max((rehearsal.peak(settings, batch, evaluations) for batch in batches), key=attrgetter("total"))
            if limit is None or needed(peak) <= limit:
                break
    found = {"micro_batch_tokens": tokens} if len(cuts) > 1 else {}
    if settings.memory_budget:
        blocks = len(find_blocks(meta_model(settings)))

        def peak_of(kept: int) -> Peak:
            return _highest_peak(replace(settings, kept_blocks=kept), batches, evaluations, classes, capability)

        kept, peak = keep_most(peak, peak_of, blocks, needed, limit)
        found |= {"blocks": blocks, "kept_blocks": kept}
    found |= {name: getattr(peak, name) for name in (*ON_DEVICE, "host", "phase", "total")}
    return found | ({"needed": overhead.needed(peak), "workspace": overhead.expected.workspace} if overhead else {})


if __name__ == "__main__":
    main()
