"""GELU in its tanh approximation, by PyTorch's kernel, which keeps only its input for the backward pass.

transformers computes the same function step by step for some models, and autograd keeps the results of several steps.
BLOOM's own function keeps only its input too, and stays: its losses in 16 bits are documented, and the kernel rounds
differently.
"""

from torch import nn
from transformers.activations import FastGELUActivation, NewGELUActivation

STEP_BY_STEP = (NewGELUActivation, FastGELUActivation)  # `gelu_new` (GPT-2, Phi) and `gelu_fast`


def fuse_gelu(model: nn.Module) -> None:
    """Replace modules that compute the tanh approximation of GELU step by step, in place."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, STEP_BY_STEP):
                setattr(module, name, nn.GELU(approximate="tanh"))
