"""Activation checkpointing: keep the input of each block, and recompute its activations for the backward pass.

`selective_checkpointing` also keeps the results of attention and matrix multiplications, which take most of the time.
(Korthikanti et al., 2022, arXiv:2205.05198, recompute only attention, which kept a matrix of tokens x tokens then.
Flash kernels keep none.)

`activation_offload` keeps the inputs in CPU memory. On CUDA a separate stream copies them, one at a time: to the CPU
while the block computes, and back while the backward pass computes the block after it. So the device holds at most two
inputs of other blocks, however far Python is ahead of it. (`Tensor.record_stream` would give memory back too late.)
"""

import logging
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import PretrainedConfig

from fabric_ladder.environment import within
from fabric_ladder.models.configs import class_for, load_config
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.technique import Technique

ATTENTION = ("aten::_scaled_dot_product_", "torch_attn::_varlen_attn")  # so begin the names of all attention kernels
PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm")
# Phi-MoE, for example, draws numbers in its router. A test runs each of these architectures.
RANDOM_ONLY_IN_DROPOUT = frozenset(
    "bloom gemma3_text gpt2 gpt_neox granite llama mistral olmo2 phi phi3 qwen2 qwen3 starcoder2 vit".split()
)
LONG = 4096  # tokens: two tiles that are large enough for a GPU
_host_memory: Callable[[], AbstractContextManager] = nullcontext


def enable_checkpointing(model: nn.Module, settings: Settings) -> None:
    """Let a model of transformers recompute its blocks for the backward pass.

    Args:
        model: Before Fabric sets it up.
        settings: `activation_offload` and `selective_checkpointing`.
    """
    options = {"use_reentrant": False, "preserve_rng_state": may_draw(model.config, settings)}
    if settings.selective_checkpointing:
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)  # warns of in-place operations
        options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
    model.activation_checkpointing_enable(options)
    if settings.activation_offload:
        offload = _Offload()
        for module in model.modules():
            if checkpoint := getattr(module, "_gradient_checkpointing_func", None):
                module._gradient_checkpointing_func = partial(_checkpoint_on_host, checkpoint, offload)


def may_draw(config: PretrainedConfig, settings: Settings) -> bool:
    """Return whether a block may draw random numbers in training, which its recomputation must draw again."""
    adapters = settings.lora and settings.lora_dropout
    dropouts = [value for name, value in config.to_dict().items() if "drop" in name]
    return bool(config.model_type not in RANDOM_ONLY_IN_DROPOUT or any(dropouts) or adapters)


def _policy(_, operation: torch._ops.OpOverload, *args, **kwargs) -> CheckpointPolicy:
    """Return whether an operation's result is kept."""
    name = operation.name()
    if name.startswith(ATTENTION):
        # attention with dropout draws random numbers; skipping it would change all numbers drawn after it
        places = {argument.name: place for place, argument in enumerate(operation._schema.arguments)}
        place = places.get("dropout_p", len(args))
        kept = not (args[place] if place < len(args) else kwargs.get("dropout_p", 0.0))
    elif name == "aten::bmm":  # attention without a kernel; its matrix of tokens x tokens is not kept
        rows, inner, columns = *args[0].shape[1:], args[1].shape[-1]
        kept = rows * columns <= (rows + columns) * inner
    else:
        kept = name in PRODUCTS
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


def _checkpoint_on_host(checkpoint: Callable, offload: "_Offload", function: Callable, hidden: Tensor, *others):
    """Checkpoint a block with its input in CPU memory; `others`, such as masks, are shared by all blocks and stay."""
    with saved_tensors_hooks(offload.pack, offload.unpack):
        return checkpoint(lambda hidden: function(hidden, *others), hidden)


def host_memory_within(context: Callable[[], AbstractContextManager]) -> AbstractContextManager:
    """Allocate the tensors in CPU memory within a context, for a count of memory that recognizes them."""
    return within(globals(), _host_memory=context)


def host_memory() -> AbstractContextManager:
    """Return the context for allocating tensors in CPU memory."""
    return _host_memory()


class _Kept:
    """A block's input in CPU memory.

    Args:
        tensor: The input on the device.
        before: A weak reference to the input of the block before.
    """

    def __init__(self, tensor: Tensor, before: weakref.ref):
        with host_memory():
            self.host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda)
        self.device, self.before = tensor.device, before


class _Move(NamedTuple):
    """The last started copy: its input, the tensor on the device, and the event that ends it."""

    kept: weakref.ref
    tensor: Tensor
    done: torch.Event | None


class _Offload:
    """Copies to CPU memory and back; only the computing stream allocates and frees memory."""

    def __init__(self):
        self._last: Callable = lambda: None
        self._move: _Move | None = None
        self._copying: torch.Stream | None = None

    def pack(self, tensor: Tensor) -> _Kept | Tensor:
        """Start to copy a block's input to CPU memory; the device keeps it until the next input arrives."""
        if not tensor.numel():  # of a checkpoint of PyTorch 2.11
            return tensor
        kept = _Kept(tensor, self._last)
        self._last = weakref.ref(kept)
        self._start(kept, tensor, kept.host, tensor)
        return kept

    def unpack(self, kept: _Kept | Tensor) -> Tensor:
        """Return a block's input on the device, and start to copy the input of the block before."""
        if isinstance(kept, Tensor):
            return kept
        tensor = self._fetch(kept)
        self._finish()
        if before := kept.before():
            self._fetch(before)
        return tensor

    def _fetch(self, kept: _Kept) -> Tensor:
        if not self._move or self._move.kept() is not kept:
            tensor = torch.empty_like(kept.host, device=kept.device)
            self._start(kept, tensor, tensor, kept.host)
        return self._move.tensor

    def _start(self, kept: _Kept, tensor: Tensor, target: Tensor, source: Tensor) -> None:
        self._finish()
        done = None
        if tensor.is_cuda:
            copying = self._copying = self._copying or torch.cuda.Stream(tensor.device)
            copying.wait_stream(torch.cuda.current_stream(tensor.device))
            with torch.cuda.stream(copying):
                target.copy_(source, non_blocking=True)
            done = copying.record_event()
        else:
            target.copy_(source)
        # if a pass fails, no `unpack` follows: the tensor is freed together with autograd's graph
        self._move = _Move(weakref.ref(kept, lambda _: self._finish()), tensor, done)

    def _finish(self) -> None:
        """Let later computations wait for the copy; then the tensor may be freed."""
        if self._move and self._move.done:
            torch.cuda.current_stream(self._move.tensor.device).wait_event(self._move.done)
        self._move = None


class ActivationCheckpointing(Technique):
    """Keep the inputs of the blocks, and recompute all other activations for the backward pass."""

    recomputes = True

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        config = load_config(settings.model)
        if class_for(config, settings.task).supports_gradient_checkpointing:
            return None
        return f"transformers does not offer it for {config.model_type}"

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        enable_checkpointing(model, settings)
        return model


class ActivationOffload(Technique):
    """Keep the inputs of the blocks in CPU memory; `ActivationCheckpointing` applies it."""

    refused_on_mps = "--activation_offload true, since Apple's GPUs share the CPU's memory: leave it out"


class SelectiveCheckpointing(Technique):
    """Also keep the results of attention and matrix multiplications; `ActivationCheckpointing` applies it."""

    explained_errors = (
        (
            "cached during selective activation checkpoint has been mutated",
            "--selective_checkpointing true: the blocks of this model change kept results in place; use "
            "src/7_grad_checkpointing.py",
        ),
    )

    def on_cuda(self, settings: Settings) -> dict[str, str]:
        """Return the compiler, which calls `_policy` once; otherwise Python calls it for each operation."""
        return {"compile": "selective checkpointing is slow without it"}
