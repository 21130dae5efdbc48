"""Streamed layers: the weights of the blocks are in CPU memory, and on the device while a block computes.

With adapters these are the frozen weights. Without adapters all weights are trained: `WeightSteps` steps them in CPU
memory, as soon as the backward pass has a gradient (as MegaTrain does, 2026, arXiv:2604.05091).

With `stream_from` frozen weights are in files, and the blocks go to the device through two staging buffers in CPU
memory. The files have no names, so the system removes them with the process, however it ends.

The device has two buffers. Block N is always copied into buffer N % 2, and its weights are fixed views of that buffer.
So tensors that autograd has saved are right again whenever the block is back. ZeRO-Infinity overlaps such copies with
the computation (Rajbhandari et al., 2021, arXiv:2104.07857).

On CUDA a separate stream copies the next block while a block computes: the block after it in the forward pass, the
block before it in the backward pass. A copy waits for the computations that were started before it, since they may read
its buffer, and a block waits for its copy. So the passes of one step, and of two steps, need no other order. A backward
pass ends with the blocks that the next forward pass begins with, and a block that was stepped is copied again.

The gradient of a block's output brings the block back, before any recomputation: transformers checkpoints inside a
block's forward pass, so the recomputation calls no hook of the block. A block's gradients of its inputs need all of its
weights, and the block before it waits for these gradients. So all computation of a block is in the GPU's queue when the
copy into its buffer is started.
"""

import os
import sys
import tempfile
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves

from fabric_ladder.environment import return_freed_memory
from fabric_ladder.errors import refused
from fabric_ladder.models.layers import find_blocks, meta_model
from fabric_ladder.settings import Settings
from fabric_ladder.techniques.checkpointing import host_memory
from fabric_ladder.techniques.lora import LoRA
from fabric_ladder.techniques.memory import Counts, Peak, bytes_of_weight, streamed_weights
from fabric_ladder.techniques.qlora import NF4_BYTES
from fabric_ladder.techniques.technique import Technique

ALIGNMENT = 256  # bytes between the starts of two weights: enough for every kernel
FORWARD, BACKWARD = 1, -1


class _Buffers(NamedTuple):
    """The memory of the blocks, and what the buffers hold.

    Attributes:
        host: The weights of each block in CPU memory or in a file, as bytes.
        staging: Two buffers in CPU memory for blocks in files; else none.
        device: The two buffers.
        copying: The stream of the copies; None: they are made immediately.
        held: The block in each buffer, and the version of its weights in CPU memory.
        done: The end of the copy into each buffer.
    """

    host: list[Tensor]
    staging: list[Tensor]
    device: list[Tensor]
    copying: torch.cuda.Stream | None
    held: list[tuple[int, int] | None]
    done: list[torch.cuda.Event | None]


class BlockStream:
    """Brings the weights of blocks to the device, one block ahead of the computation.

    The buffers are made at the first use, when Fabric has converted the weights and chosen the device.

    Args:
        blocks: The weights of each block, in the order of the forward pass.
        folder: Folder of the files; None: the blocks are in CPU memory.

    Attributes:
        device: The device of the buffers.
    """

    def __init__(self, blocks: list[list[nn.Parameter]], folder: str | None = None):
        self.device = torch.device("cpu")
        self.folder = folder
        self._blocks = blocks
        self._buffers: _Buffers | None = None

    def use(self, number: int, direction: int) -> None:
        """Let later computations wait for a block, and start to copy its neighbour in this direction."""
        buffers = self._buffers = self._buffers or self._make()
        self._load(number)
        if done := buffers.done[number % 2]:
            torch.cuda.current_stream(self.device).wait_event(done)
        following = number + direction
        if following == len(self._blocks) and not torch.is_grad_enabled():  # the next batch of an evaluation
            following = 0
        if following in range(len(self._blocks)) and following % 2 != number % 2:
            self._load(following)

    def move(self, device: torch.device) -> None:
        """Let the next use make its buffers on this device; until then the weights are in CPU memory."""
        if buffers := self._buffers:
            for host, block in zip(buffers.host, self._blocks, strict=True):
                _give_views(block, host)
        self.device, self._buffers = device, None

    def on_host(self, number: int) -> list[Tensor]:
        """Return the weights of a block in CPU memory."""
        if self._buffers is None:
            return [weight.data for weight in self._blocks[number]]
        return _views(self._blocks[number], self._buffers.host[number])

    @torch.no_grad()
    def _load(self, number: int) -> None:
        """Start to copy a block into its buffer, unless it is there."""
        buffers, place = self._buffers, number % 2
        source = buffers.host[number]
        if buffers.held[place] == (number, source._version):  # otherwise steps or a checkpoint have changed it
            return
        buffers.held[place] = number, source._version
        target = buffers.device[place][: len(source)]
        source = self._in_memory(number)
        if buffers.copying is None:
            target.copy_(source)
            return
        buffers.copying.wait_stream(torch.cuda.current_stream(self.device))  # it may still read the block before
        with torch.cuda.stream(buffers.copying):
            target.copy_(source, non_blocking=True)
        buffers.done[place] = buffers.copying.record_event()

    def _in_memory(self, number: int) -> Tensor:
        """Return the bytes of a block in CPU memory; those of a file are read into a staging buffer."""
        buffers, source = self._buffers, self._buffers.host[number]
        if not buffers.staging:
            return source
        if done := buffers.done[number % 2]:
            done.synchronize()  # the copy of the block before may still read this staging buffer
        return buffers.staging[number % 2][: len(source)].copy_(source)

    @torch.no_grad()
    def _make(self) -> _Buffers:
        """Copy all weights to pinned memory or to files, block by block, and turn them into views of the buffers.

        If memory runs out in between, no weight is lost: a weight is a view of its copy until all have one.
        """
        on_cuda = self.device.type == "cuda"
        sizes = [sum(map(_aligned, block)) for block in self._blocks]
        largest = [max(sizes[place::2], default=0) for place in range(2)]
        device = [torch.empty(size, dtype=torch.uint8, device=self.device) for size in largest]
        staging = [_host_bytes(size, on_cuda) for size in largest] if self.folder else []
        host = []
        for number, (block, size) in enumerate(zip(self._blocks, sizes, strict=True)):
            whole = staging[number % 2][:size] if staging else _host_bytes(size, on_cuda)
            for view, weight in zip(_views(block, whole), block, strict=True):
                view.copy_(weight)
                weight.streamed_from = view
            host.append(in_file(whole, self.folder))
            _give_views(block, host[-1])
        for number, block in enumerate(self._blocks):
            _give_views(block, device[number % 2])
        copying = torch.cuda.Stream(self.device) if on_cuda else None
        for buffer in device if on_cuda else ():
            buffer.record_stream(copying)  # a last copy may still be in transfer when the model is deleted
        return _Buffers(host, staging, device, copying, [None, None], [None, None])


def in_file(tensor: Tensor, folder: str | None) -> Tensor:
    """Return the tensor in a memory-mapped file without a name in this folder; without a folder, as it is.

    Raises:
        UserError: The file cannot be written.
    """
    if not folder or not tensor.numel() or tensor.untyped_storage().filename:
        return tensor
    content = tensor.contiguous().view(-1).view(torch.uint8)
    with refused(f"--stream_from {folder} cannot hold the weights; choose another folder"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(content.numpy())
            file.flush()
            os.fsync(file.fileno())  # a full disk may show here; and the system can drop written pages from memory
            name = f"/dev/fd/{file.fileno()}"
            mapped = torch.from_file(name, shared=True, size=len(content), dtype=torch.uint8)
    return mapped.view(tensor.dtype).view(tensor.shape)


def _host_bytes(size: int, pinned: bool) -> Tensor:
    """Return bytes of CPU memory; PyTorch's own pinned tensors would be rounded up to a power of two."""
    with host_memory():
        found = torch.empty(size, dtype=torch.uint8, device="cpu")
    if pinned and size:
        from torch.cuda._pin_memory_utils import pin_memory

        pin_memory(found.data_ptr(), size)
        weakref.finalize(found, _unpin, found.data_ptr()).atexit = False
    return found


def _unpin(address: int) -> None:
    from torch.cuda._pin_memory_utils import unpin_memory

    torch.cuda.synchronize()
    unpin_memory(address)


def _aligned(weight: Tensor) -> int:
    return -(-weight.nbytes // ALIGNMENT) * ALIGNMENT


def _views(block: list[nn.Parameter], memory: Tensor) -> list[Tensor]:
    """Return tensors like the weights of a block, one after the other in this memory."""
    views, start = [], 0
    for weight in block:
        views.append(memory[start : start + weight.nbytes].view(weight.dtype).view(weight.shape))
        start += _aligned(weight)
    return views


def _give_views(block: list[nn.Parameter], memory: Tensor) -> None:
    for view, weight in zip(_views(block, memory), block, strict=True):
        weight.data = view


def chosen_blocks(streamed: bool | int, blocks: int) -> list[int]:
    """Return the numbers of the streamed blocks: all, or N blocks that are as far apart as possible.

    So the copy of a block has the time of several blocks. Which blocks it is does not change the peak.
    """
    if streamed is True or streamed >= blocks:
        return [*range(blocks)]
    return [number * (blocks - 1) // max(1, streamed - 1) for number in range(streamed)]


def stream_blocks(model: nn.Module, streamed: bool | int = True, folder: str | None = None) -> BlockStream:
    """Keep the weights of the model's blocks in CPU memory, in place; return their stream. Adapters stay on the device.

    Weights that a block shares with another module stay on the device. So do buffers, and the constants that unpack
    4-bit weights.

    Args:
        model: A model in CPU memory, before Fabric sets it up.
        streamed: The value of `stream_layers`.
        folder: The value of `stream_from`.
    """
    found = [*streamed_weights(model).items()]
    blocks = [found[number] for number in chosen_blocks(streamed, len(found))]
    stream = BlockStream([list(weights.values()) for _, weights in blocks], folder)
    for number, (block, weights) in enumerate(blocks):
        for weight in weights.values():
            weight.data = in_file(weight.data, folder)
        block._apply = partial(_apply, block, stream, set(map(id, weights.values())))
        block.register_forward_pre_hook(lambda *_, number=number: stream.use(number, FORWARD))
        block.register_forward_hook(partial(_await_gradient, stream, number), with_kwargs=True)
        block.register_state_dict_post_hook(partial(_give_host, stream, number, list(weights)))
    return stream


def _await_gradient(stream: BlockStream, number: int, _: nn.Module, args: tuple, kwargs: dict, output: object) -> None:
    """Bring a block back when the gradient of its output is there, before its backward pass.

    T5's blocks pass on the first block's position bias, whose gradient is there when the first block is needed.
    """
    passed_on = set(map(id, tree_leaves((args, kwargs))))
    for tensor in tree_leaves(output):
        if isinstance(tensor, Tensor) and tensor.requires_grad and id(tensor) not in passed_on:
            tensor.register_hook(lambda _: stream.use(number, BACKWARD))


def _give_host(stream: BlockStream, number: int, names: list[str], _: nn.Module, state: dict, prefix: str, __) -> None:
    """Put the weights in CPU memory into a state dict, since the buffer may hold another block."""
    state.update(zip((prefix + name for name in names), stream.on_host(number), strict=True))


def _apply(block: nn.Module, stream: BlockStream, streamed: set[int], function, recurse: bool = True) -> nn.Module:
    """Convert and move a block, except that its streamed weights are converted in CPU memory and stay there."""

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in streamed:
            return function(tensor)
        like = function(torch.empty(0, dtype=tensor.dtype, device=stream.device))
        stream.move(like.device)
        if constants := getattr(tensor, "quant_state", None):  # 4-bit weights are packed in CPU memory
            constants.to(like.device)
            return tensor
        return in_file(tensor.data.to("cpu", like.dtype), stream.folder)

    return type(block)._apply(block, move, recurse)


class StreamedLayers(Technique):
    """Keep the weights of the blocks in CPU memory."""

    refused_on_mps = "--stream_layers true, since Apple's GPUs share the CPU's memory: leave it out"

    def reason_against(self, settings: Settings, capability: tuple[int, int] | None) -> str | None:
        if settings.ranks > 1:
            return "only on one device; use --devices 1, or src/10_fsdp.py --lora true, which shards the weights"
        if not settings.lora and not (settings.step_in_backward and settings.optimizer_offload):
            return (
                "add --lora true; or train all weights with --step_in_backward true and --optimizer_offload true, as "
                "src/29_streamed_training.py does"
            )
        if not settings.lora and settings.precision.endswith("mixed"):
            return "mixed precision keeps a 16-bit copy of all weights on the device; use --precision bf16-true"
        if settings.stream_from and not settings.lora:
            return "--stream_from holds frozen weights alone, and each step would write trained ones; leave it out"
        if settings.stream_from and sys.platform == "win32":
            return "--stream_from does not work on Windows, which cannot map files without names; leave it out"
        model = meta_model(settings)
        if not (blocks := len(find_blocks(model))):
            return f"transformers marks no blocks in {model.config.model_type}; leave it out"
        if settings.stream_layers > blocks:
            return f"{settings.model} has {blocks} blocks; use at most {blocks}, or true for all"
        return None

    def notice(self, settings: Settings) -> str | None:
        lines = []
        if settings.stream_layers is not True and settings.stream_layers <= 2:
            lines += ["two streamed blocks are on the device at any time, so up to 2 free no memory"]
        if settings.stream_from:
            lines += [f"the files of frozen weights in {settings.stream_from} have no names, and go when the run ends"]
        return f"Streamed layers: {'; '.join(lines)}" if lines else None

    @contextmanager
    def reading(self, settings: Settings) -> Iterator[None]:
        """Move each weight to a file when transformers has read it."""
        if not settings.stream_from:
            yield
            return
        os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # otherwise threads read all weights before they are written

        def move(module: nn.Module, name: str, weight: nn.Parameter) -> None:
            if weight.device.type == "cpu":
                weight.data = in_file(weight.data, settings.stream_from)
                return_freed_memory()  # constants of 4-bit weights lie between

        handle = register_module_parameter_registration_hook(move)
        try:
            yield
        finally:
            handle.remove()

    def change_model(self, model: nn.Module, settings: Settings) -> nn.Module:
        stream_blocks(model, settings.stream_layers, settings.stream_from)
        return model

    def rehearsed(self, settings: Settings) -> Settings:
        return replace(settings, stream_layers=False)

    def add_memory(self, peak: Peak, counts: Counts, settings: Settings) -> Peak:
        """Move the weights of the blocks to CPU memory, except two buffers of a block's size.

        `OptimizerOffload` has counted trained weights there. Blocks in files have two staging buffers there.
        """
        whole = _streamed_bytes(counts, settings)
        streamed = whole * _streamed_share(settings)
        count = 2 if settings.stream_layers is True else min(2, settings.stream_layers)
        buffers = count * whole * counts.largest_block / max(1, counts.in_blocks)
        host = peak.host + round(buffers if settings.stream_from else streamed) * settings.lora
        return peak._replace(parameters=peak.parameters - round(streamed - buffers), host=host)

    def loaded_bytes(self, loaded: int, counts: Counts, settings: Settings) -> int:
        """Return the bytes of one weight on its way to a file, and of all that is not written while it is read.

        These are the constants of 4-bit weights, and the linear layers that adapters convert to 16 bits.
        """
        if not settings.stream_from:
            return loaded
        kept = NF4_BYTES - 1 / 2 if settings.quantization != "no" else 2 * settings.precision.endswith("mixed")
        return LoRA().loaded_bytes(4 * counts.largest_layer, counts, settings) + round(kept * counts.linear)

    def bytes_per_pass(self, settings: Settings) -> float:
        """Return the bytes of weights that come to the device in the forward and in the backward pass."""
        return 2 * _linear_bytes(settings) * _streamed_share(settings)


def _streamed_share(settings: Settings) -> float:
    """Return the part of the blocks' weights that is streamed."""
    if settings.stream_layers is True:
        return 1
    weights = streamed_weights(meta_model(settings)).values()
    sizes = [sum(weight.numel() for weight in block.values()) for block in weights]
    return sum(sizes[number] for number in chosen_blocks(settings.stream_layers, len(sizes))) / max(1, sum(sizes))


def _linear_bytes(settings: Settings) -> float:
    """Return the bytes of a frozen linear layer per weight, without the constants of 4-bit weights."""
    return 1 / 2 if settings.quantization != "no" else bytes_of_weight(settings, frozen_linear=True)


def _streamed_bytes(counts: Counts, settings: Settings) -> float:
    """Return the bytes of the streamed weights."""
    others = (counts.in_blocks - counts.linear_in_blocks) * bytes_of_weight(settings)
    return counts.linear_in_blocks * _linear_bytes(settings) + others
