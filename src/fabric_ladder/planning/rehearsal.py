"""A run's step on fake tensors, which have a shape, a dtype and a storage, but no memory behind it.

The fake tensors are CPU tensors, since fake CUDA tensors need a CUDA build of PyTorch and, in attention, a GPU. They
keep the same for the backward pass: autocast casts the same operations, and `scaled_dot_product_attention` takes a
kernel that keeps no tokens x tokens matrix, as FlashAttention on a GPU, once its dropout is left out. Optimizers take
the form that they take on a GPU: one kernel for all tensors, which makes no others, or where that is not allowed, all
tensors at once.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial

import torch
import torch.distributed as dist
from lightning import Fabric
from lightning.fabric.plugins.environments import LightningEnvironment
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.optim import SGD, Adam, AdamW
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.data.splits import ImageDatasets, TextDatasets
from fabric_ladder.distributed.fsdp import fsdp_strategy, sharding_policy, transformer_blocks
from fabric_ladder.models.adam_4bit import Adam4bit
from fabric_ladder.models.build import build_model
from fabric_ladder.models.checkpointing import host_memory_within
from fabric_ladder.models.optimizer import build_optimizer
from fabric_ladder.planning.formulas import count_parameters
from fabric_ladder.planning.tracker import Peak, PeakTracker
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.settings import Settings
from fabric_ladder.training.gradients import accumulate_gradients, run_model


@contextmanager
def rehearse(
    settings: Settings, datasets: TextDatasets | ImageDatasets, ranks: int | None = None, emulated: bool = False
) -> Iterator["Rehearsal"]:
    """Set up the run of some settings on fake tensors.

    Args:
        settings: `precision`, `optimizer`, `max_grad_norm`, `task`, `devices`, `offload`, and those of the model.
            `16-mixed` is taken for `bf16-mixed`, which holds the same bytes.
        datasets: Tell the model its classes, images or vocabulary; samples are not looked at.
        ranks: GPUs over which FSDP shards, as in rungs 10 and 11; None: no FSDP.
        emulated: On a GPU that only emulates bfloat16, which no kernel of attention takes there that keeps no matrix
            of tokens x tokens (PyTorch, `sdp_utils.cpp: can_use_mem_efficient_attention`).
    """
    buckets = settings.ranks > 1 and not ranks
    settings = replace(settings, accelerator="cpu", devices=ranks or 1, num_nodes=1)
    if ranks:  # a process group whose first rank this process is; nothing is sent
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with torch.device("meta"):  # no weights are drawn, which takes branches that depend on values
            model = build_model(replace(settings, precision=_rehearsed(settings.precision)), datasets)
        with sdpa_kernel(SDPBackend.MATH) if emulated else nullcontext():
            yield Rehearsal(model, settings, bool(ranks), buckets)
    finally:
        if ranks:
            dist.destroy_process_group()


class Rehearsal:
    """A run on fake tensors: what a rung's script and `loop.train` do, but for printing and reading values.

    Gradients and the optimizer's state, which a run has from its second step on, are put in place instead of computed.
    Only FSDP, which prepares itself in a first pass, gets one before anything is counted.

    Args:
        model: On the meta device.
        settings: With one device for each of the ranks.
        sharded: Whether FSDP shards over the ranks.
        buckets: Whether gradients stay from step to step, as DDP's buckets do (`DDPInBuckets`).

    Attributes:
        counts: Of the model's parameters.
    """

    def __init__(self, model: nn.Module, settings: Settings, sharded: bool, buckets: bool):
        self.settings, self.sharded, self.buckets = settings, sharded, buckets
        self.parked, self._warm = sharded and settings.offload, False
        options = {"precision": _rehearsed(settings.precision)}
        if sharded:
            options |= {"strategy": fsdp_strategy(settings, self._shard), "plugins": [_AllRanksStarted()]}
        self.fabric = Fabric(accelerator="cpu", devices=settings.devices, **options)
        self.fabric.launch()
        self.meter = Meter(self.fabric)
        of_language = settings.task == "instruction-tuning"
        self.mode = _FakeTensors()
        self.tracker = PeakTracker(self.mode, model.config.vocab_size if of_language else None)
        self.counts = count_parameters(model)
        self._known: dict[tuple, Peak] = {}
        with self._counted():
            self._set_up(model)
            self._give_gradients()
            self._step()
            self._name_tensors()
            if self.settings.step_in_backward:  # which leaves none for this moment
                self.optimizer.zero_grad()
            else:
                self._give_gradients()
            self.tracker.forget_peak()
            self._step()
            self._optimizer_peak = self.tracker.peak()
            self.optimizer.zero_grad()

    @property
    def kept(self) -> Peak:
        """What is held without any activation: the peak of the optimizer's step."""
        return self._optimizer_peak

    def peak(self, micro_batches: list[MicroBatch], evaluations: list[MicroBatch]) -> Peak:
        """Return the highest of training, optimizer step and evaluation, once the optimizer has its state.

        Args:
            micro_batches: A rank's share of an effective batch, in its order. Only the shapes count, and of them only
                those that no other one exceeds.
            evaluations: Batches of the evaluation; those that training exceeds, which holds more for its backward pass,
                are left out.
        """
        peaks = [self._optimizer_peak]
        # the first one finds no gradients yet
        for part, adding in ((micro_batches[:1], self.buckets), (micro_batches[1:], True)):
            if largest := _largest(part):
                key = (adding, *largest)
                if key not in self._known:
                    self._known[key] = self._train(list(largest.values()), adding)
                peaks.append(self._known[key])
        trained = _largest(micro_batches)
        for evaluation in evaluations:
            key = _sizes(evaluation)
            if not any(_within(key, sizes) for sizes in trained):
                if key not in self._known:
                    self._known[key] = self._evaluate(evaluation)
                peaks.append(self._known[key])
        return max(peaks, key=lambda peak: peak.total)._replace(host=max(peak.host for peak in peaks))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        on_host = partial(self.tracker.at, "training", on_host=True)
        with self.mode, self.tracker, _AttentionWithoutDropout(), host_memory_within(on_host):
            yield

    def _set_up(self, model: nn.Module) -> None:
        model.to_empty(device="cpu")
        model.tie_weights()  # each was emptied on its own
        self.model = self.fabric.setup(model)
        optimizer = build_optimizer(self.settings, self.model)
        if isinstance(optimizer, Adam | AdamW | SGD) and not self.parked:
            for group in optimizer.param_groups:
                if group["foreach"] is None and not group["fused"]:
                    group["foreach"] = True  # what None means for parameters on a GPU
        if isinstance(optimizer, Adam4bit):
            optimizer.parts = 1
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        self._name_tensors()

    def _train(self, micro_batches: list[MicroBatch], adding: bool) -> Peak:
        """Return the peak of forward and backward passes; `adding`: to gradients that are there already."""
        with self._counted():
            if self.sharded and not self._warm:
                self._pass(micro_batches[-1])
                self._name_tensors()
                self._warm = True
            self.optimizer.zero_grad()
            if adding:
                self._give_gradients()
            self.tracker.forget_peak()
            for micro_batch in micro_batches:
                self._pass(micro_batch)
            self.optimizer.zero_grad()
            return self.tracker.peak()

    def _pass(self, micro_batch: MicroBatch) -> None:
        with self.tracker.at("training", gathering=self.sharded):
            accumulate_gradients(
                self.fabric, self.model, [_without_values(micro_batch)], self.meter, optimizer=self.optimizer
            )
        self.meter.discard()

    def _step(self) -> None:
        with self.tracker.at("optimizer", on_host=self.parked):
            if norm := self.settings.max_grad_norm:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=norm, error_if_nonfinite=False)
            self.optimizer.step()

    def _evaluate(self, evaluation: MicroBatch) -> Peak:
        self.model.eval()
        with self._counted(), torch.no_grad(), self.tracker.at("evaluation", gathering=self.sharded):
            if self.buckets:
                self._give_gradients()
            self.tracker.forget_peak()
            run_model(self.fabric, self.model, _without_values(evaluation))
        self.model.train()
        return self.tracker.peak()

    def _give_gradients(self) -> None:
        """Have all gradients, as after an effective batch's first micro-batch."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
                self.tracker.hold(parameter.grad, "host" if self.parked else "gradients")

    def _name_tensors(self) -> None:
        """Tell the tracker what the run keeps from step to step."""
        for tensor in self.model.parameters():
            self.tracker.watch(tensor, parked=self.parked)
        for tensor in self.model.buffers():
            self.tracker.hold(tensor, "parameters")
        for tensor in tree_leaves(list(self.optimizer.state.values())):
            if isinstance(tensor, Tensor):
                self.tracker.hold(tensor, "host" if self.parked else "optimizer_state")

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard blocks and model, as rungs 10 and 11 do."""
        options = sharding_policy(self.settings, mesh)
        for block in transformer_blocks(model):
            fully_shard(block, **options)
        return fully_shard(model, **options)


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
            dtype = args[0].dtype  # a value is read: a norm, or whether it is finite
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


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


def _rehearsed(precision: str) -> str:
    """Return what a CPU can do that holds the same bytes."""
    return "bf16-mixed" if precision == "16-mixed" else precision


def _sizes(micro_batch: MicroBatch) -> tuple[int, ...]:
    return (micro_batch.masked, *(size for tensor in micro_batch.inputs.values() for size in tensor.shape))


def _largest(micro_batches: list[MicroBatch]) -> dict[tuple[int, ...], MicroBatch]:
    """Return, by their sizes, those that no other one exceeds."""
    shapes = {_sizes(micro_batch): micro_batch for micro_batch in micro_batches}
    return {sizes: micro_batch for sizes, micro_batch in shapes.items()
            if not any(_within(sizes, other) for other in shapes.keys() - {sizes})}  # fmt: skip


def _within(sizes: tuple[int, ...], other: tuple[int, ...]) -> bool:
    return all(one <= limit for one, limit in zip(sizes, other, strict=True))


def _without_values(micro_batch: MicroBatch) -> MicroBatch:
    """Keep the inputs off the device, as in a run, until it is their turn."""
    inputs = {name: torch.empty_like(tensor, device="meta") for name, tensor in micro_batch.inputs.items()}
    return micro_batch._replace(inputs=inputs)
