"""`PeakTracker` follows the memory of all live tensors and records the peak as a `Peak`.

The tests compare it with `MemTracker` of `torch.distributed._tools`. That class takes several times as long, cannot
follow FSDP over several steps, and does not list the tensors of the peak.
"""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_ladder.techniques.memory import ON_DEVICE, Peak, Storage


class PeakTracker(TorchDispatchMode):
    """Counts the storages of tensors from their creation inside its context until they are freed.

    Args:
        fake_mode: Count only tensors of this mode. DTensor computes shapes on other fake tensors. None: real tensors.
        vocabulary: Size of a language model's vocabulary, to recognize logits; None: the model is a classifier.
    """

    def __init__(self, fake_mode: FakeTensorMode | None = None, vocabulary: int | None = None):
        super().__init__()
        self._fake_mode = fake_mode
        self._vocabulary = vocabulary
        self._phase = "training"
        self._on_host = False
        self._live: dict[int, Storage] = {}  # by address, which is unique while the storage lives
        self._references: dict[int, weakref.ref] = {}
        self._watched: set[int] = set()
        self._total = 0  # bytes on the device
        self._parked = 0  # bytes in CPU memory
        self.forget_peak()

    @contextmanager
    def at(self, phase: str, on_host: bool = False, gathering: bool = False) -> Iterator[None]:
        """Assign new tensors inside this block to a phase of the run.

        Args:
            phase: A phase of `Peak`.
            on_host: Whether new tensors are in CPU memory.
            gathering: Whether FSDP replaces the modules' sharded parameters by gathered parameters.
        """
        self._note_peak()
        self._phase = phase
        self._on_host = on_host
        hook = register_module_forward_pre_hook(self._watch_gathered) if gathering else None
        try:
            yield
        finally:
            self._note_peak()
            self._on_host = False
            if hook:
                hook.remove()

    def hold(self, tensor: Tensor, part: str) -> None:
        """Count a tensor as this part of the peak, even if it was counted before."""
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self._count(tensor, part, "")
        key = tensor.untyped_storage()._cdata
        self._put(key, self._live[key]._replace(part=part))

    def watch(self, parameter: nn.Parameter, parked: bool = False) -> None:
        """Count a parameter and its later gradient; `parked`: both are in CPU memory."""
        self.hold(parameter.detach(), "host" if parked else "parameters")
        if parameter.requires_grad and id(parameter) not in self._watched:
            self._watched.add(id(parameter))
            part = "host" if parked else "gradients"
            parameter.register_post_accumulate_grad_hook(  # an optimizer may already have freed the gradient
                lambda same: None if same.grad is None else self.hold(same.grad, part)
            )

    def forget_peak(self) -> None:
        """Start a new peak from the tensors that are alive."""
        self._peak = 0
        self._at_peak = {}
        self._peak_phase = self._phase
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
            plain(storage, size)  # FSDP frees gathered weights by resizing, which no dispatch mode sees
            if held := self._live.get(storage._cdata):
                self._put(storage._cdata, held._replace(bytes=storage.nbytes()))

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error) -> None:
        torch.UntypedStorage.resize_ = self._plain_resize
        super().__exit__(*error)

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented  # DTensor calls the operation again on local tensors
        result = operation(*args, **(kwargs or {}))
        part = None
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and self._counts(tensor):
                part = part or self._part(operation, args)
                self._count(tensor, part, operation.name())
        return result

    def _note_peak(self) -> None:
        """Record the live tensors if they exceed the peak; called before each release, not at every rise."""
        if self._total > self._peak:
            self._peak = self._total
            self._at_peak = dict(self._live)
            self._peak_phase = self._phase

    def _counts(self, tensor: Tensor) -> bool:
        return getattr(tensor, "fake_mode", None) is self._fake_mode and not tensor.is_meta

    def _part(self, operation, args: tuple) -> str:
        """Return the part of the peak that an operation's results belong to."""
        if self._on_host:
            return "host"
        if operation is torch.ops.aten._to_copy.default:  # FSDP adds gradients in another precision
            source = self._live.get(args[0].untyped_storage()._cdata)
            if source and source.part == "gradients":
                return "gradients"
        backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()  # enabled: recomputation
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
