"""The shapes of new tensors."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Made(TorchDispatchMode):
    """Records the shapes of new tensors, fake ones too; views and changes in place make no new tensor."""

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
        """Elements of the largest new tensor."""
        return max(shape.numel() for shape in self.shapes)
