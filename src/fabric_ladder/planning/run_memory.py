"""The memory of one run as a function, for other programs and notebooks."""

from dataclasses import replace
from typing import NamedTuple

from fabric_ladder.models.layers import find_blocks, meta_model
from fabric_ladder.planning.candidates import read_settings
from fabric_ladder.planning.gpus import ANY, find_gpu
from fabric_ladder.planning.overhead import overhead_of
from fabric_ladder.planning.plan import find_samples
from fabric_ladder.planning.predict import keep_most, largest_batches, memory_limit, predict_peak
from fabric_ladder.settings import FACTS, show
from fabric_ladder.techniques.memory import Peak

RUNGS = {"single": "2_grad_accum", "ddp": "9_ddp", "fsdp": "10_fsdp", "deepspeed": "12_deepspeed_zero"}


class MemoryPrediction(NamedTuple):
    """The memory of a run in bytes, on each GPU.

    Attributes:
        tensors: The peak of the tensors by kind. Its `total` predicts `torch.cuda.max_memory_allocated()`, its `host`
            is the CPU memory that offloading needs.
        low: The least GPU memory that the process may need, with CUDA's own memory and fragmentation.
        expected: The expected GPU memory of the process, as `nvidia-smi` shows it.
        high: The most GPU memory that the process may need.
        reserved: The part of `expected` in PyTorch's allocator, which predicts `torch.cuda.max_memory_reserved()`.
    """

    tensors: Peak
    low: int
    expected: int
    high: int
    reserved: int


def predict_memory(
    model: str,
    rung: str | None = None,
    *,
    length: int | None = None,
    micro_batch_size: int = 1,
    gpus: int = 1,
    gpu: str | None = None,
    classes: int = 2,
    **settings: object,
) -> MemoryPrediction:
    """Predict the memory of a training run, without weights, data, a GPU or a network.

    Example: `predict_memory("Qwen/Qwen3-8B", precision="bf16-true", optimizer="adam-8bit", lora_rank=8).expected`

    Args:
        model: Name on the Hub, a folder, or a config file. Configs of common models are shipped.
        rung: A script such as `13_lora`, whose defaults hold. Default: 32-bit weights and Adam, on one GPU or by DDP.
        length: Tokens of every text. Default: 1024, or the model's positions if it has fewer. Images have its size.
        micro_batch_size: Samples that are in memory together on one GPU.
        gpus: Number of GPUs.
        gpu: Name of the GPU, such as `T4`, for its precision and its overhead. Default: any GPU that
            computes in bfloat16.
        classes: Number of classes of a classifier.
        **settings: Any other setting of a run by name. A setting such as `lora_rank` also switches on its technique.
            `batch_size` is the effective batch; its default has one micro-batch for each GPU. `eval_batch_tokens`
            limits a batch of the evaluation; its default is the size of the micro-batch.

    Raises:
        UserError: A setting is unknown or cannot be combined with others, or the model or the GPU is not known.
    """
    needs = (FACTS[name].needs.partition("=") for name, value in settings.items() if name in FACTS and value)
    implied = {name: value or True for name, _, value in needs if name}
    sizes = {"micro_batch_size": micro_batch_size, "batch_size": micro_batch_size * gpus}
    values = sizes | ({} if length is None else {"max_length": length}) | implied | settings
    strategy = values.get("strategy", "single" if gpus == 1 else "ddp")
    words = ["--model", model]
    for name, value in values.items():
        if name != "strategy":
            words += [f"--{name}", show(value)]
    kind = find_gpu(gpu) if gpu else ANY
    read = read_settings(rung or RUNGS[strategy], words, gpus, kind)
    samples, _ = find_samples(read, read.max_length if length is None else length)
    if "eval_batch_tokens" not in settings:
        read = replace(read, eval_batch_tokens=micro_batch_size * samples.length)
    batches = largest_batches(read, samples.length, samples.image_size, classes)
    overhead = overhead_of(kind, read.cache_dir).on(read.ranks)

    def peak_of(kept: int) -> Peak:
        return predict_peak(replace(read, kept_blocks=kept), *batches, classes=classes, capability=kind.capability)

    peak = peak_of(0)
    if read.memory_budget:
        limit = memory_limit(read, kind.memory if gpu else None)
        _, peak = keep_most(peak, peak_of, len(find_blocks(meta_model(read))), overhead.needed, limit)
    low, high = overhead.bounds(peak)
    needed = overhead.needed(peak)
    return MemoryPrediction(peak, low, needed, high, needed - overhead.expected.outside)
