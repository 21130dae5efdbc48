"""Tensors that operations allocate, and kernels that they run."""

from collections import Counter

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Records the shapes of newly allocated tensors, without views and tensors that are changed in place."""

    def __init__(self):
        super().__init__()
        self.shapes = []

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        old = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf)}
        made = [leaf for leaf in tree_leaves(result) if torch.is_tensor(leaf)]
        self.shapes += [leaf.shape for leaf in made if leaf.untyped_storage()._cdata not in old]
        return result

    @property
    def largest(self):
        """Return the number of elements of the largest tensor."""
        return max(shape.numel() for shape in self.shapes)


class Kernels(TorchDispatchMode):
    """Counts operations that compute or copy, by name, without views and allocations."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        results = operation._schema.returns
        is_view = results and all(one.alias_info and not one.alias_info.is_write for one in results)
        name = operation.name().removeprefix("aten::")
        if not is_view and "empty" not in name and name not in ("_unsafe_view", "detach"):
            self.counts[name] += 1
        return operation(*args, **(kwargs or {}))
