"""Peak memory of a training step, predicted without a GPU and without allocating anything.

The project's own step (model, precision, FSDP, micro-batches, optimizer) runs on fake tensors, which have a shape, a
dtype and a storage, but no memory behind it; `PeakTracker` adds up what they would hold.

What is predicted is `torch.cuda.max_memory_allocated()`. The fake tensors are CPU tensors, since fake CUDA tensors need
a CUDA build of PyTorch and, in attention, a GPU. They keep the same for the backward pass: autocast casts the same
operations, and `scaled_dot_product_attention` takes a kernel that keeps no tokens x tokens matrix, as FlashAttention on
a GPU, once its dropout is left out. Optimizers take the form that they take on a GPU: one kernel for all tensors, which
makes no others, or where that is not allowed, all tensors at once.

Not counted: cuBLAS's workspaces (tens of MB), what a kernel allocates inside, rounding by PyTorch's allocator, and with
CPU offload the shards of one block on their way. The CUDA context and fragmentation come on top of any such figure.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
from datasets import DatasetDict
from lightning import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import SGD, Adam, AdamW
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from fabric_ladder.batching import MicroBatch
from fabric_ladder.cutting import cut
from fabric_ladder.fsdp import fsdp_strategy, sharding_policy, transformer_blocks
from fabric_ladder.gradients import accumulate_gradients
from fabric_ladder.metrics import Meter
from fabric_ladder.optimizers import build_optimizer
from fabric_ladder.tracker import Peak, PeakTracker
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
        micro_batches: A rank's share of an effective batch. Only the shapes count, and of equal ones two are run.
        evaluation: A batch of the evaluation.
        ranks: GPUs over which FSDP shards, as in rungs 10 and 11; None: no FSDP.

    Raises:
        ValueError: What cannot be predicted: `torch.compile`, DeepSpeed, 8-bit Adam and 4-bit weights.
    """
    if settings.compile or settings.deepspeed or settings.optimizer == "adam-8bit" or settings.quantization != "no":
        raise ValueError("torch.compile, DeepSpeed, 8-bit Adam and 4-bit weights cannot be predicted")
    settings = replace(settings, accelerator="cpu", devices=ranks or 1, num_nodes=1)
    with _fake_ranks(ranks):
        rehearsal = _Rehearsal(settings, ranks)
        with torch.device("meta"):  # no weights are drawn, which takes branches that depend on values
            model = build()
        with rehearsal.mode, rehearsal.tracker, _AttentionWithoutDropout():
            rehearsal.set_up(model)
            micro_batches = _two_of_each(micro_batches)
            rehearsal.step(micro_batches[:1])
            rehearsal.name_tensors()
            rehearsal.tracker.forget_peak()
            rehearsal.step(micro_batches)
            if evaluation:
                rehearsal.evaluate(evaluation)
            return rehearsal.tracker.peak()


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
        return MicroBatch(inputs | {"labels": labels}, items, 1.0, samples * length, samples * padded)

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


class _Rehearsal:
    """A run on fake tensors: what a rung's script and `loop.train` do, but for printing and reading values."""

    def __init__(self, settings, ranks: int | None):
        self.settings, self.sharded = settings, bool(ranks)
        self.parked = self.sharded and settings.offload
        precision = "bf16-mixed" if settings.precision == "16-mixed" else settings.precision
        how = {"precision": precision, "devices": settings.devices}
        if self.sharded:
            how |= {"strategy": fsdp_strategy(settings, self._shard), "plugins": [_AllRanksStarted()]}
        self.fabric = Fabric(accelerator="cpu", **how)
        self.fabric.launch()
        self.mode = _FakeTensors()
        self.tracker = PeakTracker(self.mode)

    def set_up(self, model: nn.Module) -> None:
        model.to_empty(device="cpu")
        model.tie_weights()  # each was emptied on its own
        self.model = self.fabric.setup(model)
        optimizer = build_optimizer(self.settings, self.model)
        if isinstance(optimizer, Adam | AdamW | SGD) and not self.parked:
            for group in optimizer.param_groups:
                if group["foreach"] is None and not group["fused"]:
                    group["foreach"] = True  # what None means for parameters on a GPU
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        self.name_tensors()

    def step(self, micro_batches: list[MicroBatch]) -> None:
        micro_batches = [_waiting(micro_batch) for micro_batch in micro_batches]
        with self.tracker.at("training", gathering=self.sharded):
            accumulate_gradients(self.fabric, self.model, micro_batches, Meter(self.fabric), ("", []))
        with self.tracker.at("optimizer", on_host=self.parked):
            if norm := self.settings.max_grad_norm:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=norm)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def evaluate(self, micro_batch: MicroBatch) -> None:
        self.model.eval()
        with torch.no_grad(), self.tracker.at("evaluation", gathering=self.sharded):
            self.model(**self.fabric.to_device(_waiting(micro_batch).inputs))

    def name_tensors(self) -> None:
        """Tell the tracker what the run keeps from step to step."""
        for tensor in self.model.parameters():
            self.tracker.watch(tensor, parked=self.parked)
        for tensor in self.model.buffers():
            self.tracker.hold(tensor, "parameters")
        for tensor in tree_leaves(list(self.optimizer.state.values())):
            if isinstance(tensor, Tensor):
                self.tracker.hold(tensor, "host" if self.parked else "optimizer_state")

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """As in rungs 10 and 11."""
        how = sharding_policy(self.settings, mesh)
        for block in transformer_blocks(model):
            fully_shard(block, **how)
        return fully_shard(model, **how)


class _FakeTensors(FakeTensorMode):
    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        # a weak reference to each tensor, which Module.to does not allow to those that it converts
        self.fake_tensor_converter.set_tensor_memo = lambda *_: None

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        try:
            return super().__torch_dispatch__(operation, types, args, kwargs or {})
        except DataDependentOutputException:
            if operation is not torch.ops.aten._local_scalar_dense.default:
                raise
            kind = args[0].dtype  # a value is read: a norm, or whether it is finite
            return False if kind is torch.bool else 1.0 if kind.is_floating_point else 1


class _AttentionWithoutDropout(TorchFunctionMode):
    """On a CPU, dropout in attention needs the matrix that it drops from; on a GPU two numbers stand for it."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is scaled_dot_product_attention:
            args, kwargs = args[:4], {**(kwargs or {}), "dropout_p": 0.0}
        return function(*args, **(kwargs or {}))


class _AllRanksStarted(LightningEnvironment):
    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return 0


@contextmanager
def _fake_ranks(ranks: int | None) -> Iterator[None]:
    """Stand in for a process group of so many ranks, of which this process is the first; nothing is sent."""
    if ranks is None:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _two_of_each(micro_batches: list[MicroBatch]) -> list[MicroBatch]:
    """Keep two of each shape: gradients are added up from the second on."""
    seen, kept = [], []
    for micro_batch in micro_batches:
        shapes = [tensor.shape for tensor in micro_batch.inputs.values()]
        if seen.count(shapes) < 2:
            kept.append(micro_batch)
        seen.append(shapes)
    return kept


def _waiting(micro_batch: MicroBatch) -> MicroBatch:
    """Keep the inputs off the device, as in a run, until it is their turn."""
    inputs = {name: torch.empty_like(tensor, device="meta") for name, tensor in micro_batch.inputs.items()}
    return micro_batch._replace(inputs=inputs)
