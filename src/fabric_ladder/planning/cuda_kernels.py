"""The operations that keep other tensors on a GPU than on a CPU, where a rehearsal runs."""

import torch
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.nn.functional import dropout, scaled_dot_product_attention
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

# Autocast computes these operations in 32 bits on CUDA, and in 16 bits on a CPU (PyTorch 2.13, `ATen/autocast_mode.h`:
# AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE). The lists have more operations, which no model here uses.
IN_32_BITS = frozenset(
    "exp log log_softmax softmax softplus pow __pow__ rsqrt sum cumsum prod norm layer_norm rms_norm group_norm".split()
)


class CudaKernels(TorchFunctionMode):
    """Makes operations on a CPU keep the same tensors for the backward pass as on a GPU.

    - Autocast computes `IN_32_BITS` in 32 bits.
    - Dropout keeps a mask of one byte per element, a CPU's has the type of the input (PyTorch, `Dropout.cpp`).
    - Attention drops its dropout: on a CPU it needs a tokens x tokens matrix, on a GPU only a seed.
    """

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is Tensor.backward:
            return self._backward(args[0])
        if function is dropout and kwargs["training"] and not kwargs["inplace"] and 0 < kwargs["p"] < 1:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        if function is scaled_dot_product_attention:
            args, kwargs = args[:4], {**kwargs, "dropout_p": 0.0}
        if function.__name__ in IN_32_BITS and torch.is_autocast_enabled("cpu") and not kwargs.get("dtype"):
            args, kwargs = tree_map(_in_32_bits, (args, kwargs))
        return function(*args, **kwargs)

    def _backward(self, loss: Tensor) -> None:
        """Compute the gradients with the mode on, since the backward pass recomputes checkpointed blocks.

        PyTorch switches a mode off within the function that it handles. `torch.autograd.backward` is such a function
        too, so autograd's engine is called.
        """
        with self:
            _engine_run_backward((loss,), (torch.ones_like(loss),), False, False, (), True, True)


def _in_32_bits(value):
    return value.float() if isinstance(value, Tensor) and value.dtype in (torch.float16, torch.bfloat16) else value
