"""`PeakTracker` follows the memory of all live tensors and records its highs as a list of moments.

The tests compare it with `MemTracker` of `torch.distributed._tools`. That class takes several times as long, cannot
follow FSDP over several steps, and does not list the kinds of tensors.
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from difflib import SequenceMatcher
from functools import partial
from itertools import groupby, takewhile
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fabric_ladder.techniques.memory import ON_DEVICE, Peak

PARTS = (*ON_DEVICE, "host")


class Moment(NamedTuple):
    """The memory before a tensor is freed, or at the end of a phase.

    Attributes:
        phase: A phase of `Peak`.
        backward: Whether autograd is running the backward pass.
        made: The latest operation that made a tensor, and the shape of its first tensor.
        held: Bytes by `PARTS`.
    """

    phase: str
    backward: bool
    made: tuple[str, tuple[int, ...]]
    held: tuple[int, ...]

    @property
    def total(self) -> int:
        """All bytes on the device."""
        return sum(self.held[:-1])


class Storage(NamedTuple):
    """The memory behind a tensor and its views: its bytes, and its part of the peak."""

    bytes: int
    part: int


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
        self._held = [0] * len(PARTS)
        self._made = "", ()
        self.forget_peak()

    @contextmanager
    def at(self, phase: str, on_host: bool = False, gathering: bool = False) -> Iterator[None]:
        """Assign new tensors inside this block to a phase of the run.

        Args:
            phase: A phase of `Peak`.
            on_host: Whether new tensors are in CPU memory.
            gathering: Whether FSDP replaces the modules' sharded parameters by gathered parameters.
        """
        self._note()
        before = self._phase, self._on_host
        self._phase, self._on_host = phase, on_host
        hook = register_module_forward_pre_hook(self._watch_gathered) if gathering else None
        try:
            yield
        finally:
            self._note()
            self._phase, self._on_host = before
            if hook:
                hook.remove()

    def hold(self, tensor: Tensor, part: str) -> None:
        """Count a tensor as this part of the peak, even if it was counted before."""
        tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        self._count(tensor, part)
        key = tensor.untyped_storage()._cdata
        self._put(key, self._live[key]._replace(part=PARTS.index(part)))

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
        """Start new moments from the tensors that are alive."""
        self._moments: list[Moment] = []
        self._risen = True

    def highs(self) -> list[Moment]:
        """Return the moments since `forget_peak`."""
        self._note()
        return self._moments

    def peak(self) -> Peak:
        """Return the highest state since `forget_peak`."""
        return highest(self.highs())

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

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # as in `FakeTensors`

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.prim.device.default:
            return args[0].device
        if DTensor in types:
            return NotImplemented  # DTensor calls the operation again on local tensors
        with torch._C.DisableTorchFunction():  # in a backward pass `CudaKernels` would handle each attribute
            result = operation(*args, **(kwargs or {}))
            part = None
            for tensor in tree_leaves(result):
                if isinstance(tensor, Tensor) and self._counts(tensor):
                    if part is None:
                        part = self._part(operation, args)
                        self._made = operation.name(), tuple(tensor.shape)
                    self._count(tensor, part)
        return result

    def _note(self) -> None:
        """Record the live tensors, unless nothing was added since the last moment."""
        if self._risen:
            backward = torch._C._current_graph_task_id() != -1
            self._moments.append(Moment(self._phase, backward, self._made, tuple(self._held)))
            self._risen = False

    def _counts(self, tensor: Tensor) -> bool:
        return getattr(tensor, "fake_mode", None) is self._fake_mode and not tensor.is_meta

    def _part(self, operation, args: tuple) -> str:
        """Return the part of the peak that an operation's results belong to."""
        if self._on_host:
            return "host"
        if operation is torch.ops.aten._to_copy.default:  # FSDP adds gradients in another precision
            source = self._live.get(args[0].untyped_storage()._cdata)
            if source and PARTS[source.part] == "gradients":
                return "gradients"
        backward = torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled()  # enabled: recomputation
        return "other" if backward or self._phase == "optimizer" else "activations"

    def _watch_gathered(self, module: nn.Module, _) -> None:
        for parameter in module.parameters(recurse=False):
            if not isinstance(parameter, DTensor):
                self.watch(parameter)

    def _count(self, tensor: Tensor, part: str) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._live:
            self._references[key] = weakref.ref(storage, partial(self._drop, key))
            if part in ("activations", "other") and tensor.shape[-1:] == (self._vocabulary,):
                part = "logits"
            self._put(key, Storage(storage.nbytes(), PARTS.index(part)))

    def _put(self, key: int, storage: Storage) -> None:
        before = self._live.get(key, Storage(0, storage.part))
        on_device = storage.bytes * (PARTS[storage.part] != "host") - before.bytes * (PARTS[before.part] != "host")
        if on_device < 0:
            self._note()
        self._held[before.part] -= before.bytes
        self._held[storage.part] += storage.bytes
        self._risen = self._risen or storage != before
        self._live[key] = storage

    def _drop(self, key: int, _) -> None:
        self._note()
        storage = self._live.pop(key)
        self._held[storage.part] -= storage.bytes
        del self._references[key]


def highest(moments: list[Moment]) -> Peak:
    """Return the moment with the most bytes on the device, and the most bytes in CPU memory at any moment."""
    found = max(moments, key=lambda moment: moment.total)
    sizes = dict(zip(PARTS, found.held, strict=True))
    return Peak(**sizes | {"host": max(moment.held[-1] for moment in moments)}, phase=found.phase)


def extrapolate(short: list[Moment], long: list[Moment], times: int) -> list[Moment] | None:
    """Return moments of a deeper model, which has `times` as many more blocks than `long` has more than `short`.

    Blocks are alike, so the memory at one moment is linear in their number. The peak is not linear, since it may move
    to another moment.

    Returns:
        None if the passes of both models differ by more than the number of blocks. Then the deeper model is unknown.
    """
    stage_of = attrgetter("phase", "backward")
    passes = [[(stage, list(part)) for stage, part in groupby(each, stage_of)] for each in (short, long)]
    if [stage for stage, _ in passes[0]] != [stage for stage, _ in passes[1]]:
        return None
    found = []
    for (_, fewer), (_, more) in zip(*passes, strict=True):
        pairs = _align(fewer, more)
        if len(pairs) < len(fewer):
            return None
        for before, after in pairs:
            held = (b + times * (b - a) for a, b in zip(before.held, after.held, strict=True))
            found.append(after._replace(held=tuple(held)))
    return found


def _align(fewer: list[Moment], more: list[Moment]) -> list[tuple[Moment, Moment]]:
    """Return the moments of a pass with the same moments of a pass over more blocks.

    The additional blocks are in the middle. So moments of the first half are the same when counted from the start, and
    moments of the second half when counted from the end. Memory between these two is linear in a block's position, so
    one of them is the highest. A pass may loop over the blocks several times, as some optimizers do. Then the moments
    between two loops are found by their operations.
    """
    start, end = _count_alike(fewer, more), len(fewer) - _count_alike(fewer[::-1], more[::-1])
    if start >= end:
        start = end = (start + end) // 2
    rest = len(more) - len(fewer)
    pairs = [*zip(fewer[:start], more[:start], strict=True), *zip(fewer[end:], more[rest + end :], strict=True)]
    between = [moment.made for moment in fewer[start:end]], [moment.made for moment in more[start : rest + end]]
    for match in SequenceMatcher(None, *between, autojunk=False).get_matching_blocks():
        first, second = start + match.a, start + match.b
        pairs += zip(fewer[first : first + match.size], more[second : second + match.size], strict=True)
    return pairs


def _count_alike(moments: list[Moment], others: list[Moment]) -> int:
    """Return how many moments at the start of both lists follow the same operations."""
    alike = takewhile(lambda pair: pair[0].made == pair[1].made, zip(moments, others, strict=False))
    return sum(1 for _ in alike)
