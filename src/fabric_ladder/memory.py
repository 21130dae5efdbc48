"""Peak memory of a training step, predicted without a GPU and without allocating anything.

The project's own step (model, precision, FSDP, micro-batches, optimizer) runs on fake tensors (see `rehearsal`), and
`PeakTracker` adds up what they would hold. What is predicted is `torch.cuda.max_memory_allocated()`.

Not counted: cuBLAS's workspaces (tens of MB), what a kernel allocates inside, rounding by PyTorch's allocator, and with
CPU offload the shards of one block on their way. The CUDA context and fragmentation come on top of any such figure.
"""

from collections.abc import Callable

import numpy as np
import torch
from datasets import DatasetDict
from torch import nn

from fabric_ladder.batching import MicroBatch
from fabric_ladder.cutting import cut
from fabric_ladder.rehearsal import rehearse
from fabric_ladder.tracker import Peak
from local_dataset_utilities import ImageDatasets, ImageFormat, TextDatasets


def predict_peak(
    build: Callable[[], nn.Module],
    settings,
    micro_batches: list[MicroBatch],
    evaluation: MicroBatch | None = None,
    ranks: int | None = None,
) -> Peak:
    """Return the peak of a run: that of its second optimizer step (the first makes the state) and of an evaluation.

    Args:
        build: Makes the model, such as `lambda: build_model(settings, datasets)`; its tensors are on no device.
        settings: `precision`, `optimizer`, `max_grad_norm` and, with `ranks`, `offload`. `16-mixed` is taken for
            `bf16-mixed`, which holds the same bytes.
        micro_batches: A rank's share of an effective batch. Only the shapes count.
        evaluation: A batch of the evaluation.
        ranks: GPUs over which FSDP shards, as in rungs 10 and 11; None: no FSDP.

    Raises:
        ValueError: What cannot be predicted: `torch.compile`, DeepSpeed, 8-bit Adam and 4-bit weights.
    """
    if settings.compile or settings.deepspeed or settings.optimizer == "adam-8bit" or settings.quantization != "no":
        raise ValueError("torch.compile, DeepSpeed, 8-bit Adam and 4-bit weights cannot be predicted")
    with rehearse(build, settings, ranks) as rehearsal:
        return rehearsal.peak(micro_batches, evaluation)


def largest_batches(
    settings, length: int, image_size: int | None = None, ranks: int = 1
) -> tuple[list[MicroBatch], MicroBatch]:
    """Return one rank's share of an effective batch, and a batch of the evaluation, if every sample were the longest.

    Args:
        settings: `task`, `batch_size`, `micro_batch_size` or `micro_batch_tokens`, `eval_batch_tokens`,
            `pad_to_multiple_of`.
        length: Tokens of a sample; of an image, its patches and the one for the class.
        image_size: Pixels of a side of an image; None: the samples are texts.
        ranks: GPUs that share the effective batch.

    Returns:
        Micro-batches of meta tensors, which have no more than a shape and a dtype.
    """
    multiple = 1 if image_size else settings.pad_to_multiple_of
    padded = -(-length // multiple) * multiple

    def make(samples: int) -> MicroBatch:
        items, labels = samples, torch.empty(samples, dtype=torch.long, device="meta")
        if image_size:
            inputs = {"pixel_values": torch.empty(samples, 3, image_size, image_size, device="meta")}
        else:
            ids = torch.empty(samples, padded, dtype=torch.long, device="meta")
            inputs = {"input_ids": ids, "attention_mask": ids}
        if settings.task == "instruction-tuning":  # at worst, every token but the first is trained
            labels, items = ids, samples * (length - 1)
            inputs["predicting"] = torch.empty(items, dtype=torch.long, device="meta")
        masked = samples > 1 or padded > length  # several are hardly ever equally long
        return MicroBatch(inputs | {"labels": labels}, items, 1.0, samples * length, samples * padded, masked)

    def share(samples: int, **how) -> list[MicroBatch]:
        ones = np.ones(samples, int)
        parts = cut(np.arange(samples), length * ones, ones, ranks, multiple=multiple, **how)[0]
        return [make(len(part.rows)) for part in parts]

    size, tokens = settings.micro_batch_size, settings.micro_batch_tokens
    if tokens == "auto":  # which begins with all samples at once
        size, tokens = settings.batch_size, None
    training = share(settings.batch_size, size=size, tokens=tokens)
    evaluation = share(settings.eval_batch_tokens * ranks, tokens=settings.eval_batch_tokens)[0]
    return training, evaluation


def blank_datasets(classes: int, image_size: int | None = None) -> TextDatasets | ImageDatasets:
    """Return data sets without samples, for `build_model`: of texts, or of images of so many pixels a side."""
    names = [str(number) for number in range(classes)]
    if image_size:
        form = ImageFormat(image_size, image_size, (0.5,) * 3, (0.5,) * 3, "bilinear", random_flip=False, tokens=0)
        return ImageDatasets(DatasetDict(), names, form, "", [])
    return TextDatasets(DatasetDict(), names, _NoTokenizer(), "")


class _NoTokenizer:
    pad_token_id = 0

    def __len__(self) -> int:
        return 0
