"""A run's step on fake tensors, which have a shape, a dtype and a storage, but no memory behind it.

The fake tensors are CPU tensors, since fake CUDA tensors need a CUDA build of PyTorch and, in attention, a GPU. Both
keep the same tensors for the backward pass, except in the operations that `cuda_kernels.py` replaces.
`scaled_dot_product_attention` runs a kernel without a tokens x tokens matrix, like FlashAttention. Optimizers run as on
a GPU: fused, without temporary tensors, or in their `foreach` form, with temporary tensors for all weights together.
"""

import json
import logging
from collections.abc import Callable, Iterator, Sequence
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
from torch.optim import SGD, Adam, AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves
from transformers import PretrainedConfig

from fabric_ladder.data.loaders import MicroBatch
from fabric_ladder.data.splits import ImageDatasets, TextDatasets
from fabric_ladder.distributed.fsdp import fsdp_strategy, sharding_policy, transformer_blocks
from fabric_ladder.environment import emulates
from fabric_ladder.models.configs import load_config, part_config
from fabric_ladder.models.kernels import declare_flash
from fabric_ladder.models.layers import FEWEST_BLOCKS, fewer_blocks
from fabric_ladder.planning.cuda_kernels import CudaKernels
from fabric_ladder.planning.tracker import Moment, PeakTracker, extrapolate, highest
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.runs.prediction import relevant
from fabric_ladder.settings import Settings
from fabric_ladder.techniques import used
from fabric_ladder.techniques.build import build_model, build_optimizer
from fabric_ladder.techniques.checkpointing import host_memory_within
from fabric_ladder.techniques.memory import Counts, Peak, count_parameters
from fabric_ladder.techniques.technique import Technique
from fabric_ladder.training.gradients import accumulate_gradients, run_model


@contextmanager
def rehearse(
    settings: Settings,
    datasets: TextDatasets | ImageDatasets,
    capability: tuple[int, int] | None = None,
    all_blocks: bool = False,
) -> Iterator["Rehearsal"]:
    """Set up the run of some settings on fake tensors.

    If the GPU only emulates bfloat16, its memory-efficient attention kernels refuse bfloat16. Then attention keeps a
    tokens x tokens matrix (PyTorch, `sdp_utils.cpp: can_use_mem_efficient_attention`).

    Args:
        settings: Settings of the run. `16-mixed` is rehearsed as `bf16-mixed`, which needs the same memory.
        datasets: Data sets with the model's classes, image format or vocabulary. Samples are ignored.
        capability: Compute capability of the GPU; None: it computes in bfloat16.
        all_blocks: Rehearse the whole model. Otherwise two models with a few of its blocks are rehearsed.
    """
    matrix = emulates(settings.precision, capability)
    asked = settings
    settings = to_rehearse(settings)
    sharded = settings.shards_weights
    keeps = (settings.ranks > 1 and not sharded) or any(technique.keeps_passes for technique in used(asked))
    settings = replace(settings, accelerator="cpu", devices=settings.ranks if sharded else 1, num_nodes=1)
    if sharded:  # a fake process group: this process is rank 0 and sends nothing
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=settings.ranks)

    def run(blocks: int | None) -> _Steps:
        with torch.device("meta"):  # drawing weights would branch on values
            model = build_model(replace(settings, precision=_rehearsed(settings.precision)), datasets, blocks)
        counts = count_parameters(model)
        for technique in used(asked):
            technique.rehearse_model(model, asked)
        return _Steps(model, counts, settings, sharded, keeps)

    try:
        flash = declare_flash(capability is None or capability >= (8, 0))
        with quiet_lightning(), flash, sdpa_kernel(SDPBackend.MATH) if matrix else nullcontext():
            config = part_config(load_config(settings.model), settings.task)
            further = sum(technique.further_blocks(settings) for technique in used(settings))
            fewer = None if all_blocks else fewer_blocks(config, FEWEST_BLOCKS + further)
            yield Rehearsal(run, config, fewer)
    finally:
        if sharded:
            dist.destroy_process_group()


@contextmanager
def quiet_lightning() -> Iterator[None]:
    """Hide Lightning's messages, which name the precision of every Fabric."""
    loggers = [logging.getLogger(name) for name in ("lightning.fabric", "lightning.pytorch")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def rehearsal_key(settings: Settings) -> str:
    """Return the same key for settings that differ only in their formulas or in their micro-batches."""
    changed = [each.setting for each in used(settings) if type(each).rehearse_model is not Technique.rehearse_model]
    return json.dumps(relevant(to_rehearse(settings)) | {"precision": settings.precision, "changed": changed})


def to_rehearse(settings: Settings) -> Settings:
    """Return settings whose step runs on fake tensors; the techniques' formulas add the rest."""
    rehearsed = replace(settings, from_scratch=True)
    for technique in used(settings):
        rehearsed = technique.rehearsed(rehearsed)
    return rehearsed


class Rehearsal:
    """A run on fake tensors, whose memory is that of all blocks of the model.

    Two models with a few blocks take their steps, and their memory is extrapolated moment by moment (`extrapolate`). If
    their passes do not permit that, or if the model has few blocks, the whole model takes the steps.

    Args:
        run: Sets up a model with N blocks, or with all blocks for None.
        config: Config of the model's part with blocks.
        fewer: Numbers of blocks of two smaller models; None: rehearse the whole model.

    Attributes:
        counts: Numbers of the model's parameters.
        blocks: The rehearsed models: two with a few blocks, or the whole model.
    """

    def __init__(self, run: Callable[[int | None], "_Steps"], config: PretrainedConfig, fewer: tuple[int, int] | None):
        self._run = run
        self._known: dict[tuple, Peak] = {}
        self.blocks = [run(blocks) for blocks in fewer or (None,)]
        self._times = (config.num_hidden_layers - fewer[1]) // (fewer[1] - fewer[0]) if fewer else 0
        self.counts = self.blocks[-1].counts
        if fewer:
            pairs = zip(*(steps.counts for steps in self.blocks), strict=True)
            self.counts = Counts(*(long + self._times * (long - short) for short, long in pairs))

    def peak(self, settings: Settings, micro_batches: list[MicroBatch], evaluations: Sequence[MicroBatch]) -> Peak:
        """Return the highest of training, optimizer step and evaluation, once the optimizer has its state.

        Args:
            settings: Settings of the run, whose techniques add by formula the memory that is not rehearsed.
            micro_batches: A rank's share of an effective batch, in its order. Only the largest shapes matter.
            evaluations: Batches of the evaluation. Batches within the shapes of training are skipped, since training
                also keeps activations for the backward pass.
        """
        peaks = [self._find(("optimizer",), lambda steps: steps.of_optimizer)]
        first, others = _largest(micro_batches[:1]), _largest(micro_batches[1:])
        if any(_within(sizes, other) for sizes in first for other in others):
            first = {}  # it starts without gradients, and takes no more memory than the others
        for largest, alone in ((first, True), (others, False)):
            if largest:
                parts = list(largest.values())
                peaks.append(self._find((alone, *largest), lambda steps, *own: steps.train(*own), parts, alone))
        trained = _largest(micro_batches)
        for evaluation in evaluations:
            key = _sizes(evaluation)
            if not any(_within(key, sizes) for sizes in trained):
                peaks.append(self._find(key, lambda steps, *own: steps.evaluate(*own), evaluation))
        host = max(peak.host for peak in peaks)
        passes = [peak.of_pass for peak in peaks if peak.phase == "training"]
        found = max(peaks, key=lambda peak: peak.total)._replace(host=host)
        if any(technique.keeps_passes for technique in used(settings)):
            found = found._replace(pool=max(passes))
        for technique in used(settings):
            found = technique.add_memory(found, self.counts, settings)
        return found

    def _find(self, key: tuple, question: Callable[..., list[Moment]], *options) -> Peak:
        """Return the peak of a part of the run, rehearsed at most once."""
        if key not in self._known:
            answers = [question(steps, *options) for steps in self.blocks]
            moments = extrapolate(*answers, self._times) if self._times else answers[0]
            if moments is None:
                self.blocks, self._times = [self._run(None)], 0
                return self._find(key, question, *options)
            self._known[key] = highest(moments)
        return self._known[key]


class _Steps:
    """A model's steps on fake tensors: those of a rung's script and `loop.train`, without printing or reading values.

    A run has gradients and optimizer state from its second step on. The rehearsal creates them without computing them.
    FSDP prepares itself in the first pass of each size, so it gets a pass before the tracker counts.

    Args:
        model: The model on the meta device.
        counts: Numbers of its parameters.
        settings: Settings with one device per rank.
        sharded: Whether FSDP shards over the ranks.
        keeps: Whether gradients stay from step to step, as in DDP's buckets (`DDPInBuckets`).

    Attributes:
        counts: Numbers of the model's parameters.
        of_optimizer: The moments of an optimizer step.
    """

    def __init__(self, model: nn.Module, counts: Counts, settings: Settings, sharded: bool, keeps: bool):
        self.counts = counts
        self.settings = settings
        self.sharded = sharded
        self.keeps = keeps
        self.parked = sharded and settings.offload
        self._warm: set[tuple] = set()
        options = {"precision": _rehearsed(settings.precision)}
        if sharded:
            options |= {"strategy": fsdp_strategy(settings, self._shard), "plugins": [_AllRanksStarted()]}
        self.fabric = Fabric(accelerator="cpu", devices=settings.devices, **options)
        self.fabric.launch()
        self.meter = Meter(self.fabric)
        is_language_model = settings.task == "instruction-tuning"
        self.mode = FakeTensors()
        self.tracker = PeakTracker(self.mode, model.config.get_text_config().vocab_size if is_language_model else None)
        with self._counted():
            self._set_up(model)
            self._give_gradients()
            self._step()
            self._name_tensors()
            if any(technique.frees_gradients for technique in used(settings)):
                self.optimizer.zero_grad()
            else:
                self._give_gradients()
            self.tracker.forget_peak()
            self._step()
            self.of_optimizer = self.tracker.highs()
            self.optimizer.zero_grad()

    def train(self, micro_batches: list[MicroBatch], first: bool) -> list[Moment]:
        """Return the moments of forward and backward passes; `first`: without gradients, unless they stay."""
        with self._counted():
            if self.sharded and not self._warm.issuperset(map(_sizes, micro_batches)):
                for micro_batch in micro_batches:
                    self._pass(micro_batch)
                self._name_tensors()
                self._warm.update(map(_sizes, micro_batches))
            self.optimizer.zero_grad()
            if self.keeps or not first:
                self._give_gradients()
            self.tracker.forget_peak()
            for micro_batch in micro_batches:
                self._pass(micro_batch)
            self.optimizer.zero_grad()
            return self.tracker.highs()

    def evaluate(self, evaluation: MicroBatch) -> list[Moment]:
        """Return the moments of a forward pass without gradients."""
        self.model.eval()
        with self._counted(), torch.no_grad(), self.tracker.at("evaluation", gathering=self.sharded):
            if self.keeps:
                self._give_gradients()
            self.tracker.forget_peak()
            run_model(self.fabric, self.model, evaluation.without_values())
            moments = self.tracker.highs()
        self.model.train()
        return moments

    @contextmanager
    def _counted(self) -> Iterator[None]:
        on_host = partial(self.tracker.at, "training", on_host=True)
        with self.mode, self.tracker, CudaKernels(), host_memory_within(on_host):
            yield

    def _set_up(self, model: nn.Module) -> None:
        holders: dict[int, list] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                holders.setdefault(id(parameter), []).append((module, name))
        model.to_empty(device="cpu")
        for tied in holders.values():  # to_empty has separated tied weights
            for module, name in tied[1:]:
                setattr(module, name, getattr(*tied[0]))
        self.model = self.fabric.setup(model)
        optimizer = build_optimizer(self.settings, self.model)
        if isinstance(optimizer, Adam | AdamW | SGD) and not self.parked:
            for group in optimizer.param_groups:
                if group["foreach"] is None and not group["fused"]:
                    group["foreach"] = True  # PyTorch's choice for parameters on a CUDA GPU
        optimizer.parts = 1  # of a weight in 4-bit Adam
        optimizer.single = True  # Kahan summation moves one weight at a time
        self.optimizer = self.fabric.setup_optimizers(optimizer)
        self._name_tensors()

    def _pass(self, micro_batch: MicroBatch) -> None:
        with self.tracker.at("training", gathering=self.sharded):
            parts = [micro_batch.without_values()]  # as in a run, it moves to the device before its pass
            accumulate_gradients(self.fabric, self.model, parts, self.meter, optimizer=self.optimizer)
        self.meter.discard()

    def _step(self) -> None:
        with self.tracker.at("optimizer", on_host=self.parked):
            if norm := self.settings.max_grad_norm:
                self.fabric.clip_gradients(self.model, self.optimizer, max_norm=norm, error_if_nonfinite=False)
            self.optimizer.step()

    def _give_gradients(self) -> None:
        """Create all gradients, as after an effective batch's first micro-batch."""
        for parameter in self.model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
                self.tracker.hold(parameter.grad, "host" if self.parked else "gradients")

    def _name_tensors(self) -> None:
        """Register the tensors that a run keeps from step to step."""
        for tensor in self.model.parameters():
            self.tracker.watch(tensor, parked=self.parked)
        for tensor in self.model.buffers():
            self.tracker.hold(tensor, "parameters")
        for tensor in tree_leaves(list(self.optimizer.state.values())):
            if isinstance(tensor, Tensor):
                self.tracker.hold(tensor, "host" if self.parked else "optimizer_state")

    def _shard(self, model: nn.Module, mesh: DeviceMesh) -> nn.Module:
        """Shard blocks and model, as in rungs 10 and 11."""
        options = sharding_policy(self.settings, mesh)
        for block in transformer_blocks(model):
            fully_shard(block, **options)
        return fully_shard(model, **options)


class FakeTensors(FakeTensorMode):
    """Fake tensors on a CPU; a value that is read is 1, or False."""

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        # the memo keeps a weak reference to each tensor, and Module.to cannot convert referenced tensors
        self.fake_tensor_converter.set_tensor_memo = lambda *_: None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping the compiler takes time in each operation

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.prim.device.default:  # autograd asks each tensor several times
            return args[0].device
        if operation is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            factors = [factor.bfloat16() for factor in args[:2]]  # its fake takes no other type
            return operation(*factors, *args[2:], **(kwargs or {})).to(args[0].dtype)
        try:
            return super().__torch_dispatch__(operation, types, args, kwargs or {})
        except DataDependentOutputException:
            if operation is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype  # the run reads a norm, or whether it is finite
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1


class _AllRanksStarted(LightningEnvironment):
    @property
    def creates_processes_externally(self) -> bool:
        return True

    def local_rank(self) -> int:
        return 0


def _rehearsed(precision: str) -> str:
    """Return a precision that runs on a CPU and needs the same memory."""
    return "bf16-mixed" if precision == "16-mixed" else precision


def _sizes(micro_batch: MicroBatch) -> tuple[int, ...]:
    return (micro_batch.masked, *(size for tensor in micro_batch.inputs.values() for size in tensor.shape))


def _largest(micro_batches: list[MicroBatch]) -> dict[tuple[int, ...], MicroBatch]:
    """Return the micro-batches that do not fit into another micro-batch, by their sizes."""
    shapes = {_sizes(micro_batch): micro_batch for micro_batch in micro_batches}
    return {
        sizes: micro_batch
        for sizes, micro_batch in shapes.items()
        if not any(_within(sizes, other) for other in shapes.keys() - {sizes})
    }


def _within(sizes: tuple[int, ...], other: tuple[int, ...]) -> bool:
    # micro-batches of the training may have one more input, at the end: the weights of the classes
    return all(one <= limit for one, limit in zip(sizes, other, strict=False))
