"""A stand-in for a CUDA graph on a CPU: a tape of operations, repeated on the memory that they used at first.

Like a graph it repeats no Python, so whatever Python computed from the first batch stays as it was.
"""

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

WAITS = {"_local_scalar_dense", "nonzero", "equal", "is_nonzero", "_unique2", "masked_select"}  # for the device


class Tape(TorchDispatchMode):
    """Records the operations of a block.

    Attributes:
        operations: The recorded ones, without views.
        waits: Names of operations that would wait for the device.
    """

    def __init__(self):
        super().__init__()
        self.operations, self.waits = [], []
        self._made, self._before = {}, {}  # storages of this block; tensors from outside, before they were changed

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        changes = function._schema.is_mutable
        if changes:
            for tensor in given:
                if storage(tensor) not in self._made:
                    self._before.setdefault(tensor.data_ptr(), (tensor.detach(), tensor.detach().clone()))
        result = function(*args, **kwargs)
        if function._schema.name.split("::")[1] in WAITS:
            self.waits.append(function._schema.name)
        made = [each for each in tree_leaves(result) if isinstance(each, Tensor)]
        known = set(map(storage, given))
        if changes or not made or not all(storage(each) in known for each in made):  # no view
            self.operations.append(tree_map(detached, (function, args, kwargs, result)))
        self._made |= {storage(each): each for each in made if storage(each) not in known}
        return result

    def undo(self) -> None:
        """Set the tensors from outside back: recording a CUDA graph runs nothing."""
        for tensor, before in self._before.values():
            tensor.copy_(before)

    @torch.no_grad()
    def replay(self) -> None:
        """Repeat the operations."""
        for function, args, kwargs, result in self.operations:
            again = function(*args, **kwargs)
            if not function._schema.is_mutable:
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)


class Copies(TorchFunctionMode):
    """Refuses tensors that a GPU would copy from Python's memory, for which it would wait."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        assert function not in (torch.tensor, torch.as_tensor, torch.asarray, torch.from_numpy), function
        return function(*args, **(kwargs or {}))


class TapeRecorder:
    """Takes the place of a `CudaRecorder`."""

    def record(self, work):
        """Return a function that repeats the work."""
        tape = Tape()
        with Copies(), tape:
            work()
        tape.undo()
        assert tape.operations
        assert not tape.waits
        return tape.replay


def storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def detached(value):
    return value.detach() if isinstance(value, Tensor) else value
