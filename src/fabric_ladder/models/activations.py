"""GELU in its tanh approximation, by PyTorch's kernel, which keeps only its input for the backward pass.

transformers computes the same function step by step for some models, and autograd keeps the results of several steps.
BLOOM's own function keeps only its input, but takes 9 kernels in the forward pass and 18 in the backward pass. In 16
bits each of these steps is rounded.
"""

from torch import nn
from transformers.activations import FastGELUActivation, NewGELUActivation
from transformers.models.bloom.modeling_bloom import BloomGelu

STEP_BY_STEP = (NewGELUActivation, FastGELUActivation, BloomGelu)  # `gelu_new` (GPT-2, Phi), `gelu_fast`, BLOOM


def fuse_gelu(model: nn.Module) -> None:
    """Replace modules that compute the tanh approximation of GELU step by step, in place."""
    for module in model.modules():
        for name, child in module.named_children():
            if isinstance(child, STEP_BY_STEP):
                setattr(module, name, nn.GELU(approximate="tanh"))
