"""Count the work that an eager or compiled step would give to a CUDA GPU, from its operations on fake tensors."""

import math
import sys
from collections import Counter as Counts
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

import torch
from speed import Work
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FUSIBLE, REDUCTION, ALONE = "fusible", "reduction", "alone"
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_scaled_mm")
ATTENTION = "_scaled_dot_product_"
WIDTHS = (32, 64, 96, 128, 192, 256)  # head widths of FlashAttention-2's kernels; others use the next one
WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "_unique2", "equal", "is_nonzero")
NOTHING = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")  # only allocate
OVERWRITES = ("copy_", "fill_", "zero_")  # do not read their target
SEVERAL = {"embedding_dense_backward": 12, "index_put": 6, "nll_loss_backward": 2}  # the first two sort the indices
LOOKUPS = ("embedding", "index", "gather", "index_add_", "index_add", "scatter_")  # of no more values than they give
OTHERS = ("embedding_dense_backward", "index_put", "cumsum", "argmax")  # also kernels of their own
REDUCTIONS = ("sum", "mean", "amax", "max", "linalg_vector_norm", "all", "any")
CHUNK, BLOCKS = 65_536, 320  # values of a block, and blocks of a launch (PyTorch, MultiTensorApply.cuh)
TENSORS = (110, 64, 48, 36, 30)  # the most tensors of a launch, by the number of lists (the same file)
PLAIN = ("Tensor", "Parameter", "FakeTensor")


class Operation(NamedTuple):
    """Kernels that an operation launches.

    Attributes:
        kind: `fusible`: compiled code may fuse it with its neighbours; `reduction`: over tokens or over all values;
            `alone`: all others.
        region: Number of the compiled region; None: it runs eagerly.
        reads: Bytes by storage.
        writes: Bytes by storage.
        work: Its work, run eagerly.
    """

    kind: str
    region: int | None
    reads: dict[int, int]
    writes: dict[int, int]
    work: Work

    @property
    def product(self) -> bool:
        """Whether it is a matrix multiplication or attention, which ends a fusion."""
        return self.work.flops > 0

    @property
    def compiled(self) -> bool:
        """Whether it runs in compiled code."""
        return self.region is not None


class Counter(TorchDispatchMode):
    """Counts the kernels and bytes of a CUDA GPU for the operations inside its context, on fake tensors.

    An operation is one kernel, and reads and writes each of its tensors once. Views launch nothing. Exceptions:

    - A `_foreach_*` operation or a fused optimizer launches a kernel for 320 blocks of 65,536 values, or for fewer if
      they come from many tensors.
    - The backward pass of a layer norm is two kernels, that of fused attention three (FlashAttention-2).
    - `baddbmm` copies its first input into the result before it multiplies.
    - `SEVERAL` lists operations that sort or fill.

    Causal attention has half of the FLOPs, and its heads are as wide as those of the kernel.

    Compiled code is counted by rules of fusion. Within a region of `compile`, between two matrix multiplications,
    operations that feed each other become one kernel: elementwise operations, copies, and reductions over the last
    dimension. A lookup and a matrix multiplication are kernels of their own. So is a reduction over tokens or over
    all values; it takes in the elementwise operations that only it reads. A fused kernel reads its inputs once, and
    writes only the results that another kernel reads, or that no kernel reads.

    Args:
        model: Its gradients are accumulated outside of compiled code.
        on_host: Tensors that a run on a GPU keeps in CPU memory; the CPU reads them without a wait.
    """

    def __init__(self, model: nn.Module, on_host: list[Tensor] = ()):
        super().__init__()
        self.operations: list[Operation] = []
        self._alive: dict[int, torch.UntypedStorage] = {}  # so that no key is used twice
        self._numbers = count()
        self._forward: list[int] = []
        self._backward: int | None = None
        self._python_calls = 0
        self._host = {self._key(tensor) for tensor in on_host}
        self._gradients = {self._key(weight.grad) for weight in model.parameters() if weight.grad is not None}

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if any(kind.__name__ not in PLAIN for kind in types):
            return NotImplemented  # a subclass calls operations on its plain tensors
        result = operation(*args, **(kwargs or {}))
        if operation.namespace != "prim":
            self._python_calls += self._region is None and _is_passed_on()
            self._count(operation, args, kwargs or {}, result)
        return result

    def work(self) -> Work:
        """Return the work of all operations; those in compiled regions are fused."""
        eager = [operation.work for operation in self.operations if not operation.compiled]
        return total([*eager, *fused(self.operations), Work(python_calls=self._python_calls)])

    @contextmanager
    def compile(self, modules: list[nn.Module]) -> Iterator[None]:
        """Count the forward and the backward pass of each module as a compiled region."""
        hooks = []
        for module in modules:
            hooks.append(module.register_forward_pre_hook(self._enter))
            hooks.append(module.register_forward_hook(self._leave, always_call=True))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def compiled(self, function: Callable) -> Callable:
        """Return the function with each of its calls counted as a compiled region."""

        def call(*args):
            self._forward.append(next(self._numbers))
            try:
                return function(*args)
            finally:
                self._forward.pop()

        return call

    def _enter(self, _: nn.Module, args: tuple) -> None:
        self._forward.append(next(self._numbers))

    def _leave(self, _: nn.Module, args: tuple, outputs) -> None:
        self._forward.pop()
        if torch._C._current_graph_task_id() != -1:
            return  # a recomputation, which has no backward pass of its own
        number = next(self._numbers)

        def begin(_: Tensor) -> None:
            self._backward = number

        def end(_: Tensor) -> None:
            if self._backward == number:  # the block before may have begun
                self._backward = None

        for hook, tensors in ((begin, outputs), (end, args)):
            for tensor in tree_leaves(tensors):
                if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                    tensor.register_hook(hook)

    @property
    def _region(self) -> int | None:
        if self._forward:
            return self._forward[-1]
        return self._backward if torch._C._current_graph_task_id() != -1 else None

    def _key(self, tensor: Tensor) -> int:
        storage = tensor.untyped_storage()
        self._alive.setdefault(storage._cdata, storage)
        return storage._cdata

    def _sizes(self, tensors: list[Tensor], most: int | None) -> dict[int, int]:
        """Return the bytes by storage; different parts of a storage add up."""
        parts = {(self._key(each), each.storage_offset(), each.shape, each.stride()): _bytes(each) for each in tensors}
        found: dict[int, int] = {}
        for (key, *_), size in parts.items():
            found[key] = found.get(key, 0) + (size if most is None else min(size, most))
        return found

    def _count(self, operation, args: tuple, kwargs: dict, result) -> None:
        name = operation._schema.name.removeprefix("aten::")
        given = _by_name(operation, args, kwargs)
        inputs = _tensors(list(given.values()))
        keys = {self._key(tensor) for tensor in inputs}
        on_host = any(tensor.is_meta for tensor in inputs) or (keys and keys <= self._host)
        if on_host or name in NOTHING:
            return  # a copy to the device, a computation on the CPU, or an allocation
        changed = _tensors([given.get(each.name) for each in operation._schema.arguments if _is_written(each)])
        made = [tensor for tensor in _tensors(result) if self._key(tensor) not in keys]
        if not changed and not made and name not in WAITS:
            return  # a view
        if name.startswith("_fused_"):  # the schema marks gradients as written, for a loss scale
            changed = _tensors([given[key] for key in ("self", "exp_avgs", "exp_avg_sqs") if key in given])
        reads = inputs[1:] if name in OVERWRITES else inputs
        most = None
        if name in LOOKUPS:
            most = max(map(_bytes, made or _tensors([given.get("source"), given.get("src")])), default=None)
        for part in _parts(name, given, reads, changed + made, made):
            self._add(name, most, *part)

    def _add(
        self,
        name: str,
        most: int | None,
        kind: str,
        kernels: int,
        reads: list[Tensor],
        writes: list[Tensor],
        flops: float = 0.0,
    ) -> None:
        """Record kernels; `most`: the bytes that a lookup touches of each tensor."""
        width = max((tensor.element_size() for tensor in reads), default=0)
        read, written = self._sizes(reads, most), self._sizes(writes, most)
        size = sum(read.values()) + sum(written.values())
        attends = name.startswith(ATTENTION)
        product = flops > 0 and not attends
        work = Work(
            kernels=kernels,
            waits=float(name in WAITS),
            moved=0.0 if flops else size,
            product_bytes=size if product else 0.0,
            flops_8=flops if name == "_scaled_mm" else 0.0,
            flops_16=flops if product and name != "_scaled_mm" and width == 2 else 0.0,
            flops_32=flops if product and name != "_scaled_mm" and width > 2 else 0.0,
            attention_flops=flops if attends else 0.0,
        )
        region = None if self._gradients & written.keys() else self._region
        self.operations.append(Operation(kind, region, read, written, work))


def total(works: list[Work]) -> Work:
    """Return the sum of the works."""
    return Work(*map(sum, zip(*works, strict=True)))


def launches(sizes: list[int], lists: int) -> int:
    """Return the kernels of a `_foreach_*` operation on tensors with these numbers of values, in N lists."""
    most = TENSORS[min(lists, len(TENSORS)) - 1]
    found = blocks = tensors = 0
    for size in sizes:
        blocks += -(-size // CHUNK)
        tensors += 1
        if blocks >= BLOCKS:
            found += blocks // BLOCKS
            blocks %= BLOCKS
            tensors = int(blocks > 0)
        if tensors == most:
            found += 1
            blocks = tensors = 0
    return found + (tensors > 0)


def _parts(name: str, given: dict, reads: list[Tensor], writes: list[Tensor], made: list[Tensor]) -> Iterator[tuple]:
    """Yield the arguments of `Counter._add` for each group of an operation's kernels."""
    if name.startswith(("_foreach_", "_fused_")):
        lists = [part for part in map(_tensors, given.values()) if part and part[0].numel() > 1]
        lists = lists or [_tensors(given["self"])]
        yield ALONE, launches([tensor.numel() for tensor in lists[0]], len(lists) + bool(made)), reads, writes
    elif name.startswith(ATTENTION):
        backward = "backward" in name
        yield ALONE, 3 if backward else 1, reads, writes, _attention_flops(given) * (2.5 if backward else 1)
    elif name == "baddbmm":
        yield FUSIBLE, 1, [given["self"]], made
        flops = 2.0 * made[0].numel() * given["batch1"].shape[-1]
        yield ALONE, 1, [given["batch1"], given["batch2"], *made], made, flops
    elif name in PRODUCTS:
        factor = given["mat1"] if name == "addmm" else given["self"]
        yield ALONE, 1, reads, made, 2.0 * made[0].numel() * factor.shape[-1]
    elif name == "native_layer_norm_backward":
        sources = [given[key] for key in ("grad_out", "input", "mean", "rstd")]
        yield FUSIBLE, 1, [*sources, *_tensors(given["weight"])], made[:1]
        if made[1:]:
            yield REDUCTION, 1, sources, made[1:]
    else:
        kind = (
            ALONE if name in (*LOOKUPS, *OTHERS) else REDUCTION if name in REDUCTIONS and _over_rows(given) else FUSIBLE
        )
        yield kind, SEVERAL.get(name, 1), reads, writes


def _attention_flops(given: dict) -> float:
    """Return the FLOPs of the forward pass of fused attention."""
    query, key = given["query"], given["key"]
    width = query.shape[-1]
    if query.element_size() == 2:
        width = next((each for each in WIDTHS if each >= width), width)
    scores = math.prod(query.shape[:-1]) * key.shape[-2]
    return 4.0 * scores * width / (2 if given.get("is_causal") else 1)


def _over_rows(given: dict) -> bool:
    """Return whether a reduction is over another dimension than the last, or over all."""
    dims = given.get("dim")
    dims = [dims] if isinstance(dims, int) else dims
    last = given["self"].dim() - 1
    return not dims or any(dim % (last + 1) != last for dim in dims)


def fused(operations: list[Operation]) -> list[Work]:
    """Return the work of the compiled regions, after the fusion that `Counter` describes."""
    operations = _absorbed(operations)
    groups: list[list[Operation]] = []
    number: list[int] = []  # of the group that a group has become a part of
    written: dict[tuple, int] = {}  # by region and storage: the group of fusible operations that wrote it
    for index, operation in enumerate(operations):
        groups.append([operation])
        number.append(index)
        if operation.compiled and operation.kind == FUSIBLE:
            places = [(operation.region, key) for key in (*operation.reads, *operation.writes)]
            for other in sorted({_root(number, written[place]) for place in places if place in written}):
                groups[index] = groups[other] + groups[index]
                groups[other] = []
                number[other] = index
            written |= {(operation.region, key): index for key in operation.writes}
        elif operation.product:
            written = {place: group for place, group in written.items() if place[0] != operation.region}
    readers: dict[int, set[int]] = {}  # groups by storage; an eager operation is a group too
    for index, group in enumerate(groups):
        for key in (key for operation in group for key in operation.reads):
            readers.setdefault(key, set()).add(index)
    works = [_as_one(group, index, readers) for index, group in enumerate(groups) if group and group[0].compiled]
    regions = {operation.region for operation in operations if operation.compiled}
    return [*works, Work(graphs=len(regions))]


def _absorbed(operations: list[Operation]) -> list[Operation]:
    """Return the operations, where reductions have taken in the elementwise operations that only they read."""
    readers, writers = Counts(), Counts()
    for operation in operations:
        readers.update(operation.reads.keys())
        writers.update(operation.writes.keys())
    kept: dict[int, Operation] = {}
    made: dict[int, int] = {}  # places of operations whose one result has one reader, by storage
    for place, operation in enumerate(operations):
        reads = dict(operation.reads)
        while operation.compiled and operation.kind == REDUCTION:
            taken = next((key for key in reads if key in made and kept[made[key]].region == operation.region), None)
            if taken is None:
                break
            del reads[taken]
            reads |= kept.pop(made.pop(taken)).reads
        size = sum(reads.values()) + sum(operation.writes.values())
        if reads != operation.reads:
            operation = operation._replace(reads=reads, work=operation.work._replace(moved=size))
        kept[place] = operation
        if operation.kind == FUSIBLE and len(operation.writes) == 1:
            (key,) = operation.writes
            if readers[key] == writers[key] == 1:
                made[key] = place
    return list(kept.values())


def _root(number: list[int], index: int) -> int:
    """Return the group that a group has become a part of."""
    while number[index] != index:
        index = number[index]
    return index


def _as_one(group: list[Operation], index: int, readers: dict[int, set[int]]) -> Work:
    """Return the work of a fused group of operations."""
    if len(group) == 1:
        return group[0].work._replace(compiled=group[0].work.kernels)
    reads: dict[int, int] = {}
    writes: dict[int, int] = {}
    for operation in group:
        for key, size in operation.reads.items():
            if key not in writes:
                reads[key] = max(size, reads.get(key, 0))
        for key, size in operation.writes.items():
            writes[key] = max(size, writes.get(key, 0))
    kept = sum(size for key, size in writes.items() if readers.get(key, set()) != {index})
    waits = sum(operation.work.waits for operation in group)
    return Work(kernels=1, compiled=1, waits=waits, moved=sum(reads.values()) + kept)


def _is_passed_on() -> bool:
    """Return whether another Python dispatch mode has called the operation that this module counts."""
    frame = sys._getframe(2)
    for _ in range(5):  # PyTorch's own frames are between them
        if frame.f_code.co_name == "__torch_dispatch__":
            return True
        frame = frame.f_back
        if frame is None:
            break
    return False


def _tensors(values) -> list[Tensor]:
    """Return the tensors in a value."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor's distinct values; an expanded dimension counts once."""
    sizes = zip(tensor.shape, tensor.stride(), strict=True)
    return math.prod(size for size, stride in sizes if stride) * tensor.element_size()


def _is_written(argument: torch.Argument) -> bool:
    return argument.alias_info is not None and argument.alias_info.is_write


def _by_name(operation, args: tuple, kwargs: dict) -> dict:
    names = (argument.name for argument in operation._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs
