"""Small models for the planner, and the peaks of their real tensors."""

import json

import torch
import torch.distributed as dist
from lightning import Fabric
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.fsdp import fully_shard

from fabric_ladder import build_model, build_optimizer
from fabric_ladder.distributed.ddp import DDPInBuckets
from fabric_ladder.distributed.fsdp import fsdp_strategy, sharding_policy, transformer_blocks
from fabric_ladder.planning.cuda_kernels import CudaKernels
from fabric_ladder.planning.predict import blank_datasets, largest_batches
from fabric_ladder.planning.tracker import PeakTracker
from fabric_ladder.runs.metrics import Meter
from fabric_ladder.techniques.checkpointing import host_memory_within
from fabric_ladder.techniques.memory import Peak
from fabric_ladder.training.gradients import accumulate_gradients, forget_gradients
from support.helpers import MODELS, settings_for

VIT = {"model_type": "vit", "image_size": 64, "patch_size": 8, "hidden_size": 64, "num_hidden_layers": 2,
       "num_attention_heads": 4, "intermediate_size": 256}  # fmt: skip
PIXELS, PATCHES = 64, 65
NO_PEAK = Peak(0, 0, 0, 0, 0, 0, 0, "training")


def case(tmp_path, family, **values):
    """Return the settings of a small model, and the largest micro-batches of its training and its evaluation."""
    path = MODELS / "bloom-quickstart.json"
    if family == "vit":
        path = tmp_path / "vit.json"
        path.write_text(json.dumps(VIT))
        values["task"] = "image-classification"
    if family == "bloom-lm":
        values = {"task": "instruction-tuning", "loss_chunk": 64} | values
    settings = settings_for(tmp_path, **({"batch_size": 8, "model": str(path), "from_scratch": True} | values))
    return settings, *(largest_batches(settings, PATCHES, PIXELS) if family == "vit" else largest_batches(settings, 96))


def build(settings):
    return build_model(settings, blank_datasets(2, PIXELS if settings.task == "image-classification" else None))


def count_weights(settings):
    return sum(parameter.numel() for parameter in build(settings).parameters())


class Unmoved:
    """Holds an input that needs no memory before it is moved to the device."""

    def __init__(self, tensor, counts):
        self.tensor, self.counts = tensor, counts

    def to(self, device, **_):
        zeros = torch.zeros_like(self.tensor, device=device)
        return zeros + torch.arange(zeros.shape[-1]) if self.counts else zeros


def real(micro_batch):
    """Return the micro-batch with real tensors."""
    inputs = {name: Unmoved(each, counts=name == "position_ids") for name, each in micro_batch.inputs.items()}
    return micro_batch._replace(inputs=inputs)


def set_up(settings, **options):
    """Return Fabric, the model and the optimizer of a run on CPU processes."""
    fabric = Fabric(accelerator="cpu", devices=settings.devices, precision=settings.precision, **options)
    fabric.launch()
    model = fabric.setup(build(settings))
    return fabric, model, fabric.setup_optimizers(build_optimizer(settings, model))


def measured_peak(settings, micro_batches):
    """Return the bytes of real tensors at the peak of the second step, from PyTorch's tracker.

    Both sides have the operations of a GPU, which keep other tensors than a CPU's.

    PyTorch's tracker fails on frozen parameters, so the project's tracker counts these models.
    """
    if settings.lora or settings.train_blocks != "all" or settings.block_steps:
        return tracked_peak(settings, micro_batches).total
    fabric, model, optimizer = set_up(settings)
    tracker = MemTracker()

    def step():
        for micro_batch in micro_batches:
            tracker.reset_mod_stats()  # otherwise it refuses a second pass
            accumulate_gradients(fabric, model, [real(micro_batch)], Meter(fabric), optimizer=optimizer)
        if settings.max_grad_norm:
            fabric.clip_gradients(model, optimizer, max_norm=settings.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=not settings.cuda_graphs)

    step()
    tracker.track_external(model, optimizer.optimizer)
    with tracker, CudaKernels():
        step()
    return tracker.get_tracker_snapshot("peak")[torch.device("cpu")]["Total"]


def tracked_peak(settings, micro_batches, **options):
    """Return the peak of real tensors in the second step, from the project's tracker.

    PyTorch's tracker for FSDP follows one pass only.
    """
    fabric, model, optimizer = set_up(settings, **options)
    tracker = PeakTracker()
    parked = settings.offload
    with tracker, CudaKernels(), host_memory_within(lambda: tracker.at("training", on_host=True)):
        for _ in range(2):
            for parameter in model.parameters():
                tracker.watch(parameter, parked=parked)
                if parameter.grad is not None:  # a part of DDP's buckets
                    tracker.hold(parameter.grad, "gradients")
            for state in optimizer.state.values():
                for tensor in state.values():
                    tracker.hold(tensor, "host" if parked else "optimizer_state")
            tracker.forget_peak()
            with tracker.at("training", gathering=settings.strategy == "fsdp"):
                accumulate_gradients(fabric, model, list(map(real, micro_batches)), Meter(fabric), optimizer=optimizer)
            with tracker.at("optimizer", on_host=parked):
                optimizer.step()
                forget_gradients(fabric, optimizer)
    return tracker.peak()


def strategy_of(settings):
    """Return Fabric's strategy for DDP or FSDP over gloo, as the rungs choose it."""

    def shard(model, mesh):
        options = sharding_policy(settings, mesh)
        for block in transformer_blocks(model):
            fully_shard(block, **options)
        return fully_shard(model, **options)

    return DDPInBuckets() if settings.strategy == "ddp" else fsdp_strategy(settings, shard)


def peak_of_ranks(settings, micro_batches):
    """Return the peak of each rank of DDP or FSDP over gloo, on as many processes as the settings have devices."""
    try:
        return tracked_peak(settings, micro_batches, strategy=strategy_of(settings))
    finally:
        dist.destroy_process_group()
