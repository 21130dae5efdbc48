"""Record the memory of a training step of BLOOM-560m, operation by operation.

The tensors are fake: they have a shape, a type and a storage, but no memory behind it. So the sums are predictions, and
the peaks are those of `benchmarks/results/memory_ladder.json`.
"""

import weakref
from collections import Counter
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import BloomConfig, BloomForSequenceClassification

from fabric_ladder.models.activations import fuse_gelu
from fabric_ladder.techniques.fused_attention import fuse_attention


class Step(NamedTuple):
    """A training step: bytes by part after each operation, phases as (name, start, end), and what the forward kept."""

    samples: list[Counter]
    phases: list[tuple[str, float, float]]
    kept: Counter


class Recorder(TorchDispatchMode):
    """Adds up the bytes of living tensors by part, after every operation of PyTorch."""

    def __init__(self):
        super().__init__()
        self.made: dict[int, tuple[str, int, str]] = {}  # part, bytes and operation of each living storage
        self.live: Counter = Counter()
        self.samples: list[Counter] = []
        self.making = ""  # the part of all new tensors, if that is known

    def hold(self, tensor: torch.Tensor, part: str, operation: str = "") -> None:
        """Count a tensor as this part, even if it was counted as another."""
        storage = tensor.untyped_storage()
        if storage._cdata in self.made:
            self.drop(storage._cdata)
        else:
            weakref.finalize(storage, self.drop, storage._cdata)
        self.made[storage._cdata] = (part, storage.nbytes(), operation)
        self.live[part] += storage.nbytes()

    def drop(self, key: int) -> None:
        """Stop counting a storage."""
        part, size, _ = self.made.pop(key)
        self.live[part] -= size

    def copy(self, tensor: torch.Tensor, source: str, target: str) -> torch.Tensor:
        """Return a copy that counts as `target` if the tensor counts as `source`, else the tensor."""
        part, _, _ = self.made.get(tensor.untyped_storage()._cdata, ("", 0, ""))
        if part != source:
            return tensor
        self.making = target
        copy = tensor.clone()
        self.making = ""
        return copy

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()  # enabled: recomputation
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.made:
                self.hold(tensor, self.making or ("temporary" if backward else "activations"), operation.__name__)
        self.samples.append(self.live.copy())
        return result


@cache
def record(
    rows: int = 1, tokens: int = 1024, micro_batches: int = 1, dtype: torch.dtype = torch.bfloat16, fused: bool = True,
    checkpointing: str = "", blocks: int = 24, offload: bool = False, in_backward: bool = False,
) -> Step:  # fmt: skip
    """Record a training step of BLOOM-560m with Adam, whose state exists already.

    Args:
        rows: Texts in a micro-batch.
        tokens: Tokens in each text.
        micro_batches: Forward and backward passes before the step.
        dtype: Type of weights, gradients and optimizer state.
        fused: Whether attention works without a matrix of tokens x tokens.
        checkpointing: Which blocks' activations are recomputed: none, "all" or the "cheap" ones.
        blocks: How many of the first blocks that applies to.
        offload: Whether saved activations wait in CPU memory.
        in_backward: Whether the backward pass steps each weight and frees its gradient.
    """
    recorder = Recorder()
    with FakeTensorMode(allow_non_fake_inputs=True), recorder:
        model = bloom(dtype, fused, checkpointing, blocks)
        optimizers = {weight: torch.optim.Adam([weight], fused=True) for weight in model.parameters()}
        for weight, optimizer in optimizers.items():
            recorder.hold(weight.detach(), "weights")
            weight.grad = torch.zeros_like(weight)
            optimizer.step()
            for tensor in optimizer.state[weight].values():
                recorder.hold(tensor, "optimizer state")
            weight.grad = None
            weight.register_post_accumulate_grad_hook(lambda weight: recorder.hold(weight.grad, "gradients"))
            if in_backward:
                weight.register_post_accumulate_grad_hook(partial(step_and_free, optimizer))
        ids, labels = torch.zeros(rows, tokens, dtype=torch.long), torch.zeros(rows, dtype=torch.long)
        recorder.samples.clear()
        marks = []
        for number in range(micro_batches):
            with torch.autograd.graph.saved_tensors_hooks(*to_cpu(recorder, offload)):
                loss = model(input_ids=ids, labels=labels).loss
            if not number:
                kept = Counter()
                for part, size, operation in recorder.made.values():
                    kept[operation] += size * (part == "activations")
            marks.append(("forward", len(recorder.samples)))
            loss.backward()
            del loss
            marks.append(("backward", len(recorder.samples)))
        if not in_backward:
            for optimizer in optimizers.values():
                optimizer.step()
            marks.append(("step", len(recorder.samples)))
    ends = [0, *(end / len(recorder.samples) for _, end in marks)]
    phases = [(name, *edges) for (name, _), edges in zip(marks, pairwise(ends), strict=True)]
    return Step(recorder.samples, phases, kept)


def bloom(dtype: torch.dtype, fused: bool, checkpointing: str, blocks: int = 24) -> torch.nn.Module:
    """Return a classifier with the shape of BLOOM-560m; checkpointing as in src/plain/7, 21 and 28."""
    config = BloomConfig(vocab_size=250_880, hidden_size=1024, n_layer=24, n_head=16, use_cache=False, pad_token_id=3)
    model = BloomForSequenceClassification._from_config(config, dtype=dtype)
    if fused:
        fuse_attention(model)
        fuse_gelu(model)

    def policy(context, operation, *args, **options):
        keep = operation.__name__.startswith(("mm.", "addmm.", "_scaled_dot_product_"))
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    options = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if checkpointing == "cheap" else {}
    for block in model.transformer.h[:blocks] if checkpointing else []:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **options)
    return model


def step_and_free(optimizer: torch.optim.Optimizer, weight: torch.nn.Parameter) -> None:
    """Step a weight and free its gradient, as in src/plain/17."""
    optimizer.step()
    weight.grad = None


def to_cpu(recorder: Recorder, offload: bool) -> tuple[Callable, Callable]:
    """Return hooks that copy saved activations to CPU memory and back, as `save_on_cpu` in src/plain/20 does."""

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return recorder.copy(tensor, "activations", "CPU memory") if offload else tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return recorder.copy(tensor, "CPU memory", "activations")

    return pack, unpack
