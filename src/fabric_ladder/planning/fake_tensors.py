"""Fake tensors, which have a shape, a dtype and a storage, but no memory behind it."""

from collections.abc import Collection, Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves

CPU = torch.device("cpu")
UNCERTAIN = {torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
PLAIN = (int, float, str, type(None), torch.dtype, torch.layout, torch.device, torch.memory_format)


class Made(NamedTuple):
    """A tensor that an operation returns.

    Attributes:
        source: Position of the argument whose storage it shares; None: it has its own storage.
        same: Whether it is this argument itself.
        shape: Its shape.
        stride: Its strides.
        offset: Its offset in the storage.
        dtype: Its type.
    """

    source: int | None
    same: bool
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class FakeTensors(FakeTensorMode):
    """Fake tensors on a CPU; a value that is read is 1, or False.

    The blocks of a model repeat the same operations. PyTorch's own cache of them also covers symbolic shapes, sparse
    tensors and several devices, and takes most of a rehearsal's time. So a short one for plain tensors comes first.
    """

    # what an operation with these arguments returns: one result, a list of them, or False: it has to run
    _known: ClassVar[dict[tuple, "Made | list[Made | None] | bool | None"]] = {}

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        # the memo keeps a weak reference to each tensor, and Module.to cannot convert referenced tensors
        self.fake_tensor_converter.set_tensor_memo = lambda *_: None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and skipping the compiler takes time in each operation

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        if operation is torch.ops.prim.device.default:
            return args[0].device
        kwargs = kwargs or {}
        key = [operation, torch.get_default_dtype()]
        if not isinstance(operation, OpOverload) or operation.namespace not in ("aten", "prims"):
            return self._run(operation, types, args, kwargs)
        if not all(self._add(key, each) for each in (args, kwargs, kwargs.values())):
            return self._run(operation, types, args, kwargs)
        known = self._known.get(key := tuple(key), False)
        if known is not False:
            return [self._make(each, args) for each in known] if type(known) is list else self._make(known, args)
        result = self._run(operation, types, args, kwargs)
        if key not in self._known:
            fixed = {*operation.tags}.isdisjoint(UNCERTAIN)
            self._known[key] = fixed and _describe(result, args, kwargs)
        return result

    def _run(self, operation, types: Sequence[type], args: Sequence, kwargs: dict):
        if operation is torch.ops.aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            factors = [factor.bfloat16() for factor in args[:2]]  # its fake takes no other type
            return operation(*factors, *args[2:], **kwargs).to(args[0].dtype)
        try:
            return self.dispatch(operation, types, args, kwargs)
        except DataDependentOutputException:
            if operation is not torch.ops.aten._local_scalar_dense.default:
                raise
            dtype = args[0].dtype  # the run reads a norm, or whether it is finite
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 1

    def _add(self, key: list, values: Collection) -> bool:
        """Add to a key all that an operation's results depend on, and return False if this is not known."""
        key.append(len(values))
        for value in values:
            if type(value) is FakeTensor:
                if not _is_plain(value) or value.fake_mode is not self:
                    return False
                storage = value.untyped_storage()
                key += value.shape, value.stride(), value.storage_offset(), value.dtype, storage.nbytes()
            elif isinstance(value, PLAIN):
                key += type(value), value  # 1 equals 1.0 and True
            elif type(value) not in (list, tuple) or not self._add(key, value):
                return False
        return True

    def _make(self, made: Made | None, args: Sequence) -> Tensor | None:
        if made is None:
            return None
        if made.same:
            return args[made.source]
        tensor = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta")
        if made.source is not None:
            tensor.set_(args[made.source].untyped_storage(), made.offset, made.shape, made.stride)
        return FakeTensor(self, tensor, CPU)


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.constant is None and tensor.fake_device == CPU and tensor.layout is torch.strided


def _describe(result, args: Sequence, kwargs: dict) -> Made | list[Made | None] | bool | None:
    """Return what an operation has returned; False: something else than tensors that are new or belong to arguments."""
    if isinstance(result, list | tuple):
        results = [_describe(each, args, kwargs) for each in result]
        return False if False in results else results
    if result is None:
        return None
    if type(result) is not FakeTensor or not _is_plain(result):
        return False
    storage = result.untyped_storage()
    sources = [position for position, each in enumerate(args) if isinstance(each, Tensor) and _shares(each, storage)]
    source = sources[0] if sources else None
    same = bool(sources) and result is args[source]
    made = Made(source, same, result.shape, result.stride(), result.storage_offset(), result.dtype)
    if not sources:
        alone = torch.empty_strided(made.shape, made.stride, dtype=made.dtype, device="meta").untyped_storage()
        in_lists = any(isinstance(each, Tensor) and _shares(each, storage) for each in tree_leaves((args, kwargs)))
        if in_lists or made.offset or alone.nbytes() != storage.nbytes():
            return False
    return made


def _shares(tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    return tensor.untyped_storage()._cdata == storage._cdata
