"""Which tensors are alive, what they hold, and when that is most: `PeakTracker`, and its result, a `Peak`.

`MemTracker` of `torch.distributed._tools` does the same, and is what the tests compare with; it takes several times as
long, cannot follow FSDP and several steps at once, and does not tell which tensors make the peak.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ON_DEVICE = ("parameters", "gradients", "optimizer_state", "activations", "logits", "other")


class Storage(NamedTuple):
    """What a tensor holds together with its views.

    Attributes:
        bytes: Its size.
        part: What it is for: a field of `Peak`.
        made_by: The operation that it is a result of.
        dtype: Of the first tensor in it.
        shape: Of the first tensor in it.
    """

    bytes: int
    part: str
    made_by: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def on_device(self) -> int:
        """Its bytes, but for those parked in the host's memory."""
        return 0 if self.part == "host" else self.bytes

    @property
    def parked(self) -> int:
        """Its bytes in the host's memory."""
        return self.bytes - self.on_device


class Peak(NamedTuple):
    """What one device's memory holds, in bytes, at the moment when it holds most.

    Attributes:
        parameters: Weights and buffers; under FSDP the shards and what is gathered of the others.
        gradients: Gradients of the parameters.
        optimizer_state: What the optimizer keeps of each parameter.
        activations: What the forward pass made, or its repetition under activation checkpointing.
        logits: Of that, and of their gradients, what has a value for each entry of the vocabulary.
        other: Inputs, gradients of activations, and what the optimizer needs for a moment.
        host: The most that CPU offload keeps in the host's memory at any moment; no part of the total.
        phase: The moment: `training` (forward or backward), `optimizer` or `evaluation`.
        tensors: What is on the device then: how many of each, those first that hold most together.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    logits: int
    other: int
    host: int
    phase: str
    tensors: list[tuple[int, Storage]]

    @property
    def total(self) -> int:
        """All that is on the device."""
        return sum(getattr(self, part) for part in ON_DEVICE)


class PeakTracker(TorchDispatchMode):
    """Counts the storages of the tensors that are made while it is entered, until they are freed.

    Args:
        fake_mode: Only this mode's tensors count, not those on which DTensor works out shapes; None: real tensors.
        vocabulary: Entries that a language model knows, to tell its logits; None: there are none to speak of.
    """

    def __init__(self, fake_mode: FakeTensorMode | None = None, vocabulary: int | None = None):
        super().__init__()
        self._fake_mode, self._vocabulary = fake_mode, vocabulary
        self._phase, self._on_host = "training", False
        self._live: dict[int, Storage] = {}  # by address, which is nobody else's while the storage lives
        self._references: dict[int, weakref.ref] = {}
        self._watched: set[int] = set()
        self._total = self._parked = 0  # bytes on the device, and in the host's memory
        self.forget_peak()

    @contextmanager
    def at(self, phase: str, on_host: bool = False, gathering: bool = False) -> Iterator[None]:
        """Count what is made inside this block towards a phase of the run.

        Args:
            phase: See `Peak`.
            on_host: New tensors are in the host's memory.
            gathering: FSDP gives the modules parameters of which the model's own are shards.
        """
        self._note_peak()
        self._phase, self._on_host = phase, on_host
        hook = register_module_forward_pre_hook(self._watch_gathered) if gathering else None
        try:
            yield
        finally:
            self._note_peak()
            self._on_host = False
            if hook:
                hook.remove()

    def hold(self, tensor: Tensor, part: str) -> None:
        """Count a tensor as this part of the peak, whether it was counted before or not."""
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self._count(tensor, part, "")
        key = tensor.untyped_storage()._cdata
        self._put(key, self._live[key]._replace(part=part))

    def watch(self, parameter: nn.Parameter, parked: bool = False) -> None:
        """Count a parameter, and its gradient as soon as there is one; `parked`: both in the host's memory."""
        self.hold(parameter.detach(), "host" if parked else "parameters")
        if parameter.requires_grad and id(parameter) not in self._watched:
            self._watched.add(id(parameter))
            part = "host" if parked else "gradients"
            parameter.register_post_accumulate_grad_hook(  # an optimizer may have stepped and freed it by then
                lambda same: None if same.grad is None else self.hold(same.grad, part)
            )

    def forget_peak(self) -> None:
        """Let the peak start from what is held now."""
        self._peak, self._at_peak, self._peak_phase = 0, {}, self._phase
        self._most_parked = self._parked

    def peak(self) -> Peak:
        """Return the highest state since `forget_peak`."""
        self._note_peak()
        sums = dict.fromkeys(ON_DEVICE, 0)
        counts = Counter(storage for storage in self._at_peak.values() if storage.on_device)
        for storage, count in counts.items():
            sums[storage.part] += count * storage.bytes
        tensors = sorted(((count, storage) for storage, count in counts.items()), key=lambda x: -x[0] * x[1].bytes)
        return Peak(**sums, host=self._most_parked, phase=self._peak_phase, tensors=tensors)

    def __enter__(self) -> "PeakTracker":
        plain = self._plain_resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int) -> None:
            plain(storage, size)  # so FSDP frees and refills what it gathers, and no dispatch mode is told
            if held := self._live.get(storage._cdata):
                self._put(storage._cdata, held._replace(bytes=storage.nbytes()))

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error) -> None:
        torch.UntypedStorage.resize_ = self._plain_resize
        super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # comes back with the local tensors
        result = operation(*args, **(kwargs or {}))
        part = None
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and self._counts(tensor):
                part = part or self._part(operation, args)
                self._count(tensor, part, operation.name())
        return result

    def _note_peak(self) -> None:
        """Keep what is held now, if it is the most so far; called before anything is freed, not at every rise."""
        if self._total > self._peak:
            self._peak, self._at_peak, self._peak_phase = self._total, dict(self._live), self._phase

    def _counts(self, tensor: Tensor) -> bool:
        return getattr(tensor, "fake_mode", None) is self._fake_mode and not tensor.is_meta

    def _part(self, operation, args: tuple) -> str:
        """Return the part of the peak that an operation's results belong to."""
        if self._on_host:
            return "host"
        if operation is torch.ops.aten._to_copy.default:  # FSDP adds gradients up in a precision of their own
            source = self._live.get(args[0].untyped_storage()._cdata)
            if source and source.part == "gradients":
                return "gradients"
        backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()  # enabled: recomputing
        return "other" if backward or self._phase == "optimizer" else "activations"

    def _watch_gathered(self, module: nn.Module, _) -> None:
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                self.watch(parameter)

    def _count(self, tensor: Tensor, part: str, made_by: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._references[key] = weakref.ref(storage, partial(self._drop, key))
            if part in ("activations", "other") and tensor.shape[-1:] == (self._vocabulary,):
                part = "logits"
            self._put(key, Storage(storage.nbytes(), part, made_by, tensor.dtype, tuple(tensor.shape)))

    def _put(self, key: int, storage: Storage) -> None:
        before = self._live.get(key)
        more = storage.on_device - (before.on_device if before else 0)
        if more < 0:
            self._note_peak()
        self._total += more
        self._parked += storage.parked - (before.parked if before else 0)
        self._most_parked = max(self._most_parked, self._parked)
        self._live[key] = storage

    def _drop(self, key: int, _) -> None:
        self._note_peak()
        storage = self._live.pop(key)
        self._total -= storage.on_device
        self._parked -= storage.parked
        del self._references[key]
