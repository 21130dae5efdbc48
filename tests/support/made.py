"""Tensors that operations allocate."""

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
